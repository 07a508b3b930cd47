"""Which named colours a picture has behind its object, read from its outermost pixels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.data.backgrounds import COLOURS
from training.data.claims import Background, BackgroundKind
from training.evaluation.prompts import Pixels

__all__ = ["background_colours", "shows_background"]

_NAMES = tuple(COLOURS)
_PALETTE = np.array([COLOURS[name] for name in _NAMES], np.float64)
# Of a picture's height, from where to where each claimed colour is seen, in the order of Background.colours. Of a
# gradient only the ends are pure; between wall and floor lies the horizon, at 62 to 72 %.
_SPANS: dict[BackgroundKind, tuple[tuple[float, float], ...]] = {
    "solid": ((0.0, 1.0),),
    "gradient": ((0.0, 1 / 16), (15 / 16, 1.0)),
    "floor": ((0.78, 1.0), (0.0, 0.55)),
}


def background_colours(pixels: Pixels, kind: BackgroundKind) -> tuple[str, ...]:
    """The nearest named colour of each part of a background of that kind, in the order of `Background.colours`.

    Args:
        pixels: uint8 (H, W, 3).
    """
    height = len(pixels)
    spans = [slice(int(low * height), max(int(low * height) + 1, round(high * height))) for low, high in _SPANS[kind]]
    rim = _rim(*pixels.shape[:2])
    return tuple(_nearest(np.median(pixels[span][rim[span]], axis=0)) for span in spans)


def shows_background(pixels: Pixels, background: Background) -> bool:
    """Whether every part of the claimed background has its colour."""
    return background_colours(pixels, background.kind) == background.colours


def _rim(height: int, width: int) -> NDArray[np.bool_]:
    """The outermost pixels, (H, W): two of 128. No object is so large and so far off that it covers half of them."""
    depth = max(1, height // 64)
    rim = np.ones((height, width), np.bool_)
    rim[depth : height - depth, depth : width - depth] = False
    return rim


def _nearest(colour: NDArray[np.float64]) -> str:
    return _NAMES[int(np.square(_PALETTE - colour).sum(axis=1).argmin())]
