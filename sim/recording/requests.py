"""A recording's requests as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from sim.recording.calls import Add, calls
from sim.recording.contents import Segments
from sim.recording.lines import Abort, OutputLine, Schedule, Update
from sim.recording.progress import Lengths
from sim.recording.sessions import Sessions

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
NAN = float("nan")


class Requests(NamedTuple):
    """Row i is the request added i-th. Times in seconds since the recording began, NaN where unknown."""

    name: list[str]  # vLLM's request id
    arrival_time: Floats  # when vLLM's front end took it in
    submitted_time: Floats  # when the client sent it; version 1 only
    queued_time: Floats  # when it came into the engine's queue (version 1), or to the scheduler
    added_time: Floats  # when it came to the scheduler, after the step that ran then
    scheduled_time: Floats  # start of the step that admitted it first
    first_token_time: Floats  # the engine's: end of the step that gave it
    finish_time: Floats  # the engine's: last token, or the abort
    client_first: Floats  # when the client had the first token; version 1 only
    client_last: Floats
    prompt_len: Ints  # tokens
    output_len: Ints  # really generated
    max_tokens: Ints
    stopped: Flags  # ended before max_tokens
    aborted: Flags
    num_cached_tokens: Ints  # hit tokens at the first admission; -1: never admitted
    num_preemptions: Ints
    priority: Ints
    salt: list[str | None]
    lora: list[str | None]
    after: Ints  # the request whose answer its prompt goes on with, -1: none; see sim.recording.sessions
    think_time: Floats  # from that one's end (version 1: its last token at the client) to this one
    segments: list[Segments]  # (segment id, tokens) of prompt and outputs, see sim.recording.contents


def read_requests(path: Path | str) -> Requests:
    """The requests of a recording; InputError if it is none.

    A request that had not ended when the recording did has a NaN finish_time and the outputs so far.
    """
    rows: list[dict[str, Any]] = []
    lengths, sessions = Lengths(), Sessions()
    sampled: dict[int, list[int]] = {}
    for call in calls(path):
        if isinstance(call, Add):
            lengths.add(call)
            rows.append(_added(call, sessions))
        elif isinstance(call, Schedule):
            sampled[call.step] = lengths.sampled(call)
            for row, hit in call.new:
                rows[row] |= {"scheduled_time": call.t[0] * 1e-6, "num_cached_tokens": hit}
            for row, *_ in call.pre:
                rows[row]["num_preemptions"] += 1
        elif isinstance(call, Update):
            for row in sampled.pop(call.step):
                if row not in lengths.length:
                    continue  # it ended meanwhile
                one = rows[row]
                one["output_len"] += 1
                one.setdefault("first_token_time", call.t[1] * 1e-6)
            for row in call.fin:
                rows[row] |= {"finish_time": call.t[1] * 1e-6, "stopped": row in call.stop}
        elif isinstance(call, Abort):
            for row in call.rows:
                rows[row].setdefault("finish_time", call.t * 1e-6)
        elif isinstance(call, OutputLine):
            del lengths.length[call.row]
            one = rows[call.row]
            _ended(one, call)
            sessions.end(call.row, one["finish_time"], one["prompt_len"], one["segments"])
    for row, one in enumerate(rows):
        rest = one["prompt_len"] + one["output_len"] - sum(length for _, length in one["segments"])
        if rest > 0:
            one["segments"] = [*one["segments"], (-1 - row, rest)]
    kinds = get_type_hints(Requests)
    return Requests(
        *(_column(kinds[name], [one.get(name, NAN) for one in rows]) for name in Requests._fields)
    )


def _added(add: Add, sessions: Sessions) -> dict[str, Any]:
    """What is known of a request when it arrives, and a little of its end."""
    line = add.line
    row = {
        "name": add.name,
        "arrival_time": line.arr * 1e-6,
        "queued_time": (line.t if line.inq is None else line.inq) * 1e-6,
        "added_time": line.t * 1e-6,
        "prompt_len": line.prompt_len,
        "output_len": 0,
        "max_tokens": line.max_tokens,
        "stopped": False,
        "aborted": add.aborted,
        "num_cached_tokens": -1,
        "num_preemptions": 0,
        "priority": line.priority,
        "salt": line.salt,
        "lora": line.lora,
        "segments": add.segments,
    }
    if line.sub is not None:
        row["submitted_time"] = line.sub * 1e-6
        after, think = (-1, NAN) if line.after is None else (line.after, line.think)
    else:
        after, think = sessions.before(line.arr * 1e-6, line.prompt_len, add.segments)
    return row | {"after": after, "think_time": think}


def _ended(row: dict[str, Any], line: OutputLine) -> None:
    """Adds what the end of a request tells: tokens in all, and the stamps that version 1 has."""
    row["output_len"] = line.num_tokens - row["prompt_len"]
    stamps = {
        "scheduled_time": line.sched,
        "first_token_time": line.ftok,
        "finish_time": line.ltok,
        "client_first": line.cfirst,
        "client_last": line.clast,
    }
    row |= {name: stamp * 1e-6 for name, stamp in stamps.items() if stamp is not None}


def _column(kind: Any, values: list[Any]) -> Any:
    """Values as what a field of Requests is."""
    for array, dtype in ((Floats, np.float64), (Ints, np.int64), (Flags, np.bool_)):
        if kind == array:
            return np.array(values, dtype)
    return values
