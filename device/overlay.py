"""What happened to each token, as a picture: where it came from, and how unsure the drafter was of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from shared.grid import Grid
from shared.transcript import Provenance, Transcript

__all__ = ["COLOURS", "NO_SCORE", "heat_colours", "render_overlay"]

Pixels = NDArray[np.uint8]
Floats = NDArray[np.floating[Any]]
Colour = tuple[int, int, int]

COLOURS: dict[Provenance, Colour] = {
    Provenance.SAMPLED: (0, 114, 178),
    Provenance.KEPT: (0, 158, 115),
    Provenance.VERIFIED: (240, 228, 66),
    Provenance.CORRECTED: (213, 94, 0),
    Provenance.DEGRADED: (204, 121, 167),
    Provenance.RELAXED: (230, 159, 0),
}
"""Okabe and Ito's colours, which the colour-blind can tell apart."""
NO_SCORE: Colour = (128, 128, 128)
"""Of tokens the drafter gave no score: the prefix, and whatever was never drafted."""

_SIDE = 384  # of a panel at least, in pixels
_OPACITY = 0.45
_BORDER = 0.3  # opacity of the lines between cells
_GREY = np.array([0.299, 0.587, 0.114])
_GAP = 8
_CAPTION = 64
_LINE = 18
_SWATCH = 12
_SHARE = 0.02  # of the scores at either end that may be as dark or bright as can be
# Dark to bright with an even rise of lightness: black, violet, red, orange, pale yellow.
_DARK = ((0, 0, 4), (28, 16, 68), (79, 18, 123), (129, 37, 129), (181, 54, 122))
_BRIGHT = ((229, 80, 100), (251, 135, 97), (254, 194, 135), (252, 253, 191))
_HEAT = np.array([*_DARK, *_BRIGHT], np.float64)


def render_overlay(pixels: Pixels, transcript: Transcript, scores: Floats) -> Pixels:
    """Three panels beside each other, with captions: the picture, the origin of its tokens, the heat map of scores.

    Args:
        pixels: the picture (H, W, 3).
        transcript: its committed tokens; where there is none, the picture stays as it is.
        scores: uncertainty of each token (rows, cols), the larger the less sure; NaN where there is none.

    Returns:
        pixels (H', W', 3); each panel is the picture's size times a whole number, and at least 384 pixels a side.

    Raises:
        ValueError: the shape of picture or scores is not what it should be.
    """
    grid = transcript.grid
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"pixels: (H, W, 3) of uint8 is needed, not {pixels.shape} of {pixels.dtype}")
    if scores.shape != grid.shape:
        raise ValueError(f"scores: a number for each token of the {grid} grid is needed, not {scores.shape}")
    factor = -(-_SIDE // min(pixels.shape[:2]))
    large = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
    panels = [large, _origins(large, transcript), _heat_map(large, grid, scores)]
    sheet = _sheet(panels)
    draw = ImageDraw.Draw(sheet)
    places = [index * (large.shape[1] + _GAP) for index in range(len(panels))]
    top = large.shape[0] + _GAP // 2
    draw.text((places[0], top), "picture", fill="black", font=_font())
    _origin_legend(draw, places[1], top, large.shape[1], transcript.provenance)
    _heat_legend(draw, places[2], top, large.shape[1], scores)
    return np.asarray(sheet)


def heat_colours(values: Floats) -> Pixels:
    """Colours (..., 3) of values in [0, 1], whose lightness rises with the value; NaN is grey."""
    places = np.linspace(0.0, 1.0, len(_HEAT))
    known = np.where(np.isnan(values), 0.0, values)
    colours = np.stack([np.interp(known, places, channel) for channel in _HEAT.T], axis=-1)
    colours[np.isnan(values)] = NO_SCORE
    return np.rint(colours).astype(np.uint8)


def _origins(large: Pixels, transcript: Transcript) -> Pixels:
    """The picture in grey, so that no hue of its own mixes in, under a translucent colour for each token."""
    grid, provenance = transcript.grid, transcript.provenance
    colours = np.zeros((grid.size, 4))
    for position, kind in enumerate(provenance):
        colours[position] = (*COLOURS[kind], 1.0)
    cells = _cells(large, colours.reshape(*grid.shape, 4))
    tinted = (1.0 - _OPACITY) * (large @ _GREY)[..., None] + _OPACITY * cells[..., :3]
    return _bordered(np.where(cells[..., 3:] > 0.0, tinted, large), grid, shade=0.0)


def _heat_map(large: Pixels, grid: Grid, scores: Floats) -> Pixels:
    return _bordered(_cells(large, heat_colours(_Scale.of(scores).share(scores))).astype(np.float64), grid, shade=128.0)


@dataclass(frozen=True, slots=True)
class _Scale:
    """Places scores between the darkest and the brightest colour; by ratios if it can, since U has a long tail."""

    low: float
    high: float

    @classmethod
    def of(cls, scores: Floats) -> _Scale:
        known = scores[np.isfinite(scores)]
        return cls(*np.quantile(known, [_SHARE, 1.0 - _SHARE]).tolist()) if known.size else cls(0.0, 1.0)

    def share(self, scores: Floats) -> Floats:
        """Places in [0, 1]; NaN stays NaN."""
        low, high = self._line(self.low), self._line(self.high)
        places: Floats = np.clip((self._line(scores) - low) / max(high - low, 1e-12), 0.0, 1.0)
        return places

    def middle(self) -> float:
        """The score halfway."""
        return float(np.sqrt(self.low * self.high) if self.low > 0.0 else 0.5 * (self.low + self.high))

    def _line(self, scores: Any) -> Any:
        return np.log(np.maximum(scores, self.low)) if self.low > 0.0 else scores


def _edges(side: int, count: int) -> NDArray[np.int64]:
    """Where `count` cells begin on a side of so many pixels."""
    return np.arange(count) * side // count


def _cells(large: Pixels, values: NDArray[Any]) -> NDArray[Any]:
    """Values (rows, cols, n) spread over the pixels of their cells, (H, W, n)."""
    down, across = (
        np.searchsorted(_edges(side, count), np.arange(side), side="right") - 1
        for side, count in zip(large.shape, values.shape[:2], strict=False)
    )
    return values[down][:, across]


def _bordered(image: NDArray[np.float64], grid: Grid, shade: float) -> Pixels:
    """Shades one pixel at the upper and left border of each cell."""
    rows, cols = _edges(image.shape[0], grid.rows), _edges(image.shape[1], grid.cols)
    lines = np.zeros(image.shape[:2], bool)
    lines[rows, :] = lines[:, cols] = True
    return np.rint(np.where(lines[..., None], (1.0 - _BORDER) * image + _BORDER * shade, image)).astype(np.uint8)


def _sheet(panels: Sequence[Pixels]) -> Image.Image:
    """White paper with the panels beside each other and room for captions below."""
    height, width = panels[0].shape[:2]
    sheet = Image.new("RGB", (len(panels) * (width + _GAP) - _GAP, height + _CAPTION), "white")
    for index, panel in enumerate(panels):
        sheet.paste(Image.fromarray(panel), (index * (width + _GAP), 0))
    return sheet


def _origin_legend(draw: ImageDraw.ImageDraw, left: int, top: int, width: int, kinds: Sequence[Provenance]) -> None:
    """A swatch, name and count for each origin that occurs, on as many lines as they need."""
    draw.text((left, top), "origin of each token", fill="black", font=_font())
    x, y = left, top + _LINE
    for kind in sorted(set(kinds)):
        text = f"{kind.name.lower()} {kinds.count(kind)}"
        wide = _SWATCH + 4 + int(draw.textlength(text, font=_font())) + 10
        if x > left and x + wide > left + width:
            x, y = left, y + _LINE
        draw.rectangle((x, y + 2, x + _SWATCH, y + 2 + _SWATCH), fill=COLOURS[kind], outline="black")
        draw.text((x + _SWATCH + 4, y), text, fill="black", font=_font())
        x += wide


def _heat_legend(draw: ImageDraw.ImageDraw, left: int, top: int, width: int, scores: Floats) -> None:
    """The scale of the heat map, with the scores at its ends."""
    draw.text((left, top), "uncertainty of each token (grey: no score)", fill="black", font=_font())
    if not np.isfinite(scores).any():
        draw.text((left, top + _LINE), "no token has a score", fill="black", font=_font())
        return
    length = 3 * width // 4
    for offset, colour in enumerate(heat_colours(np.linspace(0.0, 1.0, length))):
        draw.line(
            (left + offset, top + _LINE + 2, left + offset, top + _LINE + 2 + _SWATCH), fill=tuple(colour.tolist())
        )
    scale = _Scale.of(scores)
    for share, value in ((0.0, scale.low), (0.5, scale.middle()), (1.0, scale.high)):
        text = f"{value:.3g}"
        x = left + share * (length - draw.textlength(text, font=_font()))
        draw.text((x, top + 2 * _LINE), text, fill="black", font=_font())


@cache
def _font() -> Any:
    return ImageFont.load_default(size=13)
