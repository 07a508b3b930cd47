"""A verifier that is asked to stop lets pictures in progress end, takes no new ones, and says so."""

from __future__ import annotations

import signal
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from device.client import DeviceClient, GenerateSettings
from shared.bundle import Bundle
from tests.end_to_end.conftest import StartVerifier
from tests.end_to_end.programs import Client, Verifier, channel_to, converse, opening

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def plain(verifier: Verifier, toy: Bundle) -> list[int]:
    """The tokens of plain sampling."""
    with DeviceClient(verifier.address, bundle=toy.folder) as device:
        return device.generate("a red cat", GenerateSettings("ar", seed=2)).transcript.tokens


def health(address: str) -> int:
    with channel_to(address) as channel:
        request = health_pb2.HealthCheckRequest(service="ciar.v1.Verifier")
        status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status
    return status


def test_stopping_verifier_ends_what_it_began_takes_nothing_new_and_says_so(
    start_verifier: StartVerifier, toy: Bundle, client: Client, plain: list[int]
) -> None:
    verifier = start_verifier()
    checks: list[Any] = []

    def stop(done: int, total: int) -> None:
        if done < 20 or checks:
            return
        checks.append(health(verifier.address))
        verifier.process.send_signal(signal.SIGTERM)
        verifier.logged("stopping: pictures in progress may end")
        with channel_to(verifier.address) as channel, pytest.raises(grpc.RpcError) as caught:
            converse(channel, [opening(toy.manifest)], seconds=5)
        checks.append(caught.value.code())
        client.run("--server", verifier.address, "--retry-timeout", "0.3").failed(4, verifier.address)
        checks.append(health(verifier.address))

    with channel_to(verifier.address) as channel, DeviceClient(verifier.address, bundle=toy.folder) as device:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
        assert next(watch).status == SERVING
        picture = device.generate("a red cat", GenerateSettings("sd", seed=2), on_progress=stop)
        assert next(watch).status == NOT_SERVING
        # The watcher is still there, and no reason to stay.
        assert verifier.process.wait(20) == 0
        watch.cancel()
    assert picture.transcript.tokens == plain
    assert picture.report.resumed == 0
    assert checks == [SERVING, grpc.StatusCode.UNAVAILABLE, NOT_SERVING]


def test_idle_verifier_stops_at_once(start_verifier: StartVerifier) -> None:
    verifier = start_verifier()
    begun = time.monotonic()
    assert verifier.stop(signal.SIGINT) == 0
    assert time.monotonic() - begun < 20
    assert "Traceback" not in verifier.log


def test_picture_that_outlasts_the_drain_goes_on_at_the_successor(
    start_verifier: StartVerifier, toy: Bundle, plain: list[int]
) -> None:
    verifier = start_verifier("--drain-timeout", "0.5")
    successors: list[Verifier] = []

    def replace(done: int, total: int) -> None:
        if done >= 20 and not successors:
            begun = time.monotonic()
            assert verifier.stop() == 0
            assert time.monotonic() - begun < 20
            successors.append(start_verifier(port=verifier.port))

    with DeviceClient(verifier.address, bundle=toy.folder) as device:
        picture = device.generate("a red cat", GenerateSettings("sd", seed=2), on_progress=replace)
    assert picture.transcript.tokens == plain
    assert picture.report.resumed == 1


def test_second_signal_ends_a_verifier_at_once(start_verifier: StartVerifier, toy: Bundle) -> None:
    verifier = start_verifier()
    codes: list[int] = []

    def stop(done: int, total: int) -> None:
        if done >= 20 and not codes:
            verifier.process.send_signal(signal.SIGTERM)
            verifier.logged("stopping: pictures in progress may end")
            codes.append(verifier.stop(seconds=20))
            raise KeyboardInterrupt

    with DeviceClient(verifier.address, bundle=toy.folder) as device, pytest.raises(KeyboardInterrupt):
        device.generate("a red cat", GenerateSettings("sd", seed=2), on_progress=stop)
    assert codes == [-signal.SIGTERM]
