"""The verdict on a run's load, as the report defines it, and a scheduler that goes round in circles."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.engine import simulate
from sim.errors import Livelock
from sim.request import make_batch
from sim.scenario import load
from sim.simulation import run

WORK_S = Path(__file__).parent.parent / "scenarios" / "work_s.yaml"


@pytest.mark.parametrize(
    ("rate", "verdict"),
    [(8, "STABLE"), (123, "OVERLOADED"), ("inf", "BACKLOGGED")],  # an H100 takes about 61 req/s of this
)
def test_the_verdict_follows_the_load(rate: object, verdict: str) -> None:
    result = run(load(WORK_S, ["workload.num_requests=3000", f"workload.request_rate={rate}"]))
    result.records.discard()
    assert result.summary["saturation"] == verdict


def test_requests_that_preempt_each_other_for_ever_end_the_run() -> None:
    # of equals the first in the running list is preempted, loses its chunks (no caching), and is
    # admitted again behind the other, whose turn it then is
    config = EngineConfig(
        4, 11, 32, 2, 64,
        long_prefill_token_threshold=3, priority_policy=True, reserve_full_isl=False,
        enable_prefix_caching=False,
    )  # fmt: skip
    cost = linear_cost(0.01, 0.0, max_num_batched_tokens=32)
    batch = make_batch([0.0, 0.0], [38, 32], 3, [0, 1, 2], [0, 1], [41, 35])
    with pytest.raises(Livelock, match="preempt each other"):
        simulate(iter([batch]), config, cost, on_records=lambda chunk: None)
