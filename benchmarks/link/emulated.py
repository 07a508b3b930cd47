"""The link itself."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Self

from benchmarks.link.clock import Clock
from benchmarks.link.end import End
from benchmarks.link.line import Line
from benchmarks.link.settings import LinkSettings
from shared.errors import LinkError

__all__ = ["EmulatedLink"]

_ANY = ("0.0.0.0", "::")
log = logging.getLogger("link")


class EmulatedLink:
    """Listens, and passes bytes on to another port as a link of these settings would. A context manager.

    Args:
        target: port of the verifier; another that is set later counts for new connections.
        settings: the link.
        target_host: where the verifier runs.
        listen: host and port for devices; port 0 takes a free one.

    Attributes:
        host, port: where devices find the link.
        connections: connections that devices made.

    Raises:
        LinkError: the address to listen on cannot be had, or the link would lead to itself.
    """

    def __init__(
        self,
        target: int,
        settings: LinkSettings | None = None,
        target_host: str = "127.0.0.1",
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self._target, self.target_host, self._settings = target, target_host, settings or LinkSettings()
        self.host, self.port = listen
        self.connections = 0
        self._refusing = self._impatient = False
        self._ends: set[End] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._clock = Clock()
        self._up, self._down = (Line(self._clock, self._settings, up, self._changed) for up in (True, False))
        try:
            self._server = self._clock.run(self._listen())
        except OSError as error:
            self._clock.close()
            raise LinkError(f"{self.host}:{self.port}: the link cannot listen there: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            self.target = self._target
        except LinkError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.run(self._close())
        self._clock.close()

    @property
    def target(self) -> int:
        """Port of the verifier. A free port that the link takes may be the one a verifier has just left."""
        return self._target

    @target.setter
    def target(self, port: int) -> None:
        own = {listening.getsockname()[:2] for listening in self._server.sockets}
        everywhere = {(loopback, at) for host, at in own if host in _ANY for loopback in ("127.0.0.1", "::1")}
        if (own | everywhere) & _addresses(self.target_host, port):
            raise LinkError(f"{self.target_host}:{port}: the link listens there itself; name the verifier's port")
        self._target = port

    @property
    def address(self) -> str:
        """HOST:PORT for devices."""
        return f"{self.host}:{self.port}"

    @property
    def bytes_up(self) -> int:
        """Bytes of TCP payload that came from devices."""
        return self._up.bytes

    @property
    def bytes_down(self) -> int:
        """Bytes of TCP payload that came from the verifier."""
        return self._down.bytes

    def counters(self) -> dict[str, int]:
        """The counters by name."""
        return {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down, "connections": self.connections}

    @property
    def settings(self) -> LinkSettings:
        """What the link is like; may be replaced at any time, for what comes from then on."""
        return self._settings

    @settings.setter
    def settings(self, settings: LinkSettings) -> None:
        self._settings = self._up.settings = self._down.settings = settings
        self._clock.do(self._update)

    def reset(self) -> None:
        """Resets all connections, and what is on its way is gone; new ones are served."""
        self._clock.do(self._reset)

    def cut(self) -> None:
        """Resets all connections, and all that come later, until `restore`."""
        self._refusing = True
        self.reset()

    def stall(self, hold_closing: bool = True) -> None:
        """Holds all bytes back, without a word to either side, until `restore`: the link's time stands still.

        Args:
            hold_closing: that an end closes is held back, too; else it resets the other end at once.
        """
        self._clock.do(lambda: self._stall(hold_closing))

    def lose(self) -> None:
        """Swallows all that is sent on the present connections, for good and without a word; new ones are served."""
        self._clock.do(self._lose)

    def restore(self) -> None:
        """Ends `cut` and `stall`: what was held back goes on its way, in order and at the link's rate."""
        self._refusing = False
        self._clock.do(self._go_on)

    # -- on the link's thread ---------------------------------------------------------------------------------------

    def _joined(self, device: End) -> None:
        """A device has made a connection."""
        self.connections += 1
        if self._refusing:
            return device.reset()
        task = self._clock.loop.create_task(self._connect(device))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, device: End) -> None:
        loop, round_trip = self._clock.loop, 2e-3 * self._settings.delay_ms
        try:
            _, verifier = await loop.create_connection(lambda: self._end(self._down), self.target_host, self.target)
        except OSError as error:
            log.warning("a connection is reset: %s:%d: %s", self.target_host, self.target, error)
            return device.reset()
        if device.transport.is_closing():
            return verifier.reset()
        device.other, verifier.other, verifier.lost = verifier, device, device.lost
        # A device may send after SYN and SYN-ACK, a verifier after the ACK that follows them.
        loop.call_later(round_trip, device.open)
        loop.call_later(1.5 * round_trip, verifier.open)

    async def _listen(self) -> asyncio.Server:
        return await self._clock.loop.create_server(lambda: self._end(self._up, self._joined), self.host, self.port)

    def _end(self, line: Line, made: Callable[[End], None] = lambda end: None) -> End:
        end = End(line, self._ends, made)
        end.impatient = self._impatient
        return end

    def _reset(self) -> None:
        for end in list(self._ends):
            end.reset()
        self._up.clear()
        self._down.clear()

    def _stall(self, hold_closing: bool) -> None:
        self._clock.stop()
        self._set_impatient(not hold_closing)
        self._update()

    def _lose(self) -> None:
        for end in self._ends:
            end.lost = True

    def _go_on(self) -> None:
        self._clock.go_on()
        self._set_impatient(False)
        self._update()

    def _set_impatient(self, impatient: bool) -> None:
        self._impatient = impatient
        for end in self._ends:
            end.impatient = impatient

    def _update(self) -> None:
        self._up.update()
        self._down.update()

    def _changed(self) -> None:
        for end in list(self._ends):
            end.update()

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reset()
        await asyncio.sleep(0)  # the transports say goodbye


def _addresses(host: str, port: int) -> set[tuple[object, ...]]:
    try:
        return {found[4][:2] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:  # a name that is not known is said where a connection is made
        return set()
