"""A toy bundle, its models, and a verifier in this process whose every word a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from device.graphs import DeviceModels
from protos import PROTOCOL, ciar_pb2_grpc
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from training.toy import write_toy_bundle

Talk = Callable[[Iterator[pb.DeviceMessage], Any], Iterator[pb.CloudMessage]]


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_toy_bundle(tmp_path_factory.mktemp("toy") / "bundle", vocabulary=8, rows=4, cols=4)


@pytest.fixture(scope="session")
def models(toy: Bundle) -> DeviceModels:
    return DeviceModels(toy)


@pytest.fixture(autouse=True)
def no_bundle_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests see neither the user's cache nor the embedded bundle."""
    monkeypatch.setenv("CIAR_CACHE", f"{tmp_path}/cache")
    monkeypatch.setattr("device.bundle_cache.default_bundle_folder", lambda: tmp_path / "embedded")


class FakeVerifier(ciar_pb2_grpc.VerifierServicer):  # type: ignore[misc]
    """A verifier that says what a test tells it to.

    Attributes:
        talk: answers a `Generate` stream.
        chunks: answer to `FetchBundle`.
        described: calls of `Describe` so far.
        bundle_digest: what `Describe` says.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.bundle_digest, self.described = bundle, bundle.manifest.digest, 0
        self.talk: Talk = lambda messages, context: iter([])
        self.chunks: Callable[[Any], Iterator[pb.BundleChunk]] = lambda context: iter(bundle_chunks(bundle))
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        ciar_pb2_grpc.add_VerifierServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.stop(None).wait(10)

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.Description:  # noqa: N802
        self.described += 1
        return pb.Description(protocol=PROTOCOL, bundle_digest=self.bundle_digest)

    def FetchBundle(self, request: pb.FetchBundleRequest, context: Any) -> Iterator[pb.BundleChunk]:  # noqa: N802
        return self.chunks(context)

    def Generate(self, messages: Iterator[pb.DeviceMessage], context: Any) -> Iterator[pb.CloudMessage]:  # noqa: N802
        return self.talk(messages, context)


@pytest.fixture
def fake(toy: Bundle) -> Iterator[FakeVerifier]:
    verifier = FakeVerifier(toy)
    yield verifier
    verifier.close()


def bundle_chunks(bundle: Bundle, size: int = 50_000) -> list[pb.BundleChunk]:
    """What a verifier sends for the device's part of a bundle."""
    chunks = [pb.BundleChunk(manifest=bundle.manifest.to_json())]
    for file in bundle.manifest.part("device"):
        content = bundle.path(file.path).read_bytes()
        chunks += [
            pb.BundleChunk(file=pb.FileChunk(path=file.path, offset=start, data=content[start : start + size]))
            for start in range(0, len(content), size)
        ]
    return chunks
