"""Whether the engine kept up with its arrivals: latencies of an overloaded run say little."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from sim.core import EngineConfig
    from sim.cost import StepCost
    from sim.records import Records

Floats = npt.NDArray[np.float64]
Column = npt.NDArray[Any]


class Saturation(NamedTuple):
    """Whether the engine kept up with its arrivals, and the figures that say so."""

    verdict: str  # STABLE, BACKLOGGED or OVERLOADED
    completion_ratio: float  # completions within the arrival span / arrivals
    queueing_share: float  # part of TTFT spent waiting, requests of the last third
    waiting_tokens: tuple[int, int, int]  # prompt tokens waiting at 1/3, 2/3, 3/3 of the span


def saturation(
    records: Records,
    first_arrival: float,
    last_arrival: float,
    own_front_end_time: Callable[[Column], Floats] | None = None,
) -> Saturation:
    """Judge the run over its arrival span [first_arrival, last_arrival], in seconds.

    Waiting work W(t) is the prompt tokens of requests that have arrived and have not been
    scheduled by t. OVERLOADED: W rises over both last thirds of the span and fewer than 95 % of
    the arrivals completed within it. BACKLOGGED: otherwise, but queueing is more than half of
    TTFT for the requests that arrived in the last third. STABLE: otherwise.

    Queueing is for the front-end thread and for the engine: all time from arrival to the first
    step but `own_front_end_time`, the seconds that the thread works on prompts of given lengths
    (None: nothing). So a thread that cannot keep up counts, and a long hash alone does not.
    """
    span = last_arrival - first_arrival
    marks = (first_arrival + span / 3, first_arrival + span * 2 / 3, last_arrival)
    waiting = [0, 0, 0]
    arrivals = completions = 0
    queueing = until_first = 0.0
    names = ("refused", "arrival_time", "scheduled_time", "first_token_time", "finish_time")
    for refused, arrival, scheduled, first, finish, prompt in records.chunks(*names, "prompt_len"):
        ran = refused == 0
        arrivals += int(np.count_nonzero(ran))
        completions += int(np.count_nonzero(ran & (finish <= last_arrival)))
        for i, mark in enumerate(marks):
            waiting[i] += int(prompt[ran & (arrival <= mark) & (scheduled > mark)].sum())
        late = ran & (arrival >= marks[1])
        queueing += float((scheduled[late] - arrival[late]).sum())
        if own_front_end_time is not None:
            queueing -= float(own_front_end_time(prompt[late]).sum())
        until_first += float((first[late] - arrival[late]).sum())
    completion_ratio = completions / arrivals if arrivals else math.nan
    queueing_share = max(queueing, 0.0) / until_first if until_first > 0.0 else 0.0
    verdict = "STABLE"
    if waiting[0] < waiting[1] < waiting[2] and completion_ratio < 0.95:
        verdict = "OVERLOADED"
    elif queueing_share > 0.5:
        verdict = "BACKLOGGED"
    return Saturation(verdict, completion_ratio, queueing_share, (waiting[0], waiting[1], waiting[2]))


def front_end_work(cost: StepCost, config: EngineConfig, prompt_len: Column) -> Floats:
    """Seconds the front-end thread works on prompts of these lengths (as sim/advance.py has it work)."""
    blocks = prompt_len // config.block_size if config.enable_prefix_caching else np.zeros(len(prompt_len))
    work: Floats = (cost.front_end_us + cost.hash_us_per_block * blocks) * 1e-6
    return work
