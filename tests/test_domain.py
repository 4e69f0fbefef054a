"""Steps beyond what a calibration measured are counted, bound by bound, however the run goes."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import run

from sim.core import EngineConfig
from sim.cost import StepCost, linear_cost
from sim.domain import StepsOutside, domain_warnings, with_share_on_kappa
from sim.request import Batch, make_batch

CONFIG = EngineConfig(
    block_size=16, num_gpu_blocks=200, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=512,
    async_scheduling=False,
)  # fmt: skip


def two_prompts() -> Batch:
    """One of 100 tokens, in chunks of 64 and 36; one of 10; five tokens each."""
    lengths = [105, 15]
    return make_batch([0.0, 0.0], [100, 10], [5, 5], [0, 1, 2], [1, 2], lengths)


def cost(**bounds: float) -> StepCost:
    return linear_cost(1e-3, 1e-6, max_num_batched_tokens=64)._replace(**bounds)


def outside(**bounds: float) -> StepsOutside:
    found: StepsOutside = run(two_prompts(), CONFIG, cost(**bounds)).totals.steps_outside
    return found


# Steps: 64 new; 36 over 64 beside 10 new; then decodes of both, over 101 and 11 up to 104 and 14.
@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, StepsOutside(0, 0, 0, 0, 0, 0)),
        ({"max_tokens": 46.0}, StepsOutside(1, 0, 0, 0, 0, 0)),
        ({"max_tokens": 45.0}, StepsOutside(2, 0, 0, 0, 0, 0)),
        ({"max_decodes": 1.0}, StepsOutside(0, 4, 0, 0, 0, 0)),
        ({"max_decodes": 2.0}, StepsOutside(0, 0, 0, 0, 0, 0)),  # a bound is inside
        ({"max_kv_len": 57.0}, StepsOutside(0, 0, 2, 0, 0, 0)),  # means 56, 57, 58, 59
        ({"min_kv_len": 57.0}, StepsOutside(0, 0, 1, 0, 0, 0)),
        ({"max_decode_kv": 115.0}, StepsOutside(0, 0, 0, 2, 0, 0)),  # sums 112, 114, 116, 118
        ({"max_decode_kv": 114.0}, StepsOutside(0, 0, 0, 2, 0, 0)),
        ({"max_query_len": 64.0}, StepsOutside(0, 0, 0, 0, 0, 0)),
        ({"max_query_len": 63.0}, StepsOutside(0, 0, 0, 0, 1, 0)),
        # a new token of the second step sees 36 * 64 / 46 cached ones in the mean
        ({"max_context_len": 50.0}, StepsOutside(0, 0, 0, 0, 0, 1)),
        ({"max_context_len": 51.0}, StepsOutside(0, 0, 0, 0, 0, 0)),
    ],
)
def test_each_bound_counts_the_steps_beyond_it(bounds: dict[str, float], expected: StepsOutside) -> None:
    assert outside(**bounds) == expected


def test_decodes_in_one_run_are_counted_one_by_one() -> None:
    """A synchronous engine takes decodes in runs, an asynchronous one step by step; the counts agree."""
    batch = make_batch([0.0], [20], [200], [0, 1], [1], [220])
    for asynchronous in (False, True):
        config = CONFIG._replace(async_scheduling=asynchronous)
        totals = run(batch, config, cost(max_kv_len=100.0)).totals
        assert totals.steps_outside == StepsOutside(0, 0, 119, 0, 0, 0)


def test_what_is_said() -> None:
    bounded = cost(max_tokens=8192.0, max_context_len=0.0)
    steps = StepsOutside(1, 0, 0, 0, 0, 500)
    assert domain_warnings(steps, 2000, bounded) == [
        "0.1 % of the steps had more than 8,192 tokens, beyond what the calibration measured: their time is "
        "extrapolated"
    ]
    assumed = ["no CPU time", "prefill over cached context (kappa = 1.15)"]
    assert with_share_on_kappa(assumed, 500, 2000, bounded) == [
        "no CPU time",
        "prefill over cached context (kappa = 1.15); the prefill of 25.0 % of the requests rests on it",
    ]
    assert with_share_on_kappa(assumed, 0, 2000, bounded) == assumed
    assert with_share_on_kappa(assumed, 0, 0, bounded) == assumed
    measured = bounded._replace(max_context_len=1024.0)
    assert with_share_on_kappa(assumed, 500, 2000, measured) == assumed
    assert domain_warnings(steps, 2000, measured)[1].startswith("25.0 % of the steps had prefills over more")
    (rare,) = domain_warnings(StepsOutside(1, 0, 0, 0, 0, 0), 100_000, bounded)
    assert rare.startswith("1 of 100000 of the steps")
    assert domain_warnings(StepsOutside(*np.zeros(6, int).tolist()), 10, bounded) == []


def test_every_sequence_of_a_step_pays_for_its_logits() -> None:
    """Of a first chunk vLLM computes logits too, and discards the sample (GPUModelRunner)."""
    head = np.arange(65, dtype=np.float64) * 1e3  # us a row of the LM head
    batch = make_batch([0.0], [100], [1], [0, 1], [1], [101])  # chunks of 64 and 36
    free, charged = (run(batch, CONFIG, cost()._replace(output_us=table)) for table in (0 * head, head))
    assert charged.totals.last_time - free.totals.last_time == pytest.approx(2e-3)
