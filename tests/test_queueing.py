"""The engine as a single server: Lindley's recursion job by job, and what queueing theory says.

With one seat and a budget above every prompt, no cache, a step time in proportion to its tokens and
answers of one token, a request is a job and its prompt the service it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from simulation import Run, engine, run

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.request import Batch, make_batch
from workloads.arrivals import Arrivals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

GRAIN = 1000  # tokens a second: services are whole tokens, of a mean of one second
BUDGET = 100 * GRAIN
COST = linear_cost(0.0, 1 / GRAIN, max_num_batched_tokens=BUDGET)

SEEDS = range(20)
JOBS = 25_000  # a seed; the slow tests take
MORE_JOBS = 100_000
WARM_UP = 1000  # jobs that still feel the empty queue of the beginning


class Server(NamedTuple):
    """A queue: how jobs arrive, cv^2 of the service (of mean 1 s), the mean wait in theory."""

    load: Arrivals
    service_cv2: float
    mean_wait: float

    def jobs(self, seed: int, num_jobs: int) -> Batch:
        """Requests of one output token that have nothing in common."""
        prompt_len = np.full(num_jobs, GRAIN)
        if self.service_cv2 > 0:
            shape = 1 / self.service_cv2
            service = np.random.default_rng([seed, 1]).standard_gamma(shape, num_jobs) / shape
            prompt_len = np.clip(np.rint(GRAIN * service), 1, BUDGET).astype(np.int64)
        ids = np.arange(num_jobs)
        arrival = arrival_times(self.load, seed, num_jobs)
        return make_batch(
            arrival, prompt_len, np.ones(num_jobs), np.arange(num_jobs + 1), ids, prompt_len + 1
        )


SERVERS = {
    "M/M/1 at .8": Server(Arrivals(request_rate=0.8), 1, 4),
    "M/D/1 at .8": Server(Arrivals(request_rate=0.8), 0, 2),
    "M/M/1 at .5": Server(Arrivals(request_rate=0.5), 1, 1),
    "M/M/1 at .9": Server(Arrivals(request_rate=0.9), 1, 9),
    "M/M/1 at .95": Server(Arrivals(request_rate=0.95), 1, 19),
    "M/D/1 at .5": Server(Arrivals(request_rate=0.5), 0, 0.5),
    "M/D/1 at .9": Server(Arrivals(request_rate=0.9), 0, 4.5),
    "M/D/1 at .95": Server(Arrivals(request_rate=0.95), 0, 9.5),
    "M/G/1 at .8, cv^2 .5": Server(Arrivals(request_rate=0.8), 0.5, 3),
    "M/G/1 at .8, cv^2 2": Server(Arrivals(request_rate=0.8), 2, 6),
    "M/G/1 at .8, cv^2 4": Server(Arrivals(request_rate=0.8), 4, 10),
    "very bursty at .8": Server(Arrivals(request_rate=0.8, arrival="gamma", burstiness=0.25), 1, 10.955),
    "bursty at .8": Server(Arrivals(request_rate=0.8, arrival="gamma", burstiness=0.5), 1, 6.317),
    "smooth at .8": Server(Arrivals(request_rate=0.8, arrival="gamma", burstiness=2.0), 1, 2.844),
}
QUICK = "M/D/1 at .8"


def arrival_times(load: Arrivals, seed: int, num_jobs: int) -> Floats:
    return next(load.arrival_times(np.random.SeedSequence(seed), iter([num_jobs])))


def single_server(**changes: Any) -> EngineConfig:
    """One seat; a step takes whole prompts."""
    one = engine(block_size=1024, max_num_seqs=1, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)
    return one._replace(**changes)


def lindley(arrival_time: Floats, service: Floats) -> list[float]:
    """Each job's wait: what is left of the former's wait and service when it arrives."""
    waits = [0.0]
    for gap, former in zip(np.diff(arrival_time).tolist(), service.tolist(), strict=False):
        waits.append(max(0.0, waits[-1] + former - gap))
    return waits


def assert_waits_are_lindleys(result: Run, service: Floats) -> None:
    expected = np.array(lindley(result.records["arrival_time"], service))
    np.testing.assert_allclose(result.waits, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.ttft, expected + service, rtol=1e-9, atol=1e-9)
    assert result.totals.max_num_running == 1
    assert expected.max() > 0


def assert_mean(means: Sequence[float], expected: float) -> None:
    """The mean of independent means is the expected one within three standard errors; prints both."""
    standard_error = np.std(means, ddof=1) / np.sqrt(len(means))
    print(f"mean {np.mean(means):.5f}, standard error {standard_error:.5f}, in theory {expected:g}")
    assert abs(np.mean(means) - expected) < 3 * standard_error, (np.mean(means), standard_error)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SERVERS)
def test_each_jobs_wait_is_lindleys(name: str, seed: int) -> None:
    jobs = SERVERS[name].jobs(seed, 5000)
    assert_waits_are_lindleys(run(jobs, single_server(), COST), jobs.prompt_len / GRAIN)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in SERVERS]
)
def test_the_mean_wait_is_theorys(name: str) -> None:
    server = SERVERS[name]
    num_jobs = JOBS if name == QUICK else MORE_JOBS
    waits = (run(server.jobs(seed, num_jobs), single_server(), COST).waits for seed in SEEDS)
    assert_mean([wait[WARM_UP:].mean() for wait in waits], server.mean_wait)


def test_a_cache_hit_is_a_shorter_service() -> None:
    """A prefill-only server of 10,000 tokens/s, 2048 shared + 128 own tokens, independent hits of .8."""
    shared, own, token_s, n = 2048, 128, 1e-4, 10_000
    config = single_server(block_size=128, num_gpu_blocks=10_000, enable_prefix_caching=True)
    cost = linear_cost(0.0, token_s, max_num_batched_tokens=BUDGET)
    waits, ttfts = [], []
    for seed in SEEDS:
        misses = np.random.default_rng([seed, 1]).random(n) < 0.2
        misses[0] = False  # it brings the prefix into the cache
        number = np.arange(1, n + 1)
        ids = np.stack([np.where(misses, number, 0), n + number], axis=1)
        lens = np.broadcast_to([shared, own + 1], (n, 2))
        arrival = arrival_times(Arrivals(request_rate=10.0), seed, n)
        prompt_len = np.full(n, shared + own)
        starts = np.arange(0, 2 * n + 1, 2)
        result = run(
            make_batch(arrival, prompt_len, np.ones(n), starts, ids.ravel(), lens.ravel()), config, cost
        )
        assert result.hits[1:] == np.where(misses, 0, shared)[1:].tolist()
        assert_waits_are_lindleys(result, (prompt_len - result.hits) * token_s)
        waits.append(result.waits[WARM_UP:].mean())
        ttfts.append(result.ttft[WARM_UP:].mean())
    assert_mean(waits, 0.103817)
    assert_mean(ttfts, 0.157577)
