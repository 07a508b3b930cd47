"""The gRPC service: checks, hands work to the scheduler, and streams what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cloud.admission import admit
from cloud.scheduler import Task
from cloud.session import Request
from cloud.stream import Stream
from cloud.verifier import Verifier
from protos import PROTOCOL, ciar_pb2_grpc
from protos import ciar_pb2 as pb
from shared.errors import BundleError, BusyError, CiarError, LinkError, ProtocolError, SettingsError
from shared.graphs import MAX_PROMPT_CHARACTERS
from shared.methods import METHODS, RULES, law

__all__ = ["VerifierService"]

log = logging.getLogger(__name__)

_CHUNK = 1 << 18
_STATUS = {
    SettingsError: grpc.StatusCode.INVALID_ARGUMENT,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    BundleError: grpc.StatusCode.FAILED_PRECONDITION,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LinkError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class VerifierService(ciar_pb2_grpc.VerifierServicer):
    """`Describe`, `FetchBundle` and `Generate` (protos/ciar.proto).

    Args:
        verifier: runs the generations.
        idle_seconds: a device that is silent for so long loses its slot.
    """

    def __init__(self, verifier: Verifier, idle_seconds: float = 60.0) -> None:
        self.verifier = verifier
        self.manifest = verifier.bundle.manifest
        self.idle_seconds = idle_seconds
        self.active = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._pictures: dict[str, tuple[Stream, Task]] = {}

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.Description:
        manifest, engine = self.manifest, self.verifier.scheduler.engine
        return pb.Description(
            protocol=PROTOCOL,
            software=metadata.version("ciar"),
            bundle_name=manifest.name,
            bundle_digest=manifest.digest,
            codebook_digest=manifest.codebook_digest,
            rows=manifest.grid.rows,
            cols=manifest.grid.cols,
            vocabulary=manifest.vocabulary,
            max_prompt_characters=MAX_PROMPT_CHARACTERS,
            defaults=pb.Sampling(
                temperature=manifest.defaults.temperature,
                top_k=manifest.defaults.top_k,
                top_p=manifest.defaults.top_p,
                guidance=manifest.defaults.guidance,
            ),
            methods=[_describe(name) for name in METHODS],
            compute_device=str(engine.device),
            dtype=str(engine.dtype).removeprefix("torch."),
            capacity=self.verifier.settings.max_sessions,
            active=self.active,
            feature_modes=self.verifier.feature_modes,
        )

    async def FetchBundle(self, request: pb.FetchBundleRequest, context: Any) -> AsyncIterator[pb.BundleChunk]:
        yield pb.BundleChunk(manifest=self.manifest.to_json())
        served = {file.path for file in self.manifest.part("device")}
        if unknown := sorted(set(request.paths) - served):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the device's part of the bundle has no {unknown[0]}")
        for path in request.paths or sorted(served):
            async for chunk in _file_chunks(self.verifier.bundle.path(path), path):
                yield chunk

    async def Generate(
        self, request_iterator: AsyncIterator[pb.DeviceMessage], context: Any
    ) -> AsyncIterator[pb.CloudMessage]:
        if self._draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the verifier is stopping and takes no new pictures")
        stream, begun = Stream(), time.perf_counter()
        task: Task | None = None
        reader: asyncio.Task[None] | None = None
        self.active += 1
        try:
            request = await self._admit(request_iterator, stream)
            self._take_over(request)
            task = self.verifier.begin(request, stream.emit, stream.finished)
            self._pictures[request.generation] = stream, task
            reader = asyncio.create_task(self._read(request_iterator, stream, task, request))
            async for message in stream.messages(task, self.idle_seconds):
                yield message
            log.info("generation %s: done in %.2f s", request.generation, time.perf_counter() - begun)
        except CiarError as error:
            log.info("refused or ended: %s: %s", type(error).__name__, error)
            await _abort(context, error)
        except Exception:
            log.exception("a generation failed")
            await context.abort(grpc.StatusCode.INTERNAL, "the verifier failed; its log says why")
        finally:
            # An abandoned call would stay alive, and with it the slot.
            self.active -= 1
            if not self.active:
                self._idle.set()
            if reader is not None:
                reader.cancel()
            if task is not None:
                self.verifier.scheduler.cancel(task)
                if self._pictures.get(request.generation) == (stream, task):
                    del self._pictures[request.generation]

    def _take_over(self, request: Request) -> None:
        """Ends an older stream of the same picture: its device lost the link and came back before that was noticed."""
        if request.generation and request.generation in self._pictures:
            stream, task = self._pictures[request.generation]
            # Before the new session begins, so that its slot is free.
            self.verifier.scheduler.cancel(task)
            stream.fail(LinkError("the picture was taken up again on another stream"))

    async def drain(self, seconds: float) -> None:
        """Takes no new pictures and waits until those in progress are done, or for some seconds."""
        self._draining = True
        self._idle.clear()
        if self.active:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    async def _admit(self, requests: AsyncIterator[pb.DeviceMessage], stream: Stream) -> Request:
        try:
            first = await asyncio.wait_for(anext(requests), self.idle_seconds)
        except TimeoutError:
            raise LinkError(f"the stream began without a message for {self.idle_seconds:g} s") from None
        except StopAsyncIteration:
            raise ProtocolError("the stream ended before it began: no Open message came") from None
        except DecodeError as error:
            raise ProtocolError(f"the first message of the stream cannot be read: {error}") from None
        if not first.HasField("open"):
            raise ProtocolError(f"a stream begins with Open, not with {first.WhichOneof('body')}")
        stream.bytes_in += first.ByteSize()
        verifier = self.verifier
        return await asyncio.to_thread(
            admit, first.open, self.manifest, verifier.captions, verifier.dim, verifier.feature_modes
        )

    async def _read(
        self, requests: AsyncIterator[pb.DeviceMessage], stream: Stream, task: Task, request: Request
    ) -> None:
        try:
            await self._deliver(requests, stream, task, request)
        except DecodeError as error:
            stream.fail(ProtocolError(f"a message of the stream cannot be read: {error}"))

    async def _deliver(
        self, requests: AsyncIterator[pb.DeviceMessage], stream: Stream, task: Task, request: Request
    ) -> None:
        async for message in requests:
            stream.bytes_in += message.ByteSize()
            if not message.HasField("draft"):
                return stream.fail(ProtocolError(f"a second {message.WhichOneof('body')} message came on one stream"))
            if request.rule is None:
                return stream.fail(ProtocolError(f"method {request.method.name} takes no drafts"))
            self.verifier.scheduler.deliver(task, message.draft)
        if request.rule is not None:
            stream.fail(ProtocolError("the device closed the stream before the picture was complete"))


def _describe(name: str) -> pb.MethodDescription:
    method = METHODS[name]
    rules = [RULES[rule] for rule in method.rules]
    return pb.MethodDescription(
        name=method.name,
        device_role=method.device_role,
        cloud_role=method.cloud_role,
        rules=[pb.RuleDescription(name=r.name, law=law(method, r), summary=r.summary) for r in rules],
        law=law(method, rules[0] if rules else None),
        summary=method.summary,
    )


async def _file_chunks(source: Path, path: str) -> AsyncIterator[pb.BundleChunk]:
    offset = 0
    with source.open("rb") as file:
        while data := await asyncio.to_thread(file.read, _CHUNK):
            yield pb.BundleChunk(file=pb.FileChunk(path=path, offset=offset, data=data))
            offset += len(data)


async def _abort(context: Any, error: CiarError) -> None:
    """Ends the call with the status of an error; its kind travels beside, so that the device raises the same."""
    context.set_trailing_metadata((("ciar-error", type(error).__name__),))
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(status, str(error))
