"""Where objects stand: cells that do not overlap, and a box inside each."""

from dataclasses import dataclass

import numpy as np

from training.data.claims import Claims


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels: left, top, width, height."""

    left: int
    top: int
    width: int
    height: int


def cells_of(claims: Claims, size: int) -> list[Box]:
    """One cell an object, in the order of the claims' objects (copies in reading order)."""
    half = size // 2
    if claims.kind == "count":
        return _copy_cells(claims.count, size)
    if claims.relation == "left of":
        return [Box(0, 0, half, size), Box(half, 0, half, size)]
    if claims.relation == "above":
        return [Box(0, 0, size, half), Box(0, half, size, half)]
    return [Box(0, 0, size, size)]


def _copy_cells(count: int, size: int) -> list[Box]:
    half = size // 2
    if count == 2:
        return [Box(0, 0, half, size), Box(half, 0, half, size)]
    lower = [Box(0, half, half, half), Box(half, half, half, half)]
    if count == 3:
        return [Box(size // 4, 0, half, half), *lower]
    return [Box(0, 0, half, half), Box(half, 0, half, half), *lower]


def place(cell: Box, side: int, scale: float, rng: np.random.Generator, step: int = 1) -> Box:
    """A square box of about `scale` x the cell's shorter side for a sprite, near the cell's centre and wholly in it.

    side: the picture's side; the shift is at most 3 % of it, so that positions stay learnable.
    step: positions are multiples of it, in pixels, and sides of twice it (rounded down, but never to none), so that a
    centred box lies on the grid as well. With the codec's downsampling factor a drawing makes few different tables of
    tokens, and a target learns it from fewer pictures.
    """
    shorter = min(cell.width, cell.height)
    square = min(max(4, 2 * step, 2 * step * int(shorter * scale / (2 * step))), shorter)
    left = cell.left + _shifted(cell.width - square, side, rng, step)
    top = cell.top + _shifted(cell.height - square, side, rng, step)
    return Box(left, top, square, square)


def _shifted(free: int, side: int, rng: np.random.Generator, step: int) -> int:
    reach = min(free / 2, 0.03 * side)
    shift = step * round((free / 2 + rng.uniform(-reach, reach)) / step)
    return min(max(shift, 0), free)
