"""Step by step beside a recording: the first step of other decisions, and why.

The watcher cuts the run at every step, until one differs, and reads the engine between two of them; it
changes nothing: a run gives the same bits however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.clock import Clock
from sim.columns import K, R, S, T, W
from sim.core import PREEMPTED, Core
from sim.recording import Add, Requests, Schedule, Update, calls
from sim.recording.lines import Abort
from sim.recording.told import told_by_recording
from sim.samples import request_of

Ints = npt.NDArray[np.int64]
STAMP = 1e-3  # milliseconds: what recorded times are rounded to

Piece = tuple[int, int, int]  # a request's number in the recording, tokens scheduled, computed before


class Parting(NamedTuple):
    """The first step that is not the recording's; step numbers are the recording's, empty steps counted."""

    step: int
    why: str
    recorded: list[Piece]
    simulated: list[Piece]


class Decisions:
    """Compares each step of a run with the recording's; give `horizon` and `observe` to simulate.

    order: the recording's number of each request of the run.
    """

    def __init__(self, path: Path, requests: Requests, order: Ints) -> None:
        self.parting: Parting | None = None
        self.num_same = 0  # steps with tokens
        self.requests = requests
        self.order = order
        self.tape = Tape(path)
        self.num_steps = 0
        self.shift = 0.0  # from the recording's clock to the run's
        self.done = False

    def horizon(self, clock: Clock) -> float:
        """How far the engine may run ahead: to its next step, as long as all were the same."""
        return clock.horizon() if self.done else clock.now

    def observe(self, core: Core) -> None:
        """Compare the steps that have begun since the last call. Modifies nothing of the engine."""
        num_new = int(core.count[K.num_steps]) - self.num_steps
        self.num_steps += num_new
        if self.done or num_new == 0:
            return
        for simulated in self._begun(core, num_new):
            if self.num_steps == num_new and self.num_same == 0:
                self._set_clock(core, simulated[0][0])
            recorded = self._next_step()
            if recorded is None:
                self._part(self.tape.step + 1, "the simulation has a step more", [], simulated)
                return
            if recorded.scheduled != simulated:
                why = self._why(core, recorded, simulated)
                self._part(recorded.step, why, list(recorded.scheduled), simulated)
                return
            self.num_same += 1

    def finish(self) -> None:
        """The run has ended: what is left of the recording is a difference."""
        if not self.done and (recorded := self._next_step()) is not None:
            self._part(recorded.step, "the simulation has ended", list(recorded.scheduled), [])

    def _next_step(self) -> Schedule | None:
        with told_by_recording([]):  # whoever has read the requests knows
            return self.tape.next_step()

    def _part(self, step: int, why: str, recorded: list[Piece], simulated: list[Piece]) -> None:
        self.done = True
        self.parting = Parting(step, why, recorded, simulated)

    def _begun(self, core: Core, num_new: int) -> list[list[Piece]]:
        """The newest steps in flight, oldest first, as the recording has them."""
        in_flight, oldest = int(core.count[K.steps_in_flight]), int(core.count[K.oldest_step])
        later: dict[int, int] = {}  # tokens of a slot in newer steps
        found = []
        for row in [oldest, 1 - oldest][:in_flight][::-1][:num_new]:
            size = int(core.count[K.step_size + row])
            slots, ids, tokens = (
                core.steps[column, row, :size].tolist() for column in (S.slot, S.request_id, S.tokens)
            )
            pieces = []
            for slot, number, new in zip(slots, ids, tokens, strict=True):
                later[slot] = later.get(slot, 0) + new
                computed = int(core.requests[R.num_computed, slot]) - later[slot]
                pieces.append((int(self.order[request_of(number)]), new, computed))
            found.append(pieces)
        return found[::-1]

    def _set_clock(self, core: Core, row: int) -> None:
        slot = self._slot(core, row)
        if slot is not None:
            self.shift = float(core.times[T.ready_time, slot] - self.requests.queued_time[row])

    def _slot(self, core: Core, row: int) -> int | None:
        """Where the run has the request; None where it has ended or is not loaded."""
        number = np.flatnonzero(self.order == row)
        found = np.flatnonzero(core.requests[R.request_id] == number[0]) if len(number) else number
        return int(found[0]) if len(found) else None

    def _why(self, core: Core, recorded: Schedule, simulated: list[Piece]) -> str:
        now = float(core.clock[W.now])
        drift = 1e3 * (now - self.shift - recorded.t[0] * 1e-6)
        began = f"its step began {milliseconds(abs(drift))} {'later' if drift > 0 else 'earlier'}"
        if abs(drift) < STAMP:
            began = "its step began when that one did"
        here, there = ({row: piece for row, *piece in one} for one in (simulated, recorded.scheduled))
        for row in there:
            if row not in here:
                return f"the recording scheduled r{row}, which {self._in_simulation(core, row, now)}; {began}"
        for row in here:
            if row not in there:
                return f"the simulation scheduled r{row}, which {self._in_recording(recorded, row)}; {began}"
        for row, (new, computed) in there.items():
            if [new, computed] != here[row]:
                other, before = here[row]
                return (
                    f"r{row} got {new} tokens over {computed} computed ones in the recording, "
                    f"{other} over {before} in the simulation"
                )
        return "the same requests in another order"

    def _in_simulation(self, core: Core, row: int, now: float) -> str:
        """What the run has done with a request that it did not schedule."""
        if row not in self.order:
            return "is not in the simulation's load"
        slot = self._slot(core, row)
        due = float(self.requests.queued_time[row]) + self.shift
        ready = float(core.times[T.ready_time, slot]) if slot is not None else np.nan
        if np.isnan(ready) and due > now:
            ready = due
        if ready > now:
            return f"the simulation got {milliseconds(1e3 * (ready - now))} later"
        if slot is None:
            return "the simulation had finished"
        if core.requests[R.status, slot] == PREEMPTED:
            return "the simulation had preempted"
        return "waited in the simulation"

    def _in_recording(self, recorded: Schedule, row: int) -> str:
        """What the recorded engine has done with a request that it did not schedule."""
        if row not in self.tape.added:
            stamps = 1e3 * self.requests.queued_time[row], 1e3 * self.requests.added_time[row]
            late = next((late for stamp in stamps if (late := stamp - recorded.t[0] * 1e-3) > 0), 0.0)
            return f"the recording got {milliseconds(late)} later"
        if row not in self.tape.live:
            return "the recording had finished"
        return "the recording had preempted" if row in self.tape.preempted else "waited in the recording"


class Tape:
    """A recording played step by step, and who lives in it meanwhile."""

    def __init__(self, path: Path) -> None:
        self.step = -1
        self.added = range(0)
        self.live: set[int] = set()
        self.preempted: set[int] = set()
        self._steps = self._played(path)

    def next_step(self) -> Schedule | None:
        """The next step with tokens; None at the end."""
        return next(self._steps, None)

    def _played(self, path: Path) -> Iterator[Schedule]:
        for call in calls(path):
            if isinstance(call, Add):
                self.added = range(call.row + 1)
                self.live.add(call.row)
            elif isinstance(call, Schedule):
                self.step = call.step
                self.preempted |= {row for row, *_ in call.pre}
                self.preempted -= {row for row, _ in call.res}
                if call.scheduled:
                    yield call
            elif isinstance(call, Update | Abort):
                ended = call.fin if isinstance(call, Update) else call.rows
                self.live.difference_update(ended)
                self.preempted.difference_update(ended)


def milliseconds(value: float) -> str:
    """A time to read: two digits below 10 ms."""
    return f"{value:.2g} ms" if value < 10 else f"{value:,.0f} ms"
