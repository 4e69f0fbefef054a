"""SGLang's RadixAttention: a radix tree of pages, and the admission and retraction that go with it.

Follows SGLang 0.5.9. A page is a block: engine.block_size is SGLang's page_size. Prompts get into
the tree after the step that computed them, so equal prompts of one step all miss; outputs at the
end. The composition of a step is the engine's: running requests first, decodes and chunks mixed,
within max_num_batched_tokens. That is SGLang's --enable-mixed-chunk; its batches of prefills alone are
not modelled. See sim/caches/radix/tree.py, sim/caches/radix/admission.py and sim/caches/radix/order.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import hot, verb
from sim.blocks import EVICTIONS, FREE, NULL_BLOCK, take
from sim.cache_kinds import RadixKind
from sim.caches.radix.admission import (
    COUNT_WIDTH,
    FULL,
    LPM,
    RETRACT_DECODE_STEPS,
    keep_ratio,
    least_to_lose,
    may_be_admitted,
    new_ratio,
    note_admitted,
    note_retracted,
    promise,
)
from sim.caches.radix.order import MAX_SORTED, longest_prefix_first
from sim.caches.radix.tree import (
    EVICTABLE,
    NODE,
    ROOT,
    forget_leaf,
    free_page,
    insert,
    lock,
    make_room,
    match,
    new_radix_tree,
    tree_of,
    unlock,
)
from sim.columns import B, C, E, K, Q, R
from sim.core import Core, EngineConfig
from sim.prompt_fates import note_computed
from sim.request import Floats, Ints
from sim.residency import note_access
from sim.seats import leave_named_seat, take_named_seat
from sim.waiting import add_request


class Cache(NamedTuple):
    """What this cache keeps beside the engine's pool, chain ids and seats.

    Of a request's block table the first requests[R.num_cached_blocks] are in the tree, and locked.
    """

    nodes: Ints  # this and the next two: see sim/caches/radix/tree.py
    pages: Ints
    tree_count: Ints
    prefill: Ints  # [seat]: the tokens that its request had when it was admitted
    order: Ints  # [row, i]: see sim/caches/radix/order.py
    count: Ints  # type: ignore[assignment]  # this and the next: see sim/caches/radix/admission.py
    ratio: Floats


def new_cache(kind: RadixKind, config: EngineConfig) -> Cache:
    """An empty one."""
    count = np.zeros(COUNT_WIDTH, np.int64)
    count[LPM] = kind.schedule_policy == "lpm" and config.enable_prefix_caching
    return Cache(
        *new_radix_tree(config.num_gpu_blocks),
        prefill=np.zeros(config.max_num_seqs + 1, np.int64),
        order=np.zeros((3, MAX_SORTED), np.int64),
        count=count,
        ratio=new_ratio(kind.schedule_conservativeness),
    )


def metadata(core: Core) -> tuple[float, float]:
    """Nodes of the tree, and the slots of their pages; as they are now."""
    cached = np.flatnonzero(core.pool.blocks[B.chain])
    num_nodes = len(np.unique(core.cache.pages[cached, NODE]))
    return float(num_nodes), float(len(cached) * core.config.block_size)


take_seat, leave_seat, choose_victim = take_named_seat, leave_named_seat, least_to_lose
queue_again = add_request  # Scheduler.update_running_batch: a retracted request waits as if it were new


@verb
def order_waiting(core: Core) -> None:
    """Put the longest cached prefix first, if that is the policy, and add up what is promised."""
    if core.count[K.num_waiting] == 0 or core.cache.count[FULL]:
        return
    if core.cache.count[LPM] and core.count[K.num_waiting] <= MAX_SORTED:
        longest_prefix_first(core)
    promise(core)


@verb
def is_still_blocked(core: Core, slot: int, coming_changes: int) -> bool:
    """Once somebody was refused, nobody is admitted until one that runs has left (batch_is_full)."""
    full: bool = core.cache.count[FULL] != 0
    return full


@verb
def note_blocked(core: Core, slot: int, num_hit_tokens: int) -> None:
    """The head has been refused."""
    core.cache.count[FULL] = 1


@verb
def get_computed_tokens(core: Core, slot: int) -> int:
    """The tokens of a seated request's longest cached prefix of pages; it counts as used.

    All tokens but the last are looked up (Req.init_next_round_input).
    """
    if not core.config.enable_prefix_caching:
        return 0
    page_size = core.config.block_size
    chains = core.seat_chains[core.requests[R.seat, slot]]
    limit = (core.requests[R.num_tokens, slot] - 1) // page_size
    return match(tree_of(core), core.tree, chains, limit) * page_size


@hot
def lengthen(core: Core, slot: int, num_tokens: int) -> bool:
    """Take pages until a request's table holds `num_tokens` tokens; False, unchanged, if they lack."""
    config = core.config
    requests = core.requests
    num_blocks = requests[R.num_blocks, slot]
    num_pages = (min(num_tokens, config.max_model_len) + config.block_size - 1) // config.block_size
    wanted = num_pages - num_blocks
    if wanted > core.pool.count[FREE]:
        return False
    if wanted > 0:
        before = core.pool.count[EVICTIONS]
        make_room(tree_of(core), core.pool, core.tree, wanted)
        requests[R.num_evictions, slot] += core.pool.count[EVICTIONS] - before
        table = core.seat_blocks[requests[R.seat, slot]]
        for i in range(num_blocks, num_pages):
            table[i] = take(core.pool, core.tree, requests[R.owner, slot])
        requests[R.num_blocks, slot] = num_pages
    requests[R.edge, slot] = requests[R.num_blocks, slot] * config.block_size + 1
    return True


@hot
def allocate_slots(core: Core, slot: int, num_new_tokens: int, num_hit_tokens: int) -> bool:
    """Lock a waiting request's hit and give it pages for its new tokens, if the estimate lets it in.

    The estimate is asked again once the hit is locked and no longer evictable.
    """
    requests = core.requests
    if not may_be_admitted(core, slot, num_hit_tokens):
        return False
    num_hit = num_hit_tokens // core.config.block_size
    chains = core.seat_chains[requests[R.seat, slot]]
    last = core.tree.chains[C.block, chains[num_hit - 1]] if num_hit > 0 else NULL_BLOCK
    lock(tree_of(core), core.pool, NULL_BLOCK, last)
    if not may_be_admitted(core, slot, num_hit_tokens):
        unlock(tree_of(core), core.pool, last)
        return False
    table = core.seat_blocks[requests[R.seat, slot]]
    for i in range(num_hit):
        page = core.tree.chains[C.block, chains[i]]
        table[i] = page
        if len(core.pool.times) > 0:
            note_access(core.pool.times, core.pool.durations, page, requests[R.owner, slot])
    requests[R.num_blocks, slot] = num_hit
    requests[R.num_cached_blocks, slot] = num_hit
    placed = lengthen(core, slot, num_hit_tokens + num_new_tokens)
    assert placed
    core.cache.prefill[requests[R.seat, slot]] = requests[R.num_tokens, slot]
    note_admitted(core, slot)
    return True


@hot
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """Give a running request pages for its next tokens (ScheduleBatch.check_decode_mem)."""
    return lengthen(core, slot, core.requests[R.num_computed, slot] + num_new_tokens)


@verb
def put_in(core: Core, slot: int, num_tokens: int) -> int:
    """Give the tree the whole pages of a request's first tokens; returns how many pages they are."""
    requests = core.requests
    if not core.config.enable_prefix_caching:
        return 0
    num_pages = num_tokens // core.config.block_size
    seat = requests[R.seat, slot]
    insert(
        tree_of(core),
        core.pool,
        core.tree,
        core.seat_chains[seat],
        core.seat_blocks[seat],
        requests[R.num_cached_blocks, slot],
        num_pages,
    )
    return num_pages


@verb
def last_protected(core: Core, slot: int) -> int:
    """The last page that the tree holds for a request; the null block where there is none."""
    num_protected = core.requests[R.num_cached_blocks, slot]
    if num_protected == 0:
        return NULL_BLOCK
    page: int = core.seat_blocks[core.requests[R.seat, slot], num_protected - 1]
    return page


@hot
def after_step(core: Core, slot: int, num_tokens: int, sampled: bool) -> None:
    """What a step has prefilled can be found from now on, and is locked (RadixCache.cache_unfinished_req)."""
    if num_tokens > core.cache.prefill[core.requests[R.seat, slot]]:
        return  # a decode: outputs wait for the end
    keep_ratio(core, core.count[K.num_steps])
    if core.config.token_fates:
        note_computed(core, slot, num_tokens)
    before = last_protected(core, slot)
    num_pages = put_in(core, slot, num_tokens)
    core.requests[R.num_cached_blocks, slot] = num_pages
    lock(tree_of(core), core.pool, before, last_protected(core, slot))


@verb
def release(core: Core, slot: int, num_kept: int) -> None:
    """Take a request's pages but the first `num_kept`, which the tree has, and its locks."""
    requests = core.requests
    table = core.seat_blocks[requests[R.seat, slot]]
    for i in range(num_kept, requests[R.num_blocks, slot]):
        free_page(core.pool, table[i])
    unlock(tree_of(core), core.pool, last_protected(core, slot))
    requests[R.num_blocks, slot] = 0
    requests[R.num_cached_blocks, slot] = 0
    core.cache.count[FULL] = 0


@hot
def free(core: Core, slot: int) -> None:
    """Put all that an ending request has computed into the tree; its duplicates and its tail go back.

    The last sampled token has no KV (RadixCache.cache_finished_req).
    """
    requests = core.requests
    if requests[R.num_blocks, slot] == 0:
        return
    computed = requests[R.num_computed, slot] - requests[R.in_flight, slot]
    if core.config.token_fates:
        note_computed(core, slot, computed)
    release(core, slot, put_in(core, slot, computed))


@verb
def preempt(core: Core, slot: int) -> int:
    """Retract a running request: its outputs' KV is lost, its prompt's stays in the tree, unlocked.

    Room is made at once for some steps of those that stay (ScheduleBatch.release_req).
    """
    release(core, slot, core.requests[R.num_cached_blocks, slot])
    leave_seat(core, slot)
    room = note_retracted(core) * RETRACT_DECODE_STEPS
    page_size = core.config.block_size
    make_room(tree_of(core), core.pool, core.tree, (room + page_size - 1) // page_size)
    return 0


@verb
def reset(core: Core) -> bool:
    """Forget all that is cached, if no request holds any; the pages do not count as evicted (flush_cache)."""
    if core.pool.count[FREE] != core.config.num_gpu_blocks - 1:
        return False
    while core.cache.tree_count[EVICTABLE] > 0:
        forget_leaf(tree_of(core), core.pool, core.tree, False)
    return True


@verb
def computed_when_scheduled(core: Core) -> bool:
    """A token can be found once it is in the tree, after its step."""
    return False


def audit(core: Core) -> None:
    """Assert what holds between two steps: every page is free, a running request's own, or in the tree.

    Those in the tree count as free where no lock holds their node; unlocked nodes lie in the order of
    their last use, none behind a node above it.
    """
    cache = core.cache
    usable = core.config.num_gpu_blocks - 1
    own = 0
    for slot in core.queues[Q.running, : core.count[K.num_running]]:
        own += core.requests[R.num_blocks, slot] - core.requests[R.num_cached_blocks, slot]
    cached = np.flatnonzero(core.pool.blocks[B.chain])
    held = np.unique(cache.pages[cached, NODE])
    assert cache.nodes[held, E.num_pages].sum() == len(cached)
    unlocked = held[cache.nodes[held, E.lock_ref] == 0]
    evictable = cache.nodes[unlocked, E.num_pages].sum()
    assert evictable == cache.tree_count[EVICTABLE]
    assert core.pool.count[FREE] == usable - own - len(cached) + evictable
    listed = []
    node = cache.nodes[ROOT, E.after]
    while node != ROOT:
        listed.append(int(node))
        node = cache.nodes[node, E.after]
    assert sorted(listed) == unlocked.tolist()
    assert (np.diff(cache.nodes[listed, E.last_access]) > 0).all()
    above = cache.pages[cache.nodes[unlocked, E.parent_page], NODE]
    inner = above != ROOT
    assert (cache.nodes[above[inner], E.last_access] > cache.nodes[unlocked[inner], E.last_access])[
        cache.nodes[above[inner], E.lock_ref] == 0
    ].all()
