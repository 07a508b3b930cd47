"""The figures as a table for people (markdown) and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.data.claims import BACKGROUNDS, BackgroundKind
from training.evaluation.measures import Figures

__all__ = ["as_json", "markdown_table", "write_json"]

Column = Callable[[Figures], float | None]


def markdown_table(rows: dict[str, Figures]) -> str:
    """One row a set of pictures; columns that no row has a value for are left out."""
    columns = {title: (show, [column(row) for row in rows.values()]) for title, (column, show) in _COLUMNS.items()}
    columns = {title: (show, values) for title, (show, values) in columns.items() if any(v is not None for v in values)}
    cells = [[show(value) if value is not None else "-" for value in values] for show, values in columns.values()]
    lines = [["pictures", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[name, *row] for name, row in zip(rows, zip(*cells, strict=True), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_json(content: dict[str, Any], path: Path) -> None:
    """Writes the report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def as_json(rows: dict[str, Figures]) -> dict[str, Any]:
    """The same figures for programs."""
    return {name: asdict(row) for name, row in rows.items()}


def _recall(name: str) -> Column:
    return lambda row: getattr(row.retrieval, name) if row.retrieval else None


def _colours(kind: BackgroundKind) -> Column:
    return lambda row: row.background[kind].value if kind in row.background else None


def _cost(name: str) -> Column:
    return lambda row: getattr(row.cost, name) if row.cost else None


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _plain(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


_COLUMNS: dict[str, tuple[Column, Callable[[float], str]]] = {
    "n": (lambda row: row.pictures, _plain(0)),
    "Frechet": (lambda row: row.frechet, _plain(1)),
    "R@1": (_recall("recall_1"), _percent),
    "R@5": (_recall("recall_5"), _percent),
    "R@10": (_recall("recall_10"), _percent),
    "median rank": (_recall("median_rank"), _plain(0)),
    **{f"{kind} background": (_colours(kind), _percent) for kind in BACKGROUNDS},
    "s a picture": (_cost("seconds"), _plain(2)),
    "cloud passes": (_cost("cloud_forwards"), _plain(1)),
    "accepted": (_cost("accepted"), _percent),
    "cloud calls": (_cost("cloud_call_rate"), _percent),
}
