"""How long cached blocks stay, how they are reused, and whose are evicted.

The durations are those of vLLM's v1/core/kv_cache_metrics.KVCacheMetricsCollector: a block's lifetime
from allocation to eviction, its idle time from the last access (a hit, or else the allocation) to
eviction, and the gaps between accesses. vLLM samples one block in a hundred, keeps the last three
gaps of each, and takes in blocks that are used again without having been cached; here every gap and
every eviction of content counts, and nothing else. A reset of the prefix cache evicts nothing.

A block's owner is the tenant and prefix group of the request that took or touched it last, as a
small number: 0 for requests without.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim._jit import hot
from sim.histogram import NUM_BINS, bin_of, edges, percentile
from sim.request import Floats, Ints

# Columns of BlockPool.times[block, column]: seconds, and a number. One block's lie together, for it is
# the way to the memory that takes time.
BIRTH, LAST_ACCESS, OWNER, WIDTH = 0, 1, 2, 4
LIFETIME, IDLE, REUSE_GAP = range(3)  # rows of BlockPool.durations[row, bin], numbers of blocks or gaps
NAMES = (  # of those rows: vLLM's, without vllm:
    "kv_block_lifetime_seconds",
    "kv_block_idle_before_evict_seconds",
    "kv_block_reuse_gap_seconds",
)
_NOW = 0  # the null block is never allocated: its time of birth is the time it is now
_COARSER = 6  # than the bins of sim/histogram.py, in powers of two
_PER_OCTAVE = 16  # bins for each power of two, some 4 % wide


def new_durations(kept: bool) -> Ints:
    """Empty histograms; of no bins where none are kept."""
    return np.zeros((len(NAMES), NUM_BINS >> _COARSER if kept else 0), np.int64)


@hot
def set_block_time(times: Floats, now: float) -> None:
    """Say what time it is."""
    if len(times) > 0:
        times[_NOW, BIRTH] = now


@hot
def note_allocation(times: Floats, block: int, owner: int) -> None:
    """A block is taken now (on_block_allocated)."""
    times[block, OWNER] = owner
    times[block, BIRTH] = times[_NOW, BIRTH]
    times[block, LAST_ACCESS] = math.nan


@hot
def note_access(times: Floats, durations: Ints, block: int, owner: int) -> None:
    """A cached block is hit now (on_block_accessed); the first access ends no gap, as in vLLM."""
    times[block, OWNER] = owner
    now = times[_NOW, BIRTH]
    before = times[block, LAST_ACCESS]
    if not math.isnan(before):
        durations[REUSE_GAP, bin_of(now - before) >> _COARSER] += 1
    times[block, LAST_ACCESS] = now


@hot
def note_eviction(times: Floats, durations: Ints, evicted_from: Ints, block: int) -> None:
    """A block loses its content now (on_block_evicted)."""
    evicted_from[int(times[block, OWNER])] += 1
    now = times[_NOW, BIRTH]
    birth = times[block, BIRTH]
    last = times[block, LAST_ACCESS]
    if math.isnan(last):
        last = birth
    durations[LIFETIME, bin_of(now - birth) >> _COARSER] += 1
    durations[IDLE, bin_of(now - last) >> _COARSER] += 1


def block_durations(durations: Ints) -> dict[str, dict[str, Any] | None]:
    """The three durations of a run for its summary, by NAMES; None where nothing was counted.

    Each is the number counted, its percentiles within 2 %, and `buckets`: pairs of an upper edge, a
    power of two, and how many lie below it and not below the former pair's. In seconds.
    """
    return {name: _summed_up(row) for name, row in zip(NAMES, durations, strict=True)}


def _summed_up(histogram: Ints) -> dict[str, Any] | None:
    if not histogram.any():
        return None
    upper = edges(len(histogram) // _PER_OCTAVE)[1:]
    counts = histogram.reshape(-1, _PER_OCTAVE).sum(axis=1)
    return {
        "count": int(histogram.sum()),
        **{f"p{q}": percentile(histogram, q) for q in (50, 90, 99)},
        "buckets": [[float(upper[i]), int(counts[i])] for i in np.flatnonzero(counts)],
    }
