"""Read the whiteboard off an engine's columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sim import blocks
from sim._jit import entry
from sim.blocks import TAKEN_LOGGED
from sim.columns import B, C, K, Q, R, T
from sim.core import RUNNING, Core
from sim.explain.events import Board, Content
from sim.explain.tokens import NONE_HASH, Tokens

free_order = entry(blocks.free_order)


class Request(NamedTuple):
    """What the columns do not hold: a request's tokens, prompt first, and their hashes."""

    name: str
    slot: int
    prompt_len: int
    tokens: tuple[int, ...]
    hashes: tuple[bytes, ...]  # of its full blocks


def draw_board(core: Core, tokens: Tokens, requests: Mapping[int, Request]) -> Board:
    """Tables, counts, queue and hash table of an engine; `requests` are by request id."""
    block_size = core.config.block_size
    ref_cnt = core.pool.blocks[B.ref_cnt].tolist()
    order = np.zeros(len(ref_cnt), np.int64)
    free = tuple(order[: free_order(core.pool, order)].tolist())
    contents: dict[int, Content] = {}
    tables: dict[str, tuple[int, ...]] = {}
    for slot in core.queues[Q.running, : core.count[K.num_running]].tolist():
        request = requests[int(core.requests[R.request_id, slot])]
        tables[request.name] = table_of(core, slot)
        computed = request.tokens[: core.requests[R.num_computed, slot]]
        for i, block in enumerate(tables[request.name]):
            own = computed[i * block_size : (i + 1) * block_size]
            contents[block] = Content(own, request.hashes[i - 1] if i else NONE_HASH, None)
    hashes: dict[bytes, tuple[int, ...]] = {}
    for block, chain in enumerate(core.pool.blocks[B.chain].tolist()):
        if chain:
            contents[block] = content = tokens.of_chain(core.tree, chain)
            assert content.hash is not None
            hashes[content.hash] = duplicates(core, int(core.tree.chains[C.block, chain]))
    return Board(
        tables,
        tuple(requests[int(core.requests[R.request_id, slot])].name for slot in waiting_slots(core)),
        {block: refs for block, refs in enumerate(ref_cnt) if refs},
        free,
        hashes,
        contents,
    )


def table_of(core: Core, slot: int) -> tuple[int, ...]:
    """A request's block table; empty if it does not run."""
    if core.requests[R.status, slot] != RUNNING:
        return ()
    return tuple(core.seat_blocks[core.requests[R.seat, slot], : core.requests[R.num_blocks, slot]].tolist())


def waiting_slots(core: Core) -> list[int]:
    """Slots in the order they will be scheduled."""
    slots = core.queues[Q.waiting, : core.count[K.num_waiting]]
    order = (core.requests[R.rank, slots], core.times[T.wait_time, slots], core.requests[R.wait_class, slots])
    return slots[np.lexsort(order)].tolist()  # type: ignore[no-any-return]


def taken_between(before: Core, after: Core) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The blocks taken in between, and those of them that lost their content."""
    log = after.pool.taken[before.pool.count[TAKEN_LOGGED] : after.pool.count[TAKEN_LOGGED]].tolist()
    return tuple(abs(block) for block in log), tuple(-block for block in log if block < 0)


def registered_between(before: Core, after: Core) -> tuple[int, ...]:
    """The blocks that entered the hash table in between."""
    old, new = before.pool.blocks[B.chain], after.pool.blocks[B.chain]
    return tuple(np.flatnonzero((new != 0) & (new != old)).tolist())


def duplicates(core: Core, first: int) -> tuple[int, ...]:
    """The blocks of one content, in the order in which they were cached."""
    found = [first]
    while (block := int(core.pool.blocks[B.next_duplicate, found[-1]])) != first:
        found.append(block)
    return tuple(found)
