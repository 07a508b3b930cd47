"""The grid: raster order is a bijection, neighbours are true neighbours, and nothing lies outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared.grid import Grid

SHAPES = [(1, 1), (1, 7), (7, 1), (3, 4), (16, 16)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_positions_run_through_the_grid_in_raster_order(rows: int, cols: int) -> None:
    grid = Grid(rows, cols)
    raster = np.arange(rows * cols).reshape(rows, cols)
    assert grid.size == raster.size
    assert grid.shape == raster.shape
    for position in range(grid.size):
        row, col = grid.row(position), grid.col(position)
        assert raster[row, col] == position
        assert grid.position(row, col) == position


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_left_and_above_are_the_neighbours_in_the_same_row_and_column_or_none(rows: int, cols: int) -> None:
    grid = Grid(rows, cols)
    for position in range(grid.size):
        row, col = divmod(position, cols)
        assert grid.left(position) == (grid.position(row, col - 1) if col else None)
        assert grid.above(position) == (grid.position(row - 1, col) if row else None)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_row_end_is_the_first_position_of_the_next_row(rows: int, cols: int) -> None:
    grid = Grid(rows, cols)
    for position in range(grid.size):
        end = grid.row_end(position)
        assert position < end <= position + cols
        assert end % cols == 0
        assert grid.row(end - 1) == grid.row(position)


@pytest.mark.parametrize("radius", [0, 1, 2, 9])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 4), (5, 2)])
def test_neighbourhood_is_every_position_within_the_radius_in_raster_order(rows: int, cols: int, radius: int) -> None:
    grid = Grid(rows, cols)
    for position in range(grid.size):
        near = [
            other
            for other in range(grid.size)
            if abs(grid.row(other) - grid.row(position)) <= radius
            and abs(grid.col(other) - grid.col(position)) <= radius
        ]
        assert list(grid.neighbourhood(position, radius)) == near


@pytest.mark.parametrize("position", [-1, 12, 1000])
@pytest.mark.parametrize("ask", ["row", "col", "row_end", "left", "above"])
def test_a_position_outside_the_grid_is_refused_and_named(ask: str, position: int) -> None:
    with pytest.raises(IndexError, match=rf"position {position} lies outside the 3x4 grid \(0\.\.11\)"):
        getattr(Grid(3, 4), ask)(position)


def test_the_neighbourhood_of_a_position_outside_is_refused() -> None:
    with pytest.raises(IndexError, match="position 12"):
        list(Grid(3, 4).neighbourhood(12, 1))


@pytest.mark.parametrize("place", [(-1, 0), (0, -1), (3, 0), (0, 4)])
def test_a_place_outside_the_grid_is_refused_and_named(place: tuple[int, int]) -> None:
    with pytest.raises(IndexError, match=rf"place \({place[0]}, {place[1]}\) lies outside the 3x4 grid"):
        Grid(3, 4).position(*place)


@pytest.mark.parametrize("side", [0, -2, 1.5, "3", None, True])
def test_a_side_that_is_no_positive_integer_is_refused_by_name(side: Any) -> None:
    with pytest.raises(ValueError, match="rows: a positive integer"):
        Grid(side, 4)
    with pytest.raises(ValueError, match="cols: a positive integer"):
        Grid(4, side)


def test_grids_are_values() -> None:
    assert Grid(3, 4) == Grid(3, 4) != Grid(4, 3)
    assert str(Grid(3, 4)) == "3x4"
    with pytest.raises(AttributeError):
        Grid(3, 4).rows = 5  # type: ignore[misc]
