"""The device finds its bundle where it is, fetches it whole or not at all, and believes digests only."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from device import bundle_cache
from device.bundle_cache import cache_folder, fetch_bundle, find_bundle, local_bundle
from device.link import Link
from protos import ciar_pb2 as pb
from shared.bundle import Bundle
from shared.errors import BundleError, CiarError, OutputError, ProtocolError
from tests.device.conftest import FakeVerifier, bundle_chunks
from training.toy import write_toy_bundle

Chunks = list[pb.BundleChunk]


@pytest.fixture
def link(fake: FakeVerifier) -> Iterator[Link]:
    result = Link(fake.address)
    yield result
    result.close()


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_toy_bundle(tmp_path_factory.mktemp("other") / "bundle", vocabulary=8, rows=4, cols=4, seed=1)


def offline() -> Link:
    """A link that fails the test when it is used."""
    return Link("127.0.0.1:1")


def place(bundle: Bundle, folder: Path, *, ago: float = 0.0) -> Path:
    """Copies the device's part of a bundle to a folder."""
    folder.mkdir(parents=True)
    for name in ["bundle.json", *(file.path for file in bundle.manifest.part("device"))]:
        shutil.copy(bundle.folder / name, folder)
    then = folder.stat().st_mtime - ago
    os.utime(folder, (then, then))
    return folder


# -- fetching -------------------------------------------------------------------------------------------------------


def test_fetched_bundle_holds_the_devices_part_and_nothing_else(link: Link, toy: Bundle, tmp_path: Path) -> None:
    bundle = fetch_bundle(link, tmp_path / "cache" / "it")
    assert bundle.manifest == toy.manifest
    assert not bundle.damaged("device")
    names = {path.name for path in bundle.folder.iterdir()}
    assert names == {"bundle.json"} | {file.path for file in toy.manifest.part("device")}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["it"]


def test_found_bundle_is_kept_under_its_digest(link: Link, fake: FakeVerifier, toy: Bundle, tmp_path: Path) -> None:
    digest = toy.manifest.digest
    assert find_bundle(link, digest, tmp_path / "mine").folder == tmp_path / "mine" / digest
    assert find_bundle(offline(), digest, tmp_path / "mine").manifest.digest == digest
    assert find_bundle(link, digest).folder == cache_folder() / digest


def without_manifest(chunks: Chunks) -> Chunks:
    return chunks[1:]


def cut_short(chunks: Chunks) -> Chunks:
    return chunks[:-1]


def out_of_order(chunks: Chunks) -> Chunks:
    return [chunks[0], chunks[2], chunks[1], *chunks[3:]]


def come_twice(chunks: Chunks) -> Chunks:
    return [*chunks[:2], *chunks[1:]]


def changed(chunks: Chunks) -> Chunks:
    data = chunks[1].file.data
    chunks[1].file.data = bytes([data[0] ^ 1]) + data[1:]
    return chunks


def longer(chunks: Chunks) -> Chunks:
    file = chunks[-1].file
    more = pb.FileChunk(path=file.path, offset=file.offset + len(file.data), data=b"more")
    return [*chunks, pb.BundleChunk(file=more)]


def of_the_cloud(chunks: Chunks) -> Chunks:
    return [*chunks, pb.BundleChunk(file=pb.FileChunk(path="target.safetensors", data=b"weights"))]


def outside(chunks: Chunks) -> Chunks:
    manifest = chunks[0].manifest.replace('"drafter.onnx"', '"../drafter.onnx"')
    return [pb.BundleChunk(manifest=manifest), *chunks[1:]]


def outside_the_manifest(chunks: Chunks) -> Chunks:
    return [*chunks, pb.BundleChunk(file=pb.FileChunk(path="../../evil", data=b"evil"))]


def forged(chunks: Chunks) -> Chunks:
    return [pb.BundleChunk(manifest=chunks[0].manifest.replace('"vocabulary": 8', '"vocabulary": 9')), *chunks[1:]]


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (without_manifest, ProtocolError, "sent no bundle manifest"),
        (lambda chunks: [], ProtocolError, "sent no bundle manifest"),
        (lambda chunks: [pb.BundleChunk(manifest="{")], BundleError, "not a bundle manifest"),
        (cut_short, BundleError, "missing or damaged"),
        (changed, BundleError, "missing or damaged"),
        (out_of_order, ProtocolError, "out of order"),
        (come_twice, ProtocolError, "out of order"),
        (longer, ProtocolError, "more of"),
        (of_the_cloud, ProtocolError, r"'target\.safetensors', which is not of the device's part"),
        (outside, BundleError, "leaves the bundle's folder"),
        (outside_the_manifest, ProtocolError, "not of the device's part"),
        (forged, BundleError, "its digest is"),
    ],
)
def test_spoilt_bundle_is_refused_and_leaves_nothing(
    fake: FakeVerifier,
    link: Link,
    toy: Bundle,
    tmp_path: Path,
    spoil: Callable[[Chunks], Chunks],
    error: type[CiarError],
    words: str,
) -> None:
    fake.chunks = lambda context: iter(spoil(bundle_chunks(toy, size=20_000)))
    with pytest.raises(error, match=words):
        find_bundle(link, toy.manifest.digest, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    assert not (tmp_path / "evil").exists()


def test_verifier_that_sends_another_bundle_than_it_described_is_noticed(link: Link, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="described bundle abababababab, but sent"):
        find_bundle(link, "ab" * 32, tmp_path / "cache")


def test_full_disk_is_said_and_leaves_nothing(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(chunks: Iterator[pb.BundleChunk], folder: Path) -> None:
        (folder / "half").write_bytes(b"half a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle_cache, "_receive", full)
    with pytest.raises(OutputError, match=r"cannot be stored there \(No space left on device\)"):
        fetch_bundle(link, tmp_path / "cache" / "it")
    assert not list((tmp_path / "cache").iterdir())


def test_cache_that_is_no_folder_is_said(link: Link, toy: Bundle, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutputError, match="cannot be stored there"):
        find_bundle(link, toy.manifest.digest, tmp_path / "cache")


# -- what is there already ------------------------------------------------------------------------------------------


def damage_file(folder: Path) -> None:
    (folder / "codec_decoder.onnx").write_bytes(b"garbage")


def remove_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "bundle.json").write_text("{}")


@pytest.mark.parametrize("damage", [damage_file, remove_file, damage_manifest])
def test_damaged_copy_is_fetched_again_with_a_warning(
    link: Link, toy: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    folder = place(toy, tmp_path / "cache" / toy.manifest.digest)
    damage(folder)
    with caplog.at_level(logging.WARNING):
        bundle = find_bundle(link, toy.manifest.digest, tmp_path / "cache")
    assert not bundle.damaged("device")
    assert "the cached bundle is damaged and is fetched again" in caplog.text


def test_first_fetch_warns_of_nothing(
    link: Link, toy: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    find_bundle(link, toy.manifest.digest, tmp_path / "cache")
    assert not caplog.records


def test_bundle_that_another_device_completed_meanwhile_is_left_alone(
    fake: FakeVerifier, link: Link, toy: Bundle, tmp_path: Path
) -> None:
    folder, placed = tmp_path / "cache" / toy.manifest.digest, []

    def chunks(context: Any) -> Iterator[pb.BundleChunk]:
        yield from bundle_chunks(toy)
        place(toy, folder)  # by another device, which opens these files now
        placed.append(folder.stat().st_ino)

    fake.chunks = chunks
    assert find_bundle(link, toy.manifest.digest, tmp_path / "cache").folder == folder
    assert [folder.stat().st_ino] == placed


def test_embedded_bundle_is_taken_when_it_is_the_verifiers(
    toy: Bundle, other: Bundle, link: Link, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bundle_cache, "default_bundle_folder", lambda: toy.folder)
    assert find_bundle(offline(), toy.manifest.digest, tmp_path / "cache").folder == toy.folder
    monkeypatch.setattr(bundle_cache, "default_bundle_folder", lambda: other.folder)
    assert find_bundle(link, toy.manifest.digest, tmp_path / "cache").folder == tmp_path / "cache" / toy.manifest.digest


def test_alone_the_device_takes_the_embedded_bundle_first(
    toy: Bundle, other: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(other, cache_folder() / "any")
    monkeypatch.setattr(bundle_cache, "default_bundle_folder", lambda: toy.folder)
    found = local_bundle()
    assert found is not None
    assert found.manifest.digest == toy.manifest.digest


def test_alone_the_device_takes_the_bundle_it_fetched_last(toy: Bundle, other: Bundle) -> None:
    assert local_bundle() is None
    place(toy, cache_folder() / "older", ago=100.0)
    place(other, cache_folder() / "newer")
    found = local_bundle()
    assert found is not None
    assert found.manifest.digest == other.manifest.digest


def test_alone_the_device_is_told_of_a_damaged_bundle(toy: Bundle) -> None:
    damage_file(place(toy, cache_folder() / "it"))
    with pytest.raises(BundleError, match=r"codec_decoder\.onnx: missing or damaged"):
        local_bundle()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CIAR_CACHE": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/ciar"),
        ({"HOME": "/h"}, "/h/.cache/ciar"),
        ({"CIAR_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/ciar"),
    ],
)
def test_cache_lies_where_the_user_says(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CIAR_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
