"""What windows of drafts save on the cloud, losslessly and relaxed, and what relaxing costs. `make bench-csd`.

Settings are tuned on the validation split (`--split val`) and reported on test. Compare ratios of one run; nothing else
should run meanwhile. Drawn pictures are kept in work/, so that a stopped run goes on.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.quality import Point, evaluate, plot_fronts
from benchmarks.speed import PROMPTS
from cloud.process import running_verifier
from device.client import DeviceClient
from device.report import Report
from shared.bundle import Bundle, default_bundle_folder
from training.evaluation.settings import Way

SPEED = (
    "ar",
    "sjd:size=16,init=uniform,after=stop",
    "sjd:size=16,init=uniform",
    "sjd:size=16",
    "sjd",
    "sjd:size=64",
    "sjd-gumbel",
    "csd",
    "csd:delta=0.65",
    "csd:delta=0.65,size=64",
)
FRONTS = {
    "csd": [f"csd:delta={delta}" for delta in (0.2, 0.35, 0.5, 0.65, 0.8)],
    "addition": [f"sjd-addition:epsilon={epsilon}" for epsilon in (0.05, 0.1, 0.2, 0.4)],
    "amplify": [f"sjd-amplify:factor={factor}" for factor in (1.3, 2, 4)],
    "gsd": [f"sjd-gsd:group={group}" for group in (4, 14, 35)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=default_bundle_folder(), metavar="DIR")
    parser.add_argument("--repeat", type=int, default=2, help="rounds over the prompts (default: %(default)s)")
    parser.add_argument("--only", choices=("speed", "quality"), help="one part alone")
    parser.add_argument("--count", type=int, default=500, help="pictures a setting, for quality (default: %(default)s)")
    parser.add_argument("--split", choices=("val", "test"), default="test", help="default: %(default)s")
    parser.add_argument("--config", type=Path, default=Path("configs/evaluate.toml"), metavar="FILE", help="of the "
                        "evaluation; default: %(default)s")  # fmt: skip
    parser.add_argument("--plot", type=Path, default=Path("docs/csd-quality.png"), metavar="F.png")
    options = parser.parse_args()
    bundle = Bundle.open(options.bundle)
    print(f"bundle {bundle.manifest.name} {bundle.manifest.digest:.12}\n", flush=True)
    if options.only != "quality":
        speed(bundle, options.repeat)
    if options.only != "speed":
        quality(bundle, options.config, options.count, options.split, options.plot)


def speed(bundle: Bundle, repeat: int) -> None:
    """Passes and wall clock against `ar`, on loopback, one picture at a time."""
    ways = [Way.named(name, bundle.manifest.defaults) for name in SPEED]
    reports: dict[str, list[Report]] = {name: [] for name in SPEED}
    with running_verifier(bundle.folder) as verifier, DeviceClient(verifier.address, bundle=bundle.folder) as client:
        for way in ways:
            client.generate(PROMPTS[0], way.generate_settings(0))
        # Interleaved, so that a slow minute of the machine hits all alike.
        for seed in range(repeat):
            for prompt in PROMPTS:
                for name, way in zip(SPEED, ways, strict=True):
                    reports[name].append(client.generate(prompt, way.generate_settings(seed)).report)
    print(
        "way                                 seconds   speed-up   passes   fewer   first row s   relaxed   TV a token"
    )
    seconds = {name: statistics.median(r.seconds.total for r in drawn) for name, drawn in reports.items()}
    passes = {name: statistics.mean(r.cloud.forwards for r in drawn) for name, drawn in reports.items()}
    for name, drawn in reports.items():
        first = statistics.median(report.seconds.first_row for report in drawn)
        relaxed = statistics.mean(report.relaxed / report.tokens for report in drawn)
        costs = [report.tv_cost / report.tokens for report in drawn if report.tv_cost is not None]
        print(
            f"  {name:<32}{seconds[name]:>8.3f}{seconds['ar'] / seconds[name]:>10.2f}x{passes[name]:>9.1f}"
            f"{passes['ar'] / passes[name]:>7.2f}x{first:>13.3f}{relaxed:>10.1%}"
            f"{statistics.mean(costs) if costs else float('nan'):>13.4f}"
        )
    print(flush=True)


def quality(bundle: Bundle, config: Path, count: int, split: str, plot: Path) -> None:
    """Evaluates the fronts of the relaxed rules beside `ar` and lossless `sjd`, and plots quality against passes."""
    names = ["ar", "sjd", *(name for front in FRONTS.values() for name in front)]
    points = dict(
        zip(names, evaluate(bundle, config, names, count, split, Path("work/evaluation/csd.json")), strict=True)
    )
    lines: dict[str, list[Point]] = {front: [points[name] for name in ways] for front, ways in FRONTS.items()}
    marks = {name: points[name] for name in ("ar", "sjd")}
    plot_fronts(lines, marks, "forwards", "passes of the target", f"{split} prompts, {count} pictures a setting", plot)
    print(f"plot: {plot}")


if __name__ == "__main__":
    main()
