"""Which drafted tokens are uncertain: the dynamic threshold of CIAR (2603.25463; methods.md 5.3).

A decision sees the row a token is drawn from and the rows before it, never the drawn token. A threshold's state belongs
to a position: after a rejection it goes back to where it was, so that the decisions, and with them the picture, depend
neither on the link nor on how drafts were cut into messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import SettingsError

__all__ = ["THRESHOLDS", "Absolute", "MaxNorm", "Quantile", "Threshold", "make_threshold"]

THRESHOLDS = ("quantile", "maxnorm", "absolute")


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
    """Holds the share of uncertain tokens at a budget: a running quantile (Robbins-Monro), warm from calibration.

    Scores are first turned into ranks by the calibration's quantiles, so that a step means the same everywhere of a
    distribution that spans orders of magnitude.

    Args:
        budget: share of uncertain tokens wanted, 0..1.
        calibration: equidistant quantiles of the score on drawn pictures, ascending, from the bundle.
        step: how fast the threshold follows. Whatever the scores are, after n positions the share is off by at most
            (1 + step) / (step * n).
    """

    budget: float
    calibration: Sequence[float]
    step: float = 0.15
    _levels: list[float] = field(default_factory=list)
    _ranks: NDArray[np.float64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._ranks = np.linspace(0.0, 1.0, len(self.calibration))

    def uncertain(self, score: float) -> bool:
        if self.budget in (0.0, 1.0):
            return self.budget == 1.0
        level = self._levels[-1] if self._levels else 1.0 - self.budget
        verdict = self._rank(score) > level
        # Not clamped to the ranks: the share would miss what a clamp swallows. It leaves them by a step at most.
        self._levels.append(level + self.step * (verdict - self.budget))
        return verdict

    def truncate(self, count: int) -> None:
        del self._levels[count:]

    def _rank(self, score: float) -> float:
        return float(np.interp(score, self.calibration, self._ranks))


def make_threshold(mode: str, budget: float, level: float | None, calibration: Sequence[float]) -> Threshold:
    """The threshold of a mode.

    Args:
        mode: one of `THRESHOLDS`.
        budget: share of uncertain tokens, for `quantile`.
        level: for `maxnorm` (None: 0.30) and `absolute`.
        calibration: quantiles of the score in use.

    Raises:
        SettingsError: an unknown mode, or `absolute` without a level.
    """
    if mode == "quantile":
        return Quantile(budget, calibration)
    if mode == "maxnorm":
        # The largest of many pictures is an outlier that would fade for half a picture.
        return MaxNorm(0.30 if level is None else level, calibration[-2])
    if mode == "absolute":
        if level is None:
            raise SettingsError("threshold: mode absolute needs a level (--threshold X)")
        return Absolute(level)
    raise SettingsError(f"threshold_mode: one of {', '.join(THRESHOLDS)} is needed, not {mode!r}")
