"""Whatever a device or a user sends: a clear message and exit code, never a hang or traceback, and the others go on."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import cloud.cli
from cloud.server import ServerSettings
from device.client import DeviceClient, GenerateSettings
from protos import ciar_pb2 as pb
from protos import ciar_pb2_grpc
from shared.bundle import Bundle, Manifest
from shared.errors import SettingsError
from tests.end_to_end.programs import Client, Result, Verifier, channel_to, converse, opening

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNFIT = grpc.StatusCode.FAILED_PRECONDITION
TOO_LARGE = grpc.StatusCode.RESOURCE_EXHAUSTED
GARBAGE = b"\xff\xff\xff\xff"


def drafting(manifest: Manifest, *drafts: pb.Draft | bytes, **changes: Any) -> list[Any]:
    """A stream of `sd` that sends drafts."""
    messages = [draft if isinstance(draft, bytes) else pb.DeviceMessage(draft=draft) for draft in drafts]
    return [opening(manifest, method="sd", **changes), *messages]


def warped(temperature: float = 1.0, top_p: float = 1.0, guidance: float = 1.0) -> dict[str, pb.Sampling]:
    return {"sampling": pb.Sampling(temperature=temperature, top_p=top_p, guidance=guidance)}


STREAMS: dict[str, tuple[Callable[[Manifest], list[Any]], grpc.StatusCode, str]] = {
    "another protocol": (lambda m: [opening(m, protocol=99)], UNFIT, "protocol version: the device has 99"),
    "another grid": (lambda m: [opening(m, rows=9)], UNFIT, "grid: the device has 9x8, the verifier 8x8"),
    "another vocabulary": (lambda m: [opening(m, vocabulary=9)], UNFIT, "vocabulary: the device has 9"),
    "another codebook": (lambda m: [opening(m, codebook_digest="ab")], UNFIT, "codebook digest: the device has ab"),
    "another bundle": (lambda m: [opening(m, bundle_digest="ab")], UNFIT, "bundle digest: the device has ab"),
    "unknown method": (lambda m: [opening(m, method="magic")], INVALID, "method: 'magic' is unknown"),
    "method without a cloud": (lambda m: [opening(m, method="device")], INVALID, "the verifier has no part in it"),
    "unknown rule": (lambda m: [opening(m, method="sd", rule="luck")], INVALID, "not 'luck'"),
    "rule where none fits": (lambda m: [opening(m, rule="mrs")], INVALID, "takes no rule"),
    "empty prompt": (lambda m: [opening(m, prompt=" ")], INVALID, "prompt: it is empty"),
    "prompt of many letters": (lambda m: [opening(m, prompt="a" * 2001)], INVALID, "2001 characters"),
    "prompt of many words": (lambda m: [opening(m, prompt="cat " * 40)], INVALID, "40 text tokens"),
    "no sampling": (lambda m: [opening(m, sampling=pb.Sampling())], INVALID, "temperature"),
    "temperature not a number": (lambda m: [opening(m, **warped(temperature=math.nan))], INVALID, "temperature"),
    "endless guidance": (lambda m: [opening(m, **warped(guidance=math.inf))], INVALID, "guidance"),
    "top_p of 0": (lambda m: [opening(m, **warped(top_p=0.0))], INVALID, "top_p"),
    "epoch too far": (lambda m: [opening(m, epoch=2**24)], INVALID, "epoch"),
    "transcript with an id of no token": (
        lambda m: [opening(m, tokens=[0, 8], provenance=b"\0\0")], INVALID, "token id 8 at position 1"),
    "transcript of unknown provenance": (
        lambda m: [opening(m, tokens=[0, 0], provenance=b"\0\x09")], INVALID, "provenance 9 at position 1"),
    "transcript without provenance": (lambda m: [opening(m, tokens=[0, 0])], INVALID, "2 tokens but 0 provenance"),
    "transcript too long": (
        lambda m: [opening(m, tokens=[0] * 65, provenance=bytes(65))], INVALID, "65 tokens exceed the 8x8 grid"),
    "draft first": (lambda m: drafting(m, pb.Draft(ids=[1]))[1:], INVALID, "begins with Open, not with draft"),
    "empty message": (lambda m: [pb.DeviceMessage()], INVALID, "begins with Open"),
    "opened twice": (lambda m: [opening(m, method="sd")] * 2, INVALID, "a second open message"),
    "draft where none is taken": (
        lambda m: [opening(m), *drafting(m, pb.Draft(ids=[1]))[1:]], INVALID, "takes no drafts"),
    "drafted id of no token": (lambda m: drafting(m, pb.Draft(ids=[0, 8])), INVALID, "token id 8 at position 1"),
    "drafted id far out": (lambda m: drafting(m, pb.Draft(ids=[2**32 - 1])), INVALID, "token id 4294967295"),
    "draft with a gap": (lambda m: drafting(m, pb.Draft(start=5, ids=[1])), INVALID, "position 5, but 0 is next"),
    "draft of an epoch to come": (lambda m: drafting(m, pb.Draft(epoch=3, ids=[1])), INVALID, "draft of epoch 3"),
    "draft of nothing": (lambda m: drafting(m, pb.Draft()), INVALID, "holds no tokens"),
    "draft beyond the grid": (lambda m: drafting(m, pb.Draft(ids=[1] * 65)), INVALID, "exceeds the 8x8 grid"),
    "oversized opening": (lambda m: [opening(m, prompt="a" * (2 << 20))], TOO_LARGE, "larger than max"),
    "oversized draft": (lambda m: drafting(m, pb.Draft(ids=[1] * (2 << 20))), TOO_LARGE, "larger than max"),
    "garbage first": (lambda m: [GARBAGE], INVALID, "cannot be read"),
    "garbage later": (lambda m: drafting(m, GARBAGE), INVALID, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_bad_stream_gets_a_typed_error_that_says_what_and_where(verifier: Verifier, toy: Bundle, name: str) -> None:
    stream, code, words = STREAMS[name]
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError) as caught:
        converse(channel, stream(toy.manifest), seconds=5)
    error: Any = caught.value
    assert (error.code(), words in error.details()) == (code, True), f"{error.code()}: {error.details()}"


def test_mismatch_names_both_values(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError) as caught:
        converse(channel, [opening(toy.manifest, bundle_digest="ab" * 32)])
    details = caught.value.details() or ""
    assert "ab" * 32 in details
    assert toy.manifest.digest in details


def test_stream_that_ends_before_it_begins_is_refused(verifier: Verifier) -> None:
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(ciar_pb2_grpc.VerifierStub(channel).Generate(iter([]), timeout=10))
    assert caught.value.code() == INVALID


def test_device_that_closes_early_is_told(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError, match="closed the stream") as caught:
        list(ciar_pb2_grpc.VerifierStub(channel).Generate(iter(drafting(toy.manifest)), timeout=10))
    assert caught.value.code() == INVALID


def test_file_of_the_clouds_part_is_not_served(verifier: Verifier) -> None:
    for path in ("target.safetensors", "../bundle.json", "/etc/hostname"):
        with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError, match="has no") as caught:
            list(ciar_pb2_grpc.VerifierStub(channel).FetchBundle(pb.FetchBundleRequest(paths=[path]), timeout=10))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_drafts_that_are_old_or_come_twice_change_nothing_and_are_counted(verifier: Verifier, toy: Bundle) -> None:
    with DeviceClient(verifier.address, bundle=toy.folder) as device:
        tokens = device.generate("a red cat", GenerateSettings("ar", seed=1)).transcript.tokens
    wrong = (tokens[8] + 1) % 8
    drafts = [
        pb.Draft(start=0, ids=tokens[:8]),
        pb.Draft(start=0, ids=tokens[:8]),  # comes twice
        pb.Draft(start=8, ids=[wrong]),  # is corrected: a new epoch
        pb.Draft(start=9, ids=[wrong]),  # overtaken by the correction
        pb.Draft(epoch=1, start=9, ids=tokens[9:]),
    ]
    with channel_to(verifier.address) as channel:
        replies = converse(channel, drafting(toy.manifest, *drafts, pipelined=True))
    verdicts = [reply.verdict for reply in replies if reply.HasField("verdict")]
    assert [(verdict.start, verdict.accepted) for verdict in verdicts] == [(0, 8), (8, 0), (9, 55)]
    assert verdicts[1].token == tokens[8]
    assert replies[-1].done.stale_drafts == 2


def test_complete_transcript_is_done_at_once(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel:
        replies = converse(channel, [opening(toy.manifest, tokens=[1] * 64, provenance=bytes(64))])
    assert [reply.WhichOneof("body") for reply in replies] == ["opened", "done"]
    assert replies[0].opened.position == 64


def test_other_pictures_go_on_while_a_device_misbehaves(verifier: Verifier, toy: Bundle) -> None:
    with DeviceClient(verifier.address, bundle=toy.folder) as device:
        tokens = device.generate("a red cat", GenerateSettings("ar", seed=4)).transcript.tokens
        waiting = dict(STREAMS)

        def misbehave(done: int, total: int) -> None:
            if done >= 16 and waiting:
                with channel_to(verifier.address) as channel:
                    for stream, _, _ in waiting.values():
                        with pytest.raises(grpc.RpcError):
                            converse(channel, stream(toy.manifest), seconds=5)
                waiting.clear()

        picture = device.generate("a red cat", GenerateSettings("sd", seed=4), on_progress=misbehave)
    assert picture.transcript.tokens == tokens
    assert picture.report.resumed == 0
    assert not waiting


def test_name_of_a_picture_cannot_forge_lines_of_the_log(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel, contextlib.suppress(grpc.RpcError):
        converse(channel, [opening(toy.manifest, generation="x\nforged INFO line")])
    verifier.logged("forged INFO line", 2)
    assert not any(line.startswith("forged") for line in verifier.log.splitlines())


# -- the device's command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--top-k", "-1"], "top_k"),
        (["--temperature", "nan"], "temperature"),
        (["--method", "magic"], "method: 'magic' is unknown; there are ar, device, sd"),
        (["--silence-timeout", "inf"], "silence_seconds"),
        (["--server", "nowhere"], "server: HOST:PORT is needed"),
    ],
)
def test_bad_flag_is_named(client: Client, flags: list[str], words: str) -> None:
    client.run(*flags).failed(2, words)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(" ", "prompt: it is empty"), ("cat " * 40, "prompt: 40 text tokens"), (b"a \xff cat", "prompt: ")],
)
def test_bad_prompt_is_refused_by_the_device_itself(client: Client, prompt: str | bytes, words: str) -> None:
    client.run(prompt=prompt).failed(2, words)


def test_bundle_that_is_not_the_verifiers_is_noticed(
    client: Client, toy: Bundle, noisy: Bundle, noisy_verifier: Verifier
) -> None:
    result = client.run("--server", noisy_verifier.address)
    result.failed(3, toy.manifest.digest[:12], noisy.manifest.digest[:12], "leave the bundle out")


def test_damaged_bundle_is_named_with_its_file(client: Client, toy: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(toy.folder, tmp_path / "copy")
    (copy / "drafter.onnx").write_bytes(b"not a graph")
    client.run("--bundle", str(copy)).failed(3, "drafter.onnx", "damaged")
    client.run("--bundle", str(tmp_path / "nothing")).failed(3, "no bundle there")


@pytest.mark.parametrize(
    ("output", "words"),
    [("missing/picture.png", "there is no folder"), ("picture", "no picture format"), ("picture.psd", "picture.psd")],
)
def test_picture_that_cannot_be_saved_is_refused_before_it_is_drawn(
    client: Client, output: str, words: str, verifier: Verifier
) -> None:
    before = verifier.log.count("done in")
    client.run("--output", output).failed(7, words)
    assert verifier.log.count("done in") == before


def test_full_disk_at_save_is_said_and_leaves_nothing(client: Client) -> None:
    client.shell = "ulimit -f 0"
    client.run("--output", "picture.png").failed(7, "picture.png", "could not be saved")
    assert not list(client.folder.glob("*picture*"))


def test_full_disk_at_a_fetch_is_said_and_leaves_no_half_bundle(client: Client, verifier: Verifier) -> None:
    client.shell, client.flags = "ulimit -f 16", ["--server", verifier.address]
    client.run().failed(7, "cannot be stored")
    assert not list(client.cache.iterdir())


# -- verifiers that are none ----------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web() -> Iterator[str]:
    """Address of a server that speaks another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_unreachable_verifier_is_said_at_once(client: Client, deaf_port: int) -> None:
    result = client.run("--server", f"127.0.0.1:{deaf_port}", seconds=10)
    result.failed(4, f"127.0.0.1:{deaf_port}", "is cloud-verifier running there?")


def test_silent_server_is_given_up(client: Client, silent: str) -> None:
    client.run("--server", silent, seconds=15).failed(4, silent)


def test_server_of_another_protocol_is_given_up(client: Client, web: str) -> None:
    client.run("--server", web, seconds=15).failed(4, web)


# -- the verifier's command line ------------------------------------------------------------------------------------


def serve(toy: Bundle, *flags: str) -> Result:
    """Runs a verifier that should refuse to start."""
    process = Verifier(toy.folder, *flags)
    try:
        code = process.process.wait(30)
        process._reader.join(10)
        return Result(code, "", process.log)
    finally:
        process.close()


def test_port_in_use_is_said(verifier: Verifier, toy: Bundle) -> None:
    serve(toy, "--port", str(verifier.port)).failed(4, f"127.0.0.1:{verifier.port}", "in use")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--max-sessions", "0"], 2, "max_sessions"),
        (["--port", "70000"], 2, "port"),
        (["--drain-timeout", "0"], 2, "drain_seconds"),
        (["--bundle", "/nowhere"], 3, "/nowhere"),
    ],
)
def test_bad_flag_of_the_verifier_is_named(
    toy: Bundle, flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cloud.cli.main(["--bundle", str(toy.folder), "--port", "0", *flags])
    assert isinstance(ended.value.code, int)
    Result(ended.value.code, *capsys.readouterr()).failed(code, words)


@pytest.mark.parametrize("name", ["idle_seconds", "drain_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_time_that_the_verifier_cannot_wait_is_named(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=name):
        ServerSettings(**{name: value})  # type: ignore[arg-type]


def test_verifier_does_not_serve_a_damaged_bundle(toy: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(toy.folder, tmp_path / "copy")
    with (copy / "target.safetensors").open("ab") as file:
        file.write(b"more")
    serve(toy, "--bundle", str(copy)).failed(3, "target.safetensors")
