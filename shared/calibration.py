"""How a drafter's scores spread over drawn pictures: `calibration.json` of a bundle, from which thresholds start warm.

    {"scores": {"interval": [65 numbers], "width": [...], "entropy": [...]},
     "rows": {"interval": [[33 numbers] for each row of tokens], ...}, ...}

Each list of numbers holds equidistant quantiles of that score over many pictures the drafter drew, ascending, from the
smallest to the largest: over all positions, and over those of each row. Further fields say how they were made and are
not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shared.errors import BundleError, SettingsError
from shared.intervals import SCORES

__all__ = ["CALIBRATION", "QUANTILES", "ROW_QUANTILES", "Calibration", "quantiles_of", "read_calibration"]

CALIBRATION = "calibration.json"
QUANTILES = 65
ROW_QUANTILES = 33
_MEASURED = tuple(name for name in SCORES if name != "random")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Quantiles of each measured score of a bundle's drafter.

    Args:
        scores: `QUANTILES` ascending numbers for each score but `random`, which is uniform.
        rows: `ROW_QUANTILES` ascending numbers for each of these and each row of tokens.
    """

    scores: Mapping[str, tuple[float, ...]]
    rows: Mapping[str, tuple[tuple[float, ...], ...]]

    @property
    def grid_rows(self) -> int:
        """Rows of tokens of the pictures it was made from."""
        return len(next(iter(self.rows.values())))

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads `calibration.json`.

        Raises:
            BundleError: the file is missing, or is not a calibration; the message names file and score.
        """
        return cls.from_dict(read_calibration(path), str(path))

    @classmethod
    def from_dict(cls, content: Any, source: str = CALIBRATION) -> Calibration:
        """Checks what `calibration.json` says.

        Raises:
            BundleError: a score has not `QUANTILES` finite ascending numbers, or a row of it not `ROW_QUANTILES`, or
                the scores differ in their number of rows; the message names source and score.
        """
        scores, rows = (_table(content, name, source) for name in ("scores", "rows"))
        calibration = cls(
            {name: _checked(scores.get(name), QUANTILES, f"{source}: scores.{name}") for name in _MEASURED},
            {name: _checked_rows(rows.get(name), f"{source}: rows.{name}") for name in _MEASURED},
        )
        counts = {name: len(quantiles) for name, quantiles in calibration.rows.items()}
        if len(set(counts.values())) > 1:
            raise BundleError(f"{source}: rows: its scores do not have the same number of rows ({counts})")
        return calibration

    def quantiles(self, score: str) -> tuple[float, ...]:
        """Ascending quantiles of a score, from its smallest value to its largest; those of `random` are uniform.

        Raises:
            SettingsError: no such score.
        """
        if score not in SCORES:
            raise SettingsError(f"score: one of {', '.join(SCORES)} is needed, not {score!r}")
        if score == "random":
            return tuple(np.linspace(0.0, 1.0, QUANTILES).tolist())
        return self.scores[score]

    def row_quantiles(self, score: str) -> tuple[tuple[float, ...], ...]:
        """The same for each row of tokens.

        Raises:
            SettingsError: no such score.
        """
        if score == "random":
            uniform = tuple(np.linspace(0.0, 1.0, ROW_QUANTILES).tolist())
            return (uniform,) * self.grid_rows
        self.quantiles(score)
        return self.rows[score]


def read_calibration(path: Path) -> dict[str, Any]:
    """Everything a calibration's file says, checked.

    Raises:
        BundleError: the file is missing, or is not a calibration; the message names file and score.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: not a calibration ({error})") from error
    Calibration.from_dict(content, str(path))
    return content


def quantiles_of(values: ArrayLike, count: int = QUANTILES) -> list[float]:
    """The quantiles that a calibration keeps of a score's values (n,)."""
    quantiles: list[float] = np.quantile(np.asarray(values, np.float64), np.linspace(0.0, 1.0, count)).tolist()
    return quantiles


def _table(content: Any, name: str, source: str) -> Mapping[str, Any]:
    table = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(table, Mapping):
        raise BundleError(f"{source}: not a calibration (it has no table {name!r}); export the bundle again")
    return table


def _checked_rows(rows: Any, source: str) -> tuple[tuple[float, ...], ...]:
    if not isinstance(rows, list) or not rows:
        raise BundleError(f"{source}: quantiles of each row of tokens are needed; export the bundle again")
    return tuple(_checked(row, ROW_QUANTILES, f"{source}[{index}]") for index, row in enumerate(rows))


def _checked(values: Any, count: int, source: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)}" if isinstance(values, list) else "none"
        raise BundleError(f"{source}: {count} quantiles are needed, there are {found}; export the bundle again")
    strangers = [value for value in values if type(value) not in (int, float)]
    if strangers:
        raise BundleError(f"{source}: {strangers[0]!r} is not a number")
    numbers = np.array(values, np.float64)
    if not np.isfinite(numbers).all() or (np.diff(numbers) < 0.0).any():
        raise BundleError(f"{source}: its quantiles are not finite and ascending")
    return tuple(numbers.tolist())
