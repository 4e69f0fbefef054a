"""The requests of a recording as rows of a trace, and when the engine had them."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.errors import InputError
from sim.recording import Requests, Steps, read_requests, read_steps
from sim.recording.told import told_by_recording
from sim.request import Floats, Ints
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.trace_rows import Layout, Rows

LAYOUT = Layout("queued", "prompt", "output", 1.0, place="request")
HALF = 0.5e-6  # seconds: recorded times are whole microseconds


class Recorded(NamedTuple):
    """Requests in order of arrival, times in seconds since the recording began."""

    rows: Rows  # line: number of the request, from 0; time: when it came into the engine's queue
    max_tokens: Ints
    after: Ints  # the request whose answer a prompt goes on with; -1: none
    delay: Floats  # from the end of that one to `time`
    told: tuple[str, ...]  # what to know of the file


def read_recorded(path: str) -> Recorded:
    """Read a recording, of which the last one read is kept. Raises: WorkloadError if it is none."""
    try:
        status = os.stat(path)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WorkloadError(f"{path}: cannot read the recording: {reason}; check the path") from None
    return _read(path, status.st_size, status.st_mtime_ns)


def recorded_rows(path: str) -> Iterator[Rows]:
    """Yield the requests of a recording as a trace's rows, warning of what to know of it."""
    recorded = read_recorded(path)
    tell(recorded)
    yield recorded.rows


def tell(recorded: Recorded) -> None:
    """Warn of what to know of a recording."""
    for text in recorded.told:
        warnings.warn(text, WorkloadWarning, stacklevel=3)


@functools.lru_cache(maxsize=1)
def _read(path: str, size: int, modified: int) -> Recorded:
    told: list[str] = []
    with told_by_recording(told):
        try:
            requests, steps = read_requests(path), read_steps(path)
        except InputError as error:
            raise WorkloadError(str(error)) from None
    unended = int(np.isnan(requests.finish_time).sum())
    counts = {
        "had not ended: each ends here with the tokens that it had got": unended,
        "were aborted: in steps that are not recorded, each ends by itself a token later": int(
            requests.aborted.sum()
        ),
    }
    told += [f"{path}: {count} requests {what}" for what, count in counts.items() if count]
    times = _queued(requests, steps)
    ends = _ends(requests, steps)
    follows = requests.after >= 0
    delay = np.where(follows, np.maximum(times - ends[requests.after], 0.0), 0.0)
    return Recorded(_rows(requests, times), requests.max_tokens, requests.after, delay, tuple(told))


def _queued(requests: Requests, steps: Steps) -> Floats:
    """When each request came into the engine's queue, in order.

    It came before the step that found it there was scheduled, and after the one before was: what the
    queue's reader held meanwhile was not yet in it, and two stamps may be of the same microsecond.
    """
    starts = np.concatenate([[-np.inf], steps.schedule_start, [np.inf]])
    found_by = np.searchsorted(steps.schedule_start, requests.added_time) + 1
    times = np.clip(requests.queued_time, starts[found_by - 1] + HALF, starts[found_by] - HALF)
    in_order: Floats = np.maximum.accumulate(times)
    return in_order


def _ends(requests: Requests, steps: Steps) -> Floats:
    """When the step ended that gave each request its last token; NaN for one without an end.

    The engine stamps a token some microseconds before its step ends.
    """
    ends = np.append(steps.update_end, np.inf)
    at = ends[np.searchsorted(steps.update_end, requests.finish_time - HALF)]
    return np.where(requests.aborted | np.isinf(at), requests.finish_time, at)


def _rows(requests: Requests, times: Floats) -> Rows:
    """What a request has of its own stands in no segment: a reader of rows gives it what is left."""
    n = len(times)
    named = [[one for one in segments if one[0] >= 0] for segments in requests.segments]
    flat = np.array([one for row in named for one in row], np.int64).reshape(-1, 2)
    optional = {
        "cache_salt": requests.salt,
        "lora": requests.lora,
        "priority": requests.priority.tolist(),
    }
    return Rows(
        line=np.arange(n),
        time=times,
        prompt_len=requests.prompt_len,
        output_len=requests.output_len + requests.aborted,  # and the token in work that it never got
        start=np.concatenate([[0], np.cumsum([len(row) for row in named])]).astype(np.int64),
        ids=flat[:, 0],
        lens=flat[:, 1],
        optional={name: values for name, values in optional.items() if any(values)},
    )
