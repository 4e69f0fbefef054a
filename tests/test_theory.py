"""The engine against cache theory: LRU under independent references, and Little's law.

The single server's queueing theory is in tests/test_queueing.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from simulation import engine, linear, run
from test_known_answers import either_scheduling
from test_queueing import assert_mean

from sim.columns import X
from sim.request import Batch, Floats, make_batch
from sim.timeseries import FIRST_INTERVAL, SAMPLES
from workloads.popularity import draw_ranks, zipf_bounds

BLOCK = 2  # tokens: a prompt of whole blocks and one token more
TOLERANCE = 0.005
CHUNK = 20_000
WARM_UP = 0.2  # of the requests


def references(ranks: npt.NDArray[np.int64], shared: int, own: int) -> Iterator[Batch]:
    """One request a rank, far apart: `shared` blocks of its group, `own` blocks of nobody else, a token."""
    lens = [BLOCK * shared, BLOCK * own + 2]  # the last token of the prompt, and the answer
    for first in range(0, len(ranks), CHUNK):
        groups = ranks[first : first + CHUNK]
        n = len(groups)
        number = np.arange(first, first + n)
        ids = np.stack([groups, -1 - number], axis=1)
        starts = np.arange(0, 2 * n + 1, 2)
        prompt_len = BLOCK * (shared + own) + 1
        segment_len = np.broadcast_to(lens, (n, 2)).ravel()
        yield make_batch(number * 1.0, np.full(n, prompt_len), np.ones(n), starts, ids.ravel(), segment_len)


def shared_hit_rate(
    bounds: Floats, capacity: int, *, seed: int, num_requests: int, shared: int = 1, own: int = 0
) -> float:
    """Part of the shared blocks that are hit after the warm-up, with `capacity` blocks for full blocks.

    The pool has one block more, that of the running request's last token: it has no hash and is
    always the next to be taken.
    """
    ranks = draw_ranks(np.random.default_rng(seed), bounds, num_requests)
    config = engine(block_size=BLOCK, num_gpu_blocks=capacity + 2, max_num_seqs=1)
    result = run(references(ranks, shared, own), config)
    hits = np.array(result.hits)[int(WARM_UP * num_requests) :]
    return float(hits.mean()) / (BLOCK * shared)


def che(bounds: Floats, capacity: float, shared: int = 1, own: int = 0) -> float:
    """Che's approximation: a block stays for a time T, the same for all, after its last reference."""
    popularity = np.diff(bounds, prepend=0.0)

    def occupied(time: float) -> float:
        return float(shared * -np.expm1(-popularity * time).sum() + own * time)

    low, high = 0.0, 1.0
    while occupied(high) < capacity:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if occupied(middle) < capacity else (low, middle)
    return float((popularity * -np.expm1(-popularity * low)).sum())


@pytest.mark.parametrize(
    ("num", "alpha", "capacity", "expected"),
    [
        (1000, 0.8, 100, 0.377790),
        (1000, 1.0, 100, 0.576525),
        pytest.param(10_000, 0.8, 1000, 0.436660, marks=pytest.mark.slow),
        pytest.param(10_000, 1.0, 1000, 0.675602, marks=pytest.mark.slow),
        pytest.param(10_000, 1.2, 1000, 0.861435, marks=pytest.mark.slow),
    ],
)
def test_lru_under_independent_references(num: int, alpha: float, capacity: int, expected: float) -> None:
    bounds = zipf_bounds(num, alpha)
    assert che(bounds, capacity) == pytest.approx(expected, abs=5e-7)
    found = shared_hit_rate(bounds, capacity, seed=1, num_requests=200_000)
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(("capacity", "expected"), [(1, 0.38), (2, 0.7192857)])
def test_lru_of_three_contents_is_exact(capacity: int, expected: float) -> None:
    bounds = np.cumsum([0.5, 0.3, 0.2])
    rates = [shared_hit_rate(bounds, capacity, seed=seed, num_requests=5000) for seed in range(20)]
    assert_mean(rates, expected)


@pytest.mark.parametrize(
    ("capacity", "expected"), [(2000, 0.5405), pytest.param(6000, 0.738, marks=pytest.mark.slow)]
)
def test_lru_of_chains(capacity: int, expected: float) -> None:
    """500 groups, Zipf 1, with a prefix of 32 blocks, and 4 blocks of each request's own."""
    bounds = zipf_bounds(500, 1.0)
    assert che(bounds, capacity, shared=32, own=4) == pytest.approx(expected, abs=5e-4)
    found = shared_hit_rate(bounds, capacity, seed=2, num_requests=100_000, shared=32, own=4)
    assert found == pytest.approx(expected, abs=TOLERANCE)


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
