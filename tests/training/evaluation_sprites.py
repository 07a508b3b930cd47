"""Drawings for the tests of the evaluation: every concept has a shape and a colour of its own."""

from __future__ import annotations

from itertools import product

import numpy as np

from training.data.concepts import Concept
from training.data.sprites import SPRITE_SIZE, Sprite, SpriteSet

# Words that the toy tokenizer knows, so that captions stay short.
_WORDS = product(
    ("one", "two", "three"),
    ("red", "green", "blue", "yellow"),
    ("apple", "cat", "dog", "car", "star", "tree", "house"),
)
CONCEPTS = [
    Concept(f"1f{number:03x}", " ".join(words), " ".join(words), "objects", "tool", (), ())
    for number, words in enumerate(_WORDS)
]
STYLES = (("3d render", "fluent"), ("cartoon", "noto"))


def sprite_set() -> SpriteSet:
    """Stars with three to nine points, a colour for each concept, a lighter one in the second style."""
    table, pixels = [], []
    rows, cols = np.mgrid[:SPRITE_SIZE, :SPRITE_SIZE] - (SPRITE_SIZE - 1) / 2
    distance, angle = np.hypot(rows, cols), np.arctan2(rows, cols)
    for number, concept in enumerate(CONCEPTS):
        colour = np.array([number * 37 % 200, (number * 37 + 90) % 200, (number * 37 + 180) % 200])
        inside = distance <= SPRITE_SIZE / 2 * (0.75 + 0.25 * np.cos((3 + number % 7) * angle))
        for lighter, (style, family) in enumerate(STYLES):
            picture = np.zeros((SPRITE_SIZE, SPRITE_SIZE, 4), np.uint8)
            picture[inside] = (*(colour + 20 * lighter), 255)
            table.append(Sprite(len(table), concept, style, family, SPRITE_SIZE, SPRITE_SIZE))
            pixels.append(picture)
    return SpriteSet(table, np.stack(pixels))
