"""A user's own pictures: the Hugging Face `imagefolder` convention with a metadata.jsonl.

    my_pictures/train/0001.png                my_pictures/0001.png
    my_pictures/train/metadata.jsonl    or    my_pictures/metadata.jsonl
    my_pictures/validation/...
    my_pictures/test/...

Each line of metadata.jsonl is an object with `file_name` (relative to it) and `text` (the caption).
Without split folders, 5 % of the pictures go to validation and 5 % to test, by a hash of the file name.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset

from training.data.errors import DataError
from training.data.splits import hash_share
from training.data.tensors import to_tensor

METADATA = "metadata.jsonl"
SPLIT_FOLDERS = {"train": "train", "val": "validation", "test": "test"}
_VAL = _TEST = 0.05


@dataclass(frozen=True, slots=True)
class Picture:
    """One captioned file, and the line of metadata.jsonl (`file:line`) that names it."""

    path: Path
    caption: str
    origin: str


class ImageFolderDataset(Dataset[tuple[torch.Tensor, str]]):
    """Pictures of one split, centre-cropped to a square and resized.

    Item: (image float32 (3, size, size) in [-1, 1], caption). Transparent pictures are laid on white.
    Raises DataError naming file and line for missing pictures, bad JSON, missing keys and empty captions (at once),
    and for files that are no picture (when they are read).
    """

    def __init__(self, folder: Path, split: str = "train", size: int = 128) -> None:
        if split not in SPLIT_FOLDERS:
            raise ValueError(f"split must be one of {', '.join(SPLIT_FOLDERS)} for a picture folder, got {split!r}")
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        if not folder.is_dir():
            raise DataError(f"the picture folder {folder} does not exist: check data.pictures")
        self.size = size
        self.pictures = _pictures_of(folder, split)
        if not self.pictures:
            raise DataError(
                f"{folder} has no picture for the split {split}: add some, or a folder "
                f"{SPLIT_FOLDERS[split]}/ with its own {METADATA}"
            )

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, str]:
        if not 0 <= index < len(self.pictures):
            raise IndexError(f"picture {index} of {len(self.pictures)}")
        picture = self.pictures[index]
        return to_tensor(np.asarray(self._open(picture))), picture.caption

    def _open(self, picture: Picture) -> Image.Image:
        try:
            with Image.open(picture.path) as image:
                upright = ImageOps.exif_transpose(image)
                square = ImageOps.fit(_on_white(upright), (self.size, self.size), Image.Resampling.LANCZOS)
        except (OSError, Image.DecompressionBombError) as error:
            raise DataError(f"{picture.origin}: {picture.path} is not a readable picture ({error})") from error
        return square


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, "white"), layered).convert("RGB")


def _pictures_of(folder: Path, split: str) -> list[Picture]:
    if any((folder / name).is_dir() for name in SPLIT_FOLDERS.values()):
        own = folder / SPLIT_FOLDERS[split]
        if not own.is_dir():
            raise DataError(f"{folder} has split folders but no {SPLIT_FOLDERS[split]}/: add it")
        return _read_metadata(own)
    return [
        picture
        for picture in _read_metadata(folder)
        if _split_by_name(picture.path.relative_to(folder.resolve()).as_posix()) == split
    ]


def _split_by_name(file_name: str) -> str:
    share = hash_share("folder", file_name)
    if share < _VAL:
        return "val"
    return "test" if share < _VAL + _TEST else "train"


def _read_metadata(folder: Path) -> list[Picture]:
    path = folder / METADATA
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise DataError(
            f'{path} is missing: write one JSON object a line, {{"file_name": "0001.png", "text": "caption"}}'
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from error
    return [
        _picture(folder.resolve(), f"{path}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _picture(folder: Path, origin: str, line: str) -> Picture:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{origin}: not a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise DataError(f"{origin}: not a JSON object but a {type(row).__name__}")
    for key in ("file_name", "text"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise DataError(f'{origin}: needs a non-empty string "{key}", got {row.get(key)!r}')
    path = (folder / row["file_name"]).resolve()
    if not path.is_relative_to(folder):
        raise DataError(f"{origin}: file_name {row['file_name']!r} points outside {folder}")
    if not path.is_file():
        raise DataError(f"{origin}: {path} does not exist")
    return Picture(path, row["text"].strip(), origin)
