"""`cost: recorded`: an engine that makes each step when the recorded one did, while it makes the same steps.

As long as a step schedules as many tokens of the same requests as that of the recording, it begins
as late after the one before, and lasts as long; after an idle time it begins as late after the
arrival that ends it. Aborts of requests and resets of the prefix cache come between the same calls
as they did. From the first step on that is another, the engine runs by its cost alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim._jit import entry
from sim.advance import GROW, IDLE, LIVELOCK, NOTIFY, advance, flatten, reset_now, retime
from sim.clock import Process
from sim.columns import K, Q, R, S, T, W
from sim.core import Core
from sim.recorded_steps import RESET, RecordedSteps
from sim.request import Ints
from sim.update import abort_request
from sim.waiting import add_request

if TYPE_CHECKING:
    from sim.engine import Engine


NOBODY = -2  # no request's number

abort = entry(abort_request)
queue = entry(add_request)


class Leader:
    """Leads one engine through the steps of a recording."""

    def __init__(self, steps: RecordedSteps, rows: Ints) -> None:
        """`rows`: the recording's number of each request of the run, in order of loading."""
        self.steps = steps
        self.rows = rows
        self.num_steps = 0  # that the engine has made as recorded
        self.parted: str | None = None  # where its steps become others, and how
        self.numbers = {row: number for number, row in enumerate(rows.tolist())}
        self._paused = -1  # the last step before which the engine has paused
        self._calls = -1  # of the scheduler, so far
        self._to_do: list[int] = []  # requests to abort, or RESET, before the next

    def lead(self, engine: Engine) -> Process:
        """What the engine does, instead of `Engine.run`, which goes on where they part."""
        clock = engine.clock
        now = 0.0
        engine.state.core.count[K.led] = 1
        while self.parted is None:
            self.act(engine)
            core = engine.state.core
            reason = advance(now, now, *flatten(core, engine.cost))
            if reason == GROW:
                engine.state.grow()
                continue
            if reason == LIVELOCK:
                raise engine.livelock()
            if core.count[K.num_steps] > self.num_steps:
                self.follow(core, now)
            engine.show()
            if reason == NOTIFY:
                engine.tell_watchers()
            elif reason == IDLE:
                self._paused = -1
                yield engine.sleep()
                now = clock.now
            begin = self.next_call(core, now)
            if begin > now:
                yield clock.wake_at(begin, engine.replica)
                now = begin
        engine.state.core.count[K.led] = 0
        yield from engine.run(now)

    def act(self, engine: Engine) -> None:
        """Do what was done to the recorded engine before its next call, to those who are there by now."""
        core = engine.state.core
        calls = 2 * self.num_steps - int(core.count[K.steps_in_flight])
        if calls != self._calls:
            self._calls, self._to_do = calls, self.steps.between.get(calls, [])
        if self._to_do:
            self._to_do = [row for row in self._to_do if not self.done_to(core, row)]
            engine.tell_watchers()

    def done_to(self, core: Core, row: int) -> bool:
        """Abort a recorded request, or RESET the prefix cache; False if the request is not there."""
        if row == RESET:
            core.count[K.resets_due] += 1
            reset_now(core)
            return True
        (found,) = np.nonzero(core.requests[R.request_id] == self.numbers.get(row, NOBODY))
        if len(found) == 0 or np.isnan(core.times[T.submitted_time, found[0]]):
            return False
        take_in(core)
        abort(core, int(found[0]))
        return True

    def next_call(self, core: Core, now: float) -> float:
        """When an engine whose last call was at `now` goes on, to end a step or to schedule one."""
        count, step = core.count, self.num_steps
        in_flight = int(count[K.steps_in_flight])
        has_work = count[K.num_running] + count[K.num_waiting] + count[K.arrived] > count[K.taken_in]
        end = float(core.clock[W.step_end + count[K.oldest_step]]) if in_flight > 0 else now
        if not has_work or step == len(self.steps.number) or self._paused == step:
            return end
        if self.steps.updates_before[step] > step - in_flight:  # the oldest ends before
            return end
        self._paused = step
        return now + float(self.steps.pause[step])

    def follow(self, core: Core, now: float) -> None:
        """A step has begun at `now`: let it last as long as the recorded one, if it is the same."""
        oldest = int(core.count[K.oldest_step])
        row = oldest if core.count[K.steps_in_flight] == 1 else 1 - oldest
        self.parted = self.difference(core, row)
        if self.parted is None:
            retime(core, row, now + float(self.steps.duration[self.num_steps]))
            self.num_steps += 1

    def difference(self, core: Core, row: int) -> str | None:
        """What the step in a row of `steps` does and the recorded one does not; None if they are the same."""
        step = self.num_steps
        if step == len(self.steps.number):
            return f"the recording ends after {step} steps that schedule something"
        size = int(core.count[K.step_size + row])
        ids, tokens = core.steps[S.request_id, row, :size], core.steps[S.tokens, row, :size]
        here = dict(zip(self.rows[ids].tolist(), tokens.tolist(), strict=True))
        there = self.steps.decisions(step)
        request = next((one for one in [*there, *here] if here.get(one) != there.get(one)), None)
        if request is None:
            return None
        return (
            f"step {self.steps.number[step]} of the recording schedules {_tokens(there, request)} of request "
            f"{request}, and the simulation {_tokens(here, request)}"
        )

    def notes(self) -> list[str]:
        """A warning where the run has parted from the recording."""
        if self.parted is None:
            return []
        return [f"cost: recorded: {self.parted}; from there on a fit of its steps times them"]


def take_in(core: Core) -> None:
    """Queue those that have arrived since the scheduler's last call; the front end takes no time."""
    count = core.count
    for slot in core.queues[Q.arrivals, count[K.taken_in] : count[K.arrived]].tolist():
        core.times[T.ready_time, slot] = core.times[T.submitted_time, slot]
        queue(core, slot)
    count[K.taken_in] = count[K.arrived] = 0


def _tokens(scheduled: dict[int, int], request: int) -> str:
    tokens = scheduled.get(request, 0)
    return f"{tokens or 'no'} token{'' if tokens == 1 else 's'}"
