"""What a link is like."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared.errors import SettingsError

__all__ = ["PACKET", "LinkSettings"]

PACKET = 1500
"""Bytes that a line takes at once, at least."""
_LARGEST_DELAY_MS = 60_000


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """A link's properties.

    Args:
        delay_ms: time that a byte is on its way, in either direction: half of what it adds to a round trip.
        rate_mbit: 10^6 bits of TCP payload a second, for both directions or as (up, down); None for no limit.
        queue_bytes: how much may wait for the line, in each direction.
        jitter_ms: the delay varies evenly by as much, up and down. As nothing overtakes, dense traffic sees the slower
            half of it.
        seed: of the jitter.

    Raises:
        SettingsError: a value is not acceptable; the message names it.
    """

    delay_ms: float = 0.0
    rate_mbit: float | tuple[float, float] | None = None
    queue_bytes: int = 256 * 1024
    jitter_ms: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms <= _LARGEST_DELAY_MS:
            raise SettingsError(f"delay_ms: 0 to {_LARGEST_DELAY_MS} is needed, not {self.delay_ms}")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise SettingsError(f"jitter_ms: 0 to the delay, {self.delay_ms:g}, is needed, not {self.jitter_ms}")
        if self.rate_mbit is not None and not (len(self._rates) == 2 and all(0 < r < math.inf for r in self._rates)):
            raise SettingsError(f"rate_mbit: above 0 is needed, one or (up, down), not {self.rate_mbit}")
        if self.queue_bytes < PACKET:
            raise SettingsError(f"queue_bytes: at least a packet of {PACKET} is needed, not {self.queue_bytes}")

    @property
    def _rates(self) -> tuple[float, float]:
        if isinstance(self.rate_mbit, tuple):
            return self.rate_mbit
        rate = math.inf if self.rate_mbit is None else self.rate_mbit
        return rate, rate

    def bytes_per_second(self, up: bool) -> float:
        """The rate of a direction; infinite without a limit."""
        return self._rates[0 if up else 1] * 125_000
