"""The steps of a recording: what each scheduled, when it began, how long it took, and what came between.

Only steps that scheduled something count. Of the others, with which an engine tells its worker of
ended requests, a request that comes meanwhile notices no more than a longer pause before its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.recording import Abort, Add, Reset, Schedule, Update, calls
from sim.recording.lines import OutputLine
from sim.recording.told import told_by_recording
from sim.request import Floats, Ints

RESET = -1  # in place of a request: the prefix cache


class RecordedSteps(NamedTuple):
    """Columns by step, in order; times in seconds."""

    number: Ints  # in the recording, empty steps counted
    pause: Floats  # before its schedule(): since the engine had work, and had ended its last call
    duration: Floats  # from the start of its schedule() to the end of its update_from_output()
    updates_before: Ints  # how many of these steps were updated before this was scheduled
    first: Ints  # n + 1 starts into the two below
    row: Ints  # requests that it scheduled, by number
    tokens: Ints  # of each
    between: dict[int, list[int]]  # by schedules and updates before: requests aborted then, or RESET

    def decisions(self, step: int) -> dict[int, int]:
        """The tokens that a step scheduled, by request."""
        held = slice(self.first[step], self.first[step + 1])
        return dict(zip(self.row[held].tolist(), self.tokens[held].tolist(), strict=True))


def recorded_steps(path: Path | str) -> RecordedSteps:
    """Read the steps of a recording; InputError if it is none. One that was never updated is left out."""
    taken = _Calls()
    with told_by_recording([]):  # whoever reads the requests has told
        for call in calls(path):
            taken.take(call)
    return taken.columns()


class _Calls:
    """The calls so far; times in whole microseconds."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, int]] = []  # number, pause, start, updates before
        self.ends: dict[int, int] = {}  # by number
        self.in_flight: set[int] = set()
        self.counts: list[int] = []
        self.scheduled: list[tuple[int, int]] = []
        self.between: dict[int, list[int]] = {}
        self.live = 0  # requests added and not ended
        self.new: dict[int, int] = {}  # when they came, those of them that no step has met
        self.last: int | None = None  # when the last call ended, or the last step was scheduled

    def take(self, call: object) -> None:
        """Note one call of the scheduler."""
        match call:
            case Add():
                self.new[call.row] = call.line.t if call.line.inq is None else call.line.inq
                self.live += 1
            case Schedule() if call.scheduled:
                self._schedule(call)
            case Update() if call.step in self.in_flight:
                self.in_flight.remove(call.step)
                self.ends[call.step] = self.last = call.t[1]
            case OutputLine():
                self.new.pop(call.row, None)
                self.live -= 1
            case Abort():
                self._outside(call.rows)
            case Reset():
                self._outside([RESET])

    def _outside(self, rows: list[int]) -> None:
        self.between.setdefault(len(self.steps) + len(self.ends), []).extend(rows)

    def _schedule(self, call: Schedule) -> None:
        start = call.t[0]
        came = min(self.new.values(), default=start)
        since = came if self.last is None else self.last
        if self.live == len(self.new):  # it was idle before these came
            since = max(since, came)
        self.steps.append((call.step, start - since, start, len(self.ends)))
        self.counts.append(len(call.scheduled))
        self.scheduled.extend((row, tokens) for row, tokens, _ in call.scheduled)
        self.in_flight.add(call.step)
        self.last = start
        self.new.clear()

    def columns(self) -> RecordedSteps:
        """What has been noted, up to the first step without an end."""
        n = next((i for i, (number, *_) in enumerate(self.steps) if number not in self.ends), len(self.steps))
        number, pause, start, updates_before = np.array(self.steps[:n], np.int64).reshape(n, 4).T
        end = np.array([self.ends[one] for one in number.tolist()], np.int64)
        first = np.concatenate([[0], np.cumsum(np.array(self.counts[:n], np.int64))])
        row, tokens = np.array(self.scheduled[: first[-1]], np.int64).reshape(-1, 2).T
        duration = (end - start) / 1e6
        return RecordedSteps(number, pause / 1e6, duration, updates_before, first, row, tokens, self.between)
