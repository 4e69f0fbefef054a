"""The head of the waiting queue that was refused: is it worth looking up again?

vLLM looks a blocked head up at every step. Here a bound on what it needs saves the lookup while it
cannot fit; the decisions are the same.
"""

from __future__ import annotations

from sim._jit import verb
from sim.blocks import CONTENT_CHANGES, FREE
from sim.caches.apc import count_pinned, watermark_blocks
from sim.columns import C, K, R
from sim.core import NO_SEAT, Core


@verb
def note_blocked(core: Core, slot: int, num_hit: int) -> None:
    """Remember why the head was not admitted, so that the next steps need not look it up again."""
    count = core.count
    count[K.blocked_request] = core.requests[R.request_id, slot]
    count[K.blocked_tokens] = core.requests[R.num_tokens, slot]
    count[K.blocked_hit] = num_hit
    count[K.blocked_pinned] = count_pinned(core, slot, num_hit)
    count[K.blocked_changes] = core.pool.count[CONTENT_CHANGES]


@verb
def is_still_blocked(core: Core, slot: int, coming_changes: int) -> bool:
    """Whether the head that was refused cannot fit yet, without looking it up.

    Its need is its whole length less the hit blocks that others hold. Since the refusal nobody
    was admitted, so such blocks can only have become more by content cached since, one for each,
    or by an end of the hit that is now cached. `coming_changes` such changes are allowed for.
    """
    count = core.count
    requests = core.requests
    if (
        not core.config.reserve_full_isl
        or count[K.blocked_request] != requests[R.request_id, slot]
        or count[K.blocked_tokens] != requests[R.num_tokens, slot]
        or requests[R.seat, slot] == NO_SEAT
    ):
        return False
    hit = count[K.blocked_hit]
    num_tokens = requests[R.num_tokens, slot]
    block_size = core.config.block_size
    if (
        core.config.enable_prefix_caching
        and hit < (num_tokens - 1) // block_size
        and core.tree.chains[C.block, core.seat_chains[requests[R.seat, slot], hit]] != 0
    ):
        return False
    whole = (min(num_tokens, core.config.max_model_len) + block_size - 1) // block_size
    pinned = count[K.blocked_pinned] + core.pool.count[CONTENT_CHANGES] - count[K.blocked_changes]
    pinned += coming_changes
    watermark = watermark_blocks(core, slot, count[K.num_running] > 0)
    blocked: bool = whole - pinned + watermark > core.pool.count[FREE]
    return blocked
