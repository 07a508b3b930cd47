"""A bundle: a folder with the models that belong together, and `bundle.json`, which names each file with its digest.

Files carry a part: `device` files are all a device needs (and all that `FetchBundle` sends), `cloud` files stay with
the verifier, `both` files are read on both sides. Weights are safetensors or ONNX, never pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from shared.errors import BundleError
from shared.grid import Grid
from shared.sampling import SamplingSettings

__all__ = ["FORMAT", "MANIFEST", "Bundle", "BundleFile", "Manifest", "default_bundle_folder", "file_digest"]

FORMAT = 1
MANIFEST = "bundle.json"
_PARTS = ("device", "cloud", "both")


def default_bundle_folder() -> Path:
    """Where the embedded default bundle lies in a checkout."""
    return Path(__file__).resolve().parents[1] / "bundles" / "default"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class BundleFile:
    """One file of a bundle: path below the folder, SHA-256, size in bytes, and the part it belongs to."""

    path: str
    sha256: str
    bytes: int
    part: str

    def __post_init__(self) -> None:
        pure = PurePosixPath(self.path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in self.path or ":" in self.path:
            raise BundleError(f"{MANIFEST}: the path {self.path!r} leaves the bundle's folder")
        if self.part not in _PARTS:
            raise BundleError(f"{MANIFEST}: {self.path}: part is one of {', '.join(_PARTS)}, not {self.part!r}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `bundle.json` says.

    Args:
        name: a short name for people.
        grid: token grid of a picture.
        vocabulary: number of visual tokens.
        image_size: side of the decoded picture in pixels.
        prefix_rows: conditioning rows of target and drafter: the longest caption in text tokens.
        codebook_digest: SHA-256 of the codebook, so that two sides never mean different pixels by the same id.
        defaults: sampling settings the models were trained for.
        files: every file but the manifest.
        models: free-form facts about the models (sizes, training), for people.
    """

    name: str
    grid: Grid
    vocabulary: int
    image_size: int
    prefix_rows: int
    codebook_digest: str
    defaults: SamplingSettings
    files: tuple[BundleFile, ...]
    models: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        kinds = {"name": str, "vocabulary": int, "image_size": int, "prefix_rows": int, "codebook_digest": str}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}: {kind.__name__} is needed, not {getattr(self, name)!r}")

    @property
    def digest(self) -> str:
        """Names the bundle: SHA-256 over grid, vocabulary and the digests of all files."""
        content = {
            "grid": [self.grid.rows, self.grid.cols],
            "vocabulary": self.vocabulary,
            "prefix_rows": self.prefix_rows,
            "codebook": self.codebook_digest,
            "files": sorted([file.path, file.sha256] for file in self.files),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def part(self, *parts: str) -> Iterator[BundleFile]:
        """Files of the named parts; `both` files belong to either."""
        return (file for file in self.files if file.part in parts or file.part == "both")

    def to_json(self) -> str:
        """The text of `bundle.json`."""
        content = {"format": FORMAT, **asdict(self), "digest": self.digest}
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = MANIFEST) -> Manifest:
        """Reads a manifest.

        Raises:
            BundleError: not JSON, another format, a missing or wrong field, or a digest that does not match.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise BundleError(f"{source}: only bundles of format {FORMAT} can be read")
            digest = content.pop("digest")
            manifest = cls(
                **content
                | {
                    "grid": Grid(**content["grid"]),
                    "defaults": SamplingSettings(**content["defaults"]),
                    "files": tuple(BundleFile(**file) for file in content["files"]),
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BundleError(f"{source}: not a bundle manifest ({type(error).__name__}: {error})") from error
        if manifest.digest != digest:
            raise BundleError(
                f"{source}: its digest is {manifest.digest}, but it says {digest}; fetch the bundle again"
            )
        return manifest


class Bundle:
    """An opened bundle whose files were checked.

    Args:
        folder: the bundle's folder.
        manifest: its manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path | str, *parts: str) -> Bundle:
        """Opens a bundle and checks the files of the named parts (all when none is named) against their digests.

        Raises:
            BundleError: no such bundle, or a file is missing or damaged; the message names it.
        """
        folder = Path(folder)
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except OSError as error:
            raise BundleError(f"{folder}: no bundle there ({MANIFEST}: {error.strerror or error})") from error
        except UnicodeDecodeError as error:
            raise BundleError(f"{folder / MANIFEST}: not a bundle manifest ({error})") from error
        bundle = cls(folder, Manifest.from_json(text, str(folder / MANIFEST)))
        if damaged := bundle.damaged(*parts):
            raise BundleError(f"{folder / damaged[0].path}: missing or damaged (its SHA-256 does not match {MANIFEST})")
        return bundle

    def damaged(self, *parts: str) -> list[BundleFile]:
        """Files of the named parts (all when none is named) that are missing or do not match their digest."""
        return [file for file in self.manifest.part(*(parts or _PARTS)) if not self._sound(file)]

    def has(self, name: str) -> bool:
        """Whether the bundle holds a file of that name; some are optional."""
        return name in {file.path for file in self.manifest.files}

    def path(self, name: str) -> Path:
        """Path of a file of the bundle.

        Raises:
            BundleError: the bundle has no such file.
        """
        if not self.has(name):
            raise BundleError(f"{self.folder}: the bundle has no {name}")
        return self.folder / name

    def _sound(self, file: BundleFile) -> bool:
        path = self.folder / file.path
        try:
            return path.stat().st_size == file.bytes and file_digest(path) == file.sha256
        except OSError:
            return False
