"""Block tables of sequence groups: fork, copy-on-write, beams, swapping, reserved prefixes.

A request is a group of `width` sequences in lockstep: all have its prompt and the same number of
outputs, so their tables have one length. Rows `first` to `first + width - 1` are theirs; a block's
reference count says how many tables, reservations among them, name it. Two tables that share a
block share all before it, since only the last block of a table is ever written.

Source: Kwon et al., SOSP'23, sections 4.2 to 4.5; vLLM 0.2 core/block_manager.BlockSpaceManager.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import hot, verb
from sim.blocks import NULL_BLOCK, BlockPool, free_blocks, insert_after, take
from sim.chains import ChainTree
from sim.columns import B
from sim.request import Ints

# BlockTables.count
ENTRIES, COPIES, SWAPPED_OUT, SWAPPED_IN, NUM_COUNTS = range(5)

RESERVED = -1  # a mark: the block holds a reserved prefix and never leaves the GPU


class BlockTables(NamedTuple):
    """The tables of all seated groups, and what is counted of them."""

    rows: Ints  # [row, i]: physical block; of a swapped group minus the number of a block on the host
    marks: Ints  # [block]: RESERVED, or 0 (while a group is swapped out: its blocks' numbers)
    moved: Ints  # [number]: room for the blocks of one group that comes back from the host
    children: Ints  # [sequence]: room for one group's beam step
    count: Ints  # type: ignore[assignment]  # [above]; the name shadows tuple.count


def new_tables(seats: int, width: int, table_len: int, num_gpu_blocks: int) -> BlockTables:
    """Empty tables for `seats` groups of at most `width` sequences of at most `table_len` blocks."""
    return BlockTables(
        rows=np.zeros((seats * width, table_len), np.int64),
        marks=np.zeros(num_gpu_blocks, np.int64),
        moved=np.zeros(num_gpu_blocks, np.int64),
        children=np.zeros(width, np.int64),
        count=np.zeros(NUM_COUNTS, np.int64),
    )


def widened_tables(tables: BlockTables, width: int) -> BlockTables:
    """The same tables with room for `width` sequences a group; modifies nothing."""
    old = len(tables.children)
    seats, table_len = len(tables.rows) // old, tables.rows.shape[1]
    rows = np.zeros((seats, width, table_len), np.int64)
    rows[:, :old] = tables.rows.reshape(seats, old, table_len)
    return tables._replace(rows=rows.reshape(-1, table_len), children=np.zeros(width, np.int64))


@verb
def unref(pool: BlockPool, block: int) -> None:
    """Drop one reference; a block without any goes to the head of the free queue (BlockAllocator.free)."""
    pool.blocks[B.ref_cnt, block] -= 1
    if pool.blocks[B.ref_cnt, block] == 0:
        insert_after(pool, NULL_BLOCK, block)


@verb
def share(tables: BlockTables, pool: BlockPool, row: int, blocks: Ints, num_blocks: int) -> None:
    """Begin an empty table with a reserved prefix, whose last block may be partial (allocate)."""
    for i in range(num_blocks):
        tables.rows[row, i] = blocks[i]
        pool.blocks[B.ref_cnt, blocks[i]] += 1
    tables.count[ENTRIES] += num_blocks


@hot
def write(
    tables: BlockTables, pool: BlockPool, tree: ChainTree, block_size: int, first: int, width: int,
    num_blocks: int, start: int, end: int, owner: int,
) -> int:  # fmt: skip
    """Make tokens `start` to `end - 1` of each sequence writable; returns the tables' new length.

    The tables have `num_blocks` blocks and hold the tokens before `start`. A last block that others
    name too is copied; its last holder writes in place (BlockSpaceManager.append_slot). The caller
    has checked that free blocks suffice, see `blocks_to_write`.
    """
    rows = tables.rows
    last = start // block_size
    if last < num_blocks:
        for row in range(first, first + width):
            block = rows[row, last]
            if pool.blocks[B.ref_cnt, block] > 1:
                pool.blocks[B.ref_cnt, block] -= 1
                rows[row, last] = take(pool, tree, owner)
                tables.count[COPIES] += 1
    length: int = max(num_blocks, (end + block_size - 1) // block_size)
    for i in range(num_blocks, length):
        for row in range(first, first + width):
            rows[row, i] = take(pool, tree, owner)
    tables.count[ENTRIES] += width * (length - num_blocks)
    return length


@verb
def blocks_to_write(block_size: int, width: int, num_blocks: int, start: int, end: int) -> int:
    """The most blocks that `write` takes: of one token, one for each sequence (can_append_slot)."""
    grows = max((end + block_size - 1) // block_size - num_blocks, 0)
    may_copy = start // block_size < num_blocks
    return width * (grows + may_copy)


@verb
def fork(tables: BlockTables, pool: BlockPool, parent: int, child: int, num_blocks: int) -> None:
    """Let an empty table name what another names (BlockSpaceManager.fork)."""
    for i in range(num_blocks):
        block = tables.rows[parent, i]
        tables.rows[child, i] = block
        pool.blocks[B.ref_cnt, block] += 1
    tables.count[ENTRIES] += num_blocks


@verb
def become(tables: BlockTables, pool: BlockPool, parent: int, child: int, num_blocks: int) -> None:
    """Drop a table and fork another in its place; what both share stays as it is."""
    rows = tables.rows
    for i in range(num_blocks - 1, -1, -1):
        block = rows[parent, i]
        if rows[child, i] == block:
            break
        pool.blocks[B.ref_cnt, block] += 1
        unref(pool, rows[child, i])
        rows[child, i] = block


@verb
def mix(x: int) -> int:
    """Scatter a number below 2**32 over those numbers; each step can be undone, so none meet.

    Multiply and xorshift: C. Wellons' "hash prospector". No product reaches 2**63.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


@verb
def draw_parent(seed: int, step: int, candidate: int, width: int) -> int:
    """The parent of a candidate: any of `width`, equally likely, whatever was drawn before.

    A counter-based generator: the draw depends on its place alone, not on the order of draws.
    """
    return (mix(mix(mix(seed) ^ step) ^ candidate) * width) >> 32


@hot
def reorder(
    tables: BlockTables, pool: BlockPool, first: int, width: int, num_blocks: int, seed: int, step: int
) -> None:
    """A beam step: each of the next `width` candidates draws its parent among the present ones.

    ASSUMED: uniform and independent; which beams survive depends on a model's probabilities. The
    first child keeps its parent's table, the others take the places of parents without children.
    """
    children = tables.children
    for j in range(width):
        children[j] = 0
    for j in range(width):
        children[draw_parent(seed, step, j, width)] += 1
    parent = 0
    for j in range(width):
        if children[j] == 0:
            while children[parent] < 2:
                parent += 1
            children[parent] -= 1
            become(tables, pool, first + parent, first + j, num_blocks)


@hot
def release(tables: BlockTables, pool: BlockPool, first: int, width: int, num_blocks: int) -> None:
    """Drop a group's tables (BlockSpaceManager.free)."""
    for row in range(first, first + width):
        free_blocks(pool, tables.rows[row], num_blocks, False)
    tables.count[ENTRIES] -= width * num_blocks


@verb
def swap_out(tables: BlockTables, pool: BlockPool, first: int, width: int, num_blocks: int) -> int:
    """Move a group to the host, each block once; returns how many (BlockSpaceManager.swap_out).

    The tables keep what is shared with what: they name numbers on the host, from 1 in the order met.
    Blocks of reserved prefixes stay, and stay named.
    """
    marks = tables.marks
    moving = 0
    for row in range(first, first + width):
        for i in range(num_blocks):
            block = tables.rows[row, i]
            if marks[block] == RESERVED:
                continue
            if marks[block] == 0:
                moving += 1
                marks[block] = moving
            tables.rows[row, i] = -marks[block]
            unref(pool, block)
            if pool.blocks[B.ref_cnt, block] == 0:
                marks[block] = 0
    tables.count[SWAPPED_OUT] += moving
    tables.count[ENTRIES] -= width * num_blocks
    return moving


@verb
def swap_in(
    tables: BlockTables, pool: BlockPool, tree: ChainTree, first: int, width: int, num_blocks: int, owner: int
) -> None:
    """Take blocks for a swapped group, as many as `swap_out` said (BlockSpaceManager.swap_in)."""
    moved = tables.moved
    moving = 0
    for row in range(first, first + width):
        for i in range(num_blocks):
            number = -tables.rows[row, i]
            if number < 0:
                continue  # reserved
            if number > moving:
                moving = number
                moved[number] = take(pool, tree, owner)
            else:
                pool.blocks[B.ref_cnt, moved[number]] += 1
            tables.rows[row, i] = moved[number]
    tables.count[SWAPPED_IN] += moving
    tables.count[ENTRIES] += width * num_blocks


@verb
def forget_swapped(tables: BlockTables, pool: BlockPool, first: int, width: int, num_blocks: int) -> None:
    """Drop the tables of a group that is on the host: it names reserved blocks only."""
    for row in range(first, first + width):
        for i in range(num_blocks):
            if tables.rows[row, i] > 0:
                unref(pool, tables.rows[row, i])
