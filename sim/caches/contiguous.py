"""One contiguous region of memory for each request, as Orca keeps KV: nothing is shared.

Orca's code is not public; this is the baseline of the PagedAttention paper (section 6.1, and the
BuddyBlockSpaceManager of its authors' experiments): a buddy allocator gives a request, when it is
admitted, room for its prompt and for as many output tokens as the reservation says, in whole blocks and
rounded up to a power of two of them, and takes the region back at its end.

- oracle: the true length of the answer, which no system knows;
- pow2: that length rounded up to a power of two;
- max: all that max_model_len leaves.

Requests are admitted first come, first served: one that does not fit waits, and so do those behind it.
None outgrows its region, so none is preempted, and the watermark has no meaning here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import verb
from sim.blocks import FREE
from sim.buddy import Buddy, allocate, can_allocate, new_buddy, order_of, release
from sim.caches.kinds import RESERVATIONS, ContiguousKind
from sim.columns import R
from sim.core import Core, EngineConfig
from sim.request import Ints

ORACLE, POW2, MAX = range(3)
RESERVATION, BLOCKED, RELEASES, REGIONS, SLOTS = range(5)  # Cache.numbers
NEVER = 1 << 62


class Cache(NamedTuple):
    """The memory, in blocks, and who has which region of it."""

    chunks: Ints  # with `sizes`, a Buddy
    sizes: Ints
    starts: Ints  # [seat]: the first block of its region
    orders: Ints  # [seat]: the region has 2**order blocks
    # the reservation; the request refused last, -1: none; regions given back since then; all that were
    # given, and their slots
    numbers: Ints


def new_cache(kind: ContiguousKind, config: EngineConfig) -> Cache:
    """An empty memory of all blocks but the null block."""
    seats = config.max_num_seqs + 1
    return Cache(
        *new_buddy(config.num_gpu_blocks - 1),
        starts=np.zeros(seats, np.int64),
        orders=np.zeros(seats, np.int64),
        numbers=np.array([RESERVATIONS.index(kind.reservation), -1, 0, 0, 0], np.int64),
    )


def metadata(core: Core) -> tuple[float, float]:
    """Regions given so far, one entry each, and their slots."""
    numbers = core.cache.numbers
    return float(numbers[REGIONS]), float(numbers[SLOTS])


@verb
def memory(core: Core) -> Buddy:
    """The engine's memory, to the verbs of sim/buddy.py."""
    return Buddy(core.cache.chunks, core.cache.sizes)


@verb
def wanted_slots(core: Core, slot: int) -> int:
    """Tokens that a request's region is to hold."""
    requests = core.requests
    reservation = core.cache.numbers[RESERVATION]
    output_len = requests[R.output_len, slot]
    if reservation == POW2:
        output_len = 1 << order_of(output_len)
    elif reservation == MAX:
        output_len = core.config.max_model_len
    wanted: int = min(requests[R.prompt_len, slot] + output_len, core.config.max_model_len)
    return wanted


@verb
def held_slots(core: Core, slot: int) -> int:
    """Tokens that a running request's region has room for."""
    order = core.cache.orders[core.requests[R.seat, slot]]
    held: int = core.config.block_size << order
    return held


@verb
def is_still_blocked(core: Core, slot: int, coming_changes: int) -> bool:
    """Whether the head was refused and no region has been given back since."""
    numbers = core.cache.numbers
    blocked: bool = numbers[BLOCKED] == core.requests[R.request_id, slot] and numbers[RELEASES] == 0
    return blocked


@verb
def note_blocked(core: Core, slot: int, num_hit_tokens: int) -> None:
    """Remember the head that was refused."""
    core.cache.numbers[BLOCKED] = core.requests[R.request_id, slot]
    core.cache.numbers[RELEASES] = 0


@verb
def allocate_slots(core: Core, slot: int, num_new_tokens: int, num_hit_tokens: int) -> bool:
    """Give a waiting request its region, for all tokens that it will have; False if none is free."""
    cache = core.cache
    requests = core.requests
    block_size = core.config.block_size
    order = order_of((wanted_slots(core, slot) + block_size - 1) // block_size)
    if not can_allocate(memory(core), order, 1):
        return False
    seat = requests[R.seat, slot]
    cache.starts[seat] = allocate(memory(core), order)
    cache.orders[seat] = order
    core.pool.count[FREE] -= 1 << order
    cache.numbers[REGIONS] += 1
    cache.numbers[SLOTS] += block_size << order
    requests[R.num_blocks, slot] = 1 << order
    requests[R.edge, slot] = NEVER
    return True


@verb
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """A region holds all that its request will have, so its edge is never met."""
    return True


@verb
def free(core: Core, slot: int) -> None:
    """Take a request's region back; a waiting one has none."""
    cache = core.cache
    requests = core.requests
    if requests[R.num_blocks, slot] > 0:
        seat = requests[R.seat, slot]
        order = cache.orders[seat]
        release(memory(core), cache.starts[seat], order)
        core.pool.count[FREE] += 1 << order
        cache.numbers[RELEASES] += 1
    requests[R.num_blocks, slot] = 0
