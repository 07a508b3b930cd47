"""A verifier served from a thread of this process, over real gRPC, so that a test can plant a bug in it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from cloud.server import Server, ServerSettings
from cloud.verifier import Verifier, VerifierSettings
from shared.bundle import Bundle


@contextlib.contextmanager
def serving(bundle: Bundle, max_sessions: int = 16) -> Iterator[str]:
    """Serves a bundle on a free port of the loopback interface; gives its address."""
    verifier = Verifier(bundle, VerifierSettings("cpu", "float32", threads=1, max_sessions=max_sessions))
    server: list[Server] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    async def start() -> int:
        server.append(Server(verifier, ServerSettings(port=0, drain_seconds=1.0)))
        return await server[0].start()

    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server[0].stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
        verifier.close()
