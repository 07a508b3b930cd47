"""Composes captioned scenes from sprites: the same (split, seed, index) gives the same scene on every machine."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.data.backgrounds import paint_background
from training.data.captions import caption_of, drop_words
from training.data.claims import BACKGROUNDS, KINDS, Background, Claims, ObjectClaim, Relation, Scene, SceneKind
from training.data.layout import Box, cells_of, place
from training.data.pools import SpritePool
from training.data.settings import SceneSettings
from training.data.splits import SPLITS, Split
from training.data.sprites import Sprite, SpriteSet

# Redraws of the background before the best so far is taken: no colour may stand out enough from a motley drawing.
_BACKGROUND_TRIES = 12
# Contrast is judged on every fourth pixel each way: a sixteenth of the work, and no visible difference.
_STRIDE = 4

Placed = list[tuple[NDArray[np.uint8], Box]]


class SceneComposer:
    """Scenes of one split. `compose(index)` depends on (split, seed, index) alone, so any process may run it.

    split: "train", "val", "test" or "composition" (pools.py says what each may show).
    seed: varies the scenes. split_seed: decides what is held out, and should stay 0.
    vary_words: leave out or swap words as in training; None does so for train and val only.
    """

    def __init__(
        self,
        sprites: SpriteSet,
        split: Split,
        seed: int = 0,
        size: int = 128,
        settings: SceneSettings | None = None,
        vary_words: bool | None = None,
        split_seed: int = 0,
    ) -> None:
        self.size, self.seed, self.split = size, seed, split
        self.settings = settings or SceneSettings()
        self.pool = SpritePool(sprites, split, split_seed)
        self._pixels = sprites.pixels
        self._concepts = {concept.code: concept for concept in sprites.concepts}
        self._vary_words = split in ("train", "val") if vary_words is None else vary_words
        self._kind_shares = self._shares_of_kinds()

    def compose(self, index: int) -> Scene:
        """Scene number `index` >= 0: image uint8 (size, size, 3), caption, claims."""
        rng = np.random.default_rng([SPLITS.index(self.split), self.seed, index])
        sprites, claims = self._draw_claims(rng)
        placed = self._place(sprites, claims, rng)
        background, image = self._draw_background(sprites, placed, rng)
        for pixels, box in placed:
            blend(image, pixels, box)
        claims = replace(claims, background=background)
        if self._vary_words:
            claims = drop_words(claims, self._concepts, self.settings, rng)
        return Scene(image, caption_of(claims), claims)

    def _shares_of_kinds(self) -> NDArray[np.float64]:
        shares = np.array([getattr(self.settings, kind) for kind in KINDS])
        if self.split == "composition":
            shares[KINDS.index("count")] = 0.0
        if shares.sum() == 0.0:
            raise ValueError("the composition split needs data.scenes.single or data.scenes.pair above 0")
        return shares / shares.sum()

    def _draw_claims(self, rng: np.random.Generator) -> tuple[tuple[Sprite, ...], Claims]:
        kind: SceneKind = KINDS[int(rng.choice(len(KINDS), p=self._kind_shares))]
        relation: Relation | None = None
        count = 1
        if kind == "pair":
            sprites: tuple[Sprite, ...] = self.pool.draw_pair(rng)
            relation = "left of" if rng.random() < 0.5 else "above"
        else:
            sprites = (self.pool.draw(rng),)
            count = int(rng.integers(2, 5)) if kind == "count" else 1
        objects = tuple(_claim(row) for row in sprites)
        return sprites, Claims(kind, objects, count, relation, Background("solid", ("white",)))

    def _place(self, sprites: tuple[Sprite, ...], claims: Claims, rng: np.random.Generator) -> Placed:
        cells = cells_of(claims, self.size)
        rows = sprites if len(sprites) == len(cells) else sprites * len(cells)
        low, high = self.settings.smallest, self.settings.largest
        # Copies of one thing have one size: "two copies" of different sizes would read as two things.
        scales = rng.uniform(low, high, len(sprites)) if len(sprites) > 1 else [rng.uniform(low, high)] * len(cells)
        step = self.settings.step
        boxes = [place(cell, self.size, float(scale), rng, step) for cell, scale in zip(cells, scales, strict=True)]
        return [(_resized(self._pixels[row.index], box.width), box) for row, box in zip(rows, boxes, strict=True)]

    def _draw_background(
        self, sprites: tuple[Sprite, ...], placed: Placed, rng: np.random.Generator
    ) -> tuple[Background, NDArray[np.uint8]]:
        colours = self.pool.colours(sprites)
        best: tuple[float, Background, NDArray[np.uint8]] | None = None
        for _ in range(_BACKGROUND_TRIES):
            background = self._draw_colours(colours, rng)
            image = paint_background(background, self.size, self.settings.colour_jitter, rng)
            contrast = min(contrast_of(pixels, box, image) for pixels, box in placed)
            if best is None or contrast > best[0]:
                best = (contrast, background, image)
            if contrast > self.settings.contrast:
                break
        assert best is not None
        return best[1], best[2]

    def _draw_colours(self, colours: list[str], rng: np.random.Generator) -> Background:
        shares = [getattr(self.settings, kind) for kind in BACKGROUNDS]
        kind = BACKGROUNDS[int(rng.choice(len(BACKGROUNDS), p=shares))]
        if kind == "solid" or len(colours) < 2:
            return Background("solid", (colours[int(rng.integers(len(colours)))],))
        first, second = rng.choice(len(colours), size=2, replace=False)
        return Background(kind, (colours[int(first)], colours[int(second)]))


def blend(image: NDArray[np.uint8], pixels: NDArray[np.uint8], box: Box) -> None:
    """Draw RGBA `pixels` (straight alpha) over `image` in place, at `box`."""
    region = image[box.top : box.top + box.height, box.left : box.left + box.width]
    alpha = pixels[..., 3:].astype(np.uint16)
    # (x + 128) * 257 >> 16 divides by 255 with rounding, and leaves pixels without alpha exactly as they were.
    mixed = pixels[..., :3] * alpha + region * (255 - alpha)
    region[...] = ((mixed.astype(np.uint32) + 128) * 257) >> 16


def contrast_of(pixels: NDArray[np.uint8], box: Box, background: NDArray[np.uint8]) -> float:
    """Mean absolute difference, 0..255, between what of `pixels` is opaque and the background behind it."""
    drawn = pixels[::_STRIDE, ::_STRIDE]
    behind = background[box.top : box.top + box.height : _STRIDE, box.left : box.left + box.width : _STRIDE]
    opaque = drawn[..., 3] > 127
    if not opaque.any():
        return 0.0
    return float(np.abs(drawn[opaque, :3].astype(np.int16) - behind[opaque]).mean())


def _resized(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    # Pillow resizes RGBA with premultiplied alpha, so edges take no colour from invisible pixels.
    return np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BILINEAR))


def _claim(row: Sprite) -> ObjectClaim:
    return ObjectClaim(row.concept.code, row.concept.label, row.concept.name, row.style, row.family)
