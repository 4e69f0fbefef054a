"""What follows a step: sampled tokens, ends of requests, their blocks and records.

Mirrors v1/core/sched/scheduler.Scheduler.update_from_output and AsyncScheduler's override.
"""

from __future__ import annotations

from sim._jit import hot, verb
from sim.caches import after_step, computed_when_scheduled, free, leave_seat, num_sequences
from sim.columns import K, Q, R, S, T, W
from sim.core import RUNNING, VACANT, Core
from sim.fates import MISSES
from sim.histogram import bin_of
from sim.prompt_fates import note_computed
from sim.waiting import remove_request

# how a request ended, in its record
BY_LENGTH, BY_STOP_TOKEN, BY_ABORT = range(3)
NUM_MISSES = len(MISSES)


@hot
def update_from_output(core: Core, step: int) -> None:
    """Apply the outputs of the in-flight row `step` at the time clock[W.now]."""
    requests = core.requests
    count = core.count
    now = core.clock[W.now]
    before = core.clock[W.last_update]
    in_rhythm = 0  # sequences whose previous token came with the previous step
    ended = False
    for i in range(count[K.step_size + step]):
        slot = core.steps[S.slot, step, i]
        if requests[R.request_id, slot] != core.steps[S.request_id, step, i]:
            continue  # it ended meanwhile
        num_new = core.steps[S.tokens, step, i]
        requests[R.in_flight, slot] -= num_new
        stale = requests[R.stale, slot] > 0
        if stale:
            requests[R.stale, slot] -= num_new
        sampled = core.steps[S.samples, step, i] != 0
        if not stale and requests[R.status, slot] == RUNNING:
            num_computed = requests[R.num_computed, slot] - requests[R.in_flight, slot]
            after_step(core, slot, num_computed, sampled)
        if not sampled:
            continue
        num_tokens = requests[R.num_tokens, slot] + 1
        requests[R.num_tokens, slot] = num_tokens
        num_outputs = num_tokens - requests[R.prompt_len, slot]
        width = num_sequences(core, slot, requests[R.num_computed, slot])
        if num_outputs == 1:
            core.times[T.first_token_time, slot] = now
        elif core.times[T.last_token_time, slot] == before:
            in_rhythm += width
        else:
            add_latencies(core, now - core.times[T.last_token_time, slot], width)
        core.times[T.last_token_time, slot] = now
        if core.config.async_scheduling and not stale and requests[R.placeholders, slot] > 0:
            requests[R.placeholders, slot] -= 1
        if num_outputs >= requests[R.output_len, slot] or num_tokens >= core.config.max_model_len:
            stopped = (
                num_outputs >= requests[R.output_len, slot]
                and requests[R.output_len, slot] < requests[R.max_tokens, slot]
            )
            if requests[R.status, slot] == RUNNING:
                ended = True
            finish_request(core, slot, BY_STOP_TOKEN if stopped else BY_LENGTH)
    if in_rhythm > 0:
        add_latencies(core, now - before, in_rhythm)
    core.clock[W.last_update] = now
    if ended:
        drop_ended(core)


@verb
def add_latencies(core: Core, latency: float, times: int) -> None:
    """Count an inter-token latency `times` times."""
    core.itl_histogram[bin_of(latency)] += times
    core.count[K.itl_count] += times
    core.clock[W.itl_sum] += times * latency
    core.clock[W.itl_sum_squares] += times * (latency * latency)


@verb
def drop_ended(core: Core) -> None:
    """Take requests that no longer run out of the running list, keeping its order."""
    running = core.queues[Q.running]
    kept = 0
    for i in range(core.count[K.num_running]):
        slot = running[i]
        if core.requests[R.status, slot] == RUNNING:
            running[kept] = slot
            kept += 1
    core.count[K.num_running] = kept


@verb
def finish_request(core: Core, slot: int, reason: int) -> None:
    """Free a request's blocks at once, record it, and vacate its slot.

    A running request stays in the running list until `drop_ended` (Scheduler._free_request frees
    inside the loop over the step, one request at a time, and removes them after it).
    """
    requests = core.requests
    count = core.count
    if requests[R.status, slot] != RUNNING:
        remove_request(core, slot)
    if core.config.token_fates and computed_when_scheduled(core):
        note_computed(core, slot, requests[R.num_computed, slot])
    free(core, slot)
    leave_seat(core, slot)
    count[K.finished_unflushed] += 1
    record(core, slot, reason)


@verb
def record(core: Core, slot: int, reason: int) -> None:
    """Append a request's row to the records and vacate its slot."""
    requests = core.requests
    count = core.count
    row = count[K.num_records]
    for i in range(R.RECORDED):
        core.record_ints[row, i] = requests[i, slot]
    core.record_ints[row, R.RECORDED] = requests[R.num_tokens, slot] - requests[R.prompt_len, slot]
    core.record_ints[row, R.RECORDED + 1] = reason
    if core.config.token_fates:
        for i in range(NUM_MISSES):
            core.record_ints[row, R.RECORDED + 2 + i] = requests[R.fate_evicted + i, slot]
    for i in range(T.RECORDED):
        core.record_floats[row, i] = core.times[i, slot]
    count[K.num_records] = row + 1
    if requests[R.next_sample, slot] != slot:
        leave_samples(core, slot)
    elif requests[R.watched, slot]:
        core.watched[count[K.num_watched]] = requests[R.request_id, slot]
        count[K.num_watched] += 1
    requests[R.request_id, slot] = -1
    requests[R.status, slot] = VACANT
    core.queues[Q.vacant, count[K.vacant_slots]] = slot
    count[K.vacant_slots] += 1


@verb
def leave_samples(core: Core, slot: int) -> None:
    """Take a sample that has ended out of the ring of those of its request."""
    following = core.requests[R.next_sample]
    before = following[slot]
    while following[before] != slot:
        before = following[before]
    following[before] = following[slot]
    core.count[K.extra_samples] -= 1


@verb
def abort_request(core: Core, slot: int) -> None:
    """End a running or waiting request from outside (Scheduler.finish_requests)."""
    running = core.requests[R.status, slot] == RUNNING
    finish_request(core, slot, BY_ABORT)
    if running:
        drop_ended(core)
