"""A link that a test can slow, stall, cut, kill and mend: a TCP relay between a device and a verifier."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import cast

__all__ = ["Relay", "relaying"]


class Relay:
    """Listens on a free port of the loopback interface and passes bytes on to another port.

    Args:
        target: port of the verifier.

    Attributes:
        delay: seconds that bytes take, in either direction.
        bytes_up, bytes_down: bytes that came from devices and from the verifier.
        connections: connections that devices made.
    """

    def __init__(self, target: int) -> None:
        self.target, self.delay = target, 0.0
        self.bytes_up = self.bytes_down = self.connections = 0
        self.stalled = self.refusing = False
        self.ends: set[_End] = set()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self.loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self) -> None:
        """Resets all connections; new ones are served."""
        self._do(self._abort)

    def cut_for_good(self) -> None:
        """Resets all connections, and all that come later, until `mend`."""
        self.refusing = True
        self.cut()

    def stall(self) -> None:
        """Holds all bytes back, without a word to either side, until `mend`."""
        self.stalled = True

    def lose(self) -> None:
        """Swallows all that is sent on the present connections, for good and without a word; new ones are served."""
        self._do(self._lose)

    def mend(self) -> None:
        """Passes bytes on again, those held back first."""
        self.stalled = self.refusing = False
        self._do(self._flush)

    def close(self) -> None:
        self._do(self._server.close)
        self._do(self._abort)
        self._do(lambda: None)  # the closed transports have said goodbye by now
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _listen(self) -> asyncio.Server:
        return await self.loop.create_server(lambda: _End(self, up=True), "127.0.0.1", 0)

    def _abort(self) -> None:
        for end in list(self.ends):
            end.transport.abort()

    def _lose(self) -> None:
        for end in self.ends:
            end.lost = True

    def _flush(self) -> None:
        for end in list(self.ends):
            end.flush()

    def _do(self, action: Callable[[], object]) -> None:
        """Runs an action on the relay's thread and waits for it."""

        async def run() -> None:
            action()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)


class _End(asyncio.Protocol):
    """One end of a relayed connection: what it receives goes out at the other end."""

    def __init__(self, relay: Relay, up: bool, other: _End | None = None) -> None:
        self.relay, self.up, self.other = relay, up, other
        self.lost = False
        self._held = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.relay.ends.add(self)
        if self.other is not None:
            self.other.other = self
            return self.other.flush()
        self.relay.connections += 1
        if self.relay.refusing:
            return self.transport.abort()
        self._connecting = self.relay.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await self.relay.loop.create_connection(
                lambda: _End(self.relay, up=False, other=self), "127.0.0.1", self.relay.target
            )
        except OSError:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.up:
            self.relay.bytes_up += len(data)
        else:
            self.relay.bytes_down += len(data)
        self.relay.loop.call_later(self.relay.delay, self._pass, data)

    def _pass(self, data: bytes) -> None:
        self._held += data
        self.flush()

    def flush(self) -> None:
        if self.lost:
            self._held.clear()
        elif self.other is not None and self._held and not self.relay.stalled:
            self.other.transport.write(bytes(self._held))
            self._held.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self.relay.ends.discard(self)
        if self.other is None or self.lost:
            return
        if error is not None or self.relay.refusing or self.relay.stalled:
            self.other.transport.abort()
        else:
            self.other.transport.close()


@contextlib.contextmanager
def relaying(target: int) -> Iterator[Relay]:
    """A relay for a block."""
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
