"""The curve: hit tokens at every capacity, from the ranks of the blocks in an LRU stack.

A block hits in a pool of C blocks if its rank was at most C. Ranks rise along a chain, so that the
hits of a request are a prefix, as in vLLM.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.curves.load import Load, Passed
from sim.request import Ints
from sim.stack import blocks_above

KNEE = 99  # % of the ceiling
WINDOWS = (60, 600)  # seconds, of the working sets


class Curve(NamedTuple):
    """The hits of a load at one block size; capacities are usable blocks, without the null block."""

    block_size: int  # tokens
    hits: Ints  # tokens that hit, by capacity from 0 on; the last entry holds for all above it
    prompt_tokens: int  # of the requests that count
    num_requests: int  # that count
    num_refused: int
    distinct_blocks: int  # that the whole load uses
    longest: int  # blocks of the largest request, a partial one counted
    working_set: dict[int, int]  # by seconds: mean number of different blocks used so long

    @property
    def ceiling(self) -> int:
        """Tokens that hit in an infinite pool."""
        return int(self.hits[-1])

    @property
    def knee(self) -> int | None:
        """The fewest blocks with KNEE % of the ceiling's hits; None where nothing ever hits."""
        if self.ceiling == 0:
            return None
        return int(np.searchsorted(self.hits, -(-KNEE * self.ceiling // 100)))

    def hit_tokens(self, blocks: Ints) -> Ints:
        """Tokens that hit in pools of so many blocks."""
        return self.hits[np.minimum(blocks, len(self.hits) - 1)]

    def hit_rate(self, hit_tokens: int) -> float:
        return hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def curve(load: Load, passed: Passed, block_size: int, counts: npt.NDArray[np.bool_]) -> Curve:
    """The curve of a load after its pass; `counts` says of each request whether its hits count.

    Modifies nothing. Requests that do not count warm the cache.
    """
    runs = passed.runs
    limit = hit_limit(load, passed, block_size)
    above = blocks_above(runs, passed.computed, block_size)
    begin = runs.begin // block_size
    end = np.minimum(runs.end // block_size, -(-limit // block_size)[runs.request])
    kept = (begin < end) & counts[runs.request]
    first, last = above[kept], (above + end - begin)[kept]  # the run's ranks are first + 1 … last
    # Of a last block that is counted in part, the rest is no hit.
    lost = np.maximum(end * block_size - limit[runs.request], 0)[kept]
    size = int(last.max(initial=0)) + 2
    blocks_at = np.cumsum(np.bincount(first + 1, minlength=size) - np.bincount(last + 1, minlength=size))
    tokens_at = blocks_at * block_size - np.bincount(last, lost, size).astype(np.int64)
    blocks = runs.end // block_size - begin
    return Curve(
        block_size=block_size,
        hits=np.cumsum(tokens_at)[:-1],
        prompt_tokens=int(passed.prompt[counts].sum()),
        num_requests=int((counts & ~passed.refused).sum()),
        num_refused=int((counts & passed.refused).sum()),
        distinct_blocks=int((passed.computed // block_size).sum() - blocks.sum()),
        longest=int(-(-passed.computed.max() // block_size)),
        working_set=_working_set(passed, blocks, block_size),
    )


def hit_limit(load: Load, passed: Passed, block_size: int) -> Ints:
    """Tokens of each request that can hit at most.

    vLLM's rule, v1/core/kv_cache_manager.KVCacheManager.get_computed_blocks: full blocks, and never
    the last token of a prompt. By whole ids: all that have one.
    """
    if load.whole_ids:
        return np.minimum(passed.prompt, passed.computed)
    return np.maximum(passed.prompt - 1, 0) // block_size * block_size


def _working_set(passed: Passed, blocks: Ints, block_size: int) -> dict[int, int]:
    """Denning's working sets: how many different blocks a window of time uses, in the mean over time.

    Each use of a block lasts until its next, or as long as the window. Empty where all arrive at once.
    """
    arrival, runs = passed.arrival, passed.runs
    span = float(arrival[-1] - arrival[0])
    if span <= 0:
        return {}
    gap = arrival[runs.request] - arrival[runs.user]
    taken = np.bincount(runs.user, blocks, len(arrival))
    last_used = passed.computed // block_size - taken  # blocks, by the request that used them last
    to_end = arrival[-1] - arrival
    held = ((np.minimum(gap, w) * blocks).sum() + (np.minimum(to_end, w) * last_used).sum() for w in WINDOWS)
    return {window: round(float(blocks_s) / span) for window, blocks_s in zip(WINDOWS, held, strict=True)}
