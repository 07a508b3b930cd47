"""A link that breaks, falls silent or goes away: the picture goes on as if nothing had been, or ends with a message.

And a device that goes away gives its slot back.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from device.client import DeviceClient, GenerateSettings, Picture
from device.link import LinkSettings
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.errors import RefusedError
from tests.end_to_end.conftest import StartVerifier
from tests.end_to_end.programs import GENERATE, Client, Verifier, channel_to, converse, finish, opening, wait_until
from tests.end_to_end.relay import Relay

PROMPT = "a red cat"
SEED = 11


@pytest.fixture(scope="module")
def plain(verifier: Verifier, toy: Bundle) -> list[int]:
    """The tokens of plain sampling over a sound link."""
    return draw(verifier.address, toy, lambda done: None, method="ar").transcript.tokens


@pytest.fixture(scope="module")
def narrow(toy: Bundle) -> Iterator[Verifier]:
    """A verifier with room for one picture."""
    process = Verifier(toy.folder, "--max-sessions", "1")
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture(scope="module")
def impatient(toy: Bundle) -> Iterator[Verifier]:
    """A verifier with room for one picture that takes it from idle devices after a second."""
    process = Verifier(toy.folder, "--max-sessions", "1", "--idle-timeout", "1")
    try:
        yield process.ready()
    finally:
        process.close()


def draw(
    address: str,
    bundle: Bundle,
    on_token: Callable[[int], object],
    method: str = "sd",
    in_flight: int = 1,
    silence: float = 20.0,
    retry: float = 20.0,
) -> Picture:
    """A picture drawn by this process; `on_token` hears how many tokens are done."""
    patience = LinkSettings(silence_seconds=silence, retry_seconds=retry)
    settings = GenerateSettings(method, seed=SEED, in_flight=in_flight, draft_length=4 if method == "sd" else 0)
    with DeviceClient(address, bundle=bundle.folder, link=patience) as device:
        return device.generate(PROMPT, settings, on_progress=lambda done, total: _heard(on_token(done)))


def _heard(answer: object) -> None:
    """Callbacks of the tests may return anything; the device's return nothing."""


def at(position: int, action: Callable[[], object]) -> Callable[[int], None]:
    """Does something once, when so many tokens are done."""
    waiting = [action]

    def watch(done: int) -> None:
        if done >= position and waiting:
            waiting.pop()()

    return watch


# -- the picture goes on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "in_flight"), [("sd", 1), ("sd", 3), ("ar", 1)])
def test_cut_link_is_found_again_and_changes_no_token(
    relay: Relay, toy: Bundle, plain: list[int], method: str, in_flight: int
) -> None:
    cuts = [at(position, relay.cut) for position in (8, 24, 40)]
    picture = draw(relay.address, toy, lambda done: [cut(done) for cut in cuts], method, in_flight)
    assert picture.transcript.tokens == plain
    # What was under way when the link was cut may have arrived: only with one draft in flight nothing was.
    assert 1 <= picture.report.resumed <= 3
    assert picture.report.resumed == 3 or (method, in_flight) != ("sd", 1)


def test_killed_verifier_is_replaced_in_the_middle_of_a_picture(
    start_verifier: StartVerifier, toy: Bundle, plain: list[int]
) -> None:
    first = start_verifier()
    successors: list[Verifier] = []

    def replace() -> None:
        first.stop(signal.SIGKILL)
        successors.append(Verifier(toy.folder, port=first.port))

    try:
        picture = draw(first.address, toy, at(20, replace), retry=30)
    finally:
        for successor in successors:
            successor.close()
    assert picture.transcript.tokens == plain
    assert picture.report.resumed >= 1


def test_resumed_is_how_often_the_picture_went_on(relay: Relay, toy: Bundle, plain: list[int]) -> None:
    mending = threading.Timer(1.5, relay.mend)

    def cut() -> None:
        relay.cut_for_good()
        mending.start()

    picture = draw(relay.address, toy, at(20, cut))
    mending.join()
    assert picture.transcript.tokens == plain
    assert relay.connections > 3, "the device tried several times"
    assert picture.report.resumed == 1


def test_link_that_was_silent_for_a_while_changes_no_token(relay: Relay, toy: Bundle, plain: list[int]) -> None:
    mending = threading.Timer(1.0, relay.mend)

    def stall() -> None:
        relay.stall()
        mending.start()

    picture = draw(relay.address, toy, at(20, stall), silence=0.4)
    mending.join()
    assert picture.transcript.tokens == plain
    assert picture.report.resumed >= 1


def test_link_of_a_long_way_is_no_lost_link(relay: Relay, toy: Bundle, plain: list[int]) -> None:
    relay.delay = 0.3
    picture = draw(relay.address, toy, lambda done: None, method="ar")
    assert picture.transcript.tokens == plain
    assert picture.report.resumed == 0


def test_dead_connection_is_left_for_a_new_one(relay: Relay, toy: Bundle, plain: list[int]) -> None:
    picture = draw(relay.address, toy, at(20, relay.lose), silence=0.5, retry=5)
    assert picture.transcript.tokens == plain


def test_picture_that_comes_back_takes_its_own_slot_again(narrow: Verifier, toy: Bundle) -> None:
    with channel_to(narrow.address) as lost, channel_to(narrow.address) as found:
        held: Any = lost.stream_stream(GENERATE, response_deserializer=pb.CloudMessage.FromString)
        release = threading.Event()
        call = held(_kept_open(opening(toy.manifest, method="sd").SerializeToString(), release), timeout=20)
        try:
            assert next(call).HasField("opened")
            again = opening(toy.manifest, tokens=[1] * 60, provenance=bytes(60), epoch=1)
            assert converse(found, [again])[-1].HasField("done")
        finally:
            release.set()
            call.cancel()
    free_again(narrow)


def _kept_open(message: bytes, release: threading.Event) -> Iterator[bytes]:
    yield message
    release.wait(20)


def test_another_bundle_behind_the_same_address_ends_the_picture(
    relay: Relay, toy: Bundle, noisy_verifier: Verifier
) -> None:
    def replace() -> None:
        relay.target = noisy_verifier.port
        relay.cut()

    with pytest.raises(RefusedError, match="bundle digest"):
        draw(relay.address, toy, at(20, replace))


# -- the picture is given up ----------------------------------------------------------------------------------------


Drawing = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def drawing(client: Client, relay: Relay) -> Drawing:
    """Starts a device on a slow link; gives it back in the middle of a picture that will not end by itself."""

    def start(port: int, *flags: str) -> subprocess.Popen[str]:
        relay.target, relay.delay = port, 0.03
        slowly = ["--draft-length", "1", "--preview", "--output", "slow.png"]
        process = client.start("--server", relay.address, *slowly, *flags)
        middle = client.folder / "slow.preview.png"
        wait_until(lambda: middle.exists() or process.poll() is not None, "the middle of a picture")
        relay.delay = 1.0
        assert process.poll() is None, finish(process).stderr
        return process

    return start


def test_verifier_killed_for_good_is_said(drawing: Drawing, start_verifier: StartVerifier, client: Client) -> None:
    mortal = start_verifier()
    process = drawing(mortal.port, "--retry-timeout", "1")
    mortal.stop(signal.SIGKILL)
    begun = time.monotonic()
    result = finish(process, 10)
    assert time.monotonic() - begun < 10
    result.failed(4, "of 64 tokens done", "did not come back within 1 s")
    assert not list(client.folder.glob("*slow*"))


def test_link_cut_for_good_is_said(drawing: Drawing, verifier: Verifier, relay: Relay) -> None:
    process = drawing(verifier.port, "--retry-timeout", "1")
    relay.cut_for_good()
    finish(process, 10).failed(4, "of 64 tokens done", "did not come back within 1 s")


def test_verifier_that_falls_silent_for_good_is_said(drawing: Drawing, verifier: Verifier, relay: Relay) -> None:
    process = drawing(verifier.port, "--silence-timeout", "0.5", "--retry-timeout", "1")
    relay.stall()
    finish(process, 10).failed(4, "of 64 tokens done", "sent nothing for 0.5 s")


def test_link_that_falls_silent_while_the_bundle_is_fetched_is_said(
    client: Client, verifier: Verifier, relay: Relay
) -> None:
    client.flags = ["--server", relay.address, "--silence-timeout", "1"]
    relay.delay = 0.03
    process = client.start()
    wait_until(lambda: relay.bytes_down > 4000, "the bundle is on its way")
    relay.stall()
    finish(process, 25).failed(4, relay.address)
    assert not list(client.cache.iterdir())


# -- slots ----------------------------------------------------------------------------------------------------------


def free_again(verifier: Verifier) -> None:
    wait_until(lambda: verifier.active() == 0, "the slot is free", 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_device_leaves_at_once_and_frees_its_slot(
    drawing: Drawing, narrow: Verifier, client: Client, number: int
) -> None:
    process = drawing(narrow.port)
    assert narrow.active() == 1
    process.send_signal(number)
    result = finish(process, 2)
    assert result == type(result)(130, "", "device-client: interrupted\n")
    free_again(narrow)
    assert not list(client.folder.glob("*slow*"))
    assert client.run("--server", narrow.address, "--retry-timeout", "1").code == 0


def test_interrupt_counts_while_the_link_is_silent(drawing: Drawing, narrow: Verifier, relay: Relay) -> None:
    process = drawing(narrow.port)
    relay.stall()
    process.send_signal(signal.SIGINT)
    assert finish(process, 2).code == 130
    free_again(narrow)


def test_killed_device_frees_its_slot(drawing: Drawing, narrow: Verifier, client: Client) -> None:
    process = drawing(narrow.port)
    process.kill()
    finish(process)
    free_again(narrow)
    assert client.run("--server", narrow.address, "--retry-timeout", "1").code == 0


def test_full_verifier_is_waited_for_and_then_given_up(drawing: Drawing, narrow: Verifier, client: Client) -> None:
    process = drawing(narrow.port)
    client.run("--server", narrow.address, "--retry-timeout", "0.5").failed(6, "every slot of the verifier is taken")
    refused = narrow.log.count("BusyError")
    waiting = client.start("--server", narrow.address, "--retry-timeout", "20")
    wait_until(lambda: narrow.log.count("BusyError") > refused, "the next device waits")
    process.kill()
    finish(process)
    assert finish(waiting).code == 0


def test_idle_device_loses_its_slot_and_is_told(impatient: Verifier, toy: Bundle, client: Client) -> None:
    with channel_to(impatient.address) as channel, pytest.raises(grpc.RpcError, match="slot is given away") as caught:
        converse(channel, [opening(toy.manifest, method="sd")], seconds=10)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert impatient.active() == 0
    assert client.run("--server", impatient.address, "--retry-timeout", "1").code == 0


def test_device_that_was_asleep_takes_its_picture_up_again(
    drawing: Drawing, impatient: Verifier, toy: Bundle, relay: Relay, tmp_path: Path
) -> None:
    process = drawing(impatient.port)
    process.send_signal(signal.SIGSTOP)
    free_again(impatient)
    relay.delay = 0.0
    process.send_signal(signal.SIGCONT)
    result = finish(process, 20)
    assert result.code == 0, result.stderr
    assert "link    lost and resumed" in result.stdout
    assert (tmp_path / "slow.png").exists()
