"""The waiting queue: a binary heap of slots that serves fcfs and priority alike.

The order is (wait_class, wait_time, rank). Under fcfs the class is a ticket: new requests draw the
next higher one, preempted requests the next lower, which is vLLM's deque with appendleft. Under
priority they are (priority, arrival time, request id), as v1/core/sched/request_queue orders.
"""

from __future__ import annotations

from sim._jit import verb
from sim.columns import K, Q, R, T
from sim.core import Core


@verb
def goes_before(core: Core, a: int, b: int) -> bool:
    """Whether slot `a` is scheduled before slot `b`."""
    requests = core.requests
    if requests[R.wait_class, a] != requests[R.wait_class, b]:
        before: bool = requests[R.wait_class, a] < requests[R.wait_class, b]
    elif core.times[T.wait_time, a] != core.times[T.wait_time, b]:
        before = core.times[T.wait_time, a] < core.times[T.wait_time, b]
    else:
        before = requests[R.rank, a] < requests[R.rank, b]
    return before


@verb
def sift_up(core: Core, place: int) -> None:
    """Move the slot at `place` of the heap up to where it belongs."""
    waiting = core.queues[Q.waiting]
    slot = waiting[place]
    while place > 0:
        parent = (place - 1) // 2
        if not goes_before(core, slot, waiting[parent]):
            break
        waiting[place] = waiting[parent]
        place = parent
    waiting[place] = slot


@verb
def push(core: Core, slot: int) -> None:
    """Put a slot into the heap by the order it already has."""
    place = core.count[K.num_waiting]
    core.queues[Q.waiting, place] = slot
    core.count[K.num_waiting] += 1
    sift_up(core, place)


@verb
def add_request(core: Core, slot: int) -> None:
    """Queue a new request (Scheduler.add_request)."""
    if core.config.priority_policy:
        core.requests[R.wait_class, slot] = core.requests[R.priority, slot]
        core.times[T.wait_time, slot] = core.times[T.arrival_time, slot]
    else:
        core.count[K.back_class] += 1
        core.requests[R.wait_class, slot] = core.count[K.back_class]
        core.times[T.wait_time, slot] = 0.0
    push(core, slot)


@verb
def prepend_request(core: Core, slot: int) -> None:
    """Queue a preempted request: under fcfs in front of all (RequestQueue.prepend_request)."""
    if not core.config.priority_policy:
        core.count[K.front_class] -= 1
        core.requests[R.wait_class, slot] = core.count[K.front_class]
    push(core, slot)


@verb
def remove_at(core: Core, place: int) -> int:
    """Take the slot at `place` out of the heap and return it."""
    waiting = core.queues[Q.waiting]
    removed: int = waiting[place]
    core.count[K.num_waiting] -= 1
    size = core.count[K.num_waiting]
    if place == size:
        return removed
    slot = waiting[size]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and goes_before(core, waiting[child + 1], waiting[child]):
            child += 1
        if not goes_before(core, waiting[child], slot):
            break
        waiting[place] = waiting[child]
        place = child
    waiting[place] = slot
    sift_up(core, place)
    return removed


@verb
def remove_request(core: Core, slot: int) -> None:
    """Take a slot out of the heap wherever it is."""
    for place in range(core.count[K.num_waiting]):
        if core.queues[Q.waiting, place] == slot:
            remove_at(core, place)
            return
