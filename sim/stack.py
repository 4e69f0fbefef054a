"""LRU stack distances of whole prompts: how many blocks were used since, for every block at once.

A request uses a chain of blocks and leaves them the most recently used, its first block before its
second and so on, as vLLM does by freeing in reverse. So a block lies in the LRU stack above all
that follow it in any chain, and the blocks whose last user is a given request are the end of its
chain, in one piece of the stack. A run of tokens with one last user is therefore a run of ranks,
and a Fenwick tree over requests, of the blocks that each was the last to use, finds where it begins.
"""

from __future__ import annotations

import numpy as np

from sim._jit import entry, verb
from sim.request import Ints
from sim.trace.prefix_tree import Runs


def blocks_above(runs: Runs, computed_len: Ints, block_size: int) -> Ints:
    """How many blocks lie in the LRU stack above the first full block of each run. Modifies nothing.

    `computed_len` is how many tokens each request leaves in the cache; `runs` are those of the
    requests one after the other. The blocks of a run, end // block_size - begin // block_size of
    them, have the ranks from the returned number + 1 on. Where a run has none, it says nothing.
    """
    first_run = np.searchsorted(runs.request, np.arange(len(computed_len) + 1))
    blocks = runs.end // block_size - runs.begin // block_size
    above = np.zeros(len(blocks), np.int64)
    last_used = np.zeros(len(computed_len) + 1, np.int64)
    _rank(first_run, runs.user, blocks, computed_len // block_size, last_used, above)
    return above


@verb
def change(sums: Ints, index: int, amount: int) -> None:
    """Add to an entry (Fenwick tree)."""
    at = index + 1
    while at < len(sums):
        sums[at] += amount
        at += at & -at


@verb
def sum_to(sums: Ints, num: int) -> int:
    """The sum of the first `num` entries."""
    total = 0
    at = num
    while at > 0:
        total += sums[at]
        at -= at & -at
    return total


@verb
def rank(first_run: Ints, users: Ints, blocks: Ints, computed: Ints, last_used: Ints, above: Ints) -> None:
    """Writes `above`; `last_used` is an empty Fenwick tree over the requests."""
    total = 0
    for request in range(len(computed)):
        for run in range(first_run[request], first_run[request + 1]):
            above[run] = total - sum_to(last_used, users[run] + 1)
        for run in range(first_run[request], first_run[request + 1]):
            change(last_used, users[run], -blocks[run])
            total -= blocks[run]
        change(last_used, request, computed[request])
        total += computed[request]


_rank = entry(rank)
