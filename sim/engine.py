"""The engine as a SimPy process, and a whole run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from sim.advance import GROW, IDLE, LIVELOCK, NOTIFY, advance, flatten, reset_now
from sim.blocks import EVICTIONS
from sim.clients import clients, measuring, resets
from sim.clock import Clock, Process
from sim.columns import K, R, T, W
from sim.core import REFUSED, Core, EngineConfig
from sim.cost import StepCost
from sim.domain import StepsOutside, steps_outside
from sim.errors import Livelock
from sim.fates import MISSES
from sim.request import Batch, Ints, Session
from sim.state import Owner, State
from sim.timeseries import Samples, samples_of

Records = dict[str, npt.NDArray[Any]]
INT_FIELDS = (  # the first R.RECORDED columns, then the outputs: see update.record
    "request_id", "session_id", "tenant", "prefix_group", "prompt_len", "num_cached_tokens",
    "num_preemptions", "num_evictions", "output_len",
)  # fmt: skip
FATE_FIELDS = tuple(f"fate_{name}" for name in MISSES)  # behind them, with config.token_fates
FLOAT_FIELDS = ("arrival_time", "ready_time", "scheduled_time", "first_token_time", "finish_time")
ROWS = 4096  # ended requests collected between two deliveries


class Totals(NamedTuple):
    """What a run adds up to; times in seconds."""

    num_steps: int
    num_scheduled_tokens: int
    num_scheduled_seqs: int
    num_running_sum: int  # over steps
    max_num_running: int
    max_concurrent_requests: int
    prefix_cache_queries: int  # tokens of first admissions
    prefix_cache_hits: int
    preempted_queries: int  # of admissions after a preemption
    preempted_hits: int
    num_admissions: int
    num_readmissions: int
    num_preemptions: int
    num_evictions: int
    num_lookups: int
    num_resets: int  # of the prefix cache, those that succeeded
    busy_time: float  # sum of step durations
    last_time: float  # end of the last step
    itl_histogram: Ints  # inter-token latencies, see sim/histogram.py
    itl_count: int
    itl_sum: float
    itl_sum_squares: float
    max_blocks_used: int
    usage_time: float  # used blocks x step durations
    samples: Samples
    steps_outside: StepsOutside
    durations: Ints  # of blocks and gaps, see sim/residency.py; of no bins: not kept
    evicted_from: dict[Owner, int]  # evictions by the owner of the block
    warm_up: Totals | None = None  # the same sums at `measure_from`


class Engine:
    """One vLLM engine as a SimPy process around `advance`."""

    def __init__(
        self,
        clock: Clock,
        config: EngineConfig,
        cost: StepCost,
        on_records: Callable[[Records], None],
        horizon: Callable[[Clock], float],
    ) -> None:
        self.clock = clock
        self.state = State(config, num_records=ROWS + config.max_num_seqs)
        self.cost = cost
        self.on_records = on_records
        self.horizon = horizon
        self.num_done = 0
        self.warm_up: Totals | None = None
        self.progress: Callable[[int, float], None] | None = None
        self.observe: Callable[[Core], None] | None = None
        self.asleep: Event | None = None
        self.refused: set[int] = set()
        self.watchers: dict[int, Event] = {}  # by request id
        clock.process(self.run())

    def run(self) -> Process:
        """Work while there is work: schedule, let the time pass, update; else sleep."""
        clock = self.clock
        now = 0.0
        core = self.state.core
        arguments = flatten(core, self.cost)
        while True:
            if self.state.core is not core:  # it has grown
                core = self.state.core
                arguments = flatten(core, self.cost)
            reason = advance(now, self.horizon(clock), *arguments)
            if self.observe is not None:
                self.observe(core)
            if core.count[K.num_records] >= ROWS:
                self.deliver()
            if reason == GROW:
                self.state.grow()
                now = float(core.clock[W.now])  # it may have run ahead
                continue
            if reason == LIVELOCK:
                raise Livelock(f"at {core.clock[W.now]:g} s requests preempt each other and none gets on")
            if reason == NOTIFY:
                self.tell_watchers()
                yield clock.wake_at(now)
                continue
            wake = float(core.clock[W.wake])
            if reason == IDLE and wake == math.inf:
                self.asleep = clock.event()
                yield self.asleep
                now = clock.now
            else:
                yield clock.wake_at(wake)
                now = wake

    def load(self, batch: Batch) -> list[int]:
        """Bring a batch into the engine's columns; returns the slots, to be submitted on arrival."""
        slots = self.state.load(batch)
        self.refused.update(slots[self.state.core.requests[R.status, slots] == REFUSED].tolist())
        return slots.tolist()  # type: ignore[no-any-return]

    def submit(self, slot: int) -> None:
        """A loaded request arrives now."""
        if slot in self.refused:
            self.refuse(slot)
            return
        self.state.arrive(slot)
        if self.asleep is not None:
            self.clock.wake_now(self.asleep)
            self.asleep = None

    def submit_watched(self, slot: int) -> Event:
        """A loaded request arrives now; the event happens when it ends."""
        done = self.clock.event()
        core = self.state.core
        core.times[T.arrival_time, slot] = self.clock.now
        if slot in self.refused:
            self.refuse(slot)
            return done.succeed()
        core.requests[R.watched, slot] = 1
        core.count[K.any_watched] = 1
        self.watchers[int(core.requests[R.request_id, slot])] = done
        self.submit(slot)
        return done

    def reset_prefix_cache(self) -> None:
        """Forget the cached content between two steps: now, or at the end of the step in flight.

        It fails, without effect, where a request still holds a block then.
        """
        self.state.core.count[K.resets_due] += 1
        if self.state.core.count[K.steps_in_flight] == 0:
            reset_now(self.state.core)

    def begin_measuring(self) -> None:
        """Keep the sums of the time before now."""
        self.warm_up = self.totals()

    def tell_watchers(self) -> None:
        """Let those go on who waited for requests that have ended."""
        core = self.state.core
        for request_id in core.watched[: core.count[K.num_watched]].tolist():
            self.watchers.pop(request_id).succeed()
        core.count[K.num_watched] = 0

    def refuse(self, slot: int) -> None:
        """Record a request that can never run, and vacate its slot."""
        self.refused.discard(slot)
        self.deliver()  # those that ended before
        core = self.state.core
        here = slice(slot, slot + 1)
        known = R.prompt_len + 1  # the columns up to prompt_len
        chunk: Records = {name: core.requests[getattr(R, name), here].copy() for name in INT_FIELDS[:known]}
        chunk |= {name: np.zeros(1, np.int64) for name in INT_FIELDS[known:]}
        if core.config.token_fates:
            chunk |= {name: np.zeros(1, np.int64) for name in FATE_FIELDS}
        chunk["refused"] = np.ones(1, np.int64)
        chunk["arrival_time"] = core.times[T.arrival_time, here].copy()
        chunk |= {name: np.full(1, np.nan) for name in FLOAT_FIELDS[1:]}
        self.state.vacate(slot)
        self.num_done += 1
        self.on_records(chunk)

    def deliver(self) -> None:
        """Hand the collected records on."""
        core = self.state.core
        n = int(core.count[K.num_records])
        if n == 0:
            return
        ints, floats = core.record_ints[:n].copy(), core.record_floats[:n].copy()
        core.count[K.num_records] = 0
        self.num_done += n
        if self.progress is not None:
            self.progress(self.num_done, self.clock.now)
        chunk: Records = {name: ints[:, i] for i, name in enumerate(INT_FIELDS)}
        if core.config.token_fates:
            chunk |= {name: ints[:, R.RECORDED + 2 + i] for i, name in enumerate(FATE_FIELDS)}
        chunk["refused"] = np.zeros(n, np.int64)
        chunk |= {name: floats[:, i] for i, name in enumerate(FLOAT_FIELDS)}
        self.on_records(chunk)

    def totals(self) -> Totals:
        """The run's sums so far."""
        core = self.state.core
        count, clock = core.count, core.clock

        def number(index: int) -> int:
            return int(count[index])

        return Totals(
            num_steps=number(K.num_steps),
            num_scheduled_tokens=number(K.num_scheduled_tokens),
            num_scheduled_seqs=number(K.num_scheduled_seqs),
            num_running_sum=number(K.num_running_sum),
            max_num_running=number(K.max_num_running),
            max_concurrent_requests=number(K.max_concurrent),
            prefix_cache_queries=number(K.queries),
            prefix_cache_hits=number(K.hits),
            preempted_queries=number(K.preempted_queries),
            preempted_hits=number(K.preempted_hits),
            num_admissions=number(K.num_admissions),
            num_readmissions=number(K.num_readmissions),
            num_preemptions=number(K.num_preemptions),
            num_evictions=int(core.pool.count[EVICTIONS]),
            num_lookups=number(K.num_lookups),
            num_resets=number(K.num_resets),
            busy_time=float(clock[W.busy]),
            last_time=float(clock[W.last_update]),
            itl_histogram=core.itl_histogram.copy(),
            itl_count=number(K.itl_count),
            itl_sum=float(clock[W.itl_sum]),
            itl_sum_squares=float(clock[W.itl_sum_squares]),
            max_blocks_used=number(K.max_blocks_used),
            usage_time=float(clock[W.usage]),
            samples=samples_of(core),
            steps_outside=steps_outside(core),
            durations=core.pool.durations.copy(),
            evicted_from=dict(sorted(zip(self.state.owners, core.pool.evicted_from.tolist(), strict=False))),
            warm_up=self.warm_up,
        )


def simulate(
    requests: Iterator[Batch] | Iterator[Session],
    config: EngineConfig,
    cost: StepCost,
    *,
    on_records: Callable[[Records], None],
    concurrency: int | None = None,
    think_times: Iterator[float] | None = None,
    reset_prefix_cache: Sequence[float] = (),
    measure_from: float | None = None,
    progress: Callable[[int, float], None] | None = None,
    horizon: Callable[[Clock], float] = Clock.horizon,
    observe: Callable[[Core], None] | None = None,
) -> Totals:
    """Run requests through one engine until all have ended.

    Open loop: requests arrive at their arrival_time, sessions at their start. With `concurrency`,
    so many users send them in order, each the next one when its former has ended and it has
    thought for the next of `think_times` seconds (a session has pauses of its own, and no other).
    The prefix cache is reset at each of `reset_prefix_cache` seconds where no block is in use then,
    see Engine.reset_prefix_cache; Totals.warm_up is what had been added up by `measure_from` seconds.
    `on_records` gets columns of ended or refused requests (INT_FIELDS, FLOAT_FIELDS, "refused") in
    order of their end, NaN where a time does not exist. `progress` is told requests done and
    simulated seconds. `horizon` says how far an engine may run ahead; anything up to Clock.horizon
    gives the same results. `observe` is shown the engine each time that it stops, and may not touch it.
    """
    clock = Clock()
    engine = Engine(clock, config, cost, on_records, horizon)
    for process in clients(clock, engine, requests, concurrency, think_times):
        clock.process(process)
    clock.process(resets(clock, engine, reset_prefix_cache))
    if measure_from is not None:
        clock.process(measuring(clock, engine, measure_from))
    engine.progress = progress
    engine.observe = observe
    clock.run()
    engine.deliver()
    return engine.totals()
