"""A figure over seeds: its mean, and the band that holds the true mean in 95 of 100 sweeps."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

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
    half = student_t(n - 1) * statistics.stdev(known) / math.sqrt(n)
    return Band(mean, mean - half, mean + half, n)


@functools.cache
def student_t(degrees: int) -> float:
    """The t that Student's variable with so many degrees of freedom stays within, at LEVEL.

    By bisection of the angle atan(t / sqrt(degrees)). Importing SciPy for it would take longer than
    many a run.
    """
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (low, angle) if _within(angle, degrees) > LEVEL else (angle, high)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """The probability of |t| <= sqrt(degrees) * tan(angle): Abramowitz and Stegun 26.7.3-4."""
    odd = degrees % 2
    power = math.cos(angle) if odd else 1.0
    total = 0.0
    for i in range(2 + odd, degrees + 1, 2):
        total += power
        power *= math.cos(angle) ** 2 * (i - 1) / i
    return (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
