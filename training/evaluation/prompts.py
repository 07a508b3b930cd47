"""The fixed lists of prompts, each with real pictures of the same captions and as many others to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from training.data.claims import Claims, SceneKind
from training.data.errors import DataError
from training.data.folder import ImageFolderDataset
from training.data.scene_dataset import evaluation_scenes
from training.data.settings import DataSettings
from training.data.splits import Split
from training.data.sprites import SpriteSet
from training.data.tensors import to_pixels

__all__ = ["EXTRA_LISTS", "Pixels", "PromptList", "folder_prompts", "scene_prompts"]

Pixels = NDArray[np.uint8]

EXTRA_LISTS: dict[str, tuple[Split | None, SceneKind]] = {
    "pair": (None, "pair"),
    "count": (None, "count"),
    "composition": ("composition", "single"),
    "train": ("train", "single"),
}
"""Lists beside the single objects: the split they draw from (None: the evaluation's) and their kind of scene."""


@dataclass(frozen=True, slots=True)
class PromptList:
    """Prompts and what belongs to them.

    Args:
        name: names the list in tables and folders.
        captions: the prompts.
        pictures: a real picture of each caption, uint8 (H, W, 3).
        reference: real pictures of the same law with other drawings, places and backgrounds: what every set of
            pictures is compared with. None of them is among `pictures`.
        claims: what each caption claims; None where nobody knows (a user's own pictures).
    """

    name: str
    captions: Sequence[str]
    pictures: Sequence[Pixels]
    reference: Sequence[Pixels]
    claims: Sequence[Claims] | None

    @property
    def single(self) -> bool:
        """Whether each picture claims one object, which a recogniser can name."""
        return self.claims is not None and all(claims.kind == "single" for claims in self.claims)


def scene_prompts(
    sprites: SpriteSet, data: DataSettings, count: int, seed: int, split: str = "test", extra: str = ""
) -> PromptList:
    """A list of composed scenes: the single objects of a split, or the list `extra`."""
    own, kind = EXTRA_LISTS[extra] if extra else (None, "single")
    wanted = own or cast("Split", split)
    scenes, others = (
        evaluation_scenes(sprites, count, number, kind, wanted, data.size, data.scenes) for number in (seed, seed + 1)
    )
    return PromptList(
        extra if own else f"{split}-{kind}",
        [scene.caption for scene in scenes],
        [scene.image for scene in scenes],
        [scene.image for scene in others],
        [scene.claims for scene in scenes],
    )


def folder_prompts(data: DataSettings, count: int, split: str = "test") -> PromptList:
    """A list of a user's own pictures: the first half of the split is asked for, the second is the reference.

    Raises:
        DataError: the split has fewer than four pictures.
    """
    assert data.pictures is not None  # DataSettings checks it
    images = ImageFolderDataset(data.pictures, split, data.size)
    count = min(count, len(images) // 2)
    if count < 2:
        raise DataError(f"{data.pictures}: the {split} split has {len(images)} pictures; at least 4 are needed")
    items = [(to_pixels(image), caption) for image, caption in (images[index] for index in range(2 * count))]
    pictures = [pixels for pixels, _ in items]
    return PromptList(
        f"{split}-pictures", [caption for _, caption in items[:count]], pictures[:count], pictures[count:], None
    )
