"""Runs of pure decode steps: nobody arrives, ends or prefills, so only block boundaries need work.

Between them a step is one addition to the clock. The results are those of `schedule` and
`update_from_output` step by step, to the last bit: the same sums in the same order.
"""

from __future__ import annotations

from sim._jit import hot, inlined
from sim.blocks import FREE
from sim.caches import extend, is_still_blocked, num_sequences, runs_decodes, unblocks
from sim.columns import K, Q, R, T, W
from sim.core import Core
from sim.cost import StepCost, cpu_time, gpu_time
from sim.domain import note_domain
from sim.memory_states import add_states, adds_states, note_held
from sim.residency import set_block_time
from sim.timeseries import take_samples
from sim.update import add_latencies

NEVER = 1 << 62


@hot
def run_decodes(core: Core, cost: StepCost, now: float, horizon: float, next_ready: float) -> float:
    """Take as many decode steps as end before `horizon` and start before `next_ready`.

    For a synchronous engine with no step in flight. Leaves the rest to `schedule`: steps in which
    a request ends, prefills or is preempted, or the waiting queue may move. Returns the new time.
    """
    count = core.count
    clock = core.clock
    requests = core.requests
    times = core.times
    running = core.queues[Q.running]
    due = core.queues[Q.due]  # by place in the running list: the step at which it meets its edge
    n = count[K.num_running]
    if not runs_decodes(core) or n == 0 or n > core.config.max_num_batched_tokens:
        return now
    waits = count[K.num_waiting] > 0 and n < core.config.max_num_seqs
    if waits and core.config.max_loras > 0:
        return now
    head = core.queues[Q.waiting, 0] if waits else -1
    steps = NEVER
    first_due = NEVER
    decode_kv = 0
    before = clock[W.last_update]
    for i in range(n):
        slot = running[i]
        computed = requests[R.num_computed, slot]
        num_tokens = requests[R.num_tokens, slot]
        if num_tokens - computed != 1 or times[T.last_token_time, slot] != before:
            return now
        if num_sequences(core, slot, computed) > 1:
            return now
        end = min(requests[R.prompt_len, slot] + requests[R.output_len, slot], core.config.max_model_len)
        steps = min(steps, end - num_tokens - 1)
        due[i] = requests[R.edge, slot] - 1 - computed
        first_due = min(first_due, due[i])
        decode_kv += computed + 1
    if adds_states(core):
        note_held(core)
    done = 0
    next_sample = clock[W.next_sample]
    used = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
    while done < steps and now < next_ready:
        duration = gpu_time(cost, n, n, n, decode_kv, 0, 0, 0, 0, 0) + cpu_time(cost, n)
        if now + duration >= horizon:
            break
        if waits and not is_still_blocked(core, head, n if first_due <= done else 0):
            break
        if first_due <= done:
            set_block_time(core.pool.times, now)
            if not meet_edges(core, done, n, head):
                break
            first_due = NEVER
            for i in range(n):
                first_due = min(first_due, due[i])
            used = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
            count[K.max_blocks_used] = max(count[K.max_blocks_used], used)
            if adds_states(core):
                note_held(core)
        note_domain(core, cost, n, n, decode_kv, 0, 0, 0)
        clock[W.usage] += used * duration
        clock[W.busy] += duration
        if adds_states(core):
            add_states(core, decode_kv, waits, duration)
        now = now + duration
        if now >= next_sample:
            take_samples(core, now, count[K.num_scheduled_tokens] + n * (done + 1))
            next_sample = clock[W.next_sample]
        add_latencies(core, now - before, n)
        before = now
        decode_kv += n
        done += 1
    if done > 0:
        count[K.num_steps] += done
        count[K.num_scheduled_tokens] += n * done
        count[K.num_scheduled_seqs] += n * done
        count[K.num_running_sum] += n * done
        count[K.max_num_running] = max(count[K.max_num_running], n)
        count[K.finished_unflushed] = 0
        count[K.fruitless] = 0  # every step sampled
        clock[W.last_update] = now
        for i in range(n):
            slot = running[i]
            requests[R.num_computed, slot] += done
            requests[R.num_tokens, slot] += done
            times[T.last_token_time, slot] = now
    return now


@inlined
def meet_edges(core: Core, done: int, n: int, head: int) -> bool:
    """Take or register the blocks that the run's step number `done` needs, in running order.

    False, with nothing changed, if the free blocks might not suffice, or if a block would complete
    the content that the waiting queue's head (-1: none) misses first.
    """
    requests = core.requests
    running = core.queues[Q.running]
    due = core.queues[Q.due]
    meeting = 0
    for i in range(n):
        if due[i] <= done:
            meeting += 1
            if head >= 0 and unblocks(core, running[i], head):
                return False
    if meeting > core.pool.count[FREE]:
        return False
    for i in range(n):
        if due[i] <= done:
            slot = running[i]
            requests[R.num_computed, slot] += done
            requests[R.num_tokens, slot] += done
            extend(core, slot, 1)
            requests[R.num_computed, slot] -= done
            requests[R.num_tokens, slot] -= done
            due[i] = requests[R.edge, slot] - 1 - requests[R.num_computed, slot]
    return True
