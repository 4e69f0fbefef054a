"""The figures of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NOISY = 2.0  # times the 10th percentile, that the 90th may be


class Timing(NamedTuple):
    """Microseconds: the median of the repeats, and their 10th and 90th percentiles."""

    latency_us: float
    p10_us: float
    p90_us: float
    repeats: int

    @property
    def is_noisy(self) -> bool:
        """Whether the repeats differ too much for their median to be trusted."""
        return self.p90_us > NOISY * self.p10_us


def timing(times_us: Sequence[float]) -> Timing:
    """Median and percentiles of microseconds."""
    p10, median, p90 = (round(float(value), 3) for value in np.percentile(times_us, (10, 50, 90)))
    return Timing(median, p10, p90, len(times_us))
