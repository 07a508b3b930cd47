"""How long a draft should be: the length that commits most tokens a second, from what was measured so far."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["FixedPace", "Pace"]


@dataclass(slots=True)
class FixedPace:
    """Drafts of a fixed length."""

    count: int

    def length(self) -> int:
        return self.count

    def drafted(self, count: int, seconds: float) -> None: ...

    def judged(self, accepted: int, proposed: int, seconds: float) -> None: ...


@dataclass(slots=True)
class Pace:
    """Adapts the draft length to acceptance, drafting time and round time.

    With acceptance rate a, drafting time d a token and round time r, a draft of n tokens commits on average
    (1 - a**(n + 1)) / (1 - a) tokens in n*d + r seconds; `length` is the n that maximises their ratio.

    Args:
        longest: upper limit.
        acceptance, draft_seconds, round_seconds: first guesses; replaced by running means as measurements come.
        memory: weight of the past in the running means.
    """

    longest: int = 16
    acceptance: float = 0.75
    draft_seconds: float = 0.001
    round_seconds: float = 0.008
    memory: float = 0.85
    _measured: set[str] = field(default_factory=set)

    def length(self) -> int:
        """Tokens of the next draft."""
        rate = min(self.acceptance, 0.995)
        committed, power, best, best_speed = 1.0, 1.0, 1, 0.0
        for count in range(1, self.longest + 1):
            power *= rate
            committed += power
            speed = committed / (count * self.draft_seconds + self.round_seconds)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def drafted(self, count: int, seconds: float) -> None:
        """Takes note of `count` tokens drafted in `seconds`."""
        self._learn("draft_seconds", seconds / count)

    def judged(self, accepted: int, proposed: int, seconds: float) -> None:
        """Takes note of a verdict that came `seconds` after its draft was sent."""
        # Of the tokens that were really tested: those behind the first rejection say nothing.
        self._learn("acceptance", accepted / min(proposed, accepted + 1))
        self._learn("round_seconds", seconds)

    def _learn(self, name: str, value: float) -> None:
        weight = self.memory if name == "acceptance" or name in self._measured else 0.0
        setattr(self, name, weight * getattr(self, name) + (1.0 - weight) * value)
        self._measured.add(name)
