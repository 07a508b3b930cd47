"""One end of a connection through a link."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import cast

from benchmarks.link.line import READ, Line

__all__ = ["End"]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class End(asyncio.BufferedProtocol):
    """What it receives goes along its line to the other end.

    Args:
        line: the direction away from here.
        ends: those that exist; this one is added and removed.
        made: called when the connection to here is made.

    Attributes:
        other: the other end, once it is known.
        lost: whatever comes in is swallowed.
        impatient: that this end closes is told to the other end at once, as a reset, instead of after all it sent.
    """

    def __init__(self, line: Line, ends: set[End], made: Callable[[End], None] = lambda end: None) -> None:
        self.line, self._ends, self._made = line, ends, made
        self.other: End | None = None
        self.lost = self.impatient = False
        self._open = self._congested = self._ended = False
        self._buffer = memoryview(bytearray(READ))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # asyncio has set TCP_NODELAY
        # What the kernel takes in for an end that does not read is a queue that nobody asked for.
        self._set_option(socket.SO_RCVBUF, READ)
        self._ends.add(self)
        self.update()
        self._made(self)

    def open(self) -> None:
        """The connection is established, as seen from here."""
        self._open = True
        self.update()

    def update(self) -> None:
        """Reads, or does not."""
        if self._ended:
            return
        if self._open and not self._congested and not self.line.full:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer[: max(1, self.line.room())]

    def buffer_updated(self, size: int) -> None:
        self.line.put(self._buffer[:size], self._deliver)

    def eof_received(self) -> bool:
        self._ended = True
        self._tell(End.finish)
        return not self.lost

    def connection_lost(self, error: Exception | None) -> None:
        self._ends.discard(self)
        if error is not None:
            self._tell(End.reset)

    def pause_writing(self) -> None:
        self._congest(True)

    def resume_writing(self) -> None:
        self._congest(False)

    def finish(self) -> None:
        """The other end sends no more."""
        if self.transport.is_closing():
            return
        try:
            self.transport.write_eof()
        except OSError:  # it was reset, which an end that does not read has not noticed yet
            self.transport.abort()
        if self._ended:
            self.transport.close()

    def reset(self) -> None:
        """Ends the connection at once, as a reset."""
        if not self.transport.is_closing():
            self._set_option(socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()

    def _deliver(self, data: bytes) -> None:
        other = self.other
        if other is not None and not self.lost and not other.transport.is_closing():
            other.transport.write(data)

    def _tell(self, how: Callable[[End], None]) -> None:
        """The other end hears that this one has closed."""
        other = self.other
        if other is None or self.lost:
            return
        if self.impatient:
            other.reset()
            self.reset()
        else:
            self.line.follow(lambda: None if self.lost else how(other))

    def _congest(self, congested: bool) -> None:
        """A receiver that does not read stops its sender."""
        if self.other is not None:
            self.other._congested = congested
            self.other.update()

    def _set_option(self, option: int, value: int | bytes) -> None:
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, option, value)
