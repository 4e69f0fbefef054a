"""FIFO and Belady at a given capacity, for scale: each simulated block by block.

FIFO evicts what entered first, whether it is used or not. Belady, who knows the future, evicts what
is used last or never again, of one chain the last block first: no rule without that knowledge hits
more blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim._jit import entry, verb
from sim.arena import grown
from sim.chains import NO_ROOM, ChainTree, name_chains, new_tree
from sim.curves.curve import Curve, hit_limit
from sim.curves.load import Load, Passed, contents
from sim.request import Ints

FEWEST_NODES = 1 << 12


class References(NamedTuple):
    """Every use of a block, in order."""

    start: Ints  # n + 1 row starts into the two below
    name: Ints  # of the block, from 1
    next_use: Ints  # by which request, n if never again; times the longest row, plus the place in this one
    limit: Ints  # tokens of a request that can hit
    counts: Ints  # whether its hits count
    num_names: int


def references(load: Load, passed: Passed, curve: Curve, counts: npt.NDArray[np.bool_]) -> References:
    """Go through the load again and name its blocks. Memory grows with all uses of blocks."""
    block_size = curve.block_size
    start = np.concatenate([[0], np.cumsum(passed.computed // block_size)])
    name = np.empty(start[-1], np.int64)
    num_names = curve.distinct_blocks + 1
    tree = new_tree(num_names, FEWEST_NODES, 1 << num_names.bit_length())
    first = 0
    for batch, computed in contents(load, block_size):
        done, n = 0, len(computed)
        segments = np.stack([batch.segment_id, batch.segment_len])
        while done < n:
            done = _name_blocks(
                tree, batch.segment_start, segments, batch.namespace, computed, block_size, done,
                start[first : first + n + 1], name,
            )  # fmt: skip
            if done < n:
                tree = _with_more_nodes(tree)
        first += n
    next_use = np.empty(len(name), np.int64)
    _find_next_use(start, name, np.full(num_names, len(start) - 1), int(np.diff(start).max()) + 1, next_use)
    limit = hit_limit(load, passed, block_size)
    return References(start, name, next_use, limit, counts.astype(np.int64), num_names)


def fifo_hits(uses: References, block_size: int, capacity: int) -> int:
    """Tokens that hit in a pool of `capacity` blocks that evicts by order of entry."""
    ring = np.zeros(min(capacity, uses.num_names), np.int64)
    cached = np.zeros(uses.num_names, np.int64)
    return int(_fifo(uses.start, uses.name, uses.limit, uses.counts, block_size, ring, cached))


def belady_hits(uses: References, block_size: int, capacity: int) -> int:
    """Tokens that hit in a pool of `capacity` blocks that evicts what is used furthest in the future."""
    heap = np.zeros(min(capacity + int(np.diff(uses.start).max()), uses.num_names) + 1, np.int64)
    place, key = np.zeros((2, uses.num_names), np.int64)
    return int(
        _belady(
            uses.start, uses.name, uses.next_use, uses.limit, uses.counts, block_size, capacity,
            heap, place, key,
        )
    )  # fmt: skip


def _with_more_nodes(tree: ChainTree) -> ChainTree:
    return tree._replace(nodes=grown(tree.nodes, 2 * tree.nodes.shape[1]))


@verb
def name_blocks(
    tree: ChainTree,
    segment_start: Ints,
    segments: Ints,
    namespaces: Ints,
    computed: Ints,
    block_size: int,
    first: int,
    start: Ints,
    names: Ints,
) -> int:
    """Write the names of the blocks of requests from `first` on; returns the first that finds no room."""
    for i in range(first, len(computed)):
        node = name_chains(
            tree, segments, segment_start[i], segment_start[i + 1], namespaces[i], computed[i],
            block_size, names[start[i] : start[i + 1]],
        )  # fmt: skip
        if node == NO_ROOM:
            return i
    return len(computed)


@verb
def find_next_use(start: Ints, names: Ints, seen: Ints, width: int, next_use: Ints) -> None:
    """Writes `next_use`; `seen` is by name, and holds the number of requests."""
    for request in range(len(start) - 2, -1, -1):
        for at in range(start[request], start[request + 1]):
            next_use[at] = seen[names[at]] * width + at - start[request]
            seen[names[at]] = request


@verb
def hit_tokens(names: Ints, begin: int, end: int, limit: int, block_size: int, cached: Ints) -> int:
    """Tokens of a request's leading blocks that are cached."""
    at = begin
    while at < end and cached[names[at]] != 0:
        at += 1
    return min((at - begin) * block_size, limit)


@verb
def fifo(
    start: Ints, names: Ints, limits: Ints, counts: Ints, block_size: int, ring: Ints, cached: Ints
) -> int:
    """Hits with a ring of the cached names in order of entry."""
    hits = 0
    oldest = 0
    for i in range(len(start) - 1):
        found = hit_tokens(names, start[i], start[i + 1], limits[i], block_size, cached)
        hits += found * counts[i]
        for at in range(start[i], start[i + 1]):
            name = names[at]
            if cached[name] == 0:
                cached[ring[oldest]] = 0
                cached[name] = 1
                ring[oldest] = name
                oldest = oldest + 1 if oldest + 1 < len(ring) else 0
    return hits


@verb
def put(heap: Ints, place: Ints, key: Ints, at: int, name: int) -> None:
    """Put a name at an index of the heap."""
    heap[at] = name
    place[name] = at


@verb
def rise(heap: Ints, place: Ints, key: Ints, at: int) -> None:
    """Move an entry of the heap (from index 1, the largest key first) up to its place."""
    name = heap[at]
    while at > 1 and key[heap[at // 2]] < key[name]:
        put(heap, place, key, at, heap[at // 2])
        at //= 2
    put(heap, place, key, at, name)


@verb
def sink(heap: Ints, place: Ints, key: Ints, size: int) -> None:
    """Move the heap's first entry down to its place."""
    name = heap[1]
    at = 1
    while 2 * at <= size:
        child = 2 * at
        if child < size and key[heap[child + 1]] > key[heap[child]]:
            child += 1
        if key[heap[child]] <= key[name]:
            break
        put(heap, place, key, at, heap[child])
        at = child
    put(heap, place, key, at, name)


@verb
def belady(
    start: Ints,
    names: Ints,
    next_use: Ints,
    limits: Ints,
    counts: Ints,
    block_size: int,
    capacity: int,
    heap: Ints,
    place: Ints,
    key: Ints,
) -> int:
    """Hits with a heap of the cached names, the one that is used last at its head; place 0: not cached."""
    hits = 0
    size = 0
    for i in range(len(start) - 1):
        hits += hit_tokens(names, start[i], start[i + 1], limits[i], block_size, place) * counts[i]
        for at in range(start[i], start[i + 1]):
            name = names[at]
            key[name] = next_use[at]  # later than before, where it is cached
            if place[name] == 0:
                size += 1
                put(heap, place, key, size, name)
            rise(heap, place, key, place[name])
        while size > capacity:
            place[heap[1]] = 0
            last = heap[size]
            size -= 1
            if size > 0:
                heap[1] = last
                sink(heap, place, key, size)
    return hits


_name_blocks = entry(name_blocks)
_find_next_use = entry(find_next_use)
_fifo = entry(fifo)
_belady = entry(belady)
