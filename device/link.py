"""The link to a verifier: channel, calls and streams, with gRPC's statuses turned into this project's errors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from protos import ciar_pb2 as pb
from protos import ciar_pb2_grpc
from shared import errors
from shared.errors import BusyError, CiarError, LinkError, ProtocolError, RefusedError

__all__ = ["Link", "LinkSettings", "LostLinkError", "Stream", "WireCounters"]

Result = TypeVar("Result")

_OPTIONS = [
    # A proxy for the outside world must not swallow loopback and local addresses.
    ("grpc.enable_http_proxy", 0),
    # Pings find a link that died without a word. The verifier permits one every 5 s (cloud/server.py).
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 5000),
    # While data flows other pings than keepalive's are under way, with a patience of their own: a minute by default.
    ("grpc.http2.ping_timeout_ms", 5000),
    # `Retry` decides when to try again; the channel must not sit out a back-off of its own.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name this is the time that one attempt to connect may take: with less than two round trips of the
    # link no attempt ever succeeds.
    ("grpc.min_reconnect_backoff_ms", 5000),
    # Messages are small: probing the bandwidth with pings would cost more bytes than many of them hold. A bundle comes
    # over the same channel, so the window is wide from the start.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
    # A channel made anew must not share the dead connection of the one it replaces.
    ("grpc.use_local_subchannel_pool", 1),
]
_DAY = 86400
_LOST = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
}


class LostLinkError(LinkError):
    """A stream ended because of the link, not because of what was asked: the picture can be resumed."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Patience of a device with its link.

    Args:
        connect_seconds: time for a first answer.
        silence_seconds: a verifier that sends nothing for so long, though it owes an answer, counts as lost.
        retry_seconds: time without progress after which a lost picture is given up.

    Raises:
        SettingsError: a time is not above 0, or longer than a day.
    """

    connect_seconds: float = 5.0
    silence_seconds: float = 30.0
    retry_seconds: float = 20.0

    def __post_init__(self) -> None:
        for name in ("connect_seconds", "silence_seconds", "retry_seconds"):
            if not 0 < getattr(self, name) <= _DAY:
                raise errors.SettingsError(
                    f"{name}: a number of seconds above 0 and up to {_DAY} is needed, not {getattr(self, name)}"
                )


class Stream:
    """One `Generate` call. Messages are counted as serialised.

    Args:
        stub: the service.
        opening: the first message.
        counters: adds up bytes and messages over all streams of a picture.
        silence_seconds: how long `receive` waits.
        on_silence: called when it waited in vain.
    """

    def __init__(
        self,
        stub: Any,
        opening: pb.Open,
        counters: WireCounters,
        silence_seconds: float,
        on_silence: Callable[[], None] = lambda: None,
    ) -> None:
        self._counters, self._silence, self._on_silence = counters, silence_seconds, on_silence
        self._requests: queue.SimpleQueue[pb.DeviceMessage | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.CloudMessage | BaseException] = queue.SimpleQueue()
        self.send(pb.DeviceMessage(open=opening))
        self._call = stub.Generate(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="link", daemon=True)
        self._reader.start()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._call.cancel()

    def send(self, message: pb.DeviceMessage) -> None:
        """Queues a message; never blocks."""
        self._counters.count_up(message)
        self._requests.put(message)

    def receive(self) -> pb.CloudMessage:
        """The next message.

        Raises:
            LostLinkError: the link broke, or the verifier fell silent.
            ProtocolError: the message holds nothing that is known.
            CiarError: the verifier ended the stream with an error.
        """
        try:
            return self._taken(self._replies.get(timeout=self._silence))
        except queue.Empty:
            self._on_silence()
            raise LostLinkError(f"the verifier sent nothing for {self._silence:g} s") from None

    def poll(self) -> pb.CloudMessage | None:
        """The next message if one is there already; errors as for `receive`."""
        try:
            return self._taken(self._replies.get_nowait())
        except queue.Empty:
            return None

    def _taken(self, item: pb.CloudMessage | BaseException) -> pb.CloudMessage:
        if isinstance(item, BaseException):
            raise item
        if item.WhichOneof("body") is None:
            raise ProtocolError("the verifier sent an empty message, or one that this version does not know")
        self._counters.count_down(item)
        return item

    def _read(self) -> None:
        try:
            for message in self._call:
                self._replies.put(message)
            self._replies.put(LostLinkError("the verifier ended the stream before the picture was complete"))
        except grpc.RpcError as error:
            self._replies.put(_translated(error, LostLinkError))


@dataclass(slots=True)
class WireCounters:
    """Serialised messages of a picture: bytes and numbers, up from the device and down to it."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
    messages_down: int = 0

    def count_up(self, message: pb.DeviceMessage) -> None:
        self.bytes_up += message.ByteSize()
        self.messages_up += 1

    def count_down(self, message: pb.CloudMessage) -> None:
        self.bytes_down += message.ByteSize()
        self.messages_down += 1


class Link:
    """A channel to one verifier.

    Args:
        address: HOST:PORT.
        settings: patience.
    """

    def __init__(self, address: str, settings: LinkSettings | None = None) -> None:
        self.address = address
        self.settings = settings or LinkSettings()
        if not address.rpartition(":")[2].isdigit() or not address.rpartition(":")[0]:
            raise errors.SettingsError(f"server: HOST:PORT is needed, not {address!r}")
        self._renewing = threading.Lock()
        self._connect()

    def close(self) -> None:
        """Closes the channel and all its streams."""
        self._channel.close()

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        self._stub: Any = ciar_pb2_grpc.VerifierStub(self._channel)

    def _renew(self, silent: grpc.Channel) -> None:
        """Leaves a silent connection for a new one: a dead one would swallow every further stream too."""
        with self._renewing:
            if silent is self._channel:
                self._connect()
                silent.close()

    def describe(self) -> pb.Description:
        """What the verifier serves.

        Raises:
            LinkError: no verifier answers there.
        """
        return self._called(lambda: self._stub.Describe(pb.DescribeRequest(), timeout=self.settings.connect_seconds))

    def fetch(self, paths: list[str]) -> Iterator[pb.BundleChunk]:
        """Chunks of the device's part of the bundle (all files when `paths` is empty), the manifest first.

        Raises:
            LinkError: the link broke, or the verifier fell silent.
        """
        call = self._stub.FetchBundle(pb.FetchBundleRequest(paths=paths))
        chunks: queue.SimpleQueue[pb.BundleChunk | CiarError | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_chunks, args=(call, chunks), name="fetch", daemon=True).start()
        try:
            while (chunk := chunks.get(timeout=self.settings.silence_seconds)) is not None:
                if isinstance(chunk, CiarError):
                    raise chunk
                yield chunk
        except queue.Empty:
            silence = f"sent nothing for {self.settings.silence_seconds:g} s"
            raise LinkError(f"the verifier at {self.address} {silence} while the bundle was fetched") from None
        finally:
            call.cancel()

    def _read_chunks(self, call: Any, chunks: queue.SimpleQueue[pb.BundleChunk | CiarError | None]) -> None:
        try:
            for chunk in call:
                chunks.put(chunk)
            chunks.put(None)
        except grpc.RpcError as error:
            chunks.put(_translated(error, LinkError, self.address))

    def open(self, opening: pb.Open, counters: WireCounters, silence_seconds: float = 0.0) -> Stream:
        """Begins a `Generate` call; `silence_seconds` 0 takes the patience of the settings."""
        channel, silence = self._channel, silence_seconds or self.settings.silence_seconds
        return Stream(self._stub, opening, counters, silence, lambda: self._renew(channel))

    def _called(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except grpc.RpcError as error:
            raise _translated(error, LinkError, self.address) from error


def _translated(error: Any, lost: type[LinkError], address: str = "") -> CiarError:
    """This project's error for a gRPC status; the verifier names the kind of its own errors in `ciar-error`."""
    code, details = error.code(), error.details() or ""
    kind = dict(error.trailing_metadata() or ()).get("ciar-error", "")
    raised = getattr(errors, kind, None) if kind in errors.__all__ else None
    if isinstance(raised, type) and issubclass(raised, CiarError):
        if issubclass(raised, LinkError):
            return lost(f"verifier: {details}")
        return BusyError(details) if issubclass(raised, BusyError) else RefusedError(f"verifier: {details}")
    if code in _LOST:
        where = f"cannot reach a verifier at {address}" if address else "the link to the verifier broke"
        hint = "; is cloud-verifier running there?" if address else ""
        return lost(f"{where} ({code.name.lower()}: {details.strip() or 'no details'}){hint}")
    return RefusedError(f"verifier: {details} ({code.name.lower()})")
