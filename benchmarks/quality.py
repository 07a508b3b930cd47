"""Quality of ways to draw beside what they cost, and the plot of one against the other."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from shared.bundle import Bundle, default_bundle_folder
from shared.sampling import SamplingSettings
from training.evaluation.settings import EvaluationSettings, Way
from training.evaluation.stage import run_evaluation

__all__ = ["Point", "evaluate", "open_bundle", "parser", "plot_fronts"]


def parser(description: str, plot: Path) -> argparse.ArgumentParser:
    """The command line that the benchmarks of a method's quality share."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--bundle", type=Path, default=default_bundle_folder(), metavar="DIR")
    result.add_argument("--repeat", type=int, default=2, help="rounds over the prompts (default: %(default)s)")
    result.add_argument("--count", type=int, default=500, help="pictures a setting, for quality (default: %(default)s)")
    result.add_argument("--config", type=Path, default=Path("configs/evaluate.toml"), metavar="FILE",
                        help="of the evaluation; default: %(default)s")  # fmt: skip
    result.add_argument("--plot", type=Path, default=plot, metavar="F.png", help="default: %(default)s")
    return result


def open_bundle(folder: Path) -> Bundle:
    """Opens the bundle and says which it is."""
    bundle = Bundle.open(folder)
    print(f"bundle {bundle.manifest.name} {bundle.manifest.digest:.12}\n", flush=True)
    return bundle


@dataclass(frozen=True, slots=True)
class Point:
    """A way's quality and cost: means over its pictures."""

    recall: float
    frechet: float
    calls: float
    forwards: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> Point:
        """From a row of the evaluation's report."""
        cost = row["cost"]
        recall = row["retrieval"]["recall_1"] if row["retrieval"] else float("nan")
        return cls(recall, row["frechet"], cost["cloud_call_rate"], cost["cloud_forwards"])


def evaluate(bundle: Bundle, config: Path, names: Sequence[str], count: int, split: str, report: Path) -> list[Point]:
    """Draws and measures `count` pictures in each way; prints the table. Pictures of an earlier run are not redrawn."""
    settings = replace(
        EvaluationSettings.load(config),
        bundle=bundle.folder,
        methods=tuple(names),
        count=count,
        split=split,
        report=report,
        contact_sheet="",
        extra=(),
    )
    run_evaluation(settings)
    (rows,) = json.loads(report.read_text(encoding="utf-8"))["lists"].values()
    return [Point.of(rows[Way.named(name, SamplingSettings()).name]) for name in names]


def plot_fronts(
    lines: dict[str, list[Point]], marks: dict[str, Point], cost: str, label: str, title: str, path: Path
) -> None:
    """Plots R@1 and Frechet distance against a cost.

    Args:
        lines: points of each front, in order.
        marks: single ways, drawn as dotted lines for their quality.
        cost: field of `Point` on the horizontal axis.
        label: its name.
        title: over the plot.
        path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    for axis, quality, name in zip(axes, ("recall", "frechet"), ("R@1", "Frechet distance"), strict=True):
        for front, points in lines.items():
            x, y = ([getattr(point, which) for point in points] for which in (cost, quality))
            axis.plot(x, y, marker="o", markersize=3, label=front)
        for (mark, point), place in zip(marks.items(), cycle((0.01, 0.92)), strict=False):  # apart, as lines may not be
            axis.axhline(getattr(point, quality), linestyle=":", color="grey")
            axis.annotate(mark, (place, getattr(point, quality)), xycoords=("axes fraction", "data"), fontsize=8)
        axis.set(xlabel=label, ylabel=name)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
