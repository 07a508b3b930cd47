"""Shards of the token cache on disk: one folder each, complete or absent.

shard-00000/tokens.npy       uint16 (n, T)            the picture's tokens in raster order
            features.npy     float16 (sum L_i, D)     caption features, ragged, one after the other
            offsets.npy      int64 (n + 1,)           features of item i are rows offsets[i]:offsets[i + 1]
            captions.jsonl   n lines {"caption": ...}
cache.json                   what the tokens were made with; mixing two encoders is refused
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.data.errors import DataError

_SHARD_NAME = re.compile(r"^shard-(\d{5})$")


@dataclass(frozen=True, slots=True)
class Shard:
    """The arrays of one shard, memory-mapped where they come from disk. Shapes as in the module's docstring."""

    tokens: NDArray[np.uint16]
    features: NDArray[np.float16]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)


def shard_path(folder: Path, number: int) -> Path:
    """Where shard `number` lies."""
    return folder / f"shard-{number:05d}"


def finished_shards(folder: Path) -> list[Path]:
    """The complete shards, in order."""
    return sorted(path for path in folder.iterdir() if _SHARD_NAME.match(path.name)) if folder.is_dir() else []


def save_shard(path: Path, shard: Shard, captions: list[str]) -> None:
    """Write to a temporary folder beside `path`, flush it to disk, then rename: readers see all of it or none."""
    temporary = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name in ("tokens", "features", "offsets"):
        with (temporary / f"{name}.npy").open("wb") as file:
            np.save(file, getattr(shard, name))
            file.flush()
            os.fsync(file.fileno())
    lines = "".join(json.dumps({"caption": caption}, ensure_ascii=False) + "\n" for caption in captions)
    (temporary / "captions.jsonl").write_text(lines, encoding="utf-8")
    if path.is_dir():  # a shorter shard of an earlier, smaller set
        shutil.rmtree(path)
    os.rename(temporary, path)


def load_shard(path: Path) -> Shard:
    """Open a shard memory-mapped. DataError if its files are missing, damaged or disagree."""
    try:
        tokens, features, offsets = (
            np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("tokens", "features", "offsets")
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}): delete this folder and encode again") from error
    if offsets.shape != (len(tokens) + 1,) or int(offsets[-1]) != len(features):
        raise DataError(
            f"{path} is damaged ({len(tokens)} token rows, {len(offsets)} offsets up to "
            f"{int(offsets[-1])}, {len(features)} feature rows): delete this folder and encode again"
        )
    return Shard(tokens, features, offsets)


def load_captions(path: Path) -> list[str]:
    """The captions of a shard, in item order."""
    lines = (path / "captions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["caption"] for line in lines]


def claim_folder(folder: Path, made_with: dict[str, Any]) -> None:
    """Create the cache folder, or check that it was made with the same things. DataError names both if not."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cache.json"
    if not path.is_file():
        temporary = folder / "cache.json.tmp"
        temporary.write_text(json.dumps(made_with, indent=2, sort_keys=True), encoding="utf-8")
        os.replace(temporary, path)
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if found != made_with:
        raise DataError(
            f"the token cache {folder} was made with {found}, now asked for {made_with}: "
            "use another folder, or delete this one"
        )
