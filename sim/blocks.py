"""The pool of physical KV blocks: reference counts, the free queue, blocks of one content.

vLLM's v1/core/block_pool.BlockPool and FreeKVCacheBlockQueue. Block 0 is the null block: never
allocated, and here the sentinel of the free queue, a circular list through two columns. A cached
block without references stays in the free queue and keeps its content until it is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import hot, verb
from sim.chains import ChainTree, content_key, release_node
from sim.columns import B, C, N
from sim.request import Floats, Ints
from sim.residency import WIDTH, new_durations, note_access, note_allocation, note_eviction

NULL_BLOCK = 0

# BlockPool.count
FREE, EVICTIONS, TAKEN_LOGGED, CONTENT_CHANGES, NUM_EVENTS = range(5)


class BlockPool(NamedTuple):
    """The pool."""

    blocks: Ints  # [B, block id]
    count: Ints  # type: ignore[assignment]  # the name shadows tuple.count
    taken: Ints  # a log of taken blocks, negative where one was evicted; empty: not kept
    times: Floats  # [block, column]; these three: see sim/residency.py; empty: not kept
    durations: Ints
    evicted_from: Ints  # evictions by the owner of the block
    events: Ints  # what was cached and evicted, see sim/kv_index.py; empty: not told


def new_pool(
    num_gpu_blocks: int, taken_log: int = 0, residency: bool = False, kv_events: bool = False
) -> BlockPool:
    """A pool in which every block but the null block is free, in id order."""
    blocks = np.zeros((B.WIDTH, num_gpu_blocks), np.int64)
    ids = np.arange(num_gpu_blocks, dtype=np.int64)
    blocks[B.next_free] = np.roll(ids, -1)
    blocks[B.prev_free] = np.roll(ids, 1)
    count = np.array([num_gpu_blocks - 1, 0, 0, 0, 0], np.int64)
    times = np.zeros((num_gpu_blocks if residency else 0, WIDTH))
    owners = np.zeros(1 if residency else 0, np.int64)
    # a step tells of each block a few times at most, and half of this is left free for it
    events = np.zeros(16 * num_gpu_blocks if kv_events else 0, np.int64)
    taken = np.zeros(taken_log, np.int64)
    return BlockPool(blocks, count, taken, times, new_durations(residency), owners, events)


@verb
def unlink(pool: BlockPool, block: int) -> None:
    """Remove a block from the free queue (FreeKVCacheBlockQueue.remove)."""
    before = pool.blocks[B.prev_free, block]
    after = pool.blocks[B.next_free, block]
    pool.blocks[B.next_free, before] = after
    pool.blocks[B.prev_free, after] = before
    pool.count[FREE] -= 1


@verb
def insert_after(pool: BlockPool, before: int, block: int) -> None:
    """Put a block into the free queue behind `before`; behind the null block is the head."""
    after = pool.blocks[B.next_free, before]
    pool.blocks[B.next_free, before] = block
    pool.blocks[B.prev_free, block] = before
    pool.blocks[B.next_free, block] = after
    pool.blocks[B.prev_free, after] = block
    pool.count[FREE] += 1


@verb
def tell(pool: BlockPool, event: int) -> None:
    """Append a KV event: the key of a block that is cached now, negative if it no longer is."""
    pool.events[pool.count[NUM_EVENTS]] = event
    pool.count[NUM_EVENTS] += 1


@hot
def register(pool: BlockPool, tree: ChainTree, block: int, chain: int) -> None:
    """Cache a full block under its content (BlockPool.cache_full_blocks).

    Blocks of equal content are kept, not merged; the one cached first is found first.
    """
    pool.blocks[B.chain, block] = chain
    pool.count[CONTENT_CHANGES] += 1
    if len(pool.events) > 0:
        tell(pool, content_key(tree, chain))
    first = tree.chains[C.block, chain]
    if first == 0:
        tree.chains[C.block, chain] = block
        pool.blocks[B.next_duplicate, block] = block
        pool.blocks[B.prev_duplicate, block] = block
        tree.nodes[N.refs, tree.chains[C.node, chain]] += 1
    else:
        last = pool.blocks[B.prev_duplicate, first]
        pool.blocks[B.next_duplicate, last] = block
        pool.blocks[B.prev_duplicate, block] = last
        pool.blocks[B.next_duplicate, block] = first
        pool.blocks[B.prev_duplicate, first] = block


@hot
def forget(pool: BlockPool, tree: ChainTree, block: int) -> None:
    """Drop a cached block's content; its place and references stay (BlockPool._maybe_evict_cached_block)."""
    chain = pool.blocks[B.chain, block]
    if len(pool.events) > 0:
        tell(pool, -content_key(tree, chain))
    pool.blocks[B.chain, block] = 0
    pool.blocks[B.warm, block] = 0
    after = pool.blocks[B.next_duplicate, block]
    if after == block:
        tree.chains[C.block, chain] = 0
        release_node(tree, tree.chains[C.node, chain])
        return
    before = pool.blocks[B.prev_duplicate, block]
    pool.blocks[B.next_duplicate, before] = after
    pool.blocks[B.prev_duplicate, after] = before
    if tree.chains[C.block, chain] == block:
        tree.chains[C.block, chain] = after
        pool.count[CONTENT_CHANGES] += 1


@hot
def take(pool: BlockPool, tree: ChainTree, owner: int) -> int:
    """Pop the head of the free queue, evicting what it caches (BlockPool.get_new_blocks).

    The caller has checked that a block is free. `owner` is whose it is now, see sim/residency.py.
    """
    block: int = pool.blocks[B.next_free, NULL_BLOCK]
    unlink(pool, block)
    evicted = pool.blocks[B.chain, block] != 0
    if evicted:
        forget(pool, tree, block)
        pool.count[EVICTIONS] += 1
    if len(pool.times) > 0:
        if evicted:
            note_eviction(pool.times, pool.durations, pool.evicted_from, block)
        note_allocation(pool.times, block, owner)
    if len(pool.taken) > 0:
        pool.taken[pool.count[TAKEN_LOGGED]] = -block if evicted else block
        pool.count[TAKEN_LOGGED] += 1
    pool.blocks[B.ref_cnt, block] = 1
    return block


@hot
def touch(pool: BlockPool, block: int, owner: int) -> None:
    """Reference a cached block; without references it leaves the free queue (BlockPool.touch).

    `owner` is whose it is now.
    """
    if len(pool.times) > 0:
        note_access(pool.times, pool.durations, block, owner)
    if pool.blocks[B.ref_cnt, block] == 0:
        unlink(pool, block)
    pool.blocks[B.ref_cnt, block] += 1


@hot
def free_blocks(pool: BlockPool, table: Ints, num_blocks: int, all_last: bool) -> None:
    """Give back a block table from its last block to its first (BlockPool.free_blocks).

    Blocks that lose their last reference go to the free queue: cached ones to the tail, the
    others together to the head, both in the order given; with `all_last`, all to the tail.
    """
    head = NULL_BLOCK
    for i in range(num_blocks - 1, -1, -1):
        block = table[i]
        pool.blocks[B.ref_cnt, block] -= 1
        if pool.blocks[B.ref_cnt, block] == 0:
            if all_last or pool.blocks[B.chain, block] != 0:
                insert_after(pool, pool.blocks[B.prev_free, NULL_BLOCK], block)
            else:
                insert_after(pool, head, block)
                head = block


@verb
def reset_prefix_cache(pool: BlockPool, tree: ChainTree) -> bool:
    """Forget all cached content, if no block is in use; the free queue keeps its order.

    Returns whether it did (BlockPool.reset_prefix_cache).
    """
    num_blocks = pool.blocks.shape[1]
    if pool.count[FREE] != num_blocks - 1:
        return False
    for block in range(1, num_blocks):
        if pool.blocks[B.chain, block] != 0:
            forget(pool, tree, block)
    return True


@verb
def free_order(pool: BlockPool, order: Ints) -> int:
    """Write the free queue, head first, into `order`; returns its length."""
    length = 0
    block = pool.blocks[B.next_free, NULL_BLOCK]
    while block != NULL_BLOCK:
        order[length] = block
        length += 1
        block = pool.blocks[B.next_free, block]
    return length
