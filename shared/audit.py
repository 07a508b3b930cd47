"""The audit: what keeping tokens on the device cost, estimated from a few of them that the target judges afterwards.

For a kept token x that was drawn from the draft row, E[(1 - target(x) / draft(x))+] is the total variation between the
two rows. So one number a token, the target's probability of x, makes an unbiased estimate, and no row crosses the wire.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared import noise
from shared.noise import Purpose

__all__ = ["Audit", "audited"]


def audited(seed: int, positions: Sequence[int], rate: float) -> list[bool]:
    """Which positions are audited if their tokens are kept: a share `rate` of them, chosen blindly by the seed."""
    if not positions:
        return []
    draws = noise.uniform(seed, Purpose.AUDIT, positions, 1)[:, 0]
    return [bool(draw < rate) for draw in draws]


@dataclass(slots=True)
class Audit:
    """Adds up audited tokens. `tv` estimates the mean total variation of kept rows to the target's."""

    tokens: int = 0
    excess: float = 0.0
    squares: float = 0.0

    def add(self, draft_log_prob: float, target_log_prob: float) -> None:
        """One audited token's log-probabilities in both warped rows."""
        excess = max(0.0, 1.0 - math.exp(min(0.0, target_log_prob - draft_log_prob)))
        self.tokens += 1
        self.excess += excess
        self.squares += excess * excess

    @property
    def tv(self) -> float | None:
        """None while nothing was audited."""
        return self.excess / self.tokens if self.tokens else None

    @property
    def error(self) -> float | None:
        """Standard error of `tv`; None below two tokens."""
        if self.tokens < 2:
            return None
        mean = self.excess / self.tokens
        variance = max(0.0, self.squares / self.tokens - mean * mean) * self.tokens / (self.tokens - 1)
        return math.sqrt(variance / self.tokens)
