"""Measured times on a grid, read off between its points. For the table mode of the step time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from sim._jit import verb

Floats = npt.NDArray[np.float64]

NO_GRID: Floats = np.zeros((0, 0))


def make_grid(times: Mapping[tuple[int, int], float], scale: float) -> Floats:
    """A table of `times` by (x, y), times `scale`: x down the first column, y along the first row.

    A place that was not measured gets the line through the two before it in its row, then in its
    column: large batches of long sequences did not fit where they were timed.
    """
    xs = sorted({x for x, _ in times})
    ys = sorted({y for _, y in times})
    grid = np.full((len(xs) + 1, len(ys) + 1), np.nan)
    grid[0, 0] = 0.0
    grid[1:, 0] = xs
    grid[0, 1:] = ys
    for (x, y), time in times.items():
        grid[1 + xs.index(x), 1 + ys.index(y)] = scale * time
    _extend(grid)
    _extend(grid.T)
    assert np.isfinite(grid).all(), "each row or column has two measured places"
    return grid


def _extend(grid: Floats) -> None:
    """Fill gaps in each row with the line through the two places before; modifies the grid."""
    for row in range(1, grid.shape[0]):
        for column in range(3, grid.shape[1]):
            if np.isnan(grid[row, column]):
                x, y = grid[0, column - 2 : column], grid[row, column - 2 : column]
                slope = (y[1] - y[0]) / (x[1] - x[0])
                grid[row, column] = y[1] + max(slope, 0.0) * (grid[0, column] - x[1])


@verb
def on_grid(grid: Floats, x: float, y: float) -> float:
    """Bilinear between the four places around (x, y), along their lines beyond the grid; at least 0."""
    row, column = _cell(grid[1:, 0], x) + 1, _cell(grid[0, 1:], y) + 1
    right = (x - grid[row, 0]) / (grid[row + 1, 0] - grid[row, 0])
    down = (y - grid[0, column]) / (grid[0, column + 1] - grid[0, column])
    low = grid[row, column] + down * (grid[row, column + 1] - grid[row, column])
    high = grid[row + 1, column] + down * (grid[row + 1, column + 1] - grid[row + 1, column])
    return float(max(low + right * (high - low), 0.0))


@verb
def _cell(axis: Floats, at: float) -> int:
    """The place of the last mark at or below `at`, so that there is one after it."""
    place = 0
    while place < axis.shape[0] - 2 and axis[place + 1] <= at:
        place += 1
    return place
