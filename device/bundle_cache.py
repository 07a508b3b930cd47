"""Where the device takes its bundle from: a folder, the embedded one, the cache, or the verifier."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from device.link import Link
from protos import ciar_pb2 as pb
from shared.bundle import MANIFEST, Bundle, Manifest, default_bundle_folder
from shared.errors import BundleError, OutputError, ProtocolError

__all__ = ["cache_folder", "fetch_bundle", "find_bundle", "local_bundle"]

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """`$CIAR_CACHE`, or `ciar` in the user's cache folder."""
    if folder := os.environ.get("CIAR_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ciar"


def local_bundle(cache: Path | None = None) -> Bundle | None:
    """The embedded bundle, or the one most recently fetched; None when there is neither.

    Args:
        cache: folder for fetched bundles; None for the user's cache folder.

    Raises:
        BundleError: it is there, but damaged.
    """
    for folder in (default_bundle_folder(), *_cached(cache or cache_folder())):
        if (folder / MANIFEST).exists():
            return Bundle.open(folder, "device")
    return None


def find_bundle(link: Link, digest: str, cache: Path | None = None) -> Bundle:
    """The bundle with that digest: the embedded one, a cached one (mended when damaged), or fetched from the verifier.

    Raises:
        BundleError: what the verifier sent does not match.
        LinkError: the link broke.
        OutputError: the cache cannot be written.
    """
    with contextlib.suppress(BundleError):
        embedded = Bundle.open(default_bundle_folder(), "device")
        if embedded.manifest.digest == digest:
            return embedded
    folder = (cache or cache_folder()) / digest
    try:
        return Bundle.open(folder, "device")
    except BundleError as error:
        if (folder / MANIFEST).exists():
            log.warning("the cached bundle is damaged and is fetched again: %s", error)
    bundle = fetch_bundle(link, folder)
    if bundle.manifest.digest != digest:
        raise BundleError(f"the verifier described bundle {digest:.12}, but sent {bundle.manifest.digest:.12}")
    return bundle


def fetch_bundle(link: Link, folder: Path) -> Bundle:
    """Fetches the device's part of a verifier's bundle into `folder`, checked and complete or not at all.

    A copy that lies there is replaced when it is damaged. Raises as `find_bundle`.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as temporary:
            fresh = Path(temporary) / "bundle"
            fresh.mkdir()
            _receive(link.fetch([]), fresh)
            bundle = Bundle.open(fresh, "device")
            return _settle(fresh, bundle.manifest, folder)
    except OSError as error:
        raise OutputError(f"{folder}: the bundle cannot be stored there ({error.strerror or error})") from error


def _settle(fresh: Path, manifest: Manifest, folder: Path) -> Bundle:
    """Moves a complete bundle to its folder, unless another device put a sound one there meanwhile and uses it."""
    while True:
        with contextlib.suppress(BundleError):
            found = Bundle.open(folder, "device")
            if found.manifest.digest == manifest.digest:
                return found
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.replace(fresh, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return Bundle(folder, manifest)


def _receive(chunks: Iterator[pb.BundleChunk], folder: Path) -> None:
    first = next(chunks, None)
    if first is None or not first.HasField("manifest"):
        raise ProtocolError("the verifier sent no bundle manifest")
    manifest = Manifest.from_json(first.manifest, "the verifier's manifest")
    (folder / MANIFEST).write_text(first.manifest, encoding="utf-8")
    sizes = {file.path: file.bytes for file in manifest.part("device")}
    for chunk in chunks:
        path = chunk.file.path
        if path not in sizes:
            raise ProtocolError(f"the verifier sent {path!r}, which is not of the device's part of its bundle")
        if chunk.file.offset + len(chunk.file.data) > sizes[path]:
            raise ProtocolError(f"the verifier sent more of {path} than its manifest says")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            if file.tell() != chunk.file.offset:
                raise ProtocolError(f"the verifier sent {path} out of order")
            file.write(chunk.file.data)


def _cached(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("*") if (path / MANIFEST).exists()] if folder.is_dir() else []
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
