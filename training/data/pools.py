"""What a split may draw: its sprites, and the colours and partners that go with them."""

from collections import defaultdict

import numpy as np

from training.data.backgrounds import COLOURS
from training.data.errors import DataError
from training.data.splits import SPLITS, Split, assign_units, background_held_out, pair_held_out
from training.data.sprites import Sprite, SpriteSet

# Enough redraws that an allowed partner is practically always found where there is one.
_TRIES = 100


class SpritePool:
    """The sprites of one split, drawn evenly over concepts.

    train: no held-out drawing, colour or pair. val, test: their own drawings, any colour and pair.
    composition: train's drawings, but only held-out colours (single objects) and held-out pairs.
    """

    def __init__(self, sprites: SpriteSet, split: Split, seed: int = 0) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.split, self.seed = split, seed
        self._by_concept: dict[str, list[Sprite]] = defaultdict(list)
        self._by_style: dict[str, list[Sprite]] = defaultdict(list)
        units = assign_units({(row.concept.code, row.family) for row in sprites.table}, seed)
        wanted = "train" if split == "composition" else split
        for row in sprites.table:
            if units[row.concept.code, row.family] == wanted and self._has_colours(row):
                self._by_concept[row.concept.code].append(row)
                self._by_style[row.style].append(row)
        self._codes = list(self._by_concept)
        if not self._codes:
            raise DataError(f"the split {split} has no drawing: choose more concepts, or styles of two families")

    @property
    def sprites(self) -> list[Sprite]:
        """All sprites of the split."""
        return [row for rows in self._by_concept.values() for row in rows]

    def draw(self, rng: np.random.Generator) -> Sprite:
        """A concept, then one of its styles."""
        rows = self._by_concept[self._codes[int(rng.integers(len(self._codes)))]]
        return rows[int(rng.integers(len(rows)))]

    def draw_pair(self, rng: np.random.Generator) -> tuple[Sprite, Sprite]:
        """Two different concepts in one style that this split may show together."""
        for _ in range(_TRIES):
            first = self.draw(rng)
            rows = self._by_style[first.style]
            second = rows[int(rng.integers(len(rows)))]
            if second.concept.code != first.concept.code and self._allows_pair(first, second):
                return first, second
        raise DataError(
            f"the split {self.split} has too few drawings in one style to make a pair: "
            "choose more concepts, or set data.scenes.pair to 0"
        )

    def colours(self, sprites: tuple[Sprite, ...]) -> list[str]:
        """The colour names that this split may put behind `sprites`."""
        if self.split in ("val", "test"):
            return list(COLOURS)
        held_out = [
            name for name in COLOURS if any(background_held_out(row.concept.code, name, self.seed) for row in sprites)
        ]
        if self.split == "composition" and len(sprites) == 1:
            return held_out
        return [name for name in COLOURS if name not in held_out]

    def _allows_pair(self, first: Sprite, second: Sprite) -> bool:
        if self.split in ("val", "test"):
            return True
        held_out = pair_held_out(first.concept.code, second.concept.code, self.seed)
        # A gradient needs two colours; a pair whose held-out colours leave fewer is never composed.
        return held_out == (self.split == "composition") and len(self.colours((first, second))) >= 2

    def _has_colours(self, row: Sprite) -> bool:
        return bool(self.colours((row,)))
