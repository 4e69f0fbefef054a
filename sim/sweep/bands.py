"""A figure over seeds: its mean, and the band that holds the true mean in 95 of 100 sweeps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from scipy.special import stdtrit

LEVEL = 0.95


class Band(NamedTuple):
    """Mean of `n` values and Student's interval around it; NaN where the values do not tell."""

    mean: float
    low: float
    high: float
    n: int


def band(values: Iterable[float | int | None]) -> Band:
    """The band of the values that are defined. Independent seeds with a normal mean are assumed."""
    known = [float(value) for value in values if value is not None]
    n = len(known)
    if n == 0:
        return Band(math.nan, math.nan, math.nan, 0)
    mean = statistics.fmean(known)
    if n == 1:
        return Band(mean, math.nan, math.nan, 1)
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * statistics.stdev(known) / math.sqrt(n)
    return Band(mean, mean - half, mean + half, n)
