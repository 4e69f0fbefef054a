"""What a run adds up to, of one engine and of several."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.arena import Owner
from sim.blocks import EVICTIONS
from sim.columns import K, W
from sim.core import Core
from sim.domain import StepsOutside, steps_outside
from sim.memory_states import fullest_states, state_times
from sim.request import Floats, Ints
from sim.timeseries import Samples, samples_of, summed

LARGEST = ("max_num_running", "max_blocks_used", "last_time")  # of one engine; all else is summed


class Totals(NamedTuple):
    """What a run adds up to; times in seconds."""

    num_steps: int
    num_scheduled_tokens: int
    num_scheduled_seqs: int
    num_running_sum: int  # over steps
    max_num_running: int
    max_concurrent_requests: int
    prefix_cache_queries: int  # tokens of first admissions
    prefix_cache_hits: int
    preempted_queries: int  # of admissions after a preemption
    preempted_hits: int
    num_admissions: int
    num_readmissions: int
    num_preemptions: int
    num_evictions: int
    num_lookups: int
    num_resets: int  # of the prefix cache, those that succeeded
    warm_hits: int  # blocks hit by first admissions that were cached before the run began
    busy_time: float  # sum of step durations
    last_time: float  # end of the last step
    itl_histogram: Ints  # inter-token latencies, see sim/histogram.py
    itl_count: int
    itl_sum: float
    itl_sum_squares: float
    max_blocks_used: int
    usage_time: float  # used blocks x step durations
    state_times: Floats  # slots x step durations, see sim/memory_states.py
    fullest_states: Ints  # slots, in each engine's fullest step
    samples: Samples
    steps_outside: StepsOutside
    durations: Ints  # of blocks and gaps, see sim/residency.py; of no bins: not kept
    evicted_from: dict[Owner, int]  # evictions by the owner of the block
    metadata: Floats  # entries that the cache keeps to find KV, and the slots of that KV
    cache_sums: Floats  # what only this cache adds up, see its `figures`; of no length: nothing
    warm_up: Totals | None = None  # the same sums at `measure_from`
    replicas: tuple[Totals, ...] = ()  # those of each engine, of several


def totals_of(core: Core, owners: Iterable[Owner]) -> Totals:
    """An engine's sums so far; `owners` in the order of their numbers."""
    count, clock = core.count, core.clock

    def number(index: int) -> int:
        return int(count[index])

    return Totals(
        num_steps=number(K.num_steps),
        num_scheduled_tokens=number(K.num_scheduled_tokens),
        num_scheduled_seqs=number(K.num_scheduled_seqs),
        num_running_sum=number(K.num_running_sum),
        max_num_running=number(K.max_num_running),
        max_concurrent_requests=number(K.max_concurrent),
        prefix_cache_queries=number(K.queries),
        prefix_cache_hits=number(K.hits),
        preempted_queries=number(K.preempted_queries),
        preempted_hits=number(K.preempted_hits),
        num_admissions=number(K.num_admissions),
        num_readmissions=number(K.num_readmissions),
        num_preemptions=number(K.num_preemptions),
        num_evictions=int(core.pool.count[EVICTIONS]),
        num_lookups=number(K.num_lookups),
        num_resets=number(K.num_resets),
        warm_hits=number(K.warm_hits),
        busy_time=float(clock[W.busy]),
        last_time=float(clock[W.last_update]),
        itl_histogram=core.itl_histogram.copy(),
        itl_count=number(K.itl_count),
        itl_sum=float(clock[W.itl_sum]),
        itl_sum_squares=float(clock[W.itl_sum_squares]),
        max_blocks_used=number(K.max_blocks_used),
        usage_time=float(clock[W.usage]),
        state_times=state_times(core),
        fullest_states=fullest_states(core),
        samples=samples_of(core),
        steps_outside=steps_outside(core),
        durations=core.pool.durations.copy(),
        evicted_from=dict(sorted(zip(owners, core.pool.evicted_from.tolist(), strict=False))),
        metadata=np.array(_module(core).metadata(core), np.float64),
        cache_sums=np.array(getattr(core.cache, "sums", ()), np.float64),
    )


def _module(core: Core) -> Any:
    """The file of the engine's cache."""
    return sys.modules[type(core.cache).__module__]


def total(engines: Sequence[Totals]) -> Totals:
    """The sums of several engines together, LARGEST those of the engine with most.

    `max_concurrent_requests` is not known from the engines' own: the sum is an upper bound.
    """
    figures: dict[str, Any] = {}
    for name in Totals._fields:
        values = [getattr(one, name) for one in engines]
        if name in LARGEST:
            figures[name] = max(values)
        elif name == "samples":
            figures[name] = summed(values)
        elif name == "steps_outside":
            figures[name] = StepsOutside(*map(sum, zip(*values, strict=True)))
        elif name == "evicted_from":
            lost: Counter[Owner] = Counter()
            for one in values:
                lost.update(one)
            figures[name] = dict(sorted(lost.items()))
        elif name == "warm_up":
            figures[name] = total(values) if values[0] is not None else None
        elif name == "replicas":
            figures[name] = tuple(engines)
        else:
            figures[name] = sum(values[1:], start=values[0])
    return Totals(**figures)
