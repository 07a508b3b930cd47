"""Which drafted tokens are uncertain: the dynamic threshold of CIAR (2603.25463; methods.md 5.3).

A decision sees the row a token is drawn from and the rows before it, never the drawn token. A threshold's state belongs
to a position: after a rejection it goes back to where it was, so that the decisions, and with them the picture, depend
neither on the link nor on how drafts were cut into messages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import SettingsError

__all__ = ["THRESHOLDS", "Absolute", "MaxNorm", "Quantile", "Threshold", "make_threshold"]

THRESHOLDS = ("quantile", "average", "maxnorm", "absolute")
"""The budget for each picture, the budget for pictures like the calibration's on average, and two kinds of level."""


class Threshold(Protocol):
    """Decides position by position, in order."""

    def uncertain(self, score: float) -> bool:
        """Whether the token of the next position is uncertain, given the score of its row."""
        ...

    def truncate(self, count: int) -> None:
        """Forgets all decisions but the first `count`."""
        ...


@dataclass(slots=True)
class Absolute:
    """Uncertain when the score is above a fixed level; level 0 makes everything uncertain, infinity nothing."""

    level: float

    def uncertain(self, score: float) -> bool:
        return score > self.level or self.level <= 0.0

    def truncate(self, count: int) -> None: ...


@dataclass(slots=True)
class MaxNorm:
    """Uncertain when the score is above a share of the largest so far, which fades.

    Args:
        level: the share, 0.30 in the paper's reading.
        first: largest score expected, from calibration.
        fade: how the largest score fades with each position.
    """

    level: float
    first: float
    fade: float = 0.99
    _largest: list[float] = field(default_factory=list)

    def uncertain(self, score: float) -> bool:
        largest = max(score, self.fade * (self._largest[-1] if self._largest else self.first))
        self._largest.append(largest)
        return score > self.level * largest or self.level <= 0.0

    def truncate(self, count: int) -> None:
        del self._largest[count:]


@dataclass(slots=True)
class Quantile:
    """Spends a picture's budget, to the token: the level is what the calibration lets expect to use up the rest of it.

    Pictures are mostly easy at their edges and hard in the middle, so a level that held the share from moment to moment
    would judge background and keep outlines. This one moves only as the budget runs ahead or behind what the rows still
    to come are expected to need.

    Args:
        budget: share of uncertain tokens wanted, 0..1.
        calibration: for each row of tokens, equidistant quantiles of the score on drawn pictures, ascending.
        counts: positions that will be decided in each row, in order. At their end a share `budget` of them all is
            uncertain, give or take one, whatever the scores are.
    """

    budget: float
    calibration: Sequence[Sequence[float]]
    counts: Sequence[int]
    _spent: list[int] = field(default_factory=list)
    _ends: list[int] = field(init=False, repr=False, compare=False)
    _rows: list[NDArray[np.float64]] = field(init=False, repr=False, compare=False)
    _ranks: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.calibration) != len(self.counts):
            raise SettingsError(f"calibration: it is of {len(self.calibration)} rows, not {len(self.counts)}")
        self._ends = list(accumulate(self.counts))
        self._rows = [np.asarray(quantiles, np.float64) for quantiles in self.calibration]
        self._ranks = np.linspace(0.0, 1.0, len(self.calibration[0]))

    def uncertain(self, score: float) -> bool:
        place, spent = len(self._spent), self._spent[-1] if self._spent else 0
        count = self._ends[-1]
        left = self.budget * count - spent
        verdict = left >= count - place or self._expected(score, place) < left
        self._spent.append(spent + verdict)
        return verdict

    def _expected(self, score: float, place: int) -> float:
        """How many positions from `place` on are expected to have a higher score.

        By ranks of the calibration: its scores span orders of magnitude.
        """
        row = bisect_right(self._ends, place)
        counts = [self._ends[row] - place, *self.counts[row + 1 :]]
        return sum(
            count * (1.0 - float(np.interp(score, quantiles, self._ranks)))
            for count, quantiles in zip(counts, self._rows[row:], strict=True)
        )

    def truncate(self, count: int) -> None:
        del self._spent[count:]


def make_threshold(
    mode: str,
    budget: float,
    level: float | None,
    calibration: Sequence[float],
    rows: Sequence[Sequence[float]],
    counts: Sequence[int],
) -> Threshold:
    """The threshold of a mode.

    Args:
        mode: one of `THRESHOLDS`.
        budget: share of uncertain tokens, for `quantile` and `average`.
        level: for `maxnorm` (None: 0.30) and `absolute`.
        calibration: quantiles of the score in use, for `average` and `maxnorm`.
        rows: the same for each row of tokens, for `quantile`.
        counts: positions of each row that will be decided, for `quantile`.

    Raises:
        SettingsError: an unknown mode, or `absolute` without a level.
    """
    if mode == "quantile":
        return Quantile(budget, rows, counts)
    if mode == "average":
        return Absolute(_level(budget, calibration))
    if mode == "maxnorm":
        # The largest of many pictures is an outlier that would fade for half a picture.
        return MaxNorm(0.30 if level is None else level, calibration[-2])
    if mode == "absolute":
        if level is None:
            raise SettingsError("threshold: mode absolute needs a level (--threshold X)")
        return Absolute(level)
    raise SettingsError(f"threshold_mode: one of {', '.join(THRESHOLDS)} is needed, not {mode!r}")


def _level(budget: float, calibration: Sequence[float]) -> float:
    """The level above which a share `budget` of the calibration's scores lies."""
    if budget in (0.0, 1.0):
        return 0.0 if budget else math.inf
    return float(np.interp(1.0 - budget, np.linspace(0.0, 1.0, len(calibration)), calibration))
