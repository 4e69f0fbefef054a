"""The engine as a single server: Lindley's recursion job by job, and what queueing theory says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from simulation import Run, run

from sim.replicas import Cluster
from sim.router import CENTRAL_QUEUE
from sim.validate import queueing, queues
from sim.validate.queueing import (
    COST,
    GRAIN,
    PREFILL,
    PREFILL_SERVER,
    SEEDS,
    SERVERS,
    WARM_UP,
    Agreement,
    kiefer_wolfowitz,
    lindley,
    prefill,
    section,
    single_server,
    wait,
)

Floats = npt.NDArray[np.float64]

JOBS = 25_000  # a seed; the slow tests take
MORE_JOBS = 100_000
QUICK = "M/D/1 at .8"
MANY = [name for name, server in SERVERS.items() if server.servers > 1]
KNOWN = {  # mean waits in units of the service
    "M/M/1 at .5": 1, "M/M/1 at .8": 4, "M/M/1 at .9": 9, "M/M/1 at .95": 19,
    "M/D/1 at .5": 0.5, "M/D/1 at .8": 2, "M/D/1 at .9": 4.5, "M/D/1 at .95": 9.5,
    "M/G/1 at .8, cv^2 .5": 3, "M/G/1 at .8, cv^2 2": 6, "M/G/1 at .8, cv^2 4": 10,
    "gamma arrivals at .8, burstiness .25": 10.955, "gamma arrivals at .8, burstiness .5": 6.317,
    "gamma arrivals at .8, burstiness 2": 2.844, "M/M/4 at .8": 0.745541, "M/M/8 at .8": 0.286028,
}  # fmt: skip


def test_theory() -> None:
    """The formulas give the published figures."""
    assert SERVERS.keys() == KNOWN.keys()
    for name, expected in KNOWN.items():
        digits = 5e-7 if name in MANY else 5e-4
        assert SERVERS[name].mean_wait == pytest.approx(expected, abs=digits), name
    mean, mean_square = PREFILL.moments()
    assert 10.0 * mean == pytest.approx(0.5376)
    in_theory = queues.poisson_arrivals_wait(10.0, mean, mean_square)
    assert (in_theory, in_theory + mean) == pytest.approx((0.103817, 0.157577), abs=5e-7)
    assert queues.many_servers_wait(1, 0.8) == pytest.approx(4)
    assert queues.gamma_arrivals_wait(0.8, 1.0) == pytest.approx(4)


def assert_waits_are_lindleys(result: Run, service: Floats) -> None:
    expected = lindley(result.records["arrival_time"], service)
    np.testing.assert_allclose(result.waits, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(result.ttft, expected + service, rtol=1e-9, atol=1e-9)
    assert result.totals.max_num_running == 1
    assert expected.max() > 0


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [name for name in SERVERS if name not in MANY])
def test_each_jobs_wait_is_lindleys(name: str, seed: int) -> None:
    jobs = SERVERS[name].jobs(seed, 5000)
    assert_waits_are_lindleys(run(jobs, single_server(), COST), jobs.prompt_len / GRAIN)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MANY)
def test_replicas_with_a_central_queue_serve_in_order(name: str, seed: int) -> None:
    server = SERVERS[name]
    jobs = server.jobs(seed, 5000)
    result = run(jobs, single_server(), COST, cluster=Cluster(server.servers, CENTRAL_QUEUE))
    np.testing.assert_allclose(result.waits, server.waits(jobs), rtol=1e-9, atol=1e-9)
    assert result.waits.max() > 0 and set(result.records["replica"]) == set(range(server.servers))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in SERVERS]
)
def test_the_mean_wait_is_theorys(name: str) -> None:
    found, difference = wait(name, JOBS if name in (QUICK, *MANY) else MORE_JOBS)
    print(found.row())
    assert found.met and len(found.means) == len(SEEDS) >= 20
    assert difference < 1e-9


def test_a_cache_hit_is_a_shorter_service() -> None:
    """A prefill-only server of 10,000 tokens/s, 2048 shared + 128 own tokens, independent hits of .8."""
    jobs, hits = PREFILL.jobs(0, 5000)
    result = run(jobs, PREFILL_SERVER, PREFILL.cost())
    assert result.hits == hits.tolist() and 0.78 < (hits > 0).mean() < 0.82
    assert_waits_are_lindleys(result, (jobs.prompt_len - hits) / PREFILL.speed)
    both, difference = prefill(10_000)
    assert [round(one.theory, 6) for one in both] == [0.103817, 0.157577]
    for one in both:
        print(one.row())
        assert one.met
    assert difference < 1e-9


@pytest.mark.parametrize("name", MANY)
def test_the_recursion_for_many_servers(name: str) -> None:
    """Against theory; of one server it is Lindley's."""
    server = SERVERS[name]
    means = []
    for seed in SEEDS:
        jobs = server.jobs(seed, JOBS)
        service = jobs.prompt_len / GRAIN
        means.append(float(kiefer_wolfowitz(jobs.arrival_time, service, server.servers)[WARM_UP:].mean()))
    assert Agreement(name, server.mean_wait, means).met
    single = kiefer_wolfowitz(jobs.arrival_time, service / 10, 1)
    np.testing.assert_allclose(single, lindley(jobs.arrival_time, service / 10), atol=1e-8)


def test_lindleys_recursion_by_hand() -> None:
    arrival, service = np.array([0.0, 1.0, 5.0, 5.0]), np.array([3.0, 1.0, 2.0, 1.0])
    assert lindley(arrival, service).tolist() == [0, 2, 0, 2]
    assert kiefer_wolfowitz(arrival, service, 2).tolist() == [0, 0, 0, 0]
    assert kiefer_wolfowitz(arrival[[2, 2, 2]], service[:3], 2).tolist() == [0, 0, 1]


@pytest.mark.parametrize(("means", "met"), [((1.0, 1.2, 1.1), True), ((1.0, 1.02, 1.01), False)])
def test_three_standard_errors(means: tuple[float, ...], met: bool) -> None:
    """Of means of a known spread: .1 / sqrt(3) and a tenth of it, theory .1 below."""
    off = Agreement("a", 1.0 if met else 0.95, means)
    assert off.standard_error == pytest.approx((0.1 if met else 0.01) / 3**0.5)
    assert off.met is met
    assert off.errors == pytest.approx(0.1 * 3**0.5 / 0.1 if met else 0.06 * 3**0.5 / 0.01)
    assert off._replace(theory=2 * off.mean - off.theory).met is met, "on the other side as well"


def test_the_section_misses_its_bars_when_the_engine_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step a tenth longer than its tokens, neither waits nor means are right."""
    monkeypatch.setattr(queueing, "SERVERS", {QUICK: SERVERS[QUICK]})
    assert all(check.met for check in section(5000).checks)
    slower = queueing.linear_cost(0.0, 1.1 / GRAIN, max_num_batched_tokens=queueing.BUDGET)
    monkeypatch.setattr(queueing, "COST", slower)
    assert [check.met for check in section(5000).checks] == [False, False]
