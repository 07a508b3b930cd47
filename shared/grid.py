"""The token grid: positions in raster order and their rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Grid"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of visual tokens. A position is an integer 0..size-1 in raster order.

    Args:
        rows: number of token rows, at least 1.
        cols: number of token columns, at least 1.

    Raises:
        ValueError: a side is not a positive integer.
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            side = getattr(self, name)
            if not isinstance(side, int) or isinstance(side, bool) or side < 1:
                raise ValueError(f"{name}: a positive integer is needed, not {side!r}")

    @property
    def size(self) -> int:
        """Number of tokens in a picture."""
        return self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.rows, self.cols

    def row(self, position: int) -> int:
        return self._checked(position) // self.cols

    def col(self, position: int) -> int:
        return self._checked(position) % self.cols

    def position(self, row: int, col: int) -> int:
        """Raster position of (row, col).

        Raises:
            IndexError: the place lies outside the grid.
        """
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            raise IndexError(f"place ({row}, {col}) lies outside the {self} grid")
        return row * self.cols + col

    def row_end(self, position: int) -> int:
        """First position of the row after the one that holds `position`."""
        return (self.row(position) + 1) * self.cols

    def left(self, position: int) -> int | None:
        """Position to the left in the same row, or None at the first column."""
        return position - 1 if self.col(position) else None

    def above(self, position: int) -> int | None:
        """Position in the row above, or None in the first row."""
        return position - self.cols if self.row(position) else None

    def neighbourhood(self, position: int, radius: int) -> Iterator[int]:
        """Positions within `radius` in both directions (a square), in raster order, itself included."""
        row, col = self.row(position), self.col(position)
        for r in range(max(0, row - radius), min(self.rows, row + radius + 1)):
            for c in range(max(0, col - radius), min(self.cols, col + radius + 1)):
                yield r * self.cols + c

    def _checked(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} lies outside the {self} grid (0..{self.size - 1})")
        return position

    def __str__(self) -> str:
        return f"{self.rows}x{self.cols}"
