"""Whether a run is long enough for its answer to be about the load and not about the run's length.

A run whose waiting grows by a small excess of load keeps a limit of t seconds on waiting for some
t / excess seconds. So a run must last 100 times the limit for the answer to be within 1 % of what an
endless one would give; 20 times as long as a request or session stays, for its empty start and end to be
small; and have 1000 requests, 10 of them beyond a P99.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.planning.evaluate import Evaluation
from sim.planning.objective import GOOD, Limit

FEWEST = 1000  # requests measured
LIMITS_LONG = 100  # times the longest limit on TTFT or E2EL
STAYS_LONG = 20  # times what a request, or a session, is there in the mean


def too_short(best: Evaluation, limits: Sequence[Limit]) -> str | None:
    """Why a longer run might answer otherwise, with the remedy; None if nothing speaks for it."""
    figures = min((run.figures for run in best.runs), key=lambda figures: float(figures["duration"]))
    completed, duration = figures["completed"], figures["duration"]
    waits = [
        limit.value / 1e3 for limit in limits if limit.name != GOOD and limit.name[:4] in ("ttft", "e2el")
    ]
    needed = max(LIMITS_LONG * max(waits, default=0.0), STAYS_LONG * figures["mean_stay"])
    factor = max(needed / duration, FEWEST / completed)
    if factor <= 1.0:
        return None
    return (
        f"{completed} requests in {duration:.0f} s are few to tell a steady state by; make the workload "
        f"{factor:.2g} times as long, {math.ceil(factor * completed)} requests, and plan again"
    )
