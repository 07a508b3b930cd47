"""One `Generate` call: messages from the engine's thread to the event loop, and the count of its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cloud.scheduler import Task
from cloud.session import Session
from protos import ciar_pb2 as pb
from shared.errors import LinkError

__all__ = ["Stream"]


class Stream:
    """Carries messages of one call and counts its bytes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[pb.CloudMessage | BaseException | None] = asyncio.Queue()
        self.bytes_in = self.bytes_out = 0

    def emit(self, message: pb.CloudMessage) -> None:
        self._put(message)

    def finished(self, session: Session | None, error: BaseException | None) -> None:
        if error is None and session is not None:
            self._put(pb.CloudMessage(done=pb.Done(stale_drafts=session.stale_drafts)))
        self._put(error)

    def fail(self, error: BaseException) -> None:
        self._outbox.put_nowait(error)

    def _put(self, item: pb.CloudMessage | BaseException | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, item)

    async def messages(self, task: Task, idle_seconds: float) -> AsyncIterator[pb.CloudMessage]:
        """Messages for the device until the generation ends.

        Raises:
            LinkError: the task waited for the device for `idle_seconds`; time that the engine takes does not count.
            CiarError: what ended the generation.
        """
        while True:
            try:
                item = await asyncio.wait_for(self._outbox.get(), idle_seconds)
            except TimeoutError:
                if not task.awaits_device:
                    continue
                raise LinkError(
                    f"nothing came from the device for {idle_seconds:g} s; its slot is given away"
                ) from None
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            if item.HasField("done"):
                item.done.bytes_in, item.done.bytes_out = self.bytes_in, self.bytes_out
            self.bytes_out += item.ByteSize()
            yield item
