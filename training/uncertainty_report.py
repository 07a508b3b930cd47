"""The uncertainty report on disk: a line of history a validation, a table for people, and a plot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from training.reports import add_step, markdown_table, write_text
from training.uncertainty import KEPT, MeasuredRows, UncertaintyReport, kept_distance, report_on

__all__ = ["UncertaintyHistory", "history_table", "save_plot", "score_table"]

_SHARES = np.linspace(0.05, 1.0, 20)


class UncertaintyHistory:
    """Writes `uncertainty.jsonl`, `uncertainty.md` and `uncertainty.png` of a training into its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, step: int, measured: Mapping[str, MeasuredRows]) -> dict[str, UncertaintyReport]:
        """Reports on measured sets of pictures at a step."""
        reports = {name: report_on(rows) for name, rows in measured.items()}
        sets = {name: report.to_dict() for name, report in reports.items()}
        lines = add_step(self.folder / "uncertainty.jsonl", step, {"sets": sets})
        tables = [f"## Step {step}", score_table(reports), "## Validations", history_table(lines)]
        write_text(self.folder / "uncertainty.md", "\n\n".join(tables) + "\n")
        save_plot(measured, lines, self.folder / "uncertainty.png")
        return reports


def score_table(reports: Mapping[str, UncertaintyReport]) -> str:
    """A line a score: its rank correlation with the true rejection probability, and the TV of what it keeps."""
    kept = f"TV of the kept {KEPT:.0%}"
    head = ["score", *(f"{name}: {title}" for name in reports for title in ("Spearman", kept))]
    names = next(iter(reports.values())).scores
    rows = []
    for score in names:
        figures = [(report.scores[score].spearman, report.scores[score].kept) for report in reports.values()]
        rows.append([score, *(f"{value:.3f}" for pair in figures for value in pair)])
    rows.append(["oracle", *(text for report in reports.values() for text in ("1.000", f"{report.oracle:.3f}"))])
    return markdown_table(head, rows)


def history_table(lines: list[dict[str, Any]]) -> str:
    """A line a validation and set of pictures."""
    head = ["step", "pictures", "rows", "TV", "coverage", "radius", "Spearman of interval", "kept TV of interval"]
    rows = []
    for line in lines:
        for name, report in line["sets"].items():
            interval = report["scores"]["interval"]
            figures = [report["distance"], report["coverage"], report["radius"], *interval.values()]
            rows.append([str(line["step"]), name, str(report["rows"]), *(f"{value:.3f}" for value in figures)])
    return markdown_table(head, rows)


def save_plot(measured: Mapping[str, MeasuredRows], lines: list[dict[str, Any]], path: Path) -> None:
    """Mean TV of the kept rows against the share that is kept, for each score; and the course of the validations."""
    figure = Figure(figsize=(5.0 * (len(measured) + 1), 4.2), layout="constrained")
    *curves, course = figure.subplots(1, len(measured) + 1)
    for axis, (name, rows) in zip(curves, measured.items(), strict=True):
        for score, values in {**rows.scores, "oracle": rows.distance}.items():
            kept = [kept_distance(values, rows.distance, share) for share in _SHARES]
            axis.plot(_SHARES, kept, "--" if score in ("oracle", "random") else "-", label=score)
        axis.set(title=f"{name}, step {lines[-1]['step']}", xlabel="share kept", ylabel="mean TV of the kept")
        axis.legend(fontsize="small")
    steps = [line["step"] for line in lines]
    for name in measured:
        for key, label in (("distance", "TV"), ("coverage", "coverage")):
            points = [line["sets"].get(name, {}).get(key, np.nan) for line in lines]
            course.plot(steps, points, ".-", label=f"{name}: {label}")
    course.set(title="validations", xlabel="step", ylim=(0.0, 1.0))
    course.legend(fontsize="small")
    temporary = path.with_name(f"{path.stem}.tmp.png")
    figure.savefig(temporary, dpi=100)
    os.replace(temporary, path)
