"""Toy bundles, verifier processes, devices and links for the end-to-end tests."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from device.client import DeviceClient
from shared.bundle import Bundle
from tests.end_to_end.programs import Client, Verifier
from tests.end_to_end.relay import Relay, relaying
from training.toy import write_toy_bundle

StartVerifier = Callable[..., Verifier]


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A suite that a shell starts in the background ignores SIGINT, and so would every program it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose pictures are large enough to have a middle."""
    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", vocabulary=8, rows=8, cols=8)


@pytest.fixture(scope="session")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Another bundle: the same target and codebook, but a drafter that knows nothing of the target."""
    return write_toy_bundle(
        tmp_path_factory.mktemp("noisy") / "bundle", vocabulary=8, rows=8, cols=8, drafter_noise=1.0
    )


@pytest.fixture(scope="session")
def verifier(toy: Bundle) -> Iterator[Verifier]:
    """The verifier most tests share."""
    process = Verifier(toy.folder, "--max-sessions", "16", "--idle-timeout", "20")
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture(scope="session")
def exact(toy: Bundle) -> Iterator[Verifier]:
    """A verifier that computes in float32, so that rows computed one by one or together draw the same tokens."""
    process = Verifier(toy.folder, "--dtype", "float32", "--threads", "1")
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture
def device(exact: Verifier, toy: Bundle) -> Iterator[DeviceClient]:
    """A device of this process at that verifier."""
    with DeviceClient(exact.address, bundle=toy.folder) as client:
        yield client


@pytest.fixture(scope="session")
def noisy_verifier(noisy: Bundle) -> Iterator[Verifier]:
    """A verifier with the other bundle."""
    process = Verifier(noisy.folder)
    try:
        yield process.ready()
    finally:
        process.close()


@pytest.fixture
def start_verifier(toy: Bundle) -> Iterator[StartVerifier]:
    """Starts verifiers with a test's own flags; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, bundle: Path = toy.folder, port: int = 0) -> Verifier:
            process = Verifier(bundle, *flags, port=port)
            stack.callback(process.close)
            return process.ready()

        yield start


@pytest.fixture
def client(tmp_path: Path, toy: Bundle, verifier: Verifier) -> Iterator[Client]:
    """A device with the bundle at hand and the shared verifier."""
    result = Client(tmp_path, ["--bundle", str(toy.folder), "--server", verifier.address])
    yield result
    result.close()


@pytest.fixture
def relay(verifier: Verifier) -> Iterator[Relay]:
    """A link to the shared verifier."""
    with relaying(verifier.port) as link:
        yield link


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port nobody listens on, and nobody can: it is taken as long as the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
