"""Quality of ways to draw beside what they cost, and the plot of one against the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.bundle import Bundle
from shared.sampling import SamplingSettings
from training.evaluation.settings import EvaluationSettings, Way
from training.evaluation.stage import run_evaluation

__all__ = ["Point", "evaluate", "plot_fronts"]


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

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, quality, name in zip(axes, ("recall", "frechet"), ("R@1", "Frechet distance"), strict=True):
        for front, points in lines.items():
            x, y = ([getattr(point, which) for point in points] for which in (cost, quality))
            axis.plot(x, y, marker="o", markersize=3, label=front)
        for mark, point in marks.items():
            axis.axhline(getattr(point, quality), linestyle=":", color="grey")
            axis.annotate(mark, (0.01, getattr(point, quality)), xycoords=("axes fraction", "data"), fontsize=8)
        axis.set(xlabel=label, ylabel=name)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
