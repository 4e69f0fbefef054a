"""Replicas behind one queue are an M/M/c queue: job by job, and in the mean of theory."""

from __future__ import annotations

import numpy as np
import pytest

from sim.validate.central_queue import (
    GRAIN,
    SERVERS,
    draw_jobs,
    erlang_wait,
    kiefer_wolfowitz,
    rows,
    simulated_waits,
)


def test_erlangs_formula() -> None:
    assert erlang_wait(4, 3.2) == pytest.approx(0.745541, abs=1e-6)
    assert erlang_wait(8, 6.4) == pytest.approx(0.286028, abs=1e-6)
    assert erlang_wait(1, 0.8) == pytest.approx(4.0)  # M/M/1


def test_the_recursion_by_hand() -> None:
    arrival, service = np.array([0.0, 0.0, 0.0, 1.0, 9.0]), np.array([5.0, 2.0, 2.0, 1.0, 1.0])
    assert kiefer_wolfowitz(arrival, service, 2).tolist() == [0.0, 0.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("replicas", "rate"), [(1, 0.8), *SERVERS, (3, 2.99)])
def test_each_jobs_wait_is_the_recursions(replicas: int, rate: float, seed: int) -> None:
    jobs = draw_jobs(rate, 3000, seed)
    expected = kiefer_wolfowitz(jobs.arrival_time, jobs.prompt_len / GRAIN, replicas)
    assert expected.max() > 1.0
    np.testing.assert_allclose(simulated_waits(jobs, replicas), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_mean_wait_is_erlangs() -> None:
    found = rows()
    for row in found:
        print(*row.cells(), sep="  ")
        assert row.errors_off < 3.0
    assert [row.replicas for row in found] == [4, 8]
