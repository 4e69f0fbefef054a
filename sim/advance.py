"""Fast-forward: many engine steps in one compiled call, up to the next outside event.

A synchronous engine schedules, runs and updates one step after the other; an asynchronous one
(v1/engine/core.EngineCore.step_with_batch_queue, two deep) schedules step k + 2 at the end of step
k, while k + 1 runs, which hides its CPU time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim._dispatch import Packed, pack, unpack
from sim._jit import entry, hot, verb
from sim.blocks import FREE, NUM_EVENTS, BlockPool
from sim.caches import reset, transfer_time
from sim.chains import NO_ROOM, ChainTree
from sim.columns import K, Q, R, S, T, W
from sim.core import Core, EngineConfig
from sim.cost import StepCost, cpu_time, front_end_time, gpu_time
from sim.decode_run import run_decodes
from sim.domain import note_domain
from sim.history import History
from sim.memory_states import add_states, adds_states, note_held
from sim.request import Floats, Ints
from sim.residency import set_block_time
from sim.scheduler import schedule
from sim.timeseries import take_samples
from sim.update import update_from_output
from sim.waiting import add_request

# why `advance` returns
IDLE, WAIT, NOTIFY, GROW, LIVELOCK = range(5)
FRUITLESS_LIMIT = 10_000  # preemptions with no token sampled between them
_TABLES = 5  # StepCost begins with its tables


def flatten(core: Core, cost: StepCost) -> tuple[Any, ...]:
    """What `advance` takes after the times; the arrays are shared, not copied.

    Handing over a named tuple of arrays costs microseconds a call, the same arrays one by one a
    tenth of that, and a run makes a call for nearly every arrival.
    """
    config = np.array(core.config).astype(np.int64)
    coefficients = np.array([*cost[_TABLES:], core.config.watermark])
    tables = *core.pool, *core.tree, *core.history, *core[4:-1]
    return config, coefficients, *cost[:_TABLES], *tables, pack(core.cache)


@verb
def advance_verb(
    now: float, horizon: float, config: Ints, c: Floats,
    token_us: Floats, decode_us: Floats, output_us: Floats, decode_grid: Floats, prefill_grid: Floats,
    blocks: Ints, pool_count: Ints, taken: Ints, block_times: Floats, durations: Ints, evicted_from: Ints,
    events: Ints,
    chains: Ints, nodes: Ints, buckets: Ints, free_runs: Ints, tree_count: Ints,
    history_nodes: Ints, history_buckets: Ints,
    requests: Ints, times: Floats, segments: Ints, seat_chains: Ints, seat_blocks: Ints, vacant_seats: Ints,
    queues: Ints, steps: Ints, record_ints: Ints, record_floats: Floats, watched: Ints, itl_histogram: Ints,
    samples: Ints, count: Ints, clock: Floats, memory: Floats,
    cache: Packed,
) -> int:  # fmt: skip
    """Run the engine from `now` until something outside could matter; says why it stopped.

    `horizon` is the next outside event's time, after `now`. IDLE: nothing to do before
    clock[W.wake] (infinite: before an arrival). WAIT: a step ends at clock[W.wake], at or after
    the horizon, or watched requests may end in it; it is scheduled and not yet updated, so call
    again at that time, once all outside events of that instant are done. NOTIFY: watched requests
    ended now; call again at the same time after telling (of a led engine after each step, and not before
    its leader wants it to schedule). GROW: grow the tables (State.grow),
    then call again. LIVELOCK: requests preempt each other and none gets on, as vLLM's might too. A smaller
    horizon changes no result. The other arguments are `flatten`'s.
    """
    core = Core(
        EngineConfig(
            config[0], config[1], config[2], config[3], config[4], config[5],
            c[21], config[7], config[8] != 0, config[9] != 0, config[10] != 0, config[11] != 0,
            config[12] != 0, config[13] != 0, config[14] != 0, config[15] != 0, config[16] != 0,
            config[17] != 0,
        ),
        BlockPool(blocks, pool_count, taken, block_times, durations, evicted_from, events),
        ChainTree(chains, nodes, buckets, free_runs, tree_count),
        History(history_nodes, history_buckets),
        requests, times, segments, seat_chains, seat_blocks, vacant_seats, queues, steps,
        record_ints, record_floats, watched, itl_histogram, samples, count, clock, memory,
        unpack(cache),
    )  # fmt: skip
    cost = StepCost(
        token_us, decode_us, output_us, decode_grid, prefill_grid,
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11], c[12],
        c[13], c[14], c[15], c[16], c[17], c[18], c[19], c[20],
    )  # fmt: skip
    set_now(core, now)
    depth = 2 if core.config.async_scheduling else 1
    if count[K.led] > 0:
        depth = min(depth, count[K.steps_in_flight] + 1)  # one step a call
    room = core.record_ints.shape[0] - core.config.max_num_seqs
    while True:
        if now >= clock[W.next_sample]:
            take_samples(core, now, count[K.num_scheduled_tokens])
        oldest = count[K.oldest_step]
        if count[K.steps_in_flight] > 0 and clock[W.step_end + oldest] <= now:
            note_concurrency(core)
            update_from_output(core, oldest)
            count[K.steps_in_flight] -= 1
            count[K.oldest_step] = oldest = 1 - oldest
            if count[K.num_watched] > 0 or count[K.led] > 0:
                return NOTIFY
        if count[K.resets_due] > 0:
            reset_as_asked(core)
        next_ready = take_in_arrivals(core, cost, now)
        if depth == 1 and count[K.steps_in_flight] == 0:
            later = run_decodes(core, cost, now, horizon, next_ready)
            if later > now:
                now = later
                set_now(core, now)
                next_ready = take_in_arrivals(core, cost, now)
        while count[K.steps_in_flight] < depth and count[K.num_running] + count[K.num_waiting] > 0:
            row = oldest if count[K.steps_in_flight] == 0 else 1 - oldest
            size = schedule(core, row)
            if size == NO_ROOM:
                return GROW
            note_fruitless(core)
            if count[K.fruitless] > FRUITLESS_LIMIT:
                return LIVELOCK
            if size > 0:
                start_step(core, cost, row, now)
            elif count[K.steps_in_flight] > 0 or count[K.num_preempted] == 0:
                break  # an empty step: the engine waits for the oldest output
        if count[K.steps_in_flight] == 0:
            assert count[K.num_running] + count[K.num_waiting] == 0
            clock[W.wake] = next_ready
            return IDLE
        end = clock[W.step_end + oldest]
        crowded = count[K.num_records] > room or 2 * core.pool.count[NUM_EVENTS] > len(core.pool.events)
        if end >= horizon or count[K.step_watched + oldest] or crowded:
            clock[W.wake] = end
            return WAIT
        now = end
        set_now(core, now)


advance = entry(advance_verb)


@verb
def set_now(core: Core, now: float) -> None:
    """Tell the engine, and its blocks, what time it is."""
    core.clock[W.now] = now
    set_block_time(core.pool.times, now)


@verb
def reset_as_asked(core: Core) -> None:
    """Between two steps, do what was asked for meanwhile (v1/engine/core.EngineCoreProc.run_busy_loop)."""
    for _ in range(core.count[K.resets_due]):
        core.count[K.num_resets] += reset(core)
    core.count[K.resets_due] = 0


reset_now = entry(reset_as_asked)


@verb
def take_in_arrivals(core: Core, cost: StepCost, now: float) -> float:
    """Move the arrivals that the front end has finished by `now` into the waiting queue, in order.

    One front-end thread hashes and queues prompts one after the other. Returns when the next will
    be ready, infinity if there is none.
    """
    count = core.count
    clock = core.clock
    times = core.times
    while count[K.taken_in] < count[K.arrived]:
        slot = core.queues[Q.arrivals, count[K.taken_in]]
        ready: float = times[T.ready_time, slot]
        if math.isnan(ready):
            blocks = 0
            if core.config.enable_prefix_caching:
                blocks = core.requests[R.prompt_len, slot] // core.config.block_size
            begin = max(times[T.submitted_time, slot], clock[W.front_end_free])
            ready = begin + front_end_time(cost, blocks)
            times[T.ready_time, slot] = ready
            clock[W.front_end_free] = ready
        if ready > now:
            return ready
        add_request(core, slot)
        count[K.taken_in] += 1
    count[K.taken_in] = 0
    count[K.arrived] = 0
    return math.inf


@hot
def start_step(core: Core, cost: StepCost, row: int, now: float) -> None:
    """Put a scheduled step in flight and note when it ends."""
    count = core.count
    clock = core.clock
    num_tokens = count[K.shape_tokens] + count[K.shape_decodes]
    num_seqs = count[K.shape_prefills] + count[K.shape_decodes]
    gpu = gpu_time(
        cost,
        num_tokens,
        num_seqs,  # logits of every sequence, also of those whose sample is discarded (GPUModelRunner)
        count[K.shape_decodes],
        count[K.shape_decode_kv],
        count[K.shape_prefills],
        count[K.shape_tokens],
        count[K.shape_squares],
        count[K.shape_cross],
        count[K.shape_context],
    )
    gpu += transfer_time(core)
    note_domain(
        core,
        cost,
        num_tokens,
        count[K.shape_decodes],
        count[K.shape_decode_kv],
        count[K.shape_tokens],
        count[K.shape_squares],
        count[K.shape_cross],
    )
    cpu = cpu_time(cost, num_seqs)
    if core.config.async_scheduling:
        begin = now
        if count[K.steps_in_flight] > 0:
            begin = max(now, clock[W.step_end + 1 - row])
        duration = max(gpu, cpu)
    else:
        begin = now
        duration = gpu + cpu
    clock[W.step_end + row] = begin + duration
    count[K.step_watched + row] = 0
    if count[K.any_watched]:
        count[K.step_watched + row] = may_end_watched(core, row)
    count[K.steps_in_flight] += 1
    count[K.max_blocks_used] = max(count[K.max_blocks_used], spend(core, duration))
    count[K.num_steps] += 1
    count[K.num_scheduled_tokens] += num_tokens
    count[K.num_scheduled_seqs] += num_seqs
    count[K.num_running_sum] += count[K.num_running]
    count[K.max_num_running] = max(count[K.max_num_running], count[K.num_running])
    note_concurrency(core)


@verb
def spend(core: Core, duration: float) -> int:
    """Add the time of the step just scheduled to the sums over time; returns the blocks in use."""
    used: int = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
    core.clock[W.usage] += used * duration
    core.clock[W.busy] += duration
    if adds_states(core):
        add_states(core, note_held(core), core.count[K.head_refused] > 0, duration)
    return used


@verb
def end_step_at(core: Core, row: int, end: float) -> None:
    """Let the step just scheduled end at another time than its cost says."""
    spend(core, end - core.clock[W.step_end + row])
    core.clock[W.step_end + row] = end


retime = entry(end_step_at)


@verb
def note_fruitless(core: Core) -> None:
    """Count preemptions since a step last sampled a token."""
    if core.count[K.shape_outputs] > 0:
        core.count[K.fruitless] = 0
    else:
        core.count[K.fruitless] += core.count[K.num_preempted]


@verb
def may_end_watched(core: Core, row: int) -> bool:
    """Whether a watched request of the step is within two tokens of its end (to be safe, in async)."""
    requests = core.requests
    for i in range(core.count[K.step_size + row]):
        slot = core.steps[S.slot, row, i]
        if requests[R.watched, slot]:
            end = min(requests[R.prompt_len, slot] + requests[R.output_len, slot], core.config.max_model_len)
            if requests[R.num_tokens, slot] + 2 >= end:
                return True
    return False


@verb
def note_concurrency(core: Core) -> None:
    """Keep the largest number of requests in the system."""
    count = core.count
    inside = count[K.num_running] + count[K.num_waiting] + count[K.arrived] - count[K.taken_in]
    count[K.max_concurrent] = max(count[K.max_concurrent], inside - count[K.extra_samples])
