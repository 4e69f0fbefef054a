"""Time of a layer's matrix products by number of rows, from a grid of measured (m, n, k)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibrate.timings import Timings
from sim.errors import InputError
from sim.kernels import Gemm, Kernels

Floats = npt.NDArray[np.float64]


def products_of_layer(timings: Timings, kernels: Kernels) -> pd.Series[float]:
    """Microseconds of a layer's matrix products by m: in the weights' type, and the router in bf16."""
    layer = layer_curve(timings.gemm, kernels.gemms)
    if kernels.router is None:
        return layer
    return (layer + layer_curve(timings.gemm_bf16, [kernels.router])).dropna()


def layer_curve(rows: pd.DataFrame, gemms: Iterable[Gemm]) -> pd.Series[float]:
    """Microseconds of all `gemms` together, by m. Modifies nothing.

    Each product is read off the grid in log space between the measured n and k, and cut into equal
    parts where n is beyond the grid. Time never falls as m grows: a larger product bounds a smaller
    one, which takes out outliers.
    """
    grid = _clean(rows)
    return sum((_one(grid, gemm) for gemm in gemms), pd.Series(0.0, index=grid.index)).dropna()


def _clean(rows: pd.DataFrame) -> pd.DataFrame:
    """Latency by m (rows) and (n, k) (columns), the least of equal points, monotone in m."""
    grid = rows.pivot_table(index="m", columns=["n", "k"], values="latency_us", aggfunc="min")
    return grid.iloc[::-1].cummin().iloc[::-1].sort_index()


def _one(grid: pd.DataFrame, gemm: Gemm) -> pd.Series[float]:
    if (gemm.n, gemm.k) in grid.columns:
        return grid[(gemm.n, gemm.k)]
    ns, ks = (np.array(sorted(set(grid.columns.get_level_values(i))), np.float64) for i in (0, 1))
    parts = max(1, int(np.ceil(gemm.n / ns[-1])))
    logarithm: pd.Series[float] = pd.Series(0.0, index=grid.index)
    for n, in_n in _between(ns, gemm.n / parts, f"n of {gemm.name}"):
        for k, in_k in _between(ks, float(gemm.k), f"k of {gemm.name}"):
            if (n, k) not in grid.columns:
                raise InputError(
                    f"matrix product {gemm.name}: no times at n = {gemm.n}, k = {gemm.k}, "
                    "nor on a grid around it; measure this product"
                )
            logarithm = logarithm + in_n * in_k * np.log(grid[(n, k)])
    return pd.Series(parts * np.exp(logarithm.to_numpy(np.float64)), index=grid.index)


def _between(grid: Floats, x: float, what: str) -> list[tuple[int, float]]:
    """The grid's neighbours of x with their weights in log space."""
    right = int(np.searchsorted(grid, x))
    if right < len(grid) and grid[right] == x:
        return [(int(x), 1.0)]
    if right in (0, len(grid)):
        raise InputError(f"matrix products: {what} = {x:g} is outside the measured {grid[0]:g}..{grid[-1]:g}")
    low, high = grid[right - 1], grid[right]
    weight = float(np.log(x / low) / np.log(high / low))
    return [(int(low), 1.0 - weight), (int(high), weight)]
