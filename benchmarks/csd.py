"""What windows of drafts save on the cloud, losslessly and relaxed, and what relaxing costs. `make bench-csd`.

Settings are tuned on the validation split (`--split val`) and reported on test. Compare ratios of one run; nothing else
should run meanwhile. Drawn pictures are kept in work/, so that a stopped run goes on.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from benchmarks.quality import Point, evaluate, open_bundle, parser, plot_fronts
from benchmarks.speed import PROMPTS, best, step
from cloud.engine import Engine
from cloud.models.loading import load_transformer
from cloud.process import running_verifier
from cloud.relaxation import Csd, entropy, tv_cost
from cloud.verifier import VerifierSettings
from device.client import DeviceClient
from device.report import Report
from shared.bundle import Bundle
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
SETTLED = 5  # about as many as a pass of `sjd` commits
FRONTS = {
    "csd": [f"csd:delta={delta}" for delta in (0.2, 0.35, 0.5, 0.65, 0.8)],
    "addition": [f"sjd-addition:epsilon={epsilon}" for epsilon in (0.05, 0.1, 0.2, 0.4)],
    "amplify": [f"sjd-amplify:factor={factor}" for factor in (1.3, 2, 4)],
    "gsd": [f"sjd-gsd:group={group}" for group in (4, 14, 35)],
}


def main() -> None:
    command = parser(__doc__, Path("docs/csd-quality.png"))
    command.add_argument("--only", choices=("cost", "speed", "quality"), help="one part alone")
    command.add_argument("--split", choices=("val", "test"), default="test", help="default: %(default)s")
    options = command.parse_args()
    bundle = open_bundle(options.bundle)
    if options.only in (None, "cost"):
        cost(bundle)
    if options.only in (None, "speed"):
        speed(bundle, options.repeat)
    if options.only in (None, "quality"):
        quality(bundle, options.config, options.count, options.split, options.plot)


def cost(bundle: Bundle) -> None:
    """What entropy and the price of relaxing take for the tokens that a pass settles, beside the pass itself."""
    print(f"window   pass ms   entropy ms   TV cost ms   both / pass      ({SETTLED} tokens settled a pass)")
    engine = Engine(load_transformer(bundle.path("target.safetensors")), 3, dtype=VerifierSettings().torch_dtype)
    draft, target = torch.softmax(3.0 * torch.randn(2, SETTLED, engine.config.vocabulary), -1)
    rule = Csd(0.5, 0.35)
    flat, price = best(lambda: entropy(target), 200), best(lambda: tv_cost(rule, draft, target), 200)
    for size in (16, 32, 64):
        whole = best(step(engine, size), 40)
        print(f"{size:>6}{whole * 1e3:>10.2f}{flat * 1e3:>13.3f}{price * 1e3:>13.3f}{(flat + price) / whole:>14.1%}")
    print(flush=True)


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
