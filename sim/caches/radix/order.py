"""Longest prefix first: the order in which SGLang's `lpm` lets the waiting requests in.

Follows srt/managers/schedule_policy.SchedulePolicy of SGLang 0.5.9 (_determine_active_policy,
_compute_prefix_matches, _sort_by_longest_prefix). Every waiting request is matched, and what it
matches counts as used. Where several that hit little begin alike, the first goes by its hit and the
others come last: once its prompt is in the tree, they will hit it. The order lasts: what is equal
next time stays as it is.
"""

from __future__ import annotations

from sim._jit import verb
from sim.caches.radix.tree import split_behind, tree_of, use_path
from sim.chains import NAMESPACE_ROOT, ROOT, ChainTree, find_node
from sim.columns import C, K, N, Q, R
from sim.core import Core
from sim.request import Ints
from sim.waiting import goes_before

MAX_SORTED = 128  # above so many waiting requests the policy is fcfs
ALIKE = 32  # tokens: a hit of no more is little; so many equal ones are beginning alike

# rows of Cache.order of sim/caches/radix
SLOT, KEY, CLASS = range(3)
LAST = 1  # the key of a deprioritized request; the others' is minus their hit


@verb
def cached_prefix(
    tree: ChainTree, segments: Ints, first: int, end: int, namespace: int, max_tokens: int, block_size: int
) -> int:
    """The chain id of the last full block of a request's longest cached prefix, 0 if it has none.

    Of a cache whose content is prefix-closed, for a request without a seat: as chains.name_chains
    walks, but nothing is added, and of each piece the last block is asked first.
    """
    node = ROOT
    if namespace != 0:
        node = find_node(tree, ROOT, 0, namespace, NAMESPACE_ROOT)
        if node == 0:
            return 0
    found = 0
    used = 0
    depth = 0
    for i in range(first, end):
        remaining = min(segments[1, i], max_tokens - depth)
        skip = 0
        while remaining > 0:
            node = find_node(tree, node, used, segments[0, i], skip)
            if node == 0:
                return found
            used = min(remaining, tree.nodes[N.length, node])
            num_chains = (depth + used) // block_size - depth // block_size
            depth += used
            skip += used
            remaining -= used
            chain = tree.nodes[N.first_chain, node]
            low = 0
            high = num_chains + 1
            if num_chains > 0 and tree.chains[C.block, chain + num_chains - 1] != 0:
                low = num_chains
            while high - low > 1:
                middle = (low + high) // 2
                if tree.chains[C.block, chain + middle - 1] != 0:
                    low = middle
                else:
                    high = middle
            if low > 0:
                found = chain + low - 1
            if low < num_chains:
                return found
    return found


@verb
def match_waiting(core: Core, slot: int) -> int:
    """How many tokens of a waiting request are cached; they count as used."""
    requests = core.requests
    first = requests[R.first_segment, slot]
    chain = cached_prefix(
        core.tree,
        core.segments,
        first,
        first + requests[R.num_segments, slot],
        requests[R.namespace, slot],
        requests[R.num_tokens, slot],
        core.config.block_size,
    )
    if chain == 0:
        return 0
    nodes = core.tree.nodes
    node = core.tree.chains[C.node, chain]
    num_pages = nodes[N.first_block, node] + chain - nodes[N.first_chain, node]
    tree = tree_of(core)
    use_path(tree, split_behind(tree, core.tree.chains[C.block, chain], num_pages))
    tokens: int = num_pages * core.config.block_size
    return tokens


@verb
def begin_alike(core: Core, a: int, b: int) -> bool:
    """Whether the first ALIKE tokens of two requests are equal, of the same segments and namespace."""
    requests = core.requests
    if requests[R.namespace, a] != requests[R.namespace, b]:
        return False
    if min(requests[R.num_tokens, a], requests[R.num_tokens, b]) < ALIKE:
        return False
    i = requests[R.first_segment, a]
    k = requests[R.first_segment, b]
    tokens = 0
    while tokens < ALIKE:
        while core.segments[1, i] == 0:
            i += 1
        while core.segments[1, k] == 0:
            k += 1
        length_a = min(core.segments[1, i], ALIKE - tokens)
        length_b = min(core.segments[1, k], ALIKE - tokens)
        if core.segments[0, i] != core.segments[0, k] or length_a != length_b:
            return False
        tokens += length_a
        i += 1
        k += 1
    return True


@verb
def longest_prefix_first(core: Core) -> None:
    """Put the waiting queue, of at most MAX_SORTED requests, into the order of their hits."""
    order = core.cache.order
    size = core.count[K.num_waiting]
    for i in range(size):  # as they stand now
        slot = core.queues[Q.waiting, i]
        place = i
        while place > 0 and goes_before(core, slot, order[SLOT, place - 1]):
            order[SLOT, place] = order[SLOT, place - 1]
            place -= 1
        order[SLOT, place] = slot
    for i in range(size):
        slot = order[SLOT, i]
        order[CLASS, i] = core.requests[R.wait_class, slot]
        hit = match_waiting(core, slot)
        order[KEY, i] = -hit
        if hit <= ALIKE:
            for k in range(i):
                if -ALIKE <= order[KEY, k] <= 0 and begin_alike(core, order[SLOT, k], slot):
                    order[KEY, i] = LAST
                    break
    for i in range(1, size):  # equal ones stay in order
        slot, key = order[SLOT, i], order[KEY, i]
        place = i
        while place > 0 and order[KEY, place - 1] > key:
            order[SLOT, place] = order[SLOT, place - 1]
            order[KEY, place] = order[KEY, place - 1]
            place -= 1
        order[SLOT, place] = slot
        order[KEY, place] = key
    for i in range(size):  # the tickets stay, in other hands; in order they are a heap
        core.requests[R.wait_class, order[SLOT, i]] = order[CLASS, i]
        core.queues[Q.waiting, i] = order[SLOT, i]
