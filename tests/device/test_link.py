"""The link turns gRPC's statuses and silences into this project's errors, and counts what crosses it."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from device.link import Link, LinkSettings, LostLinkError, Stream, WireCounters
from protos import ciar_pb2 as pb
from shared import errors
from shared.errors import BusyError, CiarError, LinkError, RefusedError, SettingsError
from tests.device.conftest import FakeVerifier

QUICK = LinkSettings(connect_seconds=0.5, silence_seconds=0.5, retry_seconds=0.5)
OPENED = pb.CloudMessage(opened=pb.Opened(position=3))
DONE = pb.CloudMessage(done=pb.Done(stale_drafts=1))


@pytest.fixture
def link(fake: FakeVerifier) -> Iterator[Link]:
    result = Link(fake.address, QUICK)
    yield result
    result.close()


def opened(link: Link, counters: WireCounters | None = None) -> Stream:
    return link.open(pb.Open(prompt="a cat"), counters or WireCounters())


def aborting(code: grpc.StatusCode, kind: str = "", details: str = "no cats today") -> Any:
    """A verifier that ends every stream with a status, and the name of its own error beside."""

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        if kind:
            context.set_trailing_metadata((("ciar-error", kind),))
        context.abort(code, details)
        yield OPENED

    return talk


# -- streams --------------------------------------------------------------------------------------------------------


def test_messages_are_counted_as_serialised(fake: FakeVerifier, link: Link) -> None:
    heard: queue.SimpleQueue[int] = queue.SimpleQueue()

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        for message in messages:
            heard.put(len(message.SerializeToString()))
            yield DONE if message.HasField("draft") else OPENED

    fake.talk, counters = talk, WireCounters()
    with opened(link, counters) as stream:
        assert stream.receive() == OPENED
        stream.send(pb.DeviceMessage(draft=pb.Draft(start=5, ids=[1, 300, 70000])))
        assert stream.receive() == DONE
    assert (counters.messages_up, counters.messages_down) == (2, 2)
    assert counters.bytes_up == heard.get(timeout=5) + heard.get(timeout=5)
    assert counters.bytes_down == len(OPENED.SerializeToString()) + len(DONE.SerializeToString())


def test_poll_never_waits(fake: FakeVerifier, link: Link) -> None:
    speak = threading.Event()

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        speak.wait(10)
        yield OPENED

    fake.talk = talk
    with opened(link) as stream:
        begun = time.monotonic()
        assert stream.poll() is None
        assert time.monotonic() - begun < 0.2
        speak.set()
        assert stream.receive() == OPENED


def test_silent_verifier_counts_as_lost(fake: FakeVerifier, link: Link) -> None:
    release = threading.Event()

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        release.wait(10)
        yield OPENED

    fake.talk = talk
    with opened(link) as stream, pytest.raises(LostLinkError, match=r"sent nothing for 0\.5 s"):
        stream.receive()
    release.set()


def test_stream_that_ends_without_done_counts_as_lost(link: Link) -> None:
    with opened(link) as stream, pytest.raises(LostLinkError, match="before the picture was complete"):
        stream.receive()


def test_left_stream_is_cancelled_at_the_verifier(fake: FakeVerifier, link: Link) -> None:
    ended = threading.Event()

    def talk(messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:
        context.add_callback(ended.set)
        yield OPENED
        ended.wait(10)

    fake.talk = talk

    def interrupted() -> None:
        with opened(link) as stream:
            stream.receive()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ended.wait(5)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNKNOWN,
    ],
)
def test_status_of_a_broken_link_means_that_it_is_lost(fake: FakeVerifier, link: Link, code: grpc.StatusCode) -> None:
    fake.talk = aborting(code)
    with opened(link) as stream, pytest.raises(LostLinkError, match="no cats today"):
        stream.receive()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL]
)
def test_any_other_status_is_a_refusal(fake: FakeVerifier, link: Link, code: grpc.StatusCode) -> None:
    fake.talk = aborting(code)
    with opened(link) as stream, pytest.raises(RefusedError, match=rf"no cats today \({code.name.lower()}\)"):
        stream.receive()


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("BusyError", BusyError),
        ("LinkError", LostLinkError),  # the verifier gave the device up: the picture can be resumed
        ("SettingsError", RefusedError),
        ("BundleError", RefusedError),
        ("ProtocolError", RefusedError),
    ],
)
def test_verifiers_own_error_says_what_to_do(
    fake: FakeVerifier, link: Link, kind: str, raised: type[CiarError]
) -> None:
    fake.talk = aborting(grpc.StatusCode.DEADLINE_EXCEEDED, kind)
    with opened(link) as stream, pytest.raises(raised, match="no cats today") as caught:
        stream.receive()
    assert type(caught.value) is raised


@pytest.mark.parametrize("kind", ["EXIT_DEFECT", "KeyboardInterrupt", "__all__", "annotations"])
def test_made_up_kind_of_error_is_ignored(fake: FakeVerifier, link: Link, kind: str) -> None:
    assert hasattr(errors, kind) or kind == "KeyboardInterrupt"
    fake.talk = aborting(grpc.StatusCode.INVALID_ARGUMENT, kind)
    with opened(link) as stream, pytest.raises(RefusedError):
        stream.receive()


# -- calls ----------------------------------------------------------------------------------------------------------


def test_describe_tells_where_no_verifier_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = Link(f"127.0.0.1:{port}", QUICK)
    with pytest.raises(LinkError, match=rf"cannot reach a verifier at 127\.0\.0\.1:{port} .*is cloud-verifier running"):
        link.describe()
    link.close()


def test_describe_waits_no_longer_than_it_was_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(f"127.0.0.1:{server.getsockname()[1]}", QUICK)
        begun = time.monotonic()
        with pytest.raises(LinkError):
            link.describe()
        assert time.monotonic() - begun < 3
        link.close()


def test_proxy_for_the_outside_world_is_not_used(fake: FakeVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    link = Link(fake.address, QUICK)
    assert link.describe().bundle_digest == fake.bundle_digest
    link.close()


def test_fetch_passes_chunks_on_in_order(fake: FakeVerifier, link: Link) -> None:
    chunks = list(link.fetch([]))
    assert chunks[0].manifest == fake.bundle.manifest.to_json()
    assert b"".join(c.file.data for c in chunks if c.file.path == "drafter.onnx") == (
        fake.bundle.path("drafter.onnx").read_bytes()
    )


def test_fetch_tells_that_the_link_broke(fake: FakeVerifier, link: Link) -> None:
    def chunks(context: Any) -> Iterator[pb.BundleChunk]:
        yield pb.BundleChunk(manifest="{}")
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    fake.chunks = chunks
    with pytest.raises(LinkError, match="gone"):
        list(link.fetch([]))


def test_fetch_gives_a_silent_verifier_up(fake: FakeVerifier, link: Link) -> None:
    release = threading.Event()

    def chunks(context: Any) -> Iterator[pb.BundleChunk]:
        yield pb.BundleChunk(manifest="{}")
        context.add_callback(release.set)
        release.wait(10)

    fake.chunks = chunks
    begun = time.monotonic()
    with pytest.raises(LinkError, match=r"sent nothing for 0\.5 s"):
        list(link.fetch([]))
    assert time.monotonic() - begun < 3
    assert release.wait(5), "the call is cancelled"


# -- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["nowhere", "nowhere:", ":50051", "nowhere:http", "", "nowhere:-1"])
def test_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match="server: HOST:PORT is needed"):
        Link(address)


@pytest.mark.parametrize("name", ["connect_seconds", "silence_seconds", "retry_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_time_that_cannot_be_waited_for_is_refused(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=name):
        LinkSettings(**{name: value})
