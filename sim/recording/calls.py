"""The calls of a recorded scheduler, in order, as a stream.

A request is added before it is known how it ends. So a second reading of the file goes ahead of
the first, just as far as the end of the request that is added: what is kept follows the requests
that live at one time, not the length of the recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sim.recording.contents import Segments, Unreadable, segments_of
from sim.recording.lines import (
    KINDS,
    Abort,
    AddLine,
    AnyLine,
    End,
    Failed,
    OutputLine,
    Pause,
    Reset,
    Schedule,
    Update,
)
from sim.recording.source import LOST, Source, open_recording, warn_of_the_end

STEPS_IN_FLIGHT = 2  # that the simulator has room for


class Add(NamedTuple):
    """Scheduler.add_request: a request, and what became of it."""

    row: int  # its number: 0, 1, ... in order of these calls
    name: str  # vLLM's request id
    line: AddLine  # times, lengths, salt, adapter
    num_tokens: int | None  # prompt and outputs when it ended; None: the recording ends before
    aborted: bool
    segments: Segments  # of prompt and outputs; where num_tokens is None, of the prompt


Call = Add | Schedule | Update | OutputLine | Abort | Reset | Pause | Failed | End


def calls(path: Path | str) -> Iterator[Call]:
    """The calls in order, times in integer microseconds.

    An OutputLine follows the call that ended its request.
    InputError if the file is no recording or lacks lines, with the line in which that shows.
    """
    return _calls(open_recording(path))


def _calls(source: Source) -> Iterator[Call]:
    outcomes = _Outcomes(source)
    live: set[int] = set()
    in_flight: list[int] = []  # steps, oldest first
    most = STEPS_IN_FLIGHT if source.header.is_async else 1
    num_added = num_scheduled = num_updated = 0
    ended = -(2**53)  # when the last step was scheduled or updated
    last: AnyLine | None = None
    for number, line in _whole(source):
        last = line
        rows: list[int] = []  # that must live
        match line:
            case AddLine():
                if line.row != num_added:
                    raise source.error(number, f"adds request {line.row} where {num_added} is due: {LOST}")
                num_added += 1
                live.add(line.row)
                yield outcomes.added(number, line)
                continue
            case Schedule():
                num_scheduled += 1
                in_flight.append(line.step)
                if len(in_flight) > most:
                    raise source.error(
                        number, f"{len(in_flight)} steps in flight, at most {most} can be: {LOST}"
                    )
                rows = [row for row, *_ in (*line.scheduled, *line.new, *line.res, *line.pre)]
            case Update():
                if not in_flight or line.step != in_flight.pop(0):
                    raise source.error(number, f"the update of step {line.step}, which is not due: {LOST}")
                num_updated += 1
                rows = [*line.fin, *line.stop]
            case Abort():
                rows = line.rows
            case Reset():
                rows = [row for row, *_ in line.pre]
            case OutputLine():
                rows = [line.row]
            case End():
                if line.steps not in (None, num_scheduled):
                    raise source.error(
                        number, f"ends after {line.steps} steps, {num_scheduled} are there: {LOST}"
                    )
        for row in rows:
            if row not in live:
                raise source.error(number, f"request {row}, which does not live then: {LOST}")
        if isinstance(line, (Schedule, Update)):
            if not ended <= line.t[0] <= line.t[1]:
                raise source.error(number, f"t: {list(line.t)}: time goes back; record again")
            ended = line.t[1]
        if isinstance(line, OutputLine):
            live.remove(line.row)
        yield line
    if not isinstance(last, End):
        why = last.reason if isinstance(last, Failed) else ""
        warn_of_the_end(source.path, num_updated, why)


def _whole(source: Source) -> Iterator[tuple[int, AnyLine]]:
    """The lines, without a last one whose requests ended and whose `o` lines are cut off."""
    held: list[tuple[int, AnyLine]] = []
    due: list[int] = []  # requests whose `o` lines must follow
    for number, line in source.lines(KINDS):
        if isinstance(line, OutputLine):
            if line.row not in due:
                raise source.error(number, f"the end of request {line.row}, which is not due: {LOST}")
            due.remove(line.row)
        elif due:
            raise source.error(number, f"the end of request {due[0]} is not there: {LOST}")
        elif isinstance(line, (Update, Abort)):
            due = [*(line.fin if isinstance(line, Update) else line.rows)]
        held.append((number, line))
        if not due:
            yield from held
            held = []


class _Outcomes:
    """How requests end, read ahead."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ahead = source.lines(("o", "abort"))
        self.known: dict[int, OutputLine] = {}
        self.aborted: set[int] = set()

    def added(self, number: int, line: AddLine) -> Add:
        """An `add` line with what became of the request."""
        while line.row not in self.known and (found := next(self.ahead, None)) is not None:
            if isinstance(found[1], OutputLine):
                self.known[found[1].row] = found[1]
            elif isinstance(found[1], Abort):
                self.aborted.update(found[1].rows)
        outcome = self.known.pop(line.row, None)
        aborted = line.row in self.aborted
        self.aborted.discard(line.row)
        num_tokens = None if outcome is None else outcome.num_tokens
        longest = self.source.header.effective.max_model_len
        if not line.prompt_len <= (num_tokens or line.prompt_len) <= longest:
            lengths = f"{line.prompt_len} prompt tokens, {num_tokens} in all"
            raise self.source.error(
                number, f"request {line.row}: {lengths}, max_model_len {longest}; record again"
            )
        try:
            segments = segments_of(
                self.source.header,
                line.row,
                line.prompt_len,
                num_tokens or line.prompt_len,
                line.content,
                outcome.content if outcome else "",
            )
        except Unreadable as error:
            raise self.source.error(number, f"request {line.row}: {error}; record again") from None
        return Add(line.row, line.id, line, num_tokens, aborted, segments)
