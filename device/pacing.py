"""How long a draft should be: as long as its next token is expected to earn more than the average second does."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["AdaptivePace", "FixedPace", "Pace"]

_BINS = 10


class Pace(Protocol):
    """Decides token by token whether a draft goes on. It never sees the drawn token, only the row it is drawn from."""

    def begin(self) -> None:
        """A draft begins."""
        ...

    def wants(self, confidence: float) -> bool:
        """Whether to draft one more token, from a row whose largest probability is `confidence`.

        It may refuse a draft's first token only while other drafts wait for verdicts.
        """
        ...

    def drafted(self, seconds: float) -> None:
        """The draft took so long to make."""
        ...

    def judged(self, accepted: int, seconds: float) -> None:
        """The verdict on the oldest draft in flight: tokens that stand, and seconds since it was sent."""
        ...

    def forget(self) -> None:
        """No verdict will come for what is in flight."""
        ...


@dataclass(slots=True)
class FixedPace:
    """Drafts of a fixed length."""

    count: int
    _done: int = 0

    def begin(self) -> None:
        self._done = 0

    def wants(self, confidence: float) -> bool:
        self._done += 1
        return self._done <= self.count

    def drafted(self, seconds: float) -> None: ...

    def judged(self, accepted: int, seconds: float) -> None: ...

    def forget(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A draft in flight: the bins of its tokens, the seconds it took to make, the chance that all of it stands."""

    bins: list[int]
    drafting: float
    chance: float


@dataclass(slots=True)
class AdaptivePace:
    """Stops where one more token would earn less than the average second.

    A token at the end of a draft counts only if all before it stand, so its worth is the product of their chances. The
    chance of a token is learnt from verdicts, by the confidence of the row it was drawn from: a flat background is
    drafted in long runs, the eye of a face token by token. The cost of a token is the time to draft it and what it adds
    to a round (little where the target verifies many rows as fast as one, much where it does not); both are measured.
    Behind drafts in flight a token counts only if all of those stand too: often it is better to wait for verdicts.

    Args:
        longest: upper limit of a draft.
        memory: weight of the past in running means.
    """

    longest: int = 24
    memory: float = 0.9
    token_seconds: float = 0.001
    rate: float = 200.0
    _hits: list[float] = field(default_factory=lambda: [4 * (0.25 + 0.75 * (i + 0.5) / _BINS) for i in range(_BINS)])
    _tries: list[float] = field(default_factory=lambda: [4.0] * _BINS)
    _rounds: _Line = field(default_factory=lambda: _Line())
    _bins: list[int] = field(default_factory=list)
    _chance: float = 1.0
    _flying: list[_Flight] = field(default_factory=list)

    def begin(self) -> None:
        self._bins, self._chance = [], math.prod(flight.chance for flight in self._flying)

    def wants(self, confidence: float) -> bool:
        place = min(_BINS - 1, int(confidence * _BINS))
        chance = self._chance * self._hits[place] / self._tries[place]
        cost = self.token_seconds + self._rounds.slope
        # Something must be in flight.
        if (self._bins or self._flying) and (len(self._bins) >= self.longest or chance < self.rate * cost):
            return False
        self._bins.append(place)
        self._chance = chance
        return True

    def drafted(self, seconds: float) -> None:
        self.token_seconds = self._mean(self.token_seconds, seconds / len(self._bins))
        alone = self._chance / math.prod(flight.chance for flight in self._flying)
        self._flying.append(_Flight(self._bins, seconds, alone))

    def judged(self, accepted: int, seconds: float) -> None:
        flight = self._flying.pop(0)
        # Only tokens that were really tested: those behind the first rejection say nothing.
        for index, place in enumerate(flight.bins[: accepted + 1]):
            self._hits[place] = 0.98 * self._hits[place] + (index < accepted)
            self._tries[place] = 0.98 * self._tries[place] + 1.0
        self._rounds.add(len(flight.bins), seconds)
        # With other drafts in flight, drafting went on meanwhile.
        busy = max(seconds, flight.drafting) if self._flying else seconds + flight.drafting
        self.rate = self._mean(self.rate, (accepted + 1) / busy)

    def forget(self) -> None:
        self._flying.clear()

    def _mean(self, past: float, value: float) -> float:
        return self.memory * past + (1.0 - self.memory) * value


@dataclass(slots=True)
class _Line:
    """A straight line through recent (x, y): only its slope is wanted."""

    memory: float = 0.95
    weight: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)

    def add(self, x: float, y: float) -> None:
        self.weight = self.memory * self.weight + 1.0
        self.sums = [self.memory * s + new for s, new in zip(self.sums, (x, y, x * x, x * y), strict=True)]

    @property
    def slope(self) -> float:
        """At least 0, and 0 while the points say nothing."""
        x, y, xx, xy = (s / self.weight if self.weight else 0.0 for s in self.sums)
        spread = xx - x * x
        return max(0.0, (xy - x * y) / spread) if spread > 0.25 else 0.0
