"""A histogram of durations whose bins are .1 % wide, for percentiles in constant memory."""

from __future__ import annotations

import numpy as np

from sim._jit import verb
from sim.request import Floats, Ints

_MANTISSA_BITS = 10  # 1024 bins for each power of two
_SMALLEST = 2.0**-30  # seconds: about a nanosecond; anything shorter counts as that
_OCTAVES = 44  # up to 2**14 s, four and a half hours
NUM_BINS = _OCTAVES << _MANTISSA_BITS
_LARGEST = 2.0 ** (_OCTAVES - 30)
_SHIFT = 52 - _MANTISSA_BITS
_OFFSET = (1023 - 30) << _MANTISSA_BITS  # the bin number that the bits of _SMALLEST spell


def new_histogram() -> Ints:
    """An empty histogram, int64[NUM_BINS]."""
    return np.zeros(NUM_BINS, np.int64)


@verb
def bin_of(value: float) -> int:
    """The bin of a duration in seconds: exponent and leading mantissa bits of the float."""
    if not value >= _SMALLEST:  # also of infinity less infinity, in a run that `simulation.run` refuses
        return 0
    if value >= _LARGEST:
        return NUM_BINS - 1
    bits = np.float64(value).view(np.int64)
    return int((bits >> _SHIFT) - _OFFSET)


def edges(num_bins: int) -> Floats:
    """The num_bins + 1 edges of a histogram's bins in seconds; it has NUM_BINS, or a power of two fewer."""
    wider = (NUM_BINS // num_bins).bit_length() - 1  # bits dropped from bin_of
    return ((np.arange(num_bins + 1, dtype=np.int64) << wider) + _OFFSET << _SHIFT).view(np.float64)


def percentile(histogram: Ints, q: float) -> float:
    """The q-th percentile (0..100) in seconds, within half a bin (of NUM_BINS: .05 %); NaN if empty."""
    total = int(histogram.sum())
    if total == 0:
        return float("nan")
    rank = min(max(int(np.ceil(q / 100 * total)), 1), total)
    index = int(np.searchsorted(np.cumsum(histogram), rank))
    low, high = edges(len(histogram))[index : index + 2]
    return float((low + high) / 2)
