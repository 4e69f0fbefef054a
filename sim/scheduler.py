"""One engine step: which requests run, and how many tokens of each.

Mirrors v1/core/sched/scheduler.Scheduler.schedule and, for async_scheduling, AsyncScheduler.
Requests that run come first, then the waiting queue; see sim/update.py for the other half.
"""

from __future__ import annotations

from sim._jit import hot, inlined, verb
from sim.caches import (
    allocate_slots,
    choose_victim,
    computed_when_scheduled,
    cut_chunk,
    extend,
    get_computed_tokens,
    is_still_blocked,
    note_blocked,
    num_sequences,
    order_waiting,
    preempt,
    queue_again,
    take_seat,
)
from sim.chains import NO_ROOM
from sim.columns import K, Q, R, S, T, W
from sim.core import NO_SEAT, PREEMPTED, RUNNING, Core
from sim.prompt_fates import has_room, note_admission, note_computed
from sim.step_shape import update_after_schedule
from sim.waiting import push, remove_at


@inlined
def schedule(core: Core, step: int) -> int:
    """Choose the next step's work and write it to the in-flight row `step`.

    Returns how many requests it schedules, or NO_ROOM when a table must grow first: call
    again after that, and it goes on where it stopped.
    """
    count = core.count
    if count[K.admitting_budget] < 0:
        count[K.num_preempted] = 0
        count[K.num_admitted] = 0
        count[K.step_size + step] = 0
        budget = schedule_running(core, step)
        # Scheduler.schedule: a step that preempts admits nobody
        count[K.admitting_budget] = budget if count[K.num_preempted] == 0 else 0
        count[K.head_refused] = count[K.num_preempted] > 0
    if not schedule_waiting(core, step):
        return NO_ROOM
    count[K.admitting_budget] = -1
    for i in range(count[K.num_aside]):
        push(core, core.queues[Q.aside, i])
    count[K.num_aside] = 0
    count[K.finished_unflushed] = 0
    return update_after_schedule(core, step)


@verb
def prefill_threshold(core: Core) -> int:
    """The cap on one request's tokens in a step; a lone request has none (0)."""
    if core.count[K.num_running] + core.count[K.num_waiting] + core.count[K.num_aside] > 1:
        return core.config.long_prefill_token_threshold
    return 0


@hot
def schedule_running(core: Core, step: int) -> int:
    """Schedule the running requests in order, preempting from the tail; returns the budget left."""
    config = core.config
    requests = core.requests
    count = core.count
    running = core.queues[Q.running]
    step_request = core.steps[S.slot, step]
    step_tokens = core.steps[S.tokens, step]
    budget = config.max_num_batched_tokens
    threshold = prefill_threshold(core)
    size = 0
    index = 0
    while index < count[K.num_running] and budget > 0:
        slot = running[index]
        computed = requests[R.num_computed, slot]
        placeholders = requests[R.placeholders, slot]
        if (
            placeholders > 0
            and computed + 2 - placeholders >= requests[R.prompt_len, slot] + requests[R.max_tokens, slot]
        ):
            index += 1  # async: its last token is already in flight
            continue
        num_new = requests[R.num_tokens, slot] + placeholders - computed
        if 0 < threshold < num_new:
            num_new = threshold
        width = num_sequences(core, slot, computed)
        num_new = cut_chunk(core, slot, computed, num_new)
        num_new = min(num_new, budget // width, config.max_model_len - computed - 1)
        if num_new <= 0:
            index += 1
            continue
        if computed + num_new >= requests[R.edge, slot]:
            placed = extend(core, slot, num_new)
            while not placed:
                victim_index = choose_victim(core)
                victim = running[victim_index]
                count[K.num_running] -= 1
                for i in range(victim_index, count[K.num_running]):
                    running[i] = running[i + 1]
                if victim_index < index:
                    index -= 1
                    for i in range(size):
                        if step_request[i] == victim:
                            victim_computed = requests[R.num_computed, victim]
                            budget += step_tokens[i] * num_sequences(core, victim, victim_computed)
                            size -= 1
                            for k in range(i, size):
                                step_request[k] = step_request[k + 1]
                                step_tokens[k] = step_tokens[k + 1]
                            break
                preempt_request(core, victim)
                if victim == slot:
                    break
                placed = extend(core, slot, num_new)
            if not placed:
                if config.priority_policy:
                    continue
                break
        step_request[size] = slot
        step_tokens[size] = num_new
        size += 1
        budget -= num_new * width
        index += 1
    count[K.step_size + step] = size
    return budget


@inlined
def preempt_request(core: Core, slot: int) -> None:
    """Free a running request's blocks and queue it again; its tokens stay (Scheduler._preempt_request)."""
    requests = core.requests
    if core.config.token_fates and computed_when_scheduled(core):
        note_computed(core, slot, requests[R.num_computed, slot])
    requests[R.num_computed, slot] = preempt(core, slot)
    requests[R.status, slot] = PREEMPTED
    requests[R.placeholders, slot] = 0
    requests[R.stale, slot] = requests[R.in_flight, slot]
    requests[R.num_preemptions, slot] += 1
    core.count[K.num_preemptions] += 1
    core.queues[Q.preempted, core.count[K.num_preempted]] = slot
    core.count[K.num_preempted] += 1
    queue_again(core, slot)


@verb
def schedule_waiting(core: Core, step: int) -> bool:
    """Admit from the waiting queue until the budget, the seats or the blocks end.

    False if it stopped because the chain tree or the history is full (the budget left is noted).
    """
    config = core.config
    requests = core.requests
    count = core.count
    queues = core.queues
    threshold = prefill_threshold(core)
    if count[K.admitting_budget] > 0:
        order_waiting(core)
    while (
        count[K.admitting_budget] > 0
        and count[K.num_waiting] > 0
        and count[K.num_running] < config.max_num_seqs
    ):
        slot = queues[Q.waiting, 0]
        if requests[R.stale, slot] > 0 or (config.max_loras > 0 and lacks_lora_place(core, slot)):
            queues[Q.aside, count[K.num_aside]] = remove_at(core, 0)
            count[K.num_aside] += 1
            continue
        if is_still_blocked(core, slot, 0):
            count[K.head_refused] = 1
            break
        if requests[R.seat, slot] == NO_SEAT and not take_seat(core, slot):
            return False
        if config.token_fates and not has_room(core, slot):
            return False
        num_hit = get_computed_tokens(core, slot)
        count[K.num_lookups] += 1
        num_new = requests[R.num_tokens, slot] - num_hit
        if 0 < threshold < num_new:
            num_new = threshold
        if not config.enable_chunked_prefill and num_new > count[K.admitting_budget]:
            break
        width = num_sequences(core, slot, num_hit)
        if width > count[K.admitting_budget]:
            break
        num_new = min(cut_chunk(core, slot, num_hit, num_new), count[K.admitting_budget] // width)
        if not allocate_slots(core, slot, num_new, num_hit):
            note_blocked(core, slot, num_hit)
            count[K.head_refused] = 1
            break  # Scheduler.schedule: nobody overtakes a blocked head
        if config.token_fates:
            note_admission(core, step, slot, num_hit, num_new)
        admit(core, slot, num_hit)
        size = count[K.step_size + step]
        core.steps[S.slot, step, size] = slot
        core.steps[S.tokens, step, size] = num_new
        count[K.step_size + step] = size + 1
        count[K.admitting_budget] -= num_new * width
    return True


@verb
def lacks_lora_place(core: Core, slot: int) -> bool:
    """Whether as many adapters run as may, and this request's is not among them."""
    requests = core.requests
    running = core.queues[Q.running]
    adapter = requests[R.lora, slot]
    if adapter == 0:
        return False
    distinct = 0
    for i in range(core.count[K.num_running]):
        other = requests[R.lora, running[i]]
        if other == adapter:
            return False
        if other != 0:
            first = True
            for k in range(i):
                if requests[R.lora, running[k]] == other:
                    first = False
                    break
            if first:
                distinct += 1
    return distinct >= core.config.max_loras


@inlined
def admit(core: Core, slot: int, hit_tokens: int) -> None:
    """Move the head of the waiting queue to the end of the running list and count its hit.

    Re-admissions after preemption are counted apart (PrefixCacheStats.record).
    """
    requests = core.requests
    count = core.count
    remove_at(core, 0)
    if requests[R.num_preemptions, slot] == 0:
        count[K.num_admissions] += 1
        count[K.queries] += requests[R.num_tokens, slot]
        count[K.hits] += hit_tokens
        requests[R.num_cached_tokens, slot] = hit_tokens
        core.times[T.scheduled_time, slot] = core.clock[W.now]
    else:
        count[K.num_readmissions] += 1
        count[K.preempted_queries] += requests[R.num_tokens, slot]
        count[K.preempted_hits] += hit_tokens
    requests[R.status, slot] = RUNNING
    requests[R.num_computed, slot] = hit_tokens
    core.queues[Q.running, count[K.num_running]] = slot
    count[K.num_running] += 1
    core.queues[Q.admitted, count[K.num_admitted]] = slot
    count[K.num_admitted] += 1
    count[K.seated_head] = -1
