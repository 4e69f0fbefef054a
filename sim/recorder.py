"""What a timeline shows, taken down during a run: steps, what each request does, what the engine holds.

The recorder cuts the run at every step of its window and reads the engine between two of them, so it
sees each decision and changes none: a run gives the same bits however it is cut. Outside the window
the engine runs ahead as ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from sim.blocks import FREE
from sim.clock import Clock
from sim.columns import K, R, S, T, W
from sim.core import PREEMPTED, RUNNING, Core
from sim.samples import sample_of

MAX_REQUESTS = 500  # lanes: more than that nobody reads
MAX_STEPS = 20_000  # some 10 MB of JSON
NEVER = math.inf


class Step(NamedTuple):
    """One engine step; times in seconds."""

    begin: float
    end: float
    num_tokens: int
    num_decodes: int  # sequences with one token, as the step time counts them
    num_prefills: int  # the others


class Level(NamedTuple):
    """What the engine holds from `time` on."""

    time: float
    num_running: int
    num_waiting: int
    num_blocks: int


class Slice(NamedTuple):
    """What a request did for a while; a chunk has tokens, all else 0."""

    name: str
    begin: float
    end: float
    num_tokens: int = 0


@dataclass
class Lane:
    """A request as far as it has come. It prefills, decodes, or waits for another admission."""

    request_id: int
    slot: int
    about: dict[str, int]
    slices: list[Slice]
    num_preemptions: int = 0
    decoding_since: float = NEVER
    preempted_since: float = NEVER

    def add(self, name: str, begin: float, end: float, num_tokens: int = 0) -> None:
        """Append a slice, unless it is empty."""
        if end > begin:
            self.slices.append(Slice(name, begin, end, num_tokens))

    def close(self, now: float) -> None:
        """End what goes on at `now`."""
        self.add("decode", self.decoding_since, now)
        self.add("preempted", self.preempted_since, now)
        self.decoding_since = self.preempted_since = NEVER

    def preempt(self, now: float) -> None:
        """It loses its blocks at `now`; a step of it that is in flight still ends."""
        self.close(now)
        self.preempted_since = max([now, *(last.end for last in self.slices[-1:])])


@dataclass
class Recorder:
    """Sees a run between `start` and `end`, in simulated seconds, up to MAX_STEPS and MAX_REQUESTS.

    Lanes are for requests admitted first in that time; when the last of MAX_REQUESTS has ended, so
    does the recording. Give `horizon` and `observe` to sim.engine.simulate.
    """

    start: float = 0.0
    end: float = NEVER
    steps: list[Step] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    done: bool = False
    num_steps: int = 0  # of the engine so far, in the window or not
    _living: dict[int, Lane] = field(default_factory=dict)  # by request id
    _others: set[int] = field(default_factory=set)  # request ids that get no lane

    def horizon(self, clock: Clock) -> float:
        """How far the engine may run ahead: to its next step while recording, else as far as it may."""
        if self.done:
            return clock.horizon()
        return min(clock.horizon(), self.start) if clock.now < self.start else clock.now

    def observe(self, core: Core) -> None:
        """Take down what the engine did at clock[W.now]. Modifies nothing of it."""
        now = float(core.clock[W.now])
        num_new = int(core.count[K.num_steps]) - self.num_steps
        self.num_steps += num_new
        if self.done or now < self.start:
            return
        self._drop_ended(core, now)
        all_ended = len(self.lanes) == MAX_REQUESTS and not self._living
        if now >= self.end or all_ended or len(self.steps) >= MAX_STEPS:
            self._stop(now)
            return
        # two steps may have begun: one that preempts admits nobody, so whoever runs again was
        # preempted before them, and whoever waits, after
        self._note_preempted(core, now, RUNNING)
        in_flight, oldest = int(core.count[K.steps_in_flight]), int(core.count[K.oldest_step])
        rows = [oldest, 1 - oldest][:in_flight]
        begin = now
        for i, row in enumerate(rows):
            if i >= in_flight - num_new:
                self._note_step(core, row, begin)
            begin = float(core.clock[W.step_end + row])
        self._note_preempted(core, now, PREEMPTED)
        self._note_level(core, now)

    def _stop(self, now: float) -> None:
        self.done = True
        self.end = now
        for lane in self._living.values():
            lane.close(now)
        self._living.clear()
        self._others.clear()

    def _drop_ended(self, core: Core, now: float) -> None:
        holders = core.requests[R.request_id]
        for lane in list(self._living.values()):
            if holders[lane.slot] != lane.request_id:
                lane.close(now)
                del self._living[lane.request_id]

    def _note_preempted(self, core: Core, now: float, status: int) -> None:
        requests = core.requests
        for lane in self._living.values():
            times = int(requests[R.num_preemptions, lane.slot])
            if times > lane.num_preemptions and requests[R.status, lane.slot] == status:
                lane.num_preemptions = times
                lane.preempt(now)

    def _note_step(self, core: Core, row: int, begin: float) -> None:
        end = float(core.clock[W.step_end + row])
        size = int(core.count[K.step_size + row])
        slots, ids, tokens, samples = (
            core.steps[column, row, :size].tolist() for column in (S.slot, S.request_id, S.tokens, S.samples)
        )
        decodes = tokens.count(1)
        self.steps.append(Step(begin, end, sum(tokens), decodes, size - decodes))
        for i, request_id in enumerate(ids):
            if request_id in self._others:
                continue
            lane = self._living.get(request_id) or self._new_lane(core, slots[i], request_id)
            if lane is None or lane.decoding_since < NEVER:
                continue
            lane.close(begin)
            lane.add("prefill", begin, end, tokens[i])
            if samples[i]:
                lane.decoding_since = end

    def _new_lane(self, core: Core, slot: int, request_id: int) -> Lane | None:
        """A lane for a request that is admitted for the first time; None if it gets none."""
        requests, times = core.requests, core.times
        arrival, ready, scheduled = (
            float(times[row, slot]) for row in (T.arrival_time, T.ready_time, T.scheduled_time)
        )
        if len(self.lanes) == MAX_REQUESTS or scheduled < self.start:
            self._others.add(request_id)
            return None
        names = ("prompt_len", "num_cached_tokens", "output_len", "session_id", "tenant")
        about = {name: int(requests[getattr(R, name), slot]) for name in names}
        sample, n = sample_of(request_id), int(requests[R.n, slot])
        if sample > 0 or requests[R.next_sample, slot] != slot:  # the first comes while others are to come
            about |= {"sample": sample + 1 if sample < n else 0, "n": n}
        lane = Lane(request_id, slot, about, [])
        lane.add("front end", arrival, ready)
        lane.add("queue", ready, scheduled)
        self.lanes.append(lane)
        self._living[request_id] = lane
        return lane

    def _note_level(self, core: Core, now: float) -> None:
        used = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
        level = Level(now, int(core.count[K.num_running]), int(core.count[K.num_waiting]), int(used))
        if self.levels and self.levels[-1].time == now:
            self.levels.pop()
        if not self.levels or self.levels[-1][1:] != level[1:]:
            self.levels.append(level)
