"""Sprites: every chosen concept in every chosen style, rendered once, stored in one memory-mappable file.

A sprite is cropped to its drawing and scaled so that the longer side fills the square, so that "70 % of the picture"
means the same for an ant and an elephant.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from training.data.concepts import Concept
from training.data.drawings import Drawings
from training.data.errors import DataError
from training.data.styles import Style

SPRITE_SIZE = 128
# Fainter pixels than this are shadow or antialiasing and must not widen the crop.
_VISIBLE_ALPHA = 16


@dataclass(frozen=True, slots=True)
class Sprite:
    """One row of the table: where the drawing lies in the array, what it shows, and how it is drawn.

    width, height: of the drawing inside the centred SPRITE_SIZE square, in pixels.
    """

    index: int
    concept: Concept
    style: str
    family: str
    width: int
    height: int


class SpriteSet:
    """The table of sprites and their pixels: `pixels` is uint8 (n, SPRITE_SIZE, SPRITE_SIZE, 4), straight alpha."""

    def __init__(self, table: list[Sprite], pixels: NDArray[np.uint8]) -> None:
        if pixels.shape != (len(table), SPRITE_SIZE, SPRITE_SIZE, 4):
            raise DataError(f"sprite pixels have shape {pixels.shape}, the table has {len(table)} rows")
        self.table = table
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.table)

    @property
    def concepts(self) -> list[Concept]:
        """The distinct concepts, in table order."""
        return list({sprite.concept.code: sprite.concept for sprite in self.table}.values())

    def save(self, folder: Path, key: str) -> None:
        """Write the set to `folder`; `key` says what it was made from.

        The table goes first and comes last, so a table never stands beside pixels it does not describe.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sprites.json").unlink(missing_ok=True)
        temporary = folder / "sprites.npy.tmp"
        with temporary.open("wb") as file:
            np.save(file, self.pixels)
        os.replace(temporary, folder / "sprites.npy")
        table = {"key": key, "sprites": [asdict(sprite) for sprite in self.table]}
        temporary = folder / "sprites.json.tmp"
        temporary.write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
        os.replace(temporary, folder / "sprites.json")

    @classmethod
    def load(cls, folder: Path, key: str | None = None) -> "SpriteSet":
        """Open a saved set, pixels memory-mapped. DataError if missing, broken, or made from another key."""
        try:
            document = json.loads((folder / "sprites.json").read_text(encoding="utf-8"))
            pixels = np.load(folder / "sprites.npy", mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise DataError(f"{folder} has no sprites yet: run the data stage first") from error
        except ValueError as error:
            raise DataError(f"the sprites in {folder} are damaged ({error}): run the data stage again") from error
        if key is not None and document["key"] != key:
            raise DataError(
                f"the sprites in {folder} were made with other settings (key {document['key']}, "
                f"wanted {key}): run the data stage again"
            )
        return cls([_sprite(row) for row in document["sprites"]], pixels)


def _sprite(row: dict[str, Any]) -> Sprite:
    concept: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row["concept"].items()
    }
    return Sprite(**{**row, "concept": Concept(**concept)})


def render_sprites(concepts: list[Concept], drawings: Iterable[tuple[Style, Drawings]]) -> SpriteSet:
    """Render every concept in every style; drop drawings that are pixel-identical to an earlier one.

    Identical drawings come from packages that use one picture for two labels: the caption would then be a coin toss.
    """
    table: list[Sprite] = []
    pictures: list[NDArray[np.uint8]] = []
    seen: set[bytes] = set()
    for style, concept, picture in _renders(concepts, drawings):
        fitted, width, height = fit_square(picture)
        digest = hashlib.blake2b(fitted.tobytes()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        table.append(Sprite(len(table), concept, style.name, style.family, width, height))
        pictures.append(fitted)
    if not table:
        raise DataError("no concept has a drawing in any chosen style: check data.styles and data.concepts")
    return SpriteSet(table, np.stack(pictures))


def _renders(
    concepts: list[Concept], drawings: Iterable[tuple[Style, Drawings]]
) -> Iterator[tuple[Style, Concept, Image.Image]]:
    for style, source in drawings:
        for concept in tqdm(concepts, desc=style.name, unit="sprite"):
            picture = source.render(concept)
            if picture is not None and _is_visible(picture):
                yield style, concept, picture


def _is_visible(picture: Image.Image) -> bool:
    return int(picture.getchannel("A").getextrema()[1]) > _VISIBLE_ALPHA  # type: ignore[arg-type]


def fit_square(picture: Image.Image, size: int = SPRITE_SIZE) -> tuple[NDArray[np.uint8], int, int]:
    """Crop to what is visible, scale the longer side to `size`, centre. Returns RGBA (size, size, 4), width, height."""
    box = picture.getchannel("A").point(lambda alpha: 255 if alpha > _VISIBLE_ALPHA else 0).getbbox()
    cropped = picture.crop(box)
    scale = size / max(cropped.size)
    width, height = (max(1, round(side * scale)) for side in cropped.size)
    scaled = cropped.resize((width, height), Image.Resampling.LANCZOS)
    square = Image.new("RGBA", (size, size))
    square.paste(scaled, ((size - width) // 2, (size - height) // 2))
    return np.asarray(square), width, height
