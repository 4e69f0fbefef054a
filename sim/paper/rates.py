"""Throughput as the paper measures it: the highest request rate that keeps a bound on normalised latency.

Normalised latency is the time from arrival to the last token over the number of output tokens, in seconds
a token, in the mean over the requests of a run. The same requests come faster at a higher rate, for the
same length of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.scenario import Scenario
from sim.simulation import run

BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # seconds a token
DURATION = 1200.0  # seconds of arrivals; the paper's hour, shortened
STEP = 1.25  # from one rate to the next while looking for the range
TOLERANCE = 0.01  # of a rate


class Point(NamedTuple):
    """A run at one rate."""

    rate: float  # requests a second
    latency: float  # seconds a token
    summary: Mapping[str, Any]


def at_rate(scenario: Scenario, rate: float, duration: float = DURATION) -> Point:
    """Run the scenario's workload at another rate, for `duration` seconds of arrivals."""
    workload = scenario.workload.model_copy(
        update={"request_rate": rate, "num_requests": max(1, round(rate * duration))}
    )
    result = run(scenario.model_copy(update={"workload": workload}))
    total = count = 0.0
    for refused, output_len, e2el in result.records.chunks("refused", "output_len", "e2el_ms"):
        ran = refused == 0
        total += float((e2el[ran] / output_len[ran]).sum()) / 1e3
        count += float(np.count_nonzero(ran))
    result.records.discard()
    return Point(rate, total / count, result.summary)


def highest_rates(
    scenario: Scenario,
    *,
    bounds: Iterable[float] = BOUNDS,
    start: float = 2.0,
    duration: float = DURATION,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[dict[float, float], list[Point]]:
    """The highest rate within each bound, to TOLERANCE, and all points, by rate.

    NaN for a bound that is broken at `start` requests a second.
    """
    points: dict[float, Point] = {}

    def latency(rate: float) -> float:
        if rate not in points:
            points[rate] = at_rate(scenario, rate, duration)
            progress(f"{scenario.name}: {rate:.2f} requests/s: {points[rate].latency:.3f} s a token")
        return points[rate].latency

    found = {}
    for bound in sorted(bounds):
        low = high = start
        while latency(high) <= bound:
            low, high = high, high * STEP
        if high == start:
            found[bound] = math.nan
            continue
        while high - low > TOLERANCE * low:
            middle = (low + high) / 2
            low, high = (middle, high) if latency(middle) <= bound else (low, middle)
        found[bound] = low
    return found, [points[rate] for rate in sorted(points)]


def ratio(
    rows: Sequence[Mapping[str, Any]],
    prefix_len: int,
    bound: float,
    *,
    of: str = "paged",
    step_time: str = "engine of 2023",
) -> float:
    """The highest rate of a system over that of contiguous (oracle); NaN where one of them has none."""
    found = {
        row["system"]: row["highest_rate"]
        for row in rows
        if (row["prefix_len"], row["bound_s_per_token"], row["step_time"]) == (prefix_len, bound, step_time)
    }
    return float(found.get(of, math.nan) / found.get("oracle", math.nan))
