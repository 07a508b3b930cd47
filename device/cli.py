"""`device-client`: draws one picture on this device, together with a verifier or alone."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from device.client import DEFAULT_SERVER, DeviceClient, GenerateSettings, Picture
from device.link import LinkSettings
from device.overlay import render_overlay
from device.picture import check_output, save_picture
from device.selection import SelectionSettings
from shared.errors import EXIT_DEFECT, EXIT_INTERRUPTED, CiarError, SettingsError
from shared.features import FEATURE_MODES
from shared.intervals import SCORES
from shared.methods import METHODS, RULES, law
from shared.thresholds import THRESHOLDS
from shared.windows import INITS, WindowSettings

__all__ = ["main"]

_EXIT_CODES = """\
exit codes:
  0 done   2 a flag or the prompt is not acceptable   3 the bundle is missing, damaged or not the verifier's
  4 the verifier cannot be reached or the link was lost for good   5 the verifier refused   6 the verifier is full
  7 the picture could not be saved   8 the other side broke the protocol   130 interrupted
"""


def _methods_text() -> str:
    lines = ["methods:"]
    for method in METHODS.values():
        rule = RULES[method.rules[0]] if method.rules else None
        lines.append(f"  {method.name:<10}{method.summary} ({law(method, rule)})")
        if method.rules:
            lines.append(f"  {'':<10}rules: {', '.join(method.rules)}")
    lines += ["", "rules:"]
    for rule in RULES.values():
        lines.append(f"  {rule.name:<10}{rule.summary} ({'lossless' if rule.lossless else 'lossy'})")
        lines += [
            f"  {'':<10}{o.name} {o.least:g}..{o.most:g}: {o.summary} (default {o.default:g})" for o in rule.options
        ]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="device-client",
        description="Draws one picture from a prompt: this device drafts, a verifier checks.",
        epilog=f"{_methods_text()}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('ciar')}")
    _add_picture(result.add_argument_group("picture"))
    _add_method(result.add_argument_group("method"))
    _add_selection(result.add_argument_group("method ciar"))
    _add_window(result.add_argument_group("methods sjd and csd"))
    _add_link(result.add_argument_group("verifier and models"))
    _add_output(result.add_argument_group("output"))
    return result


def _add_picture(group: Any) -> None:
    group.add_argument("--prompt", required=True, metavar="TEXT", help="what to draw")
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same picture; default: a new one, printed")
    group.add_argument("--temperature", type=float, metavar="X", help="default: the bundle's")
    group.add_argument(
        "--top-k", type=int, metavar="K", help="keep the K likeliest tokens, 0 for all; default: the bundle's"
    )
    group.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens up to mass P; default: the bundle's"
    )
    group.add_argument(
        "--guidance", type=float, metavar="S", help="classifier-free guidance, 1 for none; default: the bundle's"
    )


def _add_method(group: Any) -> None:
    group.add_argument("--method", default="sd", metavar="NAME", help=f"{', '.join(METHODS)}; default: %(default)s")
    group.add_argument("--rule", default="", metavar="NAME", help="acceptance rule; default: the method's first")
    group.add_argument("--rule-option", action="append", default=[], metavar="NAME=X", help="a number of the rule, "
                       "such as lambda=0.5 of csd; may be repeated; see below")  # fmt: skip
    group.add_argument("--draft-length", type=int, default=0, metavar="N", help="tokens a draft; default: 0, adaptive")
    group.add_argument("--in-flight", type=int, default=0, metavar="N", help="drafts sent before verdicts are awaited; "
                       "above 1 the device drafts on meanwhile; default: 0, the method's choice")  # fmt: skip


def _add_window(group: Any) -> None:
    defaults = WindowSettings()
    group.add_argument("--window", type=int, default=defaults.size, metavar="N",
                       help="tokens refined in a pass; default: %(default)s")  # fmt: skip
    group.add_argument("--after-rejection", default=defaults.after, metavar="NAME", help="continue: keep what passes "
                       "behind a rejection as drafts; stop: draw it anew; default: %(default)s")  # fmt: skip
    group.add_argument("--window-init", default=defaults.init, metavar="NAME",
                       help=f"how tokens enter: {', '.join(INITS)}; default: %(default)s")  # fmt: skip


def _add_selection(group: Any) -> None:
    defaults = SelectionSettings()
    group.add_argument("--cloud-budget", type=float, default=defaults.cloud_budget, metavar="X",
                       help="share of the tokens that the cloud samples or judges; default: %(default)g")  # fmt: skip
    group.add_argument("--mode", default=defaults.mode, metavar="NAME", help="sync: ask at every uncertain token and "
                       "wait; batched: once a row of tokens, and wait; pipelined: draft on meanwhile; "
                       "default: %(default)s")  # fmt: skip
    group.add_argument("--repair", default=defaults.repair, metavar="NAME", help="truncate: drop a draft behind its "
                       "first failure; local: correct failures in place; default: %(default)s")  # fmt: skip
    group.add_argument("--score", default=defaults.score, metavar="NAME",
                       help=f"{', '.join(SCORES)}; default: %(default)s")  # fmt: skip
    group.add_argument("--threshold-mode", default=defaults.threshold_mode, metavar="NAME",
                       help=f"{', '.join(THRESHOLDS)}; default: %(default)s: each picture keeps to the "
                       "budget; average: pictures do on average")  # fmt: skip
    group.add_argument("--threshold", type=float, metavar="X", help="level for maxnorm and absolute")
    group.add_argument("--batch", type=int, default=0, metavar="N",
                       help="uncertain tokens a message; default: 0, a controller chooses")  # fmt: skip
    group.add_argument("--draft-rows", type=int, default=defaults.draft_rows, metavar="N",
                       help="rows of tokens a draft may span: more are faster and, with local repair, worse; "
                       "default: %(default)s")  # fmt: skip
    group.add_argument("--features", default="", metavar="NAME",
                       help=f"told of kept tokens: {', '.join(FEATURE_MODES)}; default: the bundle's")  # fmt: skip
    group.add_argument("--prefix-rate", type=float, default=defaults.prefix_rate, metavar="X",
                       help="share of the picture that the cloud samples first; default: %(default)g")  # fmt: skip
    group.add_argument("--audit", type=float, default=defaults.audit, metavar="X",
                       help="share of the kept tokens judged after the fact; default: %(default)g")  # fmt: skip


def _add_link(group: Any) -> None:
    defaults = LinkSettings()
    group.add_argument("--server", default=DEFAULT_SERVER, metavar="H:P", help="the verifier; default: %(default)s")
    group.add_argument("--bundle", type=Path, metavar="DIR", help="folder with the models; default: the "
                       "verifier's bundle: embedded, cached, or fetched on first use")  # fmt: skip
    group.add_argument("--cache", type=Path, metavar="DIR", help="where fetched bundles are kept; default: "
                       "$CIAR_CACHE, or ciar in the user's cache folder")  # fmt: skip
    group.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of this device's models; default: 1"
    )
    group.add_argument("--silence-timeout", type=float, default=defaults.silence_seconds, metavar="S",
                       help="a verifier silent for so long counts as lost; default: %(default)g")  # fmt: skip
    group.add_argument("--retry-timeout", type=float, default=defaults.retry_seconds, metavar="S",
                       help="give a lost picture up after so long without progress; default: %(default)g")  # fmt: skip
    group.add_argument("--on-lost-link", default="resume", metavar="NAME", help="resume: connect again and go on; "
                       "fail; finish-alone: draw the rest here and mark it; default: %(default)s")  # fmt: skip
    group.add_argument("--verdict-deadline", type=float, default=2.0, metavar="S", help="with finish-alone: an answer "
                       "that takes longer counts as a lost link; default: %(default)g")  # fmt: skip


def _add_output(group: Any) -> None:
    group.add_argument("--output", type=Path, default=Path("picture.png"), metavar="F", help="default: %(default)s")
    group.add_argument("--preview", action="store_true", help="save the picture as it grows, beside the output, as "
                       "NAME.preview.png")  # fmt: skip
    group.add_argument("--overlay", action="store_true", help="save beside the output, as NAME.overlay.png, which "
                       "tokens were kept, verified and corrected, and how unsure the device was")  # fmt: skip
    group.add_argument("--json", action="store_true", help="print the report as one JSON object and nothing else")
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `device-client`."""
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="device-client: %(message)s")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        picture = _draw(options)
    except CiarError as error:
        print(f"device-client: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("device-client: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except Exception:
        logging.getLogger(__name__).exception("this is a defect of the program; please report it")
        sys.exit(EXIT_DEFECT)
    report = picture.report
    print(report.to_json() if options.json else f"{report.to_text()}\nsaved   {options.output}")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _draw(options: argparse.Namespace) -> Picture:
    settings = GenerateSettings(
        method=options.method,
        rule=options.rule,
        seed=options.seed,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        guidance=options.guidance,
        draft_length=options.draft_length,
        in_flight=options.in_flight,
        selection=SelectionSettings(
            cloud_budget=options.cloud_budget,
            score=options.score,
            threshold_mode=options.threshold_mode,
            threshold=options.threshold,
            mode=options.mode,
            repair=options.repair,
            batch=options.batch,
            draft_rows=options.draft_rows,
            features=options.features,
            prefix_rate=options.prefix_rate,
            audit=options.audit,
        ),
        rule_options=_rule_options(options.rule_option),
        window=WindowSettings(options.window, options.after_rejection, options.window_init),
        on_lost_link=options.on_lost_link,
        verdict_seconds=options.verdict_deadline,
    )
    check_output(options.output)
    patience = LinkSettings(silence_seconds=options.silence_timeout, retry_seconds=options.retry_timeout)
    with (
        DeviceClient(
            options.server, bundle=options.bundle, cache=options.cache, threads=options.threads, link=patience
        ) as client,
        _progress_bar(options) as on_progress,
        _preview(options) as on_preview,
    ):
        picture = client.generate(options.prompt, settings, on_progress=on_progress, on_preview=on_preview)
    report = picture.report
    notes = {"prompt": report.prompt, "seed": str(report.seed), "method": report.method, "rule": report.rule or "-"}
    save_picture(picture.pixels, options.output, notes)
    if options.overlay:
        path = options.output.with_name(f"{options.output.stem}.overlay.png")
        save_picture(render_overlay(picture.pixels, picture.transcript, picture.scores), path)
    report.output = str(options.output)
    return picture


def _rule_options(texts: list[str]) -> dict[str, float]:
    """Numbers by name, from NAME=X."""
    options = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            options[name] = float(value)
        except ValueError:
            raise SettingsError(f"rule-option: NAME=NUMBER is needed, not {text!r}") from None
    return options


@contextlib.contextmanager
def _progress_bar(options: argparse.Namespace) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on the terminal's error stream; nothing when that is no terminal, or with --json or --quiet."""
    if options.json or options.quiet or not sys.stderr.isatty():
        yield None
        return
    with tqdm(desc=options.method, unit="token", leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@contextlib.contextmanager
def _preview(options: argparse.Namespace) -> Iterator[Callable[[Any, int], None] | None]:
    """Saves the growing picture beside the output, and removes it at the end."""
    if not options.preview:
        yield None
        return
    path = options.output.with_name(f"{options.output.stem}.preview.png")
    try:
        yield lambda pixels, rows: save_picture(pixels, path)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
