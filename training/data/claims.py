"""What a scene claims to show: the ground truth by which a picture can be scored, kept apart from its wording."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

SceneKind = Literal["single", "pair", "count"]
Relation = Literal["left of", "above"]
BackgroundKind = Literal["solid", "gradient", "floor"]
KINDS: tuple[SceneKind, ...] = ("single", "pair", "count")
BACKGROUNDS: tuple[BackgroundKind, ...] = ("solid", "gradient", "floor")


@dataclass(frozen=True, slots=True)
class ObjectClaim:
    """One drawn thing. code joins it to its concept; name is what the caption calls it (its noun or a synonym)."""

    code: str
    label: str
    name: str
    style: str
    family: str


@dataclass(frozen=True, slots=True)
class Background:
    """What is behind: one colour; two as a gradient from top to bottom; or floor colour, then wall colour."""

    kind: BackgroundKind
    colours: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claims:
    """Everything a scene shows, and which of it the caption says.

    objects: one, or two for a pair (the first is left of or above the second). count: copies of the only object.
    style_said, background_said: False where word drop-out left it out of the caption.
    """

    kind: SceneKind
    objects: tuple[ObjectClaim, ...]
    count: int
    relation: Relation | None
    background: Background
    style_said: bool = True
    background_said: bool = True


@dataclass(frozen=True, slots=True)
class Scene:
    """A composed picture, uint8 (size, size, 3) RGB, its caption, and what both claim."""

    image: NDArray[np.uint8]
    caption: str
    claims: Claims
