"""A contiguous region of memory for each sequence, as Orca keeps KV: nothing is shared.

Orca's code is not public; this is the baseline of the PagedAttention paper (section 6.1, and the
BuddyBlockSpaceManager of its authors' experiments): a buddy allocator gives a request, when it is
admitted, room for its prompt and for as many output tokens as the reservation says, in whole blocks and
rounded up to a power of two of them, and takes the region back at its end.

- oracle: the true length of the answer, which no system knows;
- pow2: that length rounded up to a power of two;
- max: all that max_model_len leaves.

Requests are admitted first come, first served: one that does not fit waits, and so do those behind it.
None outgrows its region, so none is preempted, and the watermark has no meaning here. Each sample of a
prompt, or candidate of a beam search, has a region with a copy of the prompt in it; the time to copy, also
where a candidate goes on from another's outputs, is not counted, to the advantage of this cache.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import verb
from sim.blocks import FREE
from sim.cache_kinds import RESERVATIONS, ContiguousKind
from sim.caches.contiguous.buddy import (
    NONE,
    ORDER,
    Buddy,
    allocate,
    can_allocate,
    new_buddy,
    order_of,
    release,
)
from sim.columns import K, Q, R
from sim.core import Core, EngineConfig
from sim.request import Ints

ORACLE, POW2, MAX = range(3)
RESERVATION, BLOCKED, RELEASES, SEQUENCES, REGIONS, SLOTS = range(6)  # Cache.numbers
NEVER = 1 << 62


class Cache(NamedTuple):
    """The memory, in blocks, and who has which regions of it."""

    chunks: Ints  # with `sizes`, a Buddy
    sizes: Ints
    starts: Ints  # [seat, j]: the first block of sequence j's region
    orders: Ints  # [seat]: each of its regions has 2**order blocks
    # the reservation; the head refused last, -1: none; regions given back since then; running sequences;
    # all regions that were given, and their slots
    numbers: Ints


def new_cache(kind: ContiguousKind, config: EngineConfig) -> Cache:
    """An empty memory of all blocks but the null block."""
    seats = config.max_num_seqs + 1
    return Cache(
        *new_buddy(config.num_gpu_blocks - 1),
        starts=np.zeros((seats, 1), np.int64),
        orders=np.zeros(seats, np.int64),
        numbers=np.array([RESERVATIONS.index(kind.reservation), -1, 0, 0, 0, 0], np.int64),
    )


def metadata(core: Core) -> tuple[float, float]:
    """Regions given so far, one entry each, and their slots."""
    numbers = core.cache.numbers
    return float(numbers[REGIONS]), float(numbers[SLOTS])


def audit(core: Core) -> None:
    """Assert, for tests: regions and free chunks cover the memory once, and hold their requests."""
    cache, requests = core.cache, core.requests
    owners = np.zeros(core.config.num_gpu_blocks - 1, np.int64)
    sequences = 0
    for slot in core.queues[Q.running, : core.count[K.num_running]]:
        width = int(requests[R.n, slot] * requests[R.beam_width, slot])
        sequences += width
        size = 1 << int(cache.orders[requests[R.seat, slot]])
        for start in cache.starts[requests[R.seat, slot], :width].tolist():
            owners[start : start + size] += 1
        assert requests[R.num_computed, slot] <= size * core.config.block_size
    assert core.pool.count[FREE] == np.count_nonzero(owners == 0)
    for start in np.flatnonzero(cache.chunks[ORDER] != NONE).tolist():
        owners[start : start + (1 << int(cache.chunks[ORDER, start]))] += 1
    assert (owners == 1).all()
    assert cache.numbers[SEQUENCES] == sequences


def widened(cache: Cache, width: int) -> Cache:
    """Places for groups of up to `width` sequences; itself if they are wide enough."""
    seats, have = cache.starts.shape
    if width <= have:
        return cache
    starts = np.zeros((seats, width), np.int64)
    starts[:, :have] = cache.starts
    return cache._replace(starts=starts)


@verb
def num_tables(core: Core, slot: int, num_computed: int) -> int:
    """The sequences of a request, each with a region from the first: n samples, or a search's candidates."""
    width: int = core.requests[R.n, slot] * core.requests[R.beam_width, slot]
    return width


@verb
def num_sequences(core: Core, slot: int, num_computed: int) -> int:
    """The prompt is computed once and copied, outputs by each sequence."""
    if num_computed < core.requests[R.prompt_len, slot]:
        return 1
    return num_tables(core, slot, num_computed)


@verb
def memory(core: Core) -> Buddy:
    """The engine's memory, to the verbs of sim/caches/contiguous/buddy.py."""
    return Buddy(core.cache.chunks, core.cache.sizes)


@verb
def wanted_slots(core: Core, slot: int) -> int:
    """Tokens that a region of a request is to hold."""
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
    """Tokens that a region of a running request has room for."""
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
    """Give a waiting request regions for all tokens that it will have; False if they or its places lack."""
    cache = core.cache
    requests = core.requests
    block_size = core.config.block_size
    order = order_of((wanted_slots(core, slot) + block_size - 1) // block_size)
    width = num_tables(core, slot, 0)
    if cache.numbers[SEQUENCES] + width > core.config.max_num_seqs:
        return False
    if not can_allocate(memory(core), order, width):
        return False
    seat = requests[R.seat, slot]
    for j in range(width):
        cache.starts[seat, j] = allocate(memory(core), order)
    cache.orders[seat] = order
    cache.numbers[SEQUENCES] += width
    core.pool.count[FREE] -= width << order
    cache.numbers[REGIONS] += width
    cache.numbers[SLOTS] += width * (block_size << order)
    requests[R.num_blocks, slot] = 1 << order
    requests[R.edge, slot] = NEVER
    return True


@verb
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """A region holds all that its request will have, so its edge is never met."""
    return True


@verb
def free(core: Core, slot: int) -> None:
    """Take a request's regions back; a waiting one has none."""
    cache = core.cache
    requests = core.requests
    if requests[R.num_blocks, slot] > 0:
        seat = requests[R.seat, slot]
        order = cache.orders[seat]
        width = num_tables(core, slot, 0)
        for j in range(width):
            release(memory(core), cache.starts[seat, j], order)
        core.pool.count[FREE] += width << order
        cache.numbers[SEQUENCES] -= width
        cache.numbers[RELEASES] += width
    requests[R.num_blocks, slot] = 0
