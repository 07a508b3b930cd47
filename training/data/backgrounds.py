"""Backgrounds with named colours."""

import numpy as np
from numpy.typing import NDArray

from training.data.claims import Background

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (205, 45, 50),
    "orange": (240, 140, 45),
    "yellow": (245, 215, 65),
    "green": (70, 160, 75),
    "teal": (20, 130, 130),
    "light blue": (150, 205, 240),
    "blue": (45, 90, 200),
    "purple": (125, 65, 165),
    "pink": (245, 160, 190),
    "brown": (125, 80, 50),
    "beige": (235, 220, 190),
    "white": (248, 248, 248),
    "grey": (130, 130, 135),
    "black": (20, 20, 24),
}


def paint_background(background: Background, size: int, jitter: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """RGB (size, size, 3). Each colour is moved by up to `jitter` a channel, once a picture, so solids are flat."""
    colours = [_jittered(COLOURS[name], jitter, rng) for name in background.colours]
    if background.kind == "gradient":
        down = np.linspace(0.0, 1.0, size)[:, None]
        rows = (colours[0] * (1.0 - down) + colours[1] * down).round()
    elif background.kind == "floor":
        horizon = round(size * rng.uniform(0.62, 0.72))
        rows = np.where(np.arange(size)[:, None] < horizon, colours[1], colours[0])
    else:
        rows = np.tile(colours[0], (size, 1))
    return np.repeat(rows.astype(np.uint8)[:, None], size, axis=1)


def _jittered(colour: tuple[int, int, int], jitter: int, rng: np.random.Generator) -> NDArray[np.float64]:
    moved = np.asarray(colour) + rng.integers(-jitter, jitter + 1, size=3)
    return np.clip(moved, 0, 255).astype(np.float64)
