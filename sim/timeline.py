"""A recorded run as Chrome trace events, to be opened in Perfetto.

Engine steps, a lane for each request, and counters. Format: Google's "Trace Event Format", the JSON
object with the phases X, C and M.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.out_file import replace_bytes
from sim.recorder import Lane, Recorder
from sim.samples import request_of

ENGINE, REQUESTS = 1, 2  # the two processes of the trace

Event = dict[str, Any]


def trace(recorder: Recorder) -> Iterator[Event]:
    """The recording as trace events: names first, then all others in order of time."""
    yield _name("process_name", ENGINE, 0, "engine")
    yield _name("thread_name", ENGINE, 1, "steps")
    yield _name("process_name", REQUESTS, 0, "requests")
    for tid, lane in enumerate(recorder.lanes, 1):
        yield _name("thread_name", REQUESTS, tid, _title(lane))
        yield _name("thread_sort_index", REQUESTS, tid, tid)
    events = [*_step_events(recorder), *_lane_events(recorder), *_counter_events(recorder)]
    yield from sorted(events, key=lambda event: event["ts"])


def _title(lane: Lane) -> str:
    name = f"request {request_of(lane.request_id)}"
    sample = lane.about.get("sample")
    if sample is None:
        return name
    return f"{name}, sample {sample}" if sample > 0 else f"{name}, its prompt ahead"


def _step_events(recorder: Recorder) -> Iterator[Event]:
    for step in recorder.steps:
        kinds = [name for name, n in (("decode", step.num_decodes), ("prefill", step.num_prefills)) if n]
        about = {
            "tokens": step.num_tokens,
            "decodes": step.num_decodes,
            "prefills": step.num_prefills,
            "prefill_tokens": step.num_tokens - step.num_decodes,
        }
        yield _complete(" + ".join(kinds), ENGINE, 1, step.begin, step.end, about)


def _lane_events(recorder: Recorder) -> Iterator[Event]:
    for tid, lane in enumerate(recorder.lanes, 1):
        for piece in lane.slices:
            about = {"tokens": piece.num_tokens} if piece.num_tokens else lane.about
            yield _complete(piece.name, REQUESTS, tid, piece.begin, piece.end, about)


def _counter_events(recorder: Recorder) -> Iterator[Event]:
    names = ("requests running", "requests waiting", "KV blocks in use")
    for level in recorder.levels:
        for name, value in zip(names, level[1:], strict=True):
            yield {"name": name, "ph": "C", "pid": ENGINE, "ts": _us(level.time), "args": {"value": value}}


def _complete(name: str, pid: int, tid: int, begin: float, end: float, args: dict[str, int]) -> Event:
    ts = _us(begin)
    dur = round(_us(end) - ts, 3)
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _name(kind: str, pid: int, tid: int, value: str | int) -> Event:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {key: value}}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond that Perfetto keeps."""
    return round(seconds * 1e6, 3)


def write_timeline(recorder: Recorder, path: Path) -> None:
    """Write the events as a JSON object, one event a line; gzipped where `path` ends in .gz.

    Whole or not at all; InputError where it cannot. Equal recordings give equal bytes.
    """
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace(recorder))
    data = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode()
    replace_bytes(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def left_out(recorder: Recorder, num_requests: int) -> str | None:
    """What the timeline does not show of a run of so many requests, in one line; None if it shows all."""
    steps, num_steps = recorder.steps, recorder.num_steps
    samples = [lane for lane in recorder.lanes if lane.about.get("sample") != 0]  # not a prompt ahead of them
    lanes = Counter(request_of(lane.request_id) for lane in samples)
    whole = sum(lanes[request_of(lane.request_id)] == lane.about.get("n", 1) for lane in samples)
    if len(lanes) == num_requests and whole == len(samples) and len(steps) == num_steps:
        return None
    span = f", from {steps[0].begin:g} to {steps[-1].end:g} s" if steps else ""
    return (
        f"timeline: {len(lanes)} of {num_requests} requests and {len(steps)} of {num_steps} steps{span}; "
        "--timeline-window START:END chooses another part"
    )
