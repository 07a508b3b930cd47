"""One direction of a link."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from benchmarks.link.clock import Clock
from benchmarks.link.settings import PACKET, LinkSettings

__all__ = ["READ", "Line"]

READ = 64 * 1024
"""Bytes that are read at once, at most."""
_WINDOW = 16 * 1024 * 1024
"""Bytes that may be on their way, as TCP's windows limit them."""


class Line:
    """A queue, a serialisation clock and a delay; first in, first out.

    Args:
        clock: its time.
        settings: the link's.
        up: the direction.
        changed: called when the line has become full or has room again.

    Attributes:
        settings: may be replaced; counts for what comes in from then on.
        bytes: what came in so far.
        full: nothing may come in now.
    """

    def __init__(self, clock: Clock, settings: LinkSettings, up: bool, changed: Callable[[], None]) -> None:
        self.settings, self.bytes, self.full = settings, 0, False
        self._clock, self._up, self._changed = clock, up, changed
        self._on_way = 0
        self._free_at = self._last_due = 0.0
        self._pieces: deque[tuple[float, int, Callable[[], None]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._noise = random.Random(f"{settings.seed} {up}")

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.settings.bytes_per_second(self._up)

    @property
    def unit(self) -> int:
        """Bytes that travel as one: half a millisecond's, so that the rate is smooth, but at least a packet."""
        return int(min(max(PACKET, self.rate * 5e-4), READ, self.settings.queue_bytes))

    def room(self) -> int:
        """Bytes that may come in."""
        queue, busy = self.settings.queue_bytes, self._free_at - self._clock.now()
        waiting = min(queue, busy * self.rate) if busy > 0 else 0.0
        return int(min(queue - waiting, _WINDOW - self._on_way))

    def put(self, data: memoryview, deliver: Callable[[bytes], None]) -> None:
        """Sends what has come in; `deliver` gets it piece by piece."""
        now, rate, unit = self._clock.now(), self.rate, self.unit
        self.bytes += len(data)
        for start in range(0, len(data), unit):
            piece = bytes(data[start : start + unit])
            self._free_at = max(now, self._free_at) + len(piece) / rate
            self._append(partial(deliver, piece), len(piece))
        self.update()

    def follow(self, action: Callable[[], None]) -> None:
        """Calls when all that has come in until now has arrived."""
        self._append(action, 0)
        self.update()

    def update(self) -> None:
        """Looks whether there is room, and sets the timer again."""
        full = self.room() < self.unit
        if full != self.full:
            self.full = full
            self._changed()
        self._arm()

    def clear(self) -> None:
        """Forgets all that is under way."""
        self._pieces.clear()
        self._on_way, self._free_at, self._last_due = 0, 0.0, 0.0
        self.update()

    def _append(self, action: Callable[[], None], size: int) -> None:
        sent, jitter = max(self._clock.now(), self._free_at), self.settings.jitter_ms
        delay = self.settings.delay_ms + self._noise.uniform(-jitter, jitter)
        self._last_due = max(self._last_due, sent + delay * 1e-3)
        self._on_way += size
        self._pieces.append((self._last_due, size, action))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        moments = [self._pieces[0][0]] if self._pieces else []
        # Later by more than a float is off. It is past when the way is full, not the queue: then an arrival makes room.
        has_room = self._free_at - (self.settings.queue_bytes - self.unit) / self.rate + 1e-5
        if self.full and has_room > self._clock.now():
            moments.append(has_room)
        if moments and not self._clock.stopped:
            self._timer = self._clock.call_at(min(moments), self._run)

    def _run(self) -> None:
        now = self._clock.now()
        while self._pieces and self._pieces[0][0] <= now:
            _, size, action = self._pieces.popleft()
            self._on_way -= size
            action()
        self.update()
