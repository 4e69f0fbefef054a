"""The verdict on a run's load, as the report defines it, and a scheduler that goes round in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.errors import Livelock
from sim.records import Records
from sim.request import make_batch
from sim.saturation import Saturation, saturation
from sim.scenario_file import load
from sim.simulate import simulate
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


# Records by hand: 100 requests, one a second from 0 to 99, so that the thirds end at 33, 66 and 99. Each
# is scheduled as it arrives and done a quarter of a second later, but for what a test changes.
ARRIVAL = np.arange(100.0)
Changes = Mapping[str, tuple[Sequence[int], Any]]  # by column: requests, and their value or values


def judged(changes: Changes, refused: Sequence[int] = ()) -> Saturation:
    columns = {
        "arrival_time": ARRIVAL, "submitted_time": ARRIVAL, "ready_time": ARRIVAL,
        "scheduled_time": ARRIVAL.copy(),
        "first_token_time": ARRIVAL + 0.25, "finish_time": ARRIVAL + 0.25, "prompt_len": np.full(100, 7),
    }  # fmt: skip
    for name, (requests, values) in changes.items():
        columns[name][list(requests)] = values
    names = ("request_id", "session_id", "tenant", "prefix_group", "num_cached_tokens", "num_preemptions",
             "num_evictions", "replica", "prefix_cache_queries", "prefix_cache_hits")  # fmt: skip
    columns |= {name: np.zeros(100, np.int64) for name in (*names, "refused")}
    columns["refused"][list(refused)] = 1
    records = Records()
    records.append(columns | {name: np.ones(100, np.int64) for name in ("output_len", "n", "beam_width")})
    records.close()
    return saturation(records, 0.0, 99.0)


@pytest.mark.parametrize(("undone", "verdict"), [(5, "STABLE"), (6, "OVERLOADED")])
def test_overload_leaves_more_than_a_twentieth_undone(undone: int, verdict: str) -> None:
    waiting = [10, 40, 70]
    late = [*waiting, *range(90, 90 + undone - 4)]  # and request 99, which comes last
    found = judged({
        "scheduled_time": (waiting, 100.0), "first_token_time": (waiting, 1e4), "finish_time": (late, 1e4)
    })  # fmt: skip
    assert (found.waiting_tokens, found.completion_ratio) == ((7, 14, 21), 1.0 - undone / 100)
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("waiting", "tokens", "overloaded"),
    [
        ([10, 40, 70], (7, 14, 21), True),
        ([40, 70], (0, 7, 14), True),
        ([10, 70], (7, 7, 14), False),
        ([10, 40], (7, 14, 14), False),
    ],
)
def test_overload_grows_what_waits_over_both_thirds(
    waiting: list[int], tokens: tuple[int, int, int], overloaded: bool
) -> None:
    found = judged({"scheduled_time": (waiting, 100.0), "finish_time": (range(50, 100), 1e4)})
    assert (found.waiting_tokens, found.completion_ratio) == (tokens, 0.5)
    assert (found.verdict == "OVERLOADED") is overloaded


def test_refused_requests_say_nothing() -> None:
    refused = (20, 50, 80)
    odd = {"scheduled_time": (refused, 1e3), "first_token_time": (refused, 2e3), "prompt_len": (refused, 500)}
    assert judged(odd, refused) == Saturation("STABLE", 96 / 97, 0.0, (0, 0, 0))


@pytest.mark.parametrize(
    ("requests", "queued", "until_first", "share", "verdict"),
    [
        (range(66), 10.0, 10.25, 0.0, "STABLE"),
        (range(66, 100), 10.0, 12.5, 0.8, "BACKLOGGED"),
        (range(66, 100), 1.0, 2.0, 0.5, "STABLE"),  # half is not more than half
    ],
)
def test_a_backlog_is_queueing_in_the_last_third(
    requests: range, queued: float, until_first: float, share: float, verdict: str
) -> None:
    arrival = ARRIVAL[requests.start : requests.stop]
    times = {"scheduled_time": arrival + queued, "first_token_time": arrival + until_first}
    found = judged({name: (requests, values) for name, values in times.items()})
    assert (found.queueing_share, found.verdict) == (share, verdict)


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
