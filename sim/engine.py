"""One engine as a SimPy process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from sim.advance import GROW, IDLE, LIVELOCK, NOTIFY, advance, flatten, reset_now
from sim.arena import Arena
from sim.clock import Clock, Process
from sim.columns import K, R, T, W
from sim.core import Core
from sim.cost import StepCost
from sim.errors import Livelock
from sim.fates import MISSES
from sim.request import ABORTED
from sim.sample_records import SampleRecords
from sim.samples import request_of
from sim.state import State
from sim.totals import Totals, totals_of

if TYPE_CHECKING:
    from sim.leader import Leader

Records = dict[str, npt.NDArray[Any]]
INT_FIELDS = (  # the first R.RECORDED columns, then the outputs: see update.record
    "request_id", "session_id", "tenant", "prefix_group", "prompt_len", "n", "beam_width",
    "num_cached_tokens", "num_preemptions", "num_evictions", "output_len",
)  # fmt: skip
FATE_FIELDS = tuple(f"fate_{name}" for name in MISSES)  # behind them, with config.token_fates
LOOKED_UP = ("prefix_cache_queries", "prefix_cache_hits")  # tokens, by first admissions of all samples
FLOAT_FIELDS = (
    "arrival_time", "submitted_time", "ready_time", "scheduled_time", "first_token_time", "finish_time",
)  # fmt: skip
SEEN_BY_CLIENT = [FLOAT_FIELDS.index(name) for name in ("first_token_time", "finish_time")]
ROWS = 4096  # ended requests collected between two deliveries


class Engine:
    """One vLLM engine as a SimPy process around `advance`: the replica number `replica` of its kind."""

    def __init__(
        self,
        clock: Clock,
        arena: Arena,
        cost: StepCost,
        on_records: Callable[[Records], None],
        horizon: Callable[[Clock], float],
        replica: int = 0,
        kv_events: bool = False,
        leader: Leader | None = None,
    ) -> None:
        self.clock = clock
        self.arena = arena
        self.replica = replica
        num_records = ROWS + arena.config.max_num_seqs
        self.state = State(arena.config, arena, num_records=num_records, kv_events=kv_events)
        self.cost = cost
        self.reply = cost.reply_us * 1e-6  # seconds from a token to the client
        self.on_records = on_records
        self.horizon = horizon
        self.num_done = 0  # requests
        self.num_ended = 0  # in the engine, where a sample is one
        self.samples = SampleRecords()
        self.held_back: dict[int, list[int]] = {}  # slots of samples, by the id of the one that goes ahead
        self.warm_up: Totals | None = None
        self.progress: Callable[[int, float], None] | None = None
        self.observe: Callable[[Core], None] | None = None
        self.asleep: Event | None = None
        self.next_wake = math.inf  # no step ends before
        self.watchers: dict[int, Event] = {}  # by request id
        clock.process(self.run(0.0) if leader is None else leader.lead(self))

    def run(self, now: float) -> Process:
        """From `now` on, work while there is work: schedule, let the time pass, update; else sleep."""
        clock = self.clock
        core = self.state.core
        arguments = flatten(core, self.cost)
        while True:
            if self.state.core is not core:  # it has grown
                core = self.state.core
                arguments = flatten(core, self.cost)
            self.next_wake = math.inf
            reason = advance(now, self.horizon(clock), *arguments)
            self.show()
            if reason == GROW:
                self.state.grow()
                now = float(core.clock[W.now])  # it may have run ahead
                continue
            if reason == LIVELOCK:
                raise self.livelock()
            if reason == NOTIFY:
                self.tell_watchers()
                self.next_wake = now
                yield clock.wake_at(now, self.replica)
                continue
            wake = float(core.clock[W.wake])
            if reason == IDLE and wake == math.inf:
                yield self.sleep()
                now = clock.now
            else:
                self.next_wake = wake
                yield clock.wake_at(wake, self.replica)
                now = wake

    def show(self) -> None:
        """Let those look who observe the engine, and hand on what has been collected."""
        core = self.state.core
        if self.observe is not None:
            self.observe(core)
        if core.count[K.num_records] >= ROWS:
            self.deliver()

    def sleep(self) -> Event:
        """What happens when the next request arrives."""
        self.asleep = self.clock.event()
        return self.asleep

    def livelock(self) -> Livelock:
        """What to raise where requests preempt each other without end."""
        now = self.state.core.clock[W.now]
        return Livelock(f"at {now:g} s requests preempt each other and none gets on")

    def submit(self, slot: int) -> None:
        """A loaded request arrives now."""
        if slot in self.arena.refused:
            self.refuse(slot)
            return
        self.state.arrive(slot, self.clock.now)
        if self.arena.has_samples:
            self.submit_others(slot)
        if self.asleep is not None:
            self.next_wake = self.clock.now
            self.clock.wake_now(self.asleep, self.replica)
            self.asleep = None

    def submit_others(self, slot: int) -> None:
        """The samples of a request that has arrived come in behind the first, or when that one ends."""
        core = self.state.core
        others = self.arena.samples_of(slot)[1:]
        if others and self.arena.kind.prompt_first:
            core.requests[R.next_sample, [slot, others[-1]]] = slot, others[0]  # a ring without it
            core.requests[R.watched, slot] = 1
            core.count[K.any_watched] = 1
            self.held_back[int(core.requests[R.request_id, slot])] = others
        else:
            self.bring_in(others, float(core.times[T.arrival_time, slot]))
            core.count[K.extra_samples] += len(others)

    def bring_in(self, samples: list[int], arrival: float) -> None:
        """Samples of a request arrive now, by their own account at `arrival`."""
        for sample in samples:
            self.state.core.times[T.arrival_time, sample] = arrival
            self.state.arrive(sample, self.clock.now)

    def submit_watched(self, slot: int) -> Event:
        """A loaded request, whose arrival_time is set, arrives now; the event happens when it ends."""
        done = self.clock.event()
        core = self.state.core
        if slot in self.arena.refused:
            self.refuse(slot)
            return done.succeed()
        core.requests[R.watched, self.arena.samples_of(slot)] = 1
        core.count[K.any_watched] = 1
        self.watchers[request_of(int(core.requests[R.request_id, slot]))] = done
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
        """Let those go on who waited for requests that have ended, samples for their prompt among them."""
        core = self.state.core
        for request_id in core.watched[: core.count[K.num_watched]].tolist():
            if request_id in self.held_back:
                samples = self.held_back.pop(request_id)
                self.bring_in(samples, self.clock.now)
                core.count[K.extra_samples] += len(samples) - 1
            else:
                self.watchers.pop(request_of(request_id)).succeed()
        core.count[K.num_watched] = 0

    def seats_taken(self) -> int:
        """Requests that have been sent here and not ended, where each sample counts."""
        recorded = int(self.state.core.count[K.num_records])
        return self.state.num_arrived + self.num_held_back() - self.num_ended - recorded

    def outstanding(self) -> int:
        """The same, but all samples of a request count as one."""
        extra = int(self.state.core.count[K.extra_samples])
        return self.seats_taken() - self.num_held_back() - extra

    def num_held_back(self) -> int:
        """Samples that have not arrived, but for one that goes ahead in the place of another."""
        return sum(len(samples) - 1 for samples in self.held_back.values())

    def refuse(self, slot: int) -> None:
        """Record a request that can never run, and vacate its slot."""
        self.arena.refused.discard(slot)
        self.deliver()  # those that ended before
        core = self.state.core
        here = slice(slot, slot + 1)
        known = R.beam_width + 1  # the columns up to there
        chunk: Records = {name: core.requests[getattr(R, name), here].copy() for name in INT_FIELDS[:known]}
        chunk |= {name: np.zeros(1, np.int64) for name in INT_FIELDS[known:]}
        chunk["request_id"] = request_of(chunk["request_id"])
        if core.config.token_fates:
            chunk |= {name: np.zeros(1, np.int64) for name in (*FATE_FIELDS, "prefix_cache_evicted")}
        chunk |= {name: np.zeros(1, np.int64) for name in LOOKED_UP}
        chunk["refused"] = np.ones(1, np.int64)
        chunk["replica"] = np.full(1, self.replica)
        chunk["arrival_time"] = core.times[T.arrival_time, here].copy()
        chunk |= {name: np.full(1, np.nan) for name in FLOAT_FIELDS[1:]}
        self.arena.vacate(slot)
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
        self.num_ended += n
        chunk: Records = {name: ints[:, i] for i, name in enumerate(INT_FIELDS)}
        if core.config.token_fates:
            chunk |= {name: ints[:, R.RECORDED + 2 + i] for i, name in enumerate(FATE_FIELDS)}
            chunk["prefix_cache_evicted"] = chunk["fate_evicted"]
        chunk |= dict(zip(LOOKED_UP, (chunk["prompt_len"], chunk["num_cached_tokens"]), strict=True))
        chunk["refused"] = without_token(chunk, floats)
        chunk["replica"] = np.full(n, self.replica)
        floats[:, SEEN_BY_CLIENT] += self.reply
        chunk |= {name: floats[:, i] for i, name in enumerate(FLOAT_FIELDS)}
        if not self.arena.kind.groups:
            chunk = self.samples.joined(chunk)
        self.num_done += len(chunk["n"])
        if self.progress is not None:
            self.progress(self.num_done, self.clock.now)
        self.on_records(chunk)

    def totals(self) -> Totals:
        """The run's sums so far."""
        return totals_of(self.state.core, self.arena.owners)._replace(warm_up=self.warm_up)


def without_token(chunk: Records, times: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """ABORTED for requests that ended before their first token, else 0. Those never admitted hit nothing.

    Modifies `chunk`.
    """
    early = np.isnan(times[:, FLOAT_FIELDS.index("first_token_time")])
    if early.any():
        never = np.isnan(times[:, FLOAT_FIELDS.index("scheduled_time")])
        for name in ("num_cached_tokens", *LOOKED_UP):
            chunk[name] = np.where(never, 0, chunk[name])
    return np.where(early, ABORTED, 0)
