"""What was measured and what was simulated, in the same columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.errors import InputError
from sim.recording import Header, Requests, Steps, read_header, read_requests, read_steps
from sim.records import Records

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Clock = Literal["client", "engine"]  # who sees a request begin and its tokens come

INSTANTS = 2001  # at which the curves are compared


class Recorded(NamedTuple):
    """A recording, read."""

    path: Path
    header: Header
    requests: Requests
    steps: Steps


class Side(NamedTuple):
    """A row a request that ended well; milliseconds and tokens."""

    row: Ints  # its number
    ttft_ms: Floats
    e2el_ms: Floats
    prompt_len: Ints
    output_len: Ints
    num_cached_tokens: Ints  # hit at the first admission
    num_preemptions: Ints


class Curves(NamedTuple):
    """The engine over time, at even instants, in seconds since the first request came into its queue."""

    time: Floats
    running: Floats
    waiting: Floats
    kv_cache_usage_perc: Floats  # of 1


def read_recorded(path: Path) -> Recorded:
    """Read a recording whole. Raises InputError, one line, also for one in which nothing ran."""
    recorded = Recorded(path, read_header(path), read_requests(path), read_steps(path))
    if not recorded.steps.num_tokens.any():
        raise InputError(f"{path}: no step ran there; record a server that is asked something")
    return recorded


def has_client(requests: Requests) -> bool:
    """Whether the client's times were recorded."""
    return bool(np.isfinite(requests.submitted_time).any() and np.isfinite(requests.client_first).any())


def measured_side(requests: Requests, clock: Clock) -> Side:
    """The requests of a recording that ended by themselves; without client, its times begin at the queue."""
    if clock == "client":
        begin, first, last = requests.submitted_time, requests.client_first, requests.client_last
    else:
        begin, first, last = requests.queued_time, requests.first_token_time, requests.finish_time
    ended = np.isfinite(begin) & np.isfinite(first) & np.isfinite(last) & ~requests.aborted
    everybody = Side(
        np.arange(len(begin)),
        1e3 * (first - begin),
        1e3 * (last - begin),
        requests.prompt_len,
        requests.output_len,
        requests.num_cached_tokens,
        requests.num_preemptions,
    )
    return picked(everybody, np.flatnonzero(ended))


def simulated_side(records: Records, clock: Clock, reply_us: float, order: Ints | None) -> Side:
    """The requests of a run, in order of their numbers; `order` gives the recording's number of each."""
    number = records.column("request_id")
    row = number if order is None else order[number]
    outside = 0.0 if clock == "client" else records.column("front_end_time_ms") + reply_us / 1e3
    everybody = Side(
        row,
        records.column("ttft_ms") - outside,
        records.column("e2el_ms") - outside,
        records.column("prompt_len"),
        records.column("output_len"),
        records.column("num_cached_tokens"),
        records.column("num_preemptions"),
    )
    in_order = np.argsort(row, kind="stable")
    return picked(everybody, in_order[records.column("refused")[in_order] == 0])


def both_of(measured: Side, simulated: Side) -> tuple[Side, Side]:
    """The requests that ended well on both sides, in the same order."""
    _, mine, other = np.intersect1d(measured.row, simulated.row, return_indices=True)
    return picked(measured, mine), picked(simulated, other)


def picked(side: Side, rows: Ints) -> Side:
    """Some of its requests."""
    return Side(**{name: getattr(side, name)[rows] for name in Side._fields})


def measured_curves(recorded: Recorded, end: float) -> Curves:
    """What the engine held over `end` seconds: since a step was scheduled, and nothing once all had ended."""
    steps = recorded.steps
    carried_on = steps.running - steps.num_admitted + steps.num_preempted > 0
    idles = np.append(~carried_on[1:], True) & (steps.waiting == 0)  # after its update
    pool = recorded.header.effective.num_gpu_blocks - 1
    none = np.zeros(int(idles.sum()))
    time = np.concatenate([steps.schedule_start, steps.update_end[idles]])
    order = np.argsort(time, kind="stable")

    def level(scheduled: Ints, idle: npt.NDArray[np.generic]) -> Floats:
        return np.concatenate([[0.0], np.concatenate([scheduled, idle])[order]])

    begin = float(np.nanmin(recorded.requests.queued_time))
    instants = np.linspace(0.0, end, INSTANTS)
    at = np.searchsorted(time[order], begin + instants, side="right")
    used = level(pool - steps.free, (pool - steps.free_after)[idles]) / pool
    return Curves(instants, level(steps.running, none)[at], level(steps.waiting, none)[at], used[at])


def simulated_curves(series: dict[str, npt.NDArray[np.generic]], begin: float, end: float) -> Curves:
    """The same of a run whose first request was queued at `begin`: a sample holds since the one before."""
    instants = np.linspace(0.0, end, INSTANTS)
    at = np.searchsorted(series["time"], begin + instants)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return Curves(instants, *(np.append(series[name], 0.0)[at] for name in names))


def figures(values: Floats) -> Iterator[tuple[str, float]]:
    """Mean, median and two percentiles, by vLLM's words."""
    if not len(values):
        return
    yield "mean", float(values.mean())
    for name, percent in (("median", 50), ("p90", 90), ("p99", 99)):
        yield name, float(np.percentile(values, percent))
