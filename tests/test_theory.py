"""The engine against cache theory: LRU under independent references, and Little's law.

The single server's queueing theory is in tests/test_queueing.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from simulation import engine, linear, run
from test_known_answers import either_scheduling

from sim.columns import X
from sim.request import make_batch
from sim.timeseries import FIRST_INTERVAL, SAMPLES
from sim.validate import cache_theory
from sim.validate.cache_theory import CASES, EXACT, THREE, Zipf, three_contents

KNOWN = dict(zip(CASES, (0.377790, 0.576525, 0.436660, 0.675602, 0.861435, 0.5405, 0.738), strict=True))
QUICK = (CASES[0], CASES[1], CASES[5])


def test_ches_approximation() -> None:
    """It gives the published figures."""
    for case, expected in KNOWN.items():
        digits = 5e-7 if case.own == 0 else 5e-4
        assert case.in_theory == pytest.approx(expected, abs=digits), case


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_lru_under_independent_references(case: Zipf) -> None:
    """Single blocks, and chains of 32 shared blocks before 4 of each request's own."""
    assert case.reached(seed=2 if case.own else 1) == pytest.approx(KNOWN[case], abs=0.005)


@pytest.mark.parametrize(("capacity", "expected"), [(1, 0.38), (2, 0.7192857)])
def test_lru_of_three_contents_is_exact(capacity: int, expected: float) -> None:
    found = three_contents(capacity)
    print(found.row())
    assert found.theory == expected and len(found.means) >= 20
    assert found.met


def test_the_exact_rate_by_the_states_of_the_list() -> None:
    """Of two blocks: those of the two contents used last, of which the one before was another."""
    assert sum(p * p for p in THREE) == pytest.approx(EXACT[1])
    of_two = sum(p / (1 - q) * q * (p + q) for p in THREE for q in THREE if p != q)
    assert of_two == pytest.approx(EXACT[2], abs=1e-7)


def test_the_section_misses_its_bar_when_the_pool_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_theory, "CASES", (CASES[0]._replace(num_requests=60_000),))
    assert all(check.met for check in cache_theory.section().checks)
    whole = cache_theory.shared_hit_rate
    monkeypatch.setattr(
        cache_theory, "shared_hit_rate", lambda bounds, capacity, **more: whole(bounds, capacity // 2, **more)
    )
    monkeypatch.setattr(cache_theory, "EXACT", {2: EXACT[2]})
    assert [check.met for check in cache_theory.section().checks] == [False, False]


@either_scheduling
@pytest.mark.parametrize("num_gpu_blocks", [1000, 30])
def test_littles_law_is_exact(num_gpu_blocks: int, async_scheduling: bool) -> None:
    """Requests over time, as the engine samples them, are the sum of the requests' times in it.

    All instants are whole multiples of the sampling interval, which a step takes, so that each sample
    holds for an interval and nobody arrives within a step.
    """
    n = 200
    rng = np.random.default_rng(4)
    arrival = FIRST_INTERVAL * np.sort(rng.integers(0, 500, n))
    prompt, output = rng.integers(1, 60, n), rng.integers(1, 40, n)
    ids = np.arange(n)
    load = make_batch(arrival, prompt, output, np.arange(n + 1), ids, prompt + output)
    config = engine(num_gpu_blocks=num_gpu_blocks, max_num_seqs=8, async_scheduling=async_scheduling)
    result = run(load, config, linear(config, FIRST_INTERVAL, 0.0))
    samples = result.totals.samples
    assert samples.interval == FIRST_INTERVAL and len(samples.table) < SAMPLES, "all instants are sampled"
    assert (result.totals.num_preemptions > 0) == (num_gpu_blocks == 30)
    inside = samples.table[:, [X.num_running, X.num_waiting]].sum()
    assert inside * FIRST_INTERVAL == result.e2el.sum()
