"""The engine over time: samples at even instants, in memory that does not grow with the run.

A sample holds what was in force just before its instant, a whole multiple of the interval. The
interval begins at 2**-10 s; when the table is full, every second sample goes and the interval
doubles, so it is always a power of two, instants are exact, and a long run keeps half a table or
more. Sampling begins with the last instant before, or at, the first arrival.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim._jit import hot, verb
from sim.blocks import EVICTIONS, FREE
from sim.columns import K, W, X
from sim.core import Core
from sim.request import Floats, Ints

SAMPLES = 4096  # an even number
FIRST_INTERVAL = 2.0**-10  # seconds
LATEST = 2.0**40  # seconds: no samples after that


class Samples(NamedTuple):
    """The samples of a run, in order of time."""

    start: float  # seconds: the instant of the first
    interval: float  # seconds
    table: Ints  # [i, X]
    after: Ints  # [X]: what holds after the last


def start_sampling(core: Core, arrival_time: float) -> None:
    """The engine's first request arrives: sample from the instant before, or at, its arrival."""
    if arrival_time <= LATEST:
        core.count[K.first_sample] = math.floor(arrival_time / FIRST_INTERVAL)
        core.clock[W.sample_interval] = FIRST_INTERVAL
        core.clock[W.next_sample] = core.count[K.first_sample] * FIRST_INTERVAL


@hot
def take_samples(core: Core, now: float, num_scheduled_tokens: int) -> None:
    """Take the samples that are due at `now`, before anything of that instant happens.

    The engine has not changed since the former instant that something happened. The tokens
    scheduled so far are given, because a run of decodes counts its own at its end.
    """
    used = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
    evictions = core.pool.count[EVICTIONS]
    append_samples(core.samples, core.count, core.clock, now, used, evictions, num_scheduled_tokens)


@verb
def append_samples(
    samples: Ints, count: Ints, clock: Floats, now: float, used: int, evictions: int, scheduled_tokens: int
) -> None:
    """The work of `take_samples`, out of line: handing over a whole engine would take longer than it."""
    while clock[W.next_sample] <= now and clock[W.next_sample] <= LATEST:
        i = count[K.num_samples]
        samples[i, X.num_running] = count[K.num_running]
        samples[i, X.num_waiting] = count[K.num_waiting]
        samples[i, X.num_blocks] = used
        samples[i, X.num_evictions] = evictions
        samples[i, X.num_preemptions] = count[K.num_preemptions]
        samples[i, X.queries] = count[K.queries]
        samples[i, X.hits] = count[K.hits]
        samples[i, X.num_scheduled_tokens] = scheduled_tokens
        count[K.num_samples] = i + 1
        if i + 1 == samples.shape[0]:
            keep_every_second(samples, count, clock)
        clock[W.next_sample] = (count[K.first_sample] + count[K.num_samples]) * clock[W.sample_interval]


@verb
def keep_every_second(samples: Ints, count: Ints, clock: Floats) -> None:
    """Drop the samples at odd multiples of the interval, and double it."""
    odd = count[K.first_sample] % 2
    kept = samples.shape[0] // 2
    for i in range(kept):
        for column in range(X.WIDTH):
            samples[i, column] = samples[2 * i + odd, column]
    count[K.num_samples] = kept
    count[K.first_sample] = (count[K.first_sample] + odd) // 2
    clock[W.sample_interval] *= 2.0


_COUNTED = {
    X.num_running: K.num_running,
    X.num_waiting: K.num_waiting,
    X.num_preemptions: K.num_preemptions,
    X.queries: K.queries,
    X.hits: K.hits,
    X.num_scheduled_tokens: K.num_scheduled_tokens,
}


def samples_of(core: Core) -> Samples:
    """A copy of the samples taken so far."""
    interval = float(core.clock[W.sample_interval])
    start = float(core.count[K.first_sample] * interval)
    after = np.zeros(X.WIDTH, np.int64)
    for column, number in _COUNTED.items():
        after[column] = core.count[number]
    after[X.num_blocks] = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
    after[X.num_evictions] = core.pool.count[EVICTIONS]
    return Samples(start, interval, core.samples[: core.count[K.num_samples]].copy(), after)


def summed(engines: Sequence[Samples]) -> Samples:
    """The samples of several engines added up, at the longest of their intervals or longer."""
    sampled = [one for one in engines if len(one.table)]
    if not sampled:
        return engines[0]
    end = max(one.start + one.interval * (len(one.table) - 1) for one in sampled)
    interval = max(one.interval for one in sampled)
    first = min(one.start for one in sampled)
    while (end - first) / interval >= SAMPLES:
        interval *= 2.0
    begin = math.ceil(first / interval)
    table = np.zeros((max(0, math.floor(end / interval) - begin + 1), X.WIDTH), np.int64)
    for one in sampled:
        every = round(interval / one.interval)
        offset = round(one.start / one.interval)
        place = (begin + np.arange(len(table))) * every - offset  # of an instant in the engine's table
        inside = (place >= 0) & (place < len(one.table))
        table[inside] += one.table[place[inside]]
        table[place >= len(one.table)] += one.after
    return Samples(begin * interval, interval, table, np.sum([one.after for one in engines], axis=0))


def time_series(samples: Samples, usable_blocks: int) -> dict[str, npt.NDArray[np.float64] | Ints]:
    """The samples as columns, named as vLLM names its metrics; `time` in seconds.

    `usable_blocks` are those of all pools, less the null blocks.

    num_requests_* and kv_cache_usage_perc (of 1) are those of the instant, all others count from
    the start of the run. Requests in the front end are not yet waiting.
    """
    table = samples.table
    time = samples.start + samples.interval * np.arange(len(table), dtype=np.float64)
    return {
        "time": time,
        "num_requests_running": table[:, X.num_running],
        "num_requests_waiting": table[:, X.num_waiting],
        "kv_cache_usage_perc": table[:, X.num_blocks] / usable_blocks,
        "num_evictions": table[:, X.num_evictions],
        "num_preemptions": table[:, X.num_preemptions],
        "prefix_cache_queries": table[:, X.queries],
        "prefix_cache_hits": table[:, X.hits],
        "num_scheduled_tokens": table[:, X.num_scheduled_tokens],
    }
