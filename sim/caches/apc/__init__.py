"""vLLM V1's Automatic Prefix Caching: lookup, allocation, release.

Mirrors v1/core/kv_cache_manager.KVCacheManager for one full-attention group. `slot` is a request's
place in the columns of `requests`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import hot, verb
from sim.blocks import EVICTIONS, FREE, free_blocks, register, take, touch
from sim.cache_kinds import ApcKind
from sim.caches.apc.blocked_head import (
    completes_missing,
    count_pinned,
    is_head_blocked,
    new_blocked,
    nobody_is_blocked,
    note_blocked_head,
    watermark_blocks,
)
from sim.columns import B, C, K, R
from sim.core import Core, EngineConfig
from sim.request import Ints
from sim.seats import leave_named_seat, take_named_seat


class Cache(NamedTuple):
    """What this cache keeps beside the engine's pool, chain ids and seats."""

    blocked: Ints  # the head that was refused, see sim/caches/apc/blocked_head.py


def new_cache(kind: ApcKind, config: EngineConfig) -> Cache:
    """An empty one."""
    return Cache(new_blocked())


def metadata(core: Core) -> tuple[float, float]:
    """Blocks that the hash table names, and the slots of their KV; as they are now."""
    cached = float(np.count_nonzero(core.pool.blocks[B.chain]))
    return cached, cached * core.config.block_size


take_seat, leave_seat = take_named_seat, leave_named_seat
is_still_blocked, note_blocked, unblocks = is_head_blocked, note_blocked_head, completes_missing


@verb
def get_computed_tokens(core: Core, slot: int) -> int:
    """How many tokens of the leading full blocks of a seated request are cached; changes nothing.

    Of at most (num_tokens - 1) // block_size blocks, since the last token is always computed; the first
    miss ends the search (KVCacheManager.get_computed_blocks, find_longest_cache_hit).
    """
    if not core.config.enable_prefix_caching:
        return 0
    chains = core.seat_chains[core.requests[R.seat, slot]]
    limit = (core.requests[R.num_tokens, slot] - 1) // core.config.block_size
    hit = 0
    while hit < limit and core.tree.chains[C.block, chains[hit]] != 0:
        hit += 1
    if core.config.use_eagle and hit > 0:
        hit -= 1
    return hit * core.config.block_size


@verb
def set_edge(core: Core, slot: int) -> None:
    """Note how many scheduled tokens will next need a block or complete one."""
    requests = core.requests
    num_blocks = requests[R.num_blocks, slot]
    num_cached = requests[R.num_cached_blocks, slot]
    if core.config.enable_prefix_caching and num_cached < num_blocks:
        requests[R.edge, slot] = (num_cached + 1) * core.config.block_size
    else:
        requests[R.edge, slot] = num_blocks * core.config.block_size + 1


@hot
def cache_blocks(core: Core, slot: int, num_tokens: int) -> None:
    """Register the blocks that the first `num_tokens` tokens fill (KVCacheManager.cache_blocks)."""
    if not core.config.enable_prefix_caching:
        return
    requests = core.requests
    chains = core.seat_chains[requests[R.seat, slot]]
    blocks = core.seat_blocks[requests[R.seat, slot]]
    num_full = num_tokens // core.config.block_size
    for i in range(requests[R.num_cached_blocks, slot], num_full):
        register(core.pool, core.tree, blocks[i], chains[i])
    if num_full > requests[R.num_cached_blocks, slot]:
        requests[R.num_cached_blocks, slot] = num_full


@hot
def allocate(
    core: Core,
    slot: int,
    num_new_tokens: int,
    num_hit_blocks: int,
    num_lookahead_tokens: int,
    full_sequence_must_fit: bool,
    reserved_blocks: int,
    has_scheduled_reqs: bool,
) -> bool:
    """Give a seated request blocks for its hit and its new tokens; False, unchanged, if they lack.

    Touches the hit blocks before it takes new ones, so an allocation never evicts its own hit,
    and registers full blocks at once, before any step has filled them, so that the next request
    of the same step finds them (KVCacheManager.allocate_slots). `num_computed` is the caller's.
    """
    config = core.config
    requests = core.requests
    block_size = config.block_size
    max_model_len = config.max_model_len
    num_tokens = requests[R.num_tokens, slot]
    num_blocks = requests[R.num_blocks, slot]
    num_free = core.pool.count[FREE]
    watermark = watermark_blocks(core, slot, has_scheduled_reqs)
    unpinned = num_hit_blocks
    if num_hit_blocks > 0:
        unpinned -= count_pinned(core, slot, num_hit_blocks)
    have = num_blocks + num_hit_blocks
    total = min(requests[R.num_computed, slot] + num_hit_blocks * block_size, max_model_len)
    if full_sequence_must_fit:
        whole = (min(num_tokens, max_model_len) + block_size - 1) // block_size
        if max(whole - have, 0) + unpinned + watermark > num_free:
            return False
    slots = min(total + num_new_tokens + num_lookahead_tokens, max_model_len)
    table_len = (slots + block_size - 1) // block_size
    if max(table_len - have, 0) + unpinned + watermark > num_free - reserved_blocks:
        return False

    seat = requests[R.seat, slot]
    chains = core.seat_chains[seat]
    blocks = core.seat_blocks[seat]
    owner = requests[R.owner, slot]
    if num_hit_blocks > 0:
        for i in range(num_hit_blocks):
            block = core.tree.chains[C.block, chains[i]]
            touch(core.pool, block, owner)
            blocks[num_blocks + i] = block
            if requests[R.num_preemptions, slot] == 0:
                core.count[K.warm_hits] += core.pool.blocks[B.warm, block]
        requests[R.num_cached_blocks, slot] = num_hit_blocks
    before = core.pool.count[EVICTIONS]
    for i in range(have, table_len):
        blocks[i] = take(core.pool, core.tree, owner)
    requests[R.num_evictions, slot] += core.pool.count[EVICTIONS] - before
    requests[R.num_blocks, slot] = max(have, table_len)
    cache_blocks(core, slot, min(total + num_new_tokens, num_tokens))
    set_edge(core, slot)
    return True


@hot
def allocate_slots(core: Core, slot: int, num_new_tokens: int, num_hit_tokens: int) -> bool:
    """Give a waiting request its hit and blocks for its new tokens, as Scheduler.schedule asks for them."""
    config = core.config
    hit_blocks = num_hit_tokens // config.block_size
    others_run = core.count[K.num_running] > 0
    placed = allocate(core, slot, num_new_tokens, hit_blocks, 0, config.reserve_full_isl, 0, others_run)
    if placed:
        nobody_is_blocked(core)
    return placed


@hot
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """Give a running request blocks for its next tokens."""
    return allocate(core, slot, num_new_tokens, 0, 0, False, 0, False)


@hot
def after_step(core: Core, slot: int, num_tokens: int, sampled: bool) -> None:
    """Register blocks whose tokens were unknown when they were scheduled (AsyncScheduler)."""
    if sampled and core.config.async_scheduling and core.requests[R.placeholders, slot] > 0:
        cache_blocks(core, slot, num_tokens)
        set_edge(core, slot)


@hot
def free(core: Core, slot: int) -> None:
    """Release all blocks of a request in reverse (KVCacheManager.free); a waiting one has none."""
    requests = core.requests
    if requests[R.num_blocks, slot] > 0:
        blocks = core.seat_blocks[requests[R.seat, slot]]
        free_blocks(core.pool, blocks, requests[R.num_blocks, slot], core.config.free_all_last)
    requests[R.num_blocks, slot] = 0
    requests[R.num_cached_blocks, slot] = 0
