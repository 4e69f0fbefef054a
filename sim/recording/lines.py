"""The lines of a recording behind its header: one for each call of vLLM's scheduler.

Names are those of the file where they say enough; times are integer microseconds since the
recording began, requests are numbered in order of arrival at the scheduler.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from sim.recording.header import Flag, Line, Text, Time, Whole

Span = tuple[Time, Time]
Pair = tuple[Whole, Whole]
Tokens = Annotated[int, Strict(), Field(ge=0, le=2**28)]
Triple = tuple[Whole, Tokens, Tokens]
Waits = tuple[Whole, Whole, Whole]
Statistics = tuple[Whole, Whole, Whole, Whole, Whole, Whole]


class AddLine(Line):
    """Scheduler.add_request."""

    row: Whole = Field(alias="add")
    t: Time
    id: Text
    arr: Time
    prompt_len: Annotated[int, Strict(), Field(ge=1, le=2**28)] = Field(alias="np")
    max_tokens: Annotated[int, Strict(), Field(ge=1, le=2**40)] = Field(alias="max")
    priority: Time = Field(0, alias="prio")
    salt: Text | None = None
    lora: Text | None = None
    content: str | list[Any] = Field("", alias="c")
    uses: list[Text] = Field(default_factory=list)  # what a replay may not know: images, grammar, ...
    # version 1 only
    inq: Time | None = None
    sub: Time | None = None
    after: Whole | None = None
    think: float | None = None


class Schedule(Line):
    """Scheduler.schedule, also one that scheduled nothing."""

    step: Whole = Field(alias="i")
    t: Span  # start, end
    scheduled: list[Triple] = Field(alias="s")  # request, tokens, computed before
    new: list[Pair] = Field(default_factory=list)  # admitted for the first time: request, hit tokens
    res: list[Pair] = Field(default_factory=list)  # admitted again after a preemption
    pre: list[Triple] = Field(default_factory=list)  # preempted: request, computed before, outputs so far
    nb: Whole = 0  # blocks taken
    bcrc: Whole = 0
    nev: Whole = 0  # cached blocks among them, evicted
    ecrc: Whole = 0
    fr: Whole  # free blocks afterwards
    throttle: Flag = False  # whether data parallelism held prefills back
    q: Pair  # running, waiting afterwards


class Update(Line):
    """Scheduler.update_from_output."""

    step: Whole = Field(alias="u")
    t: Span
    fin: list[Whole] = Field(default_factory=list)
    stop: list[Whole] = Field(default_factory=list)
    pcs: Statistics = (0, 0, 0, 0, 0, 0)
    fr2: Whole
    w: Waits | None = None  # version 1 only: worker's CPU time and waits during the step


class OutputLine(Line):
    """How a request ended."""

    row: Whole = Field(alias="o")
    t: Time = 0
    num_tokens: Whole = Field(alias="n")
    content: str | list[Any] = Field("", alias="c")
    # version 1 only: stamps of the engine and of the client
    sched: Time | None = None
    ftok: Time | None = None
    ltok: Time | None = None
    cfirst: Time | None = None
    clast: Time | None = None


class Abort(Line):
    """Scheduler.finish_requests, from outside."""

    rows: list[Whole] = Field(alias="abort")
    t: Time


class Reset(Line):
    """Scheduler.reset_prefix_cache."""

    done: Flag = Field(alias="reset")
    t: Time
    pre: list[Triple] = Field(default_factory=list)  # preempted by it


class Pause(Line):
    """The server was paused, or goes on."""

    state: Text = Field(alias="pause")
    t: Time


class Failed(Line):
    """The recorder gave up."""

    reason: Text = Field(alias="failed")
    t: Time


class End(Line):
    """The server's end; absent where it was killed."""

    end: Literal[True]
    t: Time
    steps: Whole | None = None
    end_free: Whole | None = None  # checksum of the free queue, head first
    num_free: Whole | None = None  # version 1: its length
    recorder_us: Whole = 0  # spent in the recorder


AnyLine = AddLine | Schedule | Update | OutputLine | Abort | Reset | Pause | Failed | End

KINDS: dict[str, type[AnyLine]] = {  # by the first field of a line
    "add": AddLine,
    "s": Schedule,
    "u": Update,
    "o": OutputLine,
    "abort": Abort,
    "reset": Reset,
    "pause": Pause,
    "failed": Failed,
    "end": End,
}
