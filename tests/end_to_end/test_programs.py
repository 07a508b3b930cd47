"""The two programs together: pictures, reports, bundles, and that a lossless rule changes nothing but the speed."""

from __future__ import annotations

import json
import os
import pty
import re
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image

from device.client import DeviceClient, GenerateSettings, Picture
from device.link import Link, Stream, WireCounters
from protos import PROTOCOL, ciar_pb2_grpc
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.methods import METHODS
from tests.end_to_end.programs import Client, Verifier, channel_to, converse, finish, opening, wait_until
from tests.end_to_end.relay import Relay

REPORT: dict[str, Any] = {
    "method": str,
    "rule": str,
    "law": str,
    "seed": int,
    "prompt": str,
    "output": str,
    "tokens": int,
    "seconds": {"total": float, "draft": float, "wait": float, "codec": float, "first_row": float},
    "cloud": {"forwards": int, "tokens": int, "seconds": float},
    "draft": {"proposed": int, "accepted": int, "kept_on_device": int, "uncertain": int, "corrected": int},
    "wire": {"bytes_up": int, "bytes_down": int, "messages_up": int, "messages_down": int, "round_trips": int},
    "cloud_call_rate": float,
}


def draw(verifier: Verifier, bundle: Bundle, method: str, seed: int, in_flight: int = 1) -> Picture:
    """A picture drawn by this process."""
    with DeviceClient(verifier.address, bundle=bundle.folder) as device:
        return device.generate("a red cat", GenerateSettings(method, seed=seed, in_flight=in_flight))


# -- one picture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--method", "ar"], ["--rule", "mrs"], ["--rule", "block", "--in-flight", "2"]])
def test_client_saves_a_picture_and_says_what_it_did(client: Client, flags: list[str]) -> None:
    result = client.run(*flags, "--seed", "7")
    assert result.code == 0, result.stderr
    assert result.stderr == ""
    assert "seed 7" in result.stdout
    assert "(lossless)" in result.stdout
    assert "saved   picture.png" in result.stdout
    with Image.open(client.folder / "picture.png") as image:
        assert (image.size, image.mode) == ((64, 64), "RGB")


def test_json_is_one_object_with_the_promised_keys(client: Client) -> None:
    result = client.run("--json", "--seed", "7")
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    check_shape(report, REPORT)
    assert (report["method"], report["rule"], report["law"]) == ("sd", "gumbel", "lossless")
    assert (report["seed"], report["prompt"], report["output"]) == (7, "a red cat", "picture.png")


def check_shape(report: dict[str, Any], shape: dict[str, Any]) -> None:
    for name, kind in shape.items():
        if isinstance(kind, dict):
            assert set(report[name]) == set(kind)
            check_shape(report[name], kind)
        else:
            assert isinstance(report[name], kind), name


def test_report_adds_up(client: Client) -> None:
    report = client.draw("--seed", "7")
    seconds, drafts, wire = report["seconds"], report["draft"], report["wire"]
    assert report["tokens"] == 64
    assert drafts["uncertain"] == drafts["accepted"] + drafts["corrected"]
    assert 0 < drafts["accepted"] <= drafts["proposed"]
    assert report["cloud_call_rate"] == 1.0
    assert seconds["draft"] + seconds["wait"] + seconds["codec"] <= seconds["total"]
    assert min(seconds.values()) > 0
    assert report["cloud"]["forwards"] <= wire["round_trips"] + 1
    assert wire["messages_up"] == wire["round_trips"] + 1  # the opening message and the drafts


def test_device_method_needs_no_verifier_and_repeats_itself(client: Client) -> None:
    client.flags = client.flags[:2]  # the bundle, and no server
    first = client.draw("--method", "device", "--output", "first.png")
    again = client.draw("--method", "device", "--output", "again.png", "--seed", str(first["seed"]))
    assert pixels(client.folder / "first.png") == pixels(client.folder / "again.png")
    assert (first["law"], first["rule"], first["cloud_call_rate"]) == ("lossy", None, 0.0)
    assert set(first["wire"].values()) | set(first["cloud"].values()) == {0}
    assert first["draft"]["kept_on_device"] == again["tokens"] == 64


def test_printed_seed_makes_the_picture_again(client: Client) -> None:
    first = client.run("--output", "first.png")
    (seed,) = re.findall(r"seed (\d+)", first.stdout)
    client.run("--output", "again.png", "--seed", seed)
    client.run("--output", "else.png", "--seed", str(int(seed) + 1))
    assert pixels(client.folder / "first.png") == pixels(client.folder / "again.png")
    assert pixels(client.folder / "first.png") != pixels(client.folder / "else.png")


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_progress_bar_is_shown_on_a_terminal_only(client: Client) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    os.set_blocking(ours, False)
    try:
        assert finish(client.start("--seed", "7", stderr=theirs)).code == 0
        assert re.search(r"sd: +\d+%.*\d+/64 ", os.read(ours, 1 << 16).decode())
        assert finish(client.start("--seed", "7", "--quiet", stderr=theirs)).code == 0
        assert finish(client.start("--seed", "7", "--json", stderr=theirs)).code == 0
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)


def test_preview_grows_row_by_row_and_goes_away(client: Client, relay: Relay) -> None:
    relay.delay = 0.03
    preview = client.folder / "cat.preview.png"
    process = client.start("--server", relay.address, "--method", "sd", "--draft-length", "1", "--preview",
                           "--output", "cat.png")  # fmt: skip
    stages: set[bytes] = set()

    def several() -> bool:
        if preview.exists():
            stages.add(pixels(preview))
        return len(stages) >= 3

    try:
        wait_until(several, "three stages of the preview")
        relay.delay = 0.0
    finally:
        result = finish(process)
    assert result.code == 0, result.stderr
    assert not preview.exists()
    assert pixels(client.folder / "cat.png") not in stages


# -- the same law, token by token -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 3])
def test_speculation_gives_the_tokens_of_plain_sampling(verifier: Verifier, toy: Bundle, in_flight: int) -> None:
    for seed in range(3):
        plain = draw(verifier, toy, "ar", seed)
        fast = draw(verifier, toy, "sd", seed, in_flight)
        assert fast.transcript.tokens == plain.transcript.tokens
        assert np.array_equal(fast.pixels, plain.pixels)


def test_other_sessions_do_not_change_a_picture(verifier: Verifier, toy: Bundle) -> None:
    alone = [draw(verifier, toy, "ar", seed).transcript.tokens for seed in range(8)]
    together = threading.Barrier(8)

    def one(seed: int) -> list[int]:
        together.wait(20)
        return draw(verifier, toy, "sd", seed, in_flight=1 + seed % 3).transcript.tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(8))) == alone


def test_a_drafter_of_pure_noise_costs_time_and_nothing_else(
    verifier: Verifier, toy: Bundle, noisy_verifier: Verifier, noisy: Bundle
) -> None:
    for seed, in_flight in ((1, 1), (2, 3)):
        plain = draw(noisy_verifier, noisy, "ar", seed)
        fast = draw(noisy_verifier, noisy, "sd", seed, in_flight)
        assert fast.transcript.tokens == plain.transcript.tokens
        assert fast.transcript.tokens == draw(verifier, toy, "sd", seed).transcript.tokens  # the target is the same
        assert fast.report.draft.corrected > fast.report.draft.accepted


# -- the wire -------------------------------------------------------------------------------------------------------


class Recorder:
    """Passes a stream on and keeps the last message."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.last = stream, pb.CloudMessage()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)

    def send(self, message: pb.DeviceMessage) -> None:
        self.stream.send(message)

    def receive(self) -> pb.CloudMessage:
        self.last = self.stream.receive()
        return self.last

    def poll(self) -> pb.CloudMessage | None:
        message = self.stream.poll()
        self.last = message or self.last
        return message


@pytest.mark.parametrize("method", ["ar", "sd", "ciar", "csd"])
def test_both_ends_count_the_same_bytes(
    verifier: Verifier, toy: Bundle, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[Recorder] = []
    plain_open = Link.open

    def recorded(self: Link, opening: pb.Open, counters: WireCounters, silence_seconds: float = 0.0) -> Recorder:
        recorders.append(Recorder(plain_open(self, opening, counters, silence_seconds)))
        return recorders[-1]

    monkeypatch.setattr(Link, "open", recorded)
    wire = draw(verifier, toy, method, 5).report.wire
    (recorder,) = recorders
    done = recorder.last.done
    assert (done.bytes_in, done.bytes_out) == (wire.bytes_up, wire.bytes_down - recorder.last.ByteSize())
    assert wire.bytes_up > 150


def test_describe_tells_models_methods_and_limits(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel:
        described = ciar_pb2_grpc.VerifierStub(channel).Describe(pb.DescribeRequest(), timeout=10)
    manifest = toy.manifest
    assert (described.protocol, described.bundle_name) == (PROTOCOL, "toy")
    assert (described.bundle_digest, described.codebook_digest) == (manifest.digest, manifest.codebook_digest)
    assert (described.rows, described.cols, described.vocabulary) == (8, 8, 8)
    assert (described.compute_device, described.dtype, described.capacity) == ("cpu", "float32", 16)
    methods = {method.name: method for method in described.methods}
    assert list(methods) == list(METHODS)
    assert [rule.name for rule in methods["sd"].rules] == list(METHODS["sd"].rules)
    assert (methods["ar"].law, methods["device"].law, methods["sd"].rules[0].law) == ("lossless", "lossy", "lossless")


def test_health_and_reflection_answer_while_pictures_are_computed(verifier: Verifier, toy: Bundle) -> None:
    with channel_to(verifier.address) as channel, ThreadPoolExecutor(4) as pool:
        health = health_pb2_grpc.HealthStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        pictures = [pool.submit(draw, verifier, toy, "ar", seed) for seed in range(12)]
        wait_until(lambda: verifier.active() > 0, "a picture in progress")
        answers = 0
        while not all(picture.done() for picture in pictures):
            answer = health.Check(health_pb2.HealthCheckRequest(service="ciar.v1.Verifier"), timeout=2)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            (listed,) = reflection.ServerReflectionInfo(iter([asked]), timeout=2)
            names = {service.name for service in listed.list_services_response.service}
            assert {"ciar.v1.Verifier", "grpc.health.v1.Health"} <= names
            answers += 1
        assert answers >= 3
        assert all(len(picture.result().transcript) == 64 for picture in pictures)


def test_health_of_an_unknown_service_is_not_found(verifier: Verifier) -> None:
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_log_names_pictures_and_never_prompts(client: Client, verifier: Verifier) -> None:
    for flags in ([], ["--method", "ar"]):
        assert client.run(*flags, prompt="a secret cat").code == 0
    with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError, match="prompt"):
        converse(channel, [opening(Bundle.open(client.flags[1]).manifest, prompt="secret " * 400)])
    verifier.logged(r"generation [0-9a-f]{16}: done in [\d.]+ s")
    verifier.logged(r"refused .*prompt: 2800 characters")
    assert "secret" not in verifier.log
    assert "Traceback" not in verifier.log


# -- the bundle of a new device -------------------------------------------------------------------------------------


def served(verifier: Verifier) -> list[str]:
    """The flags of a device without a bundle."""
    return ["--server", verifier.address]


def test_bundle_is_fetched_on_first_use_and_kept(client: Client, verifier: Verifier, toy: Bundle) -> None:
    client.flags = served(verifier)
    client.draw("--seed", "7", "--output", "first.png")
    folder = client.cache / toy.manifest.digest
    files = {path.name for path in folder.iterdir()}
    assert files == {"bundle.json"} | {file.path for file in toy.manifest.part("device")}
    assert not any("target" in name for name in files)
    before = [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    client.draw("--seed", "7", "--output", "again.png")
    assert before == [(path.name, path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    assert pixels(client.folder / "first.png") == pixels(client.folder / "again.png")
    assert [path.name for path in client.cache.iterdir()] == [toy.manifest.digest]


def test_damaged_cached_file_is_fetched_again_with_a_warning(client: Client, verifier: Verifier, toy: Bundle) -> None:
    client.flags = served(verifier)
    client.draw()
    damaged = client.cache / toy.manifest.digest / "drafter.onnx"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    result = client.run()
    assert result.code == 0, result.stderr
    assert "damaged" in result.stderr
    assert "drafter.onnx" in result.stderr
    assert Bundle.open(client.cache / toy.manifest.digest, "device").manifest.digest == toy.manifest.digest
    assert client.run().stderr == ""


def test_new_devices_may_share_an_empty_cache(client: Client, verifier: Verifier) -> None:
    client.flags = served(verifier)
    processes = [client.start("--output", f"{index}.png") for index in range(3)]
    results = [finish(process) for process in processes]
    assert [(result.code, result.stderr) for result in results] == [(0, "")] * 3
    assert len(list(client.cache.iterdir())) == 1


def test_cache_is_looked_up_by_the_verifiers_bundle(
    client: Client, verifier: Verifier, toy: Bundle, noisy_verifier: Verifier, noisy: Bundle
) -> None:
    client.flags = ["--cache", str(client.folder / "mine")]
    client.draw("--server", verifier.address)
    client.draw("--server", noisy_verifier.address)
    kept = {path.name for path in (client.folder / "mine").iterdir()}
    assert kept == {toy.manifest.digest, noisy.manifest.digest}
    assert not client.cache.exists()
