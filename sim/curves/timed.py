"""The gap between the one-pass curve and the engine: whole timed runs at some capacities.

The curve serves one request after the other. What concurrent requests pin, what a preemption throws
away and computes again, and in which order requests come to be admitted, only a timed run knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sim.curves.curve import Curve
from sim.scenario import Scenario

FROM = 5  # % of the ceiling's hits: below, the curve is flat and tells little
BEYOND = 1.25  # times the capacity at which the curve reaches its ceiling


class Point(NamedTuple):
    """A timed run at one capacity, beside the curve there."""

    blocks: int  # usable ones
    hit_tokens: int
    prompt_tokens: int
    hit_rate: float
    curve_hit_tokens: int
    curve_hit_rate: float
    num_preemptions: int
    failed: int
    saturation: str

    @property
    def gap(self) -> float:
        """By how many points of hit rate the run lies below the curve."""
        return 100 * (self.curve_hit_rate - self.hit_rate)


def capacities(curve: Curve, num: int) -> list[int]:
    """At most `num` different capacities, evenly spaced by their logarithm, over what is of interest.

    From where the curve has FROM % of its hits, or where the largest request fits, to a little above
    where it ends.
    """
    start = int(np.searchsorted(curve.hits, -(-FROM * curve.ceiling // 100)))
    first = max(start, curve.longest, 1)
    last = max(round(BEYOND * (len(curve.hits) - 1)), 2 * first)
    spaced: list[int] = np.unique(np.geomspace(first, last, num).round().astype(np.int64)).tolist()
    return spaced


def timed_point(
    scenario: Scenario, curve: Curve, blocks: int, *, progress: Callable[[int, float], None] | None = None
) -> Point:
    """Run a scenario whole with `blocks` usable blocks, engine.num_gpu_blocks less the null block.

    `curve` is that of the scenario with its answers kept in the cache, as the engine keeps them;
    `progress` and what is raised are those of sim.simulation.run.
    """
    from sim.simulation import run  # with the engine: a curve alone need not wait for it

    sizes = {"num_gpu_blocks": blocks + 1, "block_size": curve.block_size}
    engine = scenario.engine.model_copy(update=sizes)
    result = run(scenario.model_copy(update={"engine": engine}), progress=progress)
    result.records.discard()
    summary, hit = result.summary, int(curve.hit_tokens(np.array([blocks]))[0])
    return Point(
        blocks=blocks,
        hit_tokens=summary["prefix_cache_hits"],
        prompt_tokens=summary["prefix_cache_queries"],
        hit_rate=summary["prefix_cache_hit_rate"],
        curve_hit_tokens=hit,
        curve_hit_rate=curve.hit_rate(hit),
        num_preemptions=summary["num_preemptions"],
        failed=summary["failed"],
        saturation=summary["saturation"],
    )
