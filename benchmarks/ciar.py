"""What CIAR gains and what it costs: speed on real links, and quality against the share of cloud calls.

`make bench-ciar`, or `python -m benchmarks.ciar --help`. Compare ratios of one run; nothing else should run meanwhile.
Drawn pictures are kept in work/, so that a stopped run goes on.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from benchmarks.link import EmulatedLink, LinkSettings
from benchmarks.quality import Point, evaluate, open_bundle, parser, plot_fronts
from benchmarks.speed import PROMPTS
from cloud.process import VerifierProcess, running_verifier
from device.client import DeviceClient
from device.report import Report
from device.selection import MODES, REPAIRS, SelectionSettings
from shared.bundle import Bundle
from training.evaluation.settings import Way

FAR = LinkSettings(delay_ms=20.0, rate_mbit=10.0)
PLACES = (("loopback", None, False), ("40 ms, 10 Mbit/s", FAR, False), ("40 ms, apart", FAR, True))
"""Names, links, and whether device and verifier have half of the cores each, as two machines would, or share all."""
SCORES = ("interval", "entropy", "random")
BUDGETS = (0.15, 0.30, 0.60)


def _named(**options: float | str) -> str:
    """The name of a setting; what is the default is left out, so that pictures drawn for others are found again."""
    default = SelectionSettings()
    own = [f"{name}={value}" for name, value in options.items() if value != getattr(default, name)]
    return ":".join(["ciar", *([",".join(own)] if own else [])])


PREFIX_ONLY = _named(cloud_budget=0.06)  # the budget that the prefix takes alone, so that nothing is judged
FRONTS = {score: [_named(cloud_budget=budget, score=score) for budget in BUDGETS] for score in SCORES}
OTHERS = {
    "30 % judged and the prefix": _named(cloud_budget=0.36),
    "average": _named(threshold_mode="average"),
    "truncate": _named(repair="truncate"),
    "2 rows a draft": _named(draft_rows=2),
    "2 rows, 30 % judged": _named(cloud_budget=0.36, draft_rows=2),
    "4 rows a draft": _named(draft_rows=4),
    "4 rows, 30 % judged": _named(cloud_budget=0.36, draft_rows=4),
}
QUALITY = tuple(dict.fromkeys(["ar", "device", PREFIX_ONLY, *chain(*FRONTS.values()), *OTHERS.values()]))
SPEED = tuple(
    dict.fromkeys(
        [
            *("ar", "sd", "device", PREFIX_ONLY, *FRONTS["interval"], _named(cloud_budget=1.0)),
            *(_named(score=score) for score in SCORES),
            *(_named(mode=mode, repair=repair) for repair in REPAIRS for mode in MODES),
            *(_named(mode=mode, draft_rows=rows) for rows in (2, 4) for mode in ("batched", "pipelined")),
            *OTHERS.values(),
        ]
    )
)


def main() -> None:
    command = parser(__doc__, Path("docs/ciar-quality.png"))
    command.add_argument("--only", choices=("speed", "quality"), help="one part alone")
    options = command.parse_args()
    bundle = open_bundle(options.bundle)
    gains = speed(bundle, options.repeat) if options.only != "quality" else {}
    points = quality(bundle, options.config, options.count, options.plot) if options.only != "speed" else {}
    if gains and points:
        _print_both(gains, points)


def _print_both(gains: dict[str, dict[str, float]], points: dict[str, Point]) -> None:
    """Quality beside speed, of the settings that have both."""
    print(
        "\ntimes as fast as ar                "
        + "".join(f"{place:>18}" for place in gains)
        + " cloud calls      R@1  Frechet"
    )
    for name, point in points.items():
        times = [gain.get(name) for gain in gains.values()]
        if None not in times:
            cells = "".join(f"{time:>17.2f}x" for time in times)
            print(f"  {name:<32}{cells}{point.calls:>12.1%}{point.recall:>9.1%}{point.frechet:>9.0f}")


# -- speed ----------------------------------------------------------------------------------------------------------


def speed(bundle: Bundle, repeat: int) -> dict[str, dict[str, float]]:
    """Wall clock and traffic of every mode and budget on every link, one picture at a time.

    Returns:
        How many times as fast as `ar` each setting is, by place.
    """
    gains = {}
    for place, link, apart in PLACES:
        if apart and len(_cores()) < 2:
            print(f"{place}: left out; it needs two cores, and a system that lets a process choose its own\n")
            continue
        with (
            _verifier(bundle, apart) as verifier,
            _address(verifier.port, link) as address,
            DeviceClient(address, bundle=bundle.folder) as client,
        ):
            gains[place] = _print_speed(place, _drawn(client, bundle, repeat))
    return gains


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


def _drawn(client: DeviceClient, bundle: Bundle, repeat: int) -> dict[str, list[Report]]:
    """Reports of each setting, interleaved so that a slow minute of the machine hits all alike."""
    ways = {name: Way.named(name, bundle.manifest.defaults) for name in SPEED}
    for way in ways.values():
        client.generate(PROMPTS[0], way.generate_settings(0))
    reports: dict[str, list[Report]] = {name: [] for name in ways}
    for seed in range(repeat):
        for prompt in PROMPTS:
            for name, way in ways.items():
                reports[name].append(client.generate(prompt, way.generate_settings(seed)).report)
    return reports


def _print_speed(place: str, reports: dict[str, list[Report]]) -> dict[str, float]:
    print(f"{place:<36}seconds   speed-up   verified   cloud calls   passes   round trips   bytes up/token   a message")
    seconds = {name: statistics.median(report.seconds.total for report in drawn) for name, drawn in reports.items()}
    gains = {name: seconds["ar"] / own for name, own in seconds.items()}
    for name, drawn in reports.items():
        mean = {key: statistics.mean(values) for key, values in _figures(drawn).items()}
        print(
            f"  {name:<34}{seconds[name]:>7.3f}{gains[name]:>10.2f}x{mean['verified']:>11.1%}{mean['calls']:>14.1%}"
            f"{mean['passes']:>9.1f}{mean['trips']:>14.1f}{mean['bytes']:>17.1f}{mean['batch']:>12.1f}"
        )
    print(flush=True)
    return gains


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


def quality(bundle: Bundle, config: Path, count: int, plot: Path) -> dict[str, Point]:
    """Evaluates budgets, scores and modes beside `ar` and `device`; plots quality against the share of cloud calls."""
    found = evaluate(bundle, config, QUALITY, count, "test", Path("work/evaluation/ciar.json"))
    points = dict(zip(QUALITY, found, strict=True))
    lines = {score: [points[name] for name in (PREFIX_ONLY, *front, "ar")] for score, front in FRONTS.items()} | {
        label: [points[name]] for label, name in OTHERS.items()
    }
    marks = {name: points[name] for name in ("ar", "device")}
    plot_fronts(lines, marks, "calls", "share of cloud calls", f"ciar, {count} test prompts", plot)
    print(f"plot: {plot}")
    return points


if __name__ == "__main__":
    main()
