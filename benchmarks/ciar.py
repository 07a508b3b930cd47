"""What CIAR gains and what it costs: speed on real links, and quality against the share of cloud calls.

`make bench-ciar`, or `python -m benchmarks.ciar --help`. Compare ratios of one run; nothing else should run meanwhile.
Drawn pictures are kept in work/, so that a stopped run goes on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.link import EmulatedLink, LinkSettings
from benchmarks.quality import evaluate, open_bundle, parser, plot_fronts
from benchmarks.speed import PROMPTS
from cloud.process import VerifierProcess, running_verifier
from device.client import DeviceClient, GenerateSettings
from device.report import Report
from device.selection import MODES, REPAIRS, SelectionSettings
from shared.bundle import Bundle

FAR = LinkSettings(delay_ms=20.0, rate_mbit=10.0)
PLACES = (("loopback", None, False), ("40 ms, 10 Mbit/s", FAR, False), ("40 ms, apart", FAR, True))
"""Names, links, and whether device and verifier have half of the cores each, as two machines would, or share all."""
PREFIX_ONLY = "ciar:cloud_budget=0.06"  # the budget that the prefix takes alone, so that nothing is judged
BUDGETS = (0.15, 0.30, 0.60)  # at 1 the pictures are those of `ar`
SCORES = ("interval", "entropy", "random")
DRAFT_ROWS = (2, 4)
OTHERS = {
    "30 % judged and the prefix": "ciar:cloud_budget=0.36",
    "average": "ciar:threshold_mode=average",
    "truncate": "ciar:repair=truncate",
} | {f"{rows} rows a draft": f"ciar:draft_rows={rows}" for rows in DRAFT_ROWS}


def main() -> None:
    command = parser(__doc__, Path("docs/ciar-quality.png"))
    command.add_argument("--only", choices=("speed", "quality"), help="one part alone")
    options = command.parse_args()
    bundle = open_bundle(options.bundle)
    if options.only != "quality":
        speed(bundle, options.repeat)
    if options.only != "speed":
        quality(bundle, options.config, options.count, options.plot)


# -- speed ----------------------------------------------------------------------------------------------------------


def speed(bundle: Bundle, repeat: int) -> None:
    """Wall clock and traffic of every mode on every link, one picture at a time."""
    settings = {"ar": GenerateSettings("ar"), "sd": GenerateSettings("sd"), "device": GenerateSettings("device")}
    for repair in REPAIRS:
        for mode in MODES:
            selection = SelectionSettings(mode=mode, repair=repair)
            settings[f"ciar {mode}, {repair}"] = GenerateSettings("ciar", selection=selection)
    for rows in DRAFT_ROWS:
        for mode in ("batched", "pipelined"):
            selection = SelectionSettings(mode=mode, draft_rows=rows)
            settings[f"ciar {mode}, {rows} rows"] = GenerateSettings("ciar", selection=selection)
    for name, link, apart in PLACES:
        if apart and len(_cores()) < 2:
            print(f"{name}: left out; it needs two cores, and a system that lets a process choose its own\n")
            continue
        with (
            _verifier(bundle, apart) as verifier,
            _address(verifier.port, link) as address,
            DeviceClient(address, bundle=bundle.folder) as client,
        ):
            _print_speed(name, _drawn(client, settings, repeat))


def _cores() -> list[int]:
    """The cores this thread may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def _verifier(bundle: Bundle, apart: bool) -> Iterator[VerifierProcess]:
    """A verifier; when `apart`, on the first half of the cores, and what this thread starts later on the others."""
    if not apart:
        with running_verifier(bundle.folder) as verifier:
            yield verifier
        return
    cores = _cores()
    half = len(cores) // 2
    os.sched_setaffinity(0, cores[:half])
    try:
        with running_verifier(bundle.folder, ["--threads", str(half)]) as verifier:
            os.sched_setaffinity(0, cores[half:])
            yield verifier
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _address(port: int, link: LinkSettings | None) -> Iterator[str]:
    """Where the verifier is reached over a link; None for loopback as it is."""
    if link is None:
        yield f"127.0.0.1:{port}"
        return
    with EmulatedLink(port, settings=link) as emulated:
        yield emulated.address


def _drawn(client: DeviceClient, settings: dict[str, GenerateSettings], repeat: int) -> dict[str, list[Report]]:
    """Reports of each setting, interleaved so that a slow minute of the machine hits all alike."""
    for setting in settings.values():
        client.generate(PROMPTS[0], setting)
    reports: dict[str, list[Report]] = {name: [] for name in settings}
    for round_ in range(repeat):
        for prompt in PROMPTS:
            for name, setting in settings.items():
                reports[name].append(client.generate(prompt, replace(setting, seed=round_)).report)
    return reports


def _print_speed(link: str, reports: dict[str, list[Report]]) -> None:
    print(f"{link:<28}seconds   speed-up   verified   cloud calls   passes   round trips   bytes up/token   a message")
    base = statistics.median(report.seconds.total for report in reports["ar"])
    for name, drawn in reports.items():
        seconds = statistics.median(report.seconds.total for report in drawn)
        mean = {key: statistics.mean(values) for key, values in _figures(drawn).items()}
        print(
            f"  {name:<26}{seconds:>7.3f}{base / seconds:>10.2f}x{mean['verified']:>11.1%}{mean['calls']:>14.1%}"
            f"{mean['passes']:>9.1f}{mean['trips']:>14.1f}{mean['bytes']:>17.1f}{mean['batch']:>12.1f}"
        )
    print(flush=True)


def _figures(drawn: Sequence[Report]) -> dict[str, list[float]]:
    return {
        "verified": [report.draft.uncertain / report.tokens for report in drawn],
        "calls": [report.cloud_call_rate for report in drawn],
        "passes": [report.cloud.forwards for report in drawn],
        "trips": [report.wire.round_trips for report in drawn],
        "bytes": [report.wire.bytes_up / report.tokens for report in drawn],
        "batch": [report.draft.proposed / max(1, report.wire.messages_up - 1) for report in drawn],
    }


# -- quality --------------------------------------------------------------------------------------------------------


def quality(bundle: Bundle, config: Path, count: int, plot: Path) -> None:
    """Evaluates budgets, scores and modes beside `ar` and `device`; plots quality against the share of cloud calls."""
    fronts = {score: [_way(budget, score) for budget in BUDGETS] for score in SCORES}
    names = ["ar", "device", PREFIX_ONLY, *(name for front in fronts.values() for name in front), *OTHERS.values()]
    found = evaluate(bundle, config, names, count, "test", Path("work/evaluation/ciar.json"))
    points = dict(zip(names, found, strict=True))
    lines = {score: [points[name] for name in (PREFIX_ONLY, *front, "ar")] for score, front in fronts.items()} | {
        label: [points[name]] for label, name in OTHERS.items()
    }
    marks = {name: points[name] for name in ("ar", "device")}
    plot_fronts(lines, marks, "calls", "share of cloud calls", f"ciar, {count} test prompts", plot)
    print(f"plot: {plot}")


def _way(budget: float, score: str) -> str:
    """The name of a setting; what is the default is left out, so that pictures drawn for others are found again."""
    own = {"cloud_budget": f"{budget:g}", "score": score}
    options = [f"{name}={value}" for name, value in own.items() if value != str(getattr(SelectionSettings(), name))]
    return ":".join(["ciar", *([",".join(options)] if options else [])])


if __name__ == "__main__":
    main()
