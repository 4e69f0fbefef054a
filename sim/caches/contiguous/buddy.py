"""Buddy allocation: regions of 2**k adjacent units, out of a memory of any number of them.

The memory is cut into the powers of two that add up to it, largest first, so a chunk's start is a
multiple of its size. A request takes the smallest free chunk that holds it, halved as long as one half
would do; a region given back joins its other half, its buddy, as soon as both are free. Of chunks of one
size the one freed last goes first (a stack), and of two halves the lower.

Each verb takes time of the order of the number of sizes. The idea is Knowlton's (A fast storage allocator,
CACM 1965); that Orca allocates so is assumed by the PagedAttention paper, section 6.1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import verb
from sim.request import Ints

NONE = -1
ORDER, NEXT, PREV = range(3)  # rows of Buddy.chunks
HEAD, COUNT = range(2)  # rows of Buddy.sizes


class Buddy(NamedTuple):
    """A memory, and what of it is free."""

    chunks: Ints  # [row, unit]: of a free chunk that starts there its order, else NONE; its list
    sizes: Ints  # [row, order]: the first free chunk of 2**order units, or NONE; how many there are


def new_buddy(num_units: int) -> Buddy:
    """A memory of `num_units` free units."""
    chunks = np.full((3, num_units), NONE, np.int64)
    sizes = np.zeros((2, num_units.bit_length()), np.int64)
    sizes[HEAD] = NONE
    start = 0
    for order in reversed(range(num_units.bit_length())):
        if num_units >> order & 1:
            chunks[ORDER, start] = order
            sizes[HEAD, order] = start
            sizes[COUNT, order] = 1
            start += 1 << order
    return Buddy(chunks, sizes)


@verb
def order_of(size: int) -> int:
    """The least k with 2**k >= size; `size` is at least 1."""
    order = 0
    while 1 << order < size:
        order += 1
    return order


@verb
def can_allocate(buddy: Buddy, order: int, number: int) -> bool:
    """Whether so many regions of 2**order units can be taken, one after the other."""
    room = 0
    for size in range(order, buddy.sizes.shape[1]):
        room += buddy.sizes[COUNT, size] << (size - order)
    return room >= number


@verb
def allocate(buddy: Buddy, order: int) -> int:
    """Take a region of 2**order units; its first unit, or NONE, unchanged, if no free chunk holds it."""
    size = order
    while size < buddy.sizes.shape[1] and buddy.sizes[COUNT, size] == 0:
        size += 1
    if size >= buddy.sizes.shape[1]:
        return NONE
    start: int = buddy.sizes[HEAD, size]
    unlink(buddy, start, size)
    while size > order:
        size -= 1
        push(buddy, start + (1 << size), size)
    return start


@verb
def release(buddy: Buddy, start: int, order: int) -> None:
    """Give back the region of 2**order units at `start`, which `allocate` gave, and join free buddies."""
    while True:
        other = start ^ (1 << order)
        if other >= buddy.chunks.shape[1] or buddy.chunks[ORDER, other] != order:
            break
        unlink(buddy, other, order)
        start = min(start, other)
        order += 1
    push(buddy, start, order)


@verb
def push(buddy: Buddy, start: int, order: int) -> None:
    """Put a free chunk first in the list of its size."""
    head = buddy.sizes[HEAD, order]
    buddy.chunks[ORDER, start] = order
    buddy.chunks[NEXT, start] = head
    buddy.chunks[PREV, start] = NONE
    if head != NONE:
        buddy.chunks[PREV, head] = start
    buddy.sizes[HEAD, order] = start
    buddy.sizes[COUNT, order] += 1


@verb
def unlink(buddy: Buddy, start: int, order: int) -> None:
    """Take a free chunk out of the list of its size."""
    before = buddy.chunks[PREV, start]
    after = buddy.chunks[NEXT, start]
    buddy.chunks[ORDER, start] = NONE
    buddy.sizes[COUNT, order] -= 1
    if before == NONE:
        buddy.sizes[HEAD, order] = after
    else:
        buddy.chunks[NEXT, before] = after
    if after != NONE:
        buddy.chunks[PREV, after] = before
