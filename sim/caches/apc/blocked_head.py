"""The head of the waiting queue that was refused: is it worth looking up again?

vLLM looks a blocked head up at every step. Here a bound on what it needs saves the lookup while it
cannot fit; the decisions are the same.
"""

from __future__ import annotations

import numpy as np

from sim._jit import verb
from sim.blocks import CONTENT_CHANGES, FREE
from sim.columns import B, C, K, R
from sim.core import NO_SEAT, PREEMPTED, WAITING, Core
from sim.request import Ints

# core.cache.blocked: the request, and what its lookup found
REQUEST, TOKENS, HIT, PINNED, CHANGES, WIDTH = range(6)


def new_blocked() -> Ints:
    """Nobody is blocked."""
    return np.full(WIDTH, -1, np.int64)


@verb
def nobody_is_blocked(core: Core) -> None:
    """Somebody has been admitted: what was noted before says nothing now."""
    core.cache.blocked[REQUEST] = -1


@verb
def watermark_blocks(core: Core, slot: int, has_scheduled_reqs: bool) -> int:
    """Blocks that an admission must leave free while others run (KVCacheManager.allocate_slots)."""
    status = core.requests[R.status, slot]
    if has_scheduled_reqs and status in (WAITING, PREEMPTED):
        return int(core.config.watermark * core.config.num_gpu_blocks)
    return 0


@verb
def count_pinned(core: Core, slot: int, num_hit_blocks: int) -> int:
    """How many of the hit blocks are in use: the others take a free block each when touched."""
    chains = core.seat_chains[core.requests[R.seat, slot]]
    pinned = 0
    for i in range(num_hit_blocks):
        if core.pool.blocks[B.ref_cnt, core.tree.chains[C.block, chains[i]]] > 0:
            pinned += 1
    return pinned


@verb
def note_blocked_head(core: Core, slot: int, num_hit_tokens: int) -> None:
    """Remember why the head was not admitted, so that the next steps need not look it up again."""
    blocked = core.cache.blocked
    hit = num_hit_tokens // core.config.block_size
    blocked[REQUEST] = core.requests[R.request_id, slot]
    blocked[TOKENS] = core.requests[R.num_tokens, slot]
    blocked[HIT] = hit
    blocked[PINNED] = count_pinned(core, slot, hit)
    blocked[CHANGES] = core.pool.count[CONTENT_CHANGES]


@verb
def is_head_blocked(core: Core, slot: int, coming_changes: int) -> bool:
    """Whether the head that was refused cannot fit yet, without looking it up.

    Its need is its whole length less the hit blocks that others hold. Since the refusal nobody
    was admitted, so such blocks can only have become more by content cached since, one for each,
    or by an end of the hit that is now cached. `coming_changes` such changes are allowed for.
    """
    blocked = core.cache.blocked
    requests = core.requests
    if (
        not core.config.reserve_full_isl
        or blocked[REQUEST] != requests[R.request_id, slot]
        or blocked[TOKENS] != requests[R.num_tokens, slot]
        or requests[R.seat, slot] == NO_SEAT
    ):
        return False
    hit = blocked[HIT]
    num_tokens = requests[R.num_tokens, slot]
    block_size = core.config.block_size
    if (
        core.config.enable_prefix_caching
        and hit < (num_tokens - 1) // block_size
        and core.tree.chains[C.block, core.seat_chains[requests[R.seat, slot], hit]] != 0
    ):
        return False
    whole = (min(num_tokens, core.config.max_model_len) + block_size - 1) // block_size
    pinned = blocked[PINNED] + core.pool.count[CONTENT_CHANGES] - blocked[CHANGES]
    pinned += coming_changes
    watermark = watermark_blocks(core, slot, core.count[K.num_running] > 0)
    still: bool = whole - pinned + watermark > core.pool.count[FREE]
    return still


@verb
def completes_missing(core: Core, slot: int, head: int) -> bool:
    """Whether the block that a decoding request completes next is the one that the head misses first."""
    if not core.config.enable_prefix_caching:
        return False
    requests = core.requests
    missing = core.seat_chains[requests[R.seat, head], core.cache.blocked[HIT]]
    coming = core.seat_chains[requests[R.seat, slot], requests[R.num_cached_blocks, slot]]
    found: bool = missing != 0 and coming == missing
    return found
