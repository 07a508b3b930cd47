"""Waiting between attempts: exponential back-off with full jitter, bounded in time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Retry"]


@dataclass(slots=True)
class Retry:
    """Decides whether and how long to wait before the next attempt.

    Args:
        first: upper bound of the first wait, in seconds; doubles with each attempt.
        longest: upper bound of any wait, in seconds.
        patience: seconds since the last progress after which no further attempt is made.
        clock, sleep, jitter: replaceable for tests.
    """

    first: float = 0.1
    longest: float = 2.0
    patience: float = 20.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random
    attempts: int = field(default=0, init=False)
    _since: float | None = field(default=None, init=False)

    def progressed(self) -> None:
        """Starts afresh: the last attempt got somewhere."""
        self.attempts, self._since = 0, None

    def wait(self) -> bool:
        """Waits before the next attempt; False when patience has run out (without waiting)."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        left = self.patience - (now - self._since)
        if left <= 0:
            return False
        bound = min(self.longest, self.first * 2**self.attempts)
        self.attempts += 1
        self.sleep(min(left, bound * self.jitter()))
        return True
