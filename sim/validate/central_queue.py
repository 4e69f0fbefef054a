"""Replicas behind one queue as the M/M/c queue, held against Erlang's formula.

With one seat at each replica, a budget above every prompt, no cache, a step time in proportion to its
tokens and answers of one token, a request is a job and its prompt the service it asks for. Jobs come
as a Poisson process, their services are exponential with mean 1 s, in whole tokens.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.engine import Records
from sim.replicas import Cluster
from sim.request import Batch, Floats, make_batch
from sim.router import CENTRAL_QUEUE
from sim.simulate import simulate

GRAIN = 1000  # tokens a second
BUDGET = 100 * GRAIN
BLOCK_SIZE = 1024
SERVERS = ((4, 3.2), (8, 6.4))  # replicas, jobs a second
SEEDS = range(20)
JOBS = 20_000  # a seed
WARM_UP = 1000  # jobs that still feel the empty queue of the beginning
HEADINGS = ("replicas", "jobs a second", "mean wait in theory, s", "simulated, s", "standard errors off")


class Row(NamedTuple):
    """The mean wait in one queue, in theory and of independent runs; seconds."""

    replicas: int
    rate: float
    theory: float
    simulated: float
    standard_error: float

    @property
    def errors_off(self) -> float:
        """How many standard errors the simulated mean lies from the theory's."""
        return abs(self.simulated - self.theory) / self.standard_error

    def cells(self) -> tuple[str, ...]:
        """The row as text, under HEADINGS."""
        simulated = f"{self.simulated:.4f} ± {self.standard_error:.4f}"
        return str(self.replicas), f"{self.rate:g}", f"{self.theory:.6f}", simulated, f"{self.errors_off:.1f}"


def erlang_wait(servers: int, rate: float) -> float:
    """Mean wait of M/M/c with services of mean 1 s (Erlang's C formula), seconds; rate < servers."""
    assert 0 < rate < servers
    all_busy = rate**servers / math.factorial(servers) * servers / (servers - rate)
    some_free = sum(rate**n / math.factorial(n) for n in range(servers))
    return all_busy / (some_free + all_busy) / (servers - rate)


def kiefer_wolfowitz(arrival_time: Floats, service: Floats, servers: int) -> Floats:
    """Each job's wait behind one queue in order of arrival: until the first of the servers is free.

    Kiefer and Wolfowitz' recursion (1955), kept in times at which servers become free; seconds.
    """
    free = [0.0] * servers
    waits = np.empty(len(service))
    for i, (arrival, wanted) in enumerate(zip(arrival_time.tolist(), service.tolist(), strict=True)):
        start = max(arrival, free[0])
        waits[i] = start - arrival
        heapq.heapreplace(free, start + wanted)
    return waits


def draw_jobs(rate: float, num_jobs: int, seed: int) -> Batch:
    """Requests of one output token that have nothing in common."""
    rng = np.random.default_rng(seed)
    arrival_time = np.cumsum(rng.standard_exponential(num_jobs)) / rate
    prompt_len = np.clip(np.rint(GRAIN * rng.standard_exponential(num_jobs)), 1, BUDGET).astype(np.int64)
    ids = np.arange(num_jobs)
    return make_batch(
        arrival_time, prompt_len, np.ones(num_jobs), np.arange(num_jobs + 1), ids, prompt_len + 1
    )


def simulated_waits(jobs: Batch, replicas: int) -> Floats:
    """Each job's wait from arrival to its first step, in the order of the jobs; seconds."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=2 + (BUDGET + 1) // BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=1,
        max_model_len=BUDGET + 2,
        enable_prefix_caching=False,
    )
    chunks: list[Records] = []
    simulate(
        iter([jobs]),
        config,
        linear_cost(0.0, 1 / GRAIN, max_num_batched_tokens=BUDGET),
        on_records=chunks.append,
        cluster=Cluster(replicas, CENTRAL_QUEUE),
    )
    waits = np.empty(len(jobs.prompt_len))
    for chunk in chunks:
        waits[chunk["request_id"]] = chunk["scheduled_time"] - chunk["arrival_time"]
    return waits


def rows(seeds: Sequence[int] = SEEDS, num_jobs: int = JOBS) -> list[Row]:
    """Both queues of SERVERS, each simulated with every seed."""
    found = []
    for replicas, rate in SERVERS:
        jobs = (draw_jobs(rate, num_jobs, seed) for seed in seeds)
        means = [simulated_waits(one, replicas)[WARM_UP:].mean() for one in jobs]
        standard_error = float(np.std(means, ddof=1)) / math.sqrt(len(means))
        found.append(Row(replicas, rate, erlang_wait(replicas, rate), float(np.mean(means)), standard_error))
    return found
