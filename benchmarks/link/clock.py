"""The thread of a link, and its time."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Clock"]

Result = TypeVar("Result")

if sys.platform == "linux":

    class _Selector(selectors.EpollSelector):
        """epoll counts in milliseconds and rounds up; select counts in microseconds, and is asked about epoll alone."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is None or timeout > 0:
                select.select([self.fileno()], [], [], timeout)
            return super().select(0)

else:
    _Selector = selectors.DefaultSelector


class Clock:
    """An event loop on a thread of its own, whose time can be stopped. Timers are good to about 0.1 ms.

    Attributes:
        loop: the event loop.
        stopped: time stands still.
    """

    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop(_Selector())
        self.stopped = False
        self._behind = self._stopped_at = 0.0
        self._thread = threading.Thread(target=self.loop.run_forever, name="emulated-link", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds."""
        return self._stopped_at if self.stopped else self.loop.time() - self._behind

    def stop(self) -> None:
        """Time stands still from now on. The caller cancels timers."""
        self._stopped_at, self.stopped = self.now(), True

    def go_on(self) -> None:
        """Time goes on where it stood. The caller sets its timers again."""
        if self.stopped:
            self.stopped, self._behind = False, self.loop.time() - self._stopped_at

    def call_at(self, moment: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Calls at a moment of this time, as if it never stopped."""
        return self.loop.call_at(moment + self._behind, action)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Does some work on the clock's thread and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def do(self, action: Callable[[], None]) -> None:
        """The same for a function."""

        async def call() -> None:
            action()
            await asyncio.sleep(0)  # transports that were aborted say goodbye

        self.run(call())

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
