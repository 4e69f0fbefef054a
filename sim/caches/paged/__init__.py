"""PagedAttention: block tables with copy-on-write, groups of sequences, reserved prefixes.

A request is a group of sequences that is scheduled and preempted whole: the n samples of its prompt, or
the candidates of its beam search. Nothing is looked up: a hit comes only from prefixes that the server
reserved before the run (section 4.4), and may end inside a block, which the first write copies.

Source: Kwon et al., SOSP'23; vLLM 0.2, core/block_manager.BlockSpaceManager and core/scheduler.Scheduler.
The engine's loop is the same for all caches. Preempted groups, swapped or not, wait in front of all
others, the last one preempted first. A group of several that is recomputed computes its prompt once,
then the outputs of each sequence; only blocks of the prompt are shared from then on. The host has room
for all that is swapped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sim._jit import entry, hot, verb
from sim.blocks import FREE, BlockPool, take
from sim.cache_kinds import EquippedPaged, PagedKind
from sim.caches.paged.block_tables import (
    COPIES,
    ENTRIES,
    RESERVED,
    SWAPPED_IN,
    SWAPPED_OUT,
    BlockTables,
    blocks_to_write,
    forget_swapped,
    fork,
    mix,
    new_tables,
    release,
    reorder,
    share,
    swap_in,
    swap_out,
    widened_tables,
    write,
)
from sim.chains import ChainTree
from sim.columns import B, K, Q, R
from sim.core import Core, EngineConfig
from sim.request import Floats, Ints
from sim.seats import leave_plain_seat

RECOMPUTE, SWAP, BY_WIDTH = range(3)  # how a group is preempted
SEQUENCES, MODE, SEED, NUM_NUMBERS = range(4)  # Cache.numbers
(
    STEP_ENTRIES, STEP_BLOCKS, STEP_COPIES, STEP_SWAPPED_OUT, STEP_SWAPPED_IN, STEP_SECONDS, STEP_RESERVED,
    NUM_SUMS,
) = range(8)  # fmt: skip  # Cache.sums

LABELS = {
    "blocks_saved_by_sharing": "Blocks saved by sharing (%)",
    "num_cow_copies": "Blocks copied on write",
    "num_blocks_swapped_out": "Blocks swapped out",
    "num_blocks_swapped_in": "Blocks swapped in",
    "copy_time": "Time of copies and swaps (s)",
}

_take = entry(take)


class Cache(NamedTuple):
    """What this cache keeps beside the engine's pool."""

    tables: BlockTables  # rows seat * width up to seat * width + width - 1 are a seat's
    on_host: Ints  # [seat]: blocks of a swapped group, 0: it runs
    prefix_start: Ints  # [prefix group]: where its blocks begin below
    prefix_len: Ints  # [prefix group]: reserved tokens
    prefix_blocks: Ints
    numbers: Ints  # running sequences, preemption mode, the seed of beams
    # over steps: table entries, blocks in use, copies, blocks swapped out and in, seconds, reserved blocks
    sums: Floats
    seconds: Floats  # to copy a block, and to swap one


def new_cache(kind: PagedKind, config: EngineConfig) -> Cache:
    """Empty tables, where no prefix is reserved yet: see `equip`."""
    known = kind if isinstance(kind, EquippedPaged) else EquippedPaged()
    mode = BY_WIDTH if kind.preemption_mode is None else ("recompute", "swap").index(kind.preemption_mode)
    seats = config.max_num_seqs + 1
    lens = np.array(known.prefix_lens, np.int64)
    num_blocks = -(-lens // config.block_size)
    return Cache(
        tables=new_tables(
            seats, 1, min(-(-config.max_model_len // config.block_size), config.num_gpu_blocks) + 1,
            config.num_gpu_blocks,
        ),
        on_host=np.zeros(seats, np.int64),
        prefix_start=np.cumsum(num_blocks) - num_blocks,
        prefix_len=lens,
        prefix_blocks=np.zeros(int(num_blocks.sum()), np.int64),
        numbers=np.array([0, mode, known.seed], np.int64),
        sums=np.zeros(NUM_SUMS),
        seconds=np.array([known.copy_seconds, known.swap_seconds]),
    )  # fmt: skip


def begin(cache: Cache, pool: BlockPool, tree: ChainTree) -> None:
    """Take the blocks of reserved prefixes out of the pool, for good. Modifies all three."""
    for i in range(len(cache.prefix_blocks)):
        cache.prefix_blocks[i] = _take(pool, tree, 0)
    cache.tables.marks[cache.prefix_blocks] = RESERVED
    cache.tables.count[ENTRIES] += len(cache.prefix_blocks)


def widened(cache: Cache, width: int) -> Cache:
    """Tables for groups of up to `width` sequences; itself if they are wide enough."""
    if width <= len(cache.tables.children):
        return cache
    return cache._replace(tables=widened_tables(cache.tables, width))


def figures(sums: Floats) -> dict[str, Any]:
    """What the summary says of sharing, copies and swaps.

    blocks_saved_by_sharing: 1 - blocks in use / table entries, each summed over steps; an entry is a
    block that would be needed without sharing (section 6.3). None where prefixes are reserved: their
    blocks are in use whether anybody shares them or not.
    """
    entries, blocks, copies, swapped_out, swapped_in, seconds, reserved = sums.tolist()
    return {
        "blocks_saved_by_sharing": 1.0 - blocks / entries if entries > 0 and reserved == 0 else None,
        "num_cow_copies": int(copies),
        "num_blocks_swapped_out": int(swapped_out),
        "num_blocks_swapped_in": int(swapped_in),
        "copy_time": seconds,
    }


def metadata(core: Core) -> tuple[float, float]:
    """Table entries, of reserved prefixes too, and the slots of the blocks in use, each summed over steps."""
    sums = core.cache.sums
    return float(sums[STEP_ENTRIES]), float(sums[STEP_BLOCKS] * core.config.block_size)


def audit(core: Core) -> None:
    """Assert, for tests: blocks have as many references as tables name them, and all others are free."""
    cache, requests = core.cache, core.requests
    rows = cache.tables.rows
    named = np.zeros(core.pool.blocks.shape[1], np.int64)
    np.add.at(named, cache.prefix_blocks, 1)
    entries = sequences = 0
    running = core.queues[Q.running, : core.count[K.num_running]].tolist()
    for slot in (*running, *core.queues[Q.waiting, : core.count[K.num_waiting]].tolist()):
        if (num_blocks := requests[R.num_blocks, slot]) == 0:
            continue
        width = int(requests[R.n, slot] * requests[R.beam_width, slot])
        first = requests[R.seat, slot] * len(cache.tables.children)
        table = rows[first : first + width, :num_blocks]
        assert (table != 0).all()
        np.add.at(named, table[table > 0], 1)
        if slot in running:
            assert (table > 0).all() and cache.on_host[requests[R.seat, slot]] == 0
            entries += table.size
            sequences += width
        else:
            moved = set(table[table < 0].tolist())
            assert len(moved) == -min(moved) == cache.on_host[requests[R.seat, slot]]
    assert np.array_equal(core.pool.blocks[B.ref_cnt], named)
    assert core.pool.count[FREE] == len(named) - 1 - np.count_nonzero(named)
    assert cache.tables.count[ENTRIES] == entries + len(cache.prefix_blocks)
    assert cache.numbers[SEQUENCES] == sequences <= core.config.max_num_seqs


@verb
def width_of(core: Core, slot: int) -> int:
    """The sequences of a request."""
    width: int = core.requests[R.n, slot] * core.requests[R.beam_width, slot]
    return width


@verb
def first_row(core: Core, slot: int) -> int:
    """Where the tables of a seated request begin."""
    first: int = core.requests[R.seat, slot] * len(core.cache.tables.children)
    return first


@verb
def is_swapped(core: Core, slot: int) -> bool:
    """Whether a waiting request's KV is on the host."""
    seat = core.requests[R.seat, slot]
    swapped: bool = seat >= 0 and core.cache.on_host[seat] > 0
    return swapped


@verb
def runs_decodes(core: Core) -> bool:
    """Each step asks for a free block for each sequence, and counts what is shared."""
    return False


@verb
def num_sequences(core: Core, slot: int, num_computed: int) -> int:
    """The prompt is computed once, outputs by each sequence."""
    if num_computed < core.requests[R.prompt_len, slot]:
        return 1
    return width_of(core, slot)


@verb
def cut_chunk(core: Core, slot: int, num_computed: int, num_new_tokens: int) -> int:
    """A group's step computes prompt or outputs: after a preemption there may be both to compute."""
    rest = core.requests[R.prompt_len, slot] - num_computed
    if rest > 0 and width_of(core, slot) > 1:
        num_new_tokens = min(num_new_tokens, rest)
    return num_new_tokens


@verb
def get_computed_tokens(core: Core, slot: int) -> int:
    """Of a swapped group what it had computed, else the reserved prefix, but for the prompt's last token."""
    requests = core.requests
    cache = core.cache
    if is_swapped(core, slot):
        kept: int = requests[R.num_computed, slot]
        return kept
    group = requests[R.prefix_group, slot]
    if group < 0 or group >= len(cache.prefix_len) or requests[R.namespace, slot] != 0:
        return 0
    hit: int = min(cache.prefix_len[group], requests[R.prompt_len, slot] - 1)
    return hit


@verb
def watermark_blocks(core: Core) -> int:
    """Blocks that an admission must leave free (BlockSpaceManager.watermark_blocks)."""
    return int(core.config.watermark * core.config.num_gpu_blocks)


@hot
def allocate_slots(core: Core, slot: int, num_new_tokens: int, num_hit_tokens: int) -> bool:
    """Take blocks for all tokens that a waiting group has; False if they or its sequences' places lack."""
    numbers = core.cache.numbers
    width = width_of(core, slot)
    if numbers[SEQUENCES] + width > core.config.max_num_seqs:
        return False
    if is_swapped(core, slot):
        placed = swap_group_in(core, slot, width)
    else:
        placed = allocate_group(core, slot, width, num_hit_tokens)
    if placed:
        numbers[SEQUENCES] += width
    return placed


@verb
def swap_group_in(core: Core, slot: int, width: int) -> bool:
    """As BlockSpaceManager.can_swap_in and swap_in: with a free block for each sequence besides."""
    cache = core.cache
    requests = core.requests
    seat = requests[R.seat, slot]
    if core.pool.count[FREE] - cache.on_host[seat] - width < watermark_blocks(core):
        return False
    num_blocks = requests[R.num_blocks, slot]
    first = first_row(core, slot)
    swap_in(cache.tables, core.pool, core.tree, first, width, num_blocks, requests[R.owner, slot])
    cache.on_host[seat] = 0
    if requests[R.num_tokens, slot] >= requests[R.edge, slot]:
        append(core, slot, width, requests[R.num_computed, slot], requests[R.num_tokens, slot])
    return True


@verb
def allocate_group(core: Core, slot: int, width: int, num_hit_tokens: int) -> bool:
    """As BlockSpaceManager.can_allocate and allocate: the whole prompt, shared by all sequences."""
    cache = core.cache
    requests = core.requests
    block_size = core.config.block_size
    prompt_len = requests[R.prompt_len, slot]
    num_tokens = requests[R.num_tokens, slot]
    prompt_blocks = (prompt_len + block_size - 1) // block_size
    needed = prompt_blocks - num_hit_tokens // block_size
    if num_tokens > prompt_len:
        needed += width * ((num_tokens + block_size - 1) // block_size - prompt_blocks)
        if prompt_len % block_size != 0:
            needed += width - 1
    if core.pool.count[FREE] - needed < watermark_blocks(core):
        return False
    tables = cache.tables
    first = first_row(core, slot)
    owner = requests[R.owner, slot]
    num_blocks = (num_hit_tokens + block_size - 1) // block_size
    if num_blocks > 0:
        start = cache.prefix_start[requests[R.prefix_group, slot]]
        share(tables, core.pool, first, cache.prefix_blocks[start : start + num_blocks], num_blocks)
    requests[R.num_blocks, slot] = write(
        tables, core.pool, core.tree, block_size, first, 1, num_blocks, num_hit_tokens, prompt_len, owner
    )
    for j in range(1, width):
        fork(tables, core.pool, first, first + j, requests[R.num_blocks, slot])
    requests[R.edge, slot] = prompt_len + 1
    if num_tokens > prompt_len:
        append(core, slot, width, prompt_len, num_tokens)
    return True


@hot
def append(core: Core, slot: int, width: int, start: int, end: int) -> None:
    """Make a group's tokens from `start` to `end` writable; their number is what the edge lies behind."""
    requests = core.requests
    requests[R.num_blocks, slot] = write(
        core.cache.tables, core.pool, core.tree, core.config.block_size, first_row(core, slot), width,
        requests[R.num_blocks, slot], start, end, requests[R.owner, slot],
    )  # fmt: skip
    requests[R.edge, slot] = end + 1


@hot
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """One more token for each sequence, if each could have a block (BlockSpaceManager.can_append_slot)."""
    requests = core.requests
    width = width_of(core, slot)
    start = requests[R.num_computed, slot]
    end = start + num_new_tokens
    block_size = core.config.block_size
    if blocks_to_write(block_size, width, requests[R.num_blocks, slot], start, end) > core.pool.count[FREE]:
        return False
    append(core, slot, width, start, end)
    return True


@verb
def preempt(core: Core, slot: int) -> int:
    """Swap a group out or drop its blocks; returns how many of its tokens keep their KV.

    As Scheduler._preempt: by default recomputation for one sequence, and swapping for several.
    """
    cache = core.cache
    requests = core.requests
    width = width_of(core, slot)
    mode = cache.numbers[MODE]
    if mode == RECOMPUTE or (mode == BY_WIDTH and width == 1):
        free(core, slot)
        leave_plain_seat(core, slot)
        return 0
    num_blocks = requests[R.num_blocks, slot]
    moved = swap_out(cache.tables, core.pool, first_row(core, slot), width, num_blocks)
    cache.on_host[requests[R.seat, slot]] = moved
    cache.numbers[SEQUENCES] -= width
    computed: int = requests[R.num_computed, slot]
    return computed


@hot
def after_step(core: Core, slot: int, num_tokens: int, sampled: bool) -> None:
    """A beam search's candidates draw their parents; the first ones come of one prompt."""
    requests = core.requests
    width = requests[R.beam_width, slot]
    num_outputs = requests[R.num_tokens, slot] - requests[R.prompt_len, slot]
    if sampled and width > 1 and num_outputs > 0:
        seed = mix(core.cache.numbers[SEED] ^ mix(requests[R.request_id, slot] & 0xFFFFFFFF))
        num_blocks = requests[R.num_blocks, slot]
        reorder(core.cache.tables, core.pool, first_row(core, slot), width, num_blocks, seed, num_outputs)


@hot
def free(core: Core, slot: int) -> None:
    """Drop all tables of a group, running or swapped; a waiting one has none."""
    cache = core.cache
    requests = core.requests
    num_blocks = requests[R.num_blocks, slot]
    if num_blocks > 0:
        width = width_of(core, slot)
        if is_swapped(core, slot):
            forget_swapped(cache.tables, core.pool, first_row(core, slot), width, num_blocks)
            cache.on_host[requests[R.seat, slot]] = 0
        else:
            release(cache.tables, core.pool, first_row(core, slot), width, num_blocks)
            cache.numbers[SEQUENCES] -= width
    requests[R.num_blocks, slot] = 0


@verb
def transfer_time(core: Core) -> float:
    """Seconds of the copies and swaps that the step being scheduled asks for; adds up what it shares."""
    cache = core.cache
    count = cache.tables.count
    sums = cache.sums
    copies = count[COPIES] - sums[STEP_COPIES]
    swapped = count[SWAPPED_OUT] - sums[STEP_SWAPPED_OUT] + (count[SWAPPED_IN] - sums[STEP_SWAPPED_IN])
    seconds: float = copies * cache.seconds[0] + swapped * cache.seconds[1]
    sums[STEP_ENTRIES] += count[ENTRIES]
    sums[STEP_RESERVED] += len(cache.prefix_blocks)
    sums[STEP_BLOCKS] += core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
    sums[STEP_COPIES] = count[COPIES]
    sums[STEP_SWAPPED_OUT] = count[SWAPPED_OUT]
    sums[STEP_SWAPPED_IN] = count[SWAPPED_IN]
    sums[STEP_SECONDS] += seconds
    return seconds
