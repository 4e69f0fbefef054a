"""Seats: rows of the tables that only running requests and a few waiting ones need.

A long queue holds segments, not chain ids and block tables.
"""

from __future__ import annotations

from sim._jit import verb
from sim.chains import NO_ROOM, name_chains, release_node
from sim.columns import K, R
from sim.core import NO_SEAT, Core


@verb
def take_named_seat(core: Core, slot: int) -> bool:
    """Give a request a seat and write its chain ids there; False, unchanged, if the tree is full.

    Of the waiting requests only the head is seated: whoever was so before loses the seat.
    """
    requests = core.requests
    head = core.count[K.seated_head]
    if head >= 0:
        leave_named_seat(core, head)
    seat = core.vacant_seats[core.count[K.vacant_seats] - 1]
    first = requests[R.first_segment, slot]
    end = first + requests[R.num_segments, slot]
    node = name_chains(
        core.tree,
        core.segments,
        first,
        end,
        requests[R.namespace, slot],
        core.config.max_model_len,
        core.config.block_size,
        core.seat_chains[seat],
    )
    if node == NO_ROOM:
        return False
    core.count[K.vacant_seats] -= 1
    core.count[K.seated_head] = slot
    requests[R.seat, slot] = seat
    requests[R.node, slot] = node
    return True


@verb
def leave_named_seat(core: Core, slot: int) -> None:
    """Give the seat back, if it has one; the request must hold no blocks."""
    if core.requests[R.seat, slot] == NO_SEAT:
        return
    release_node(core.tree, core.requests[R.node, slot])
    leave_plain_seat(core, slot)


@verb
def take_plain_seat(core: Core, slot: int) -> None:
    """Give a request a seat without chain ids: of a cache that looks nothing up."""
    head = core.count[K.seated_head]
    if head >= 0:
        leave_plain_seat(core, head)
    core.count[K.vacant_seats] -= 1
    core.count[K.seated_head] = slot
    core.requests[R.seat, slot] = core.vacant_seats[core.count[K.vacant_seats]]


@verb
def leave_plain_seat(core: Core, slot: int) -> None:
    """Give the seat back, if it has one."""
    seat = core.requests[R.seat, slot]
    if seat == NO_SEAT:
        return
    core.vacant_seats[core.count[K.vacant_seats]] = seat
    core.count[K.vacant_seats] += 1
    core.requests[R.seat, slot] = NO_SEAT
    if core.count[K.seated_head] == slot:
        core.count[K.seated_head] = -1
