"""A link that a test can slow, stall, cut, kill and mend: the emulated link, in the words of the tests."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.link import EmulatedLink

__all__ = ["Relay", "relaying"]


class Relay(EmulatedLink):
    """A link from a free port of the loopback interface to another port; a context manager."""

    cut = EmulatedLink.reset
    cut_for_good = EmulatedLink.cut
    mend = EmulatedLink.restore

    def stall(self, hold_closing: bool = False) -> None:
        """Holds all bytes back until `mend`. A program that ends is not waited for by the other meanwhile."""
        super().stall(hold_closing)

    @property
    def delay(self) -> float:
        """Seconds that bytes take, in either direction."""
        return self.settings.delay_ms / 1000

    @delay.setter
    def delay(self, seconds: float) -> None:
        self.settings = replace(self.settings, delay_ms=seconds * 1000)


relaying = Relay
