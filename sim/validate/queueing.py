"""The engine as a server, against queueing theory: every job's wait, and the means.

With one seat and a budget above every prompt, no cache, a step time in proportion to its tokens and
answers of one token, a request is a job and its prompt the service that it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.core import EngineConfig
from sim.cost import StepCost, linear_cost
from sim.engine import Records
from sim.replicas import Cluster
from sim.request import Batch, Floats, Ints, make_batch
from sim.router import CENTRAL_QUEUE
from sim.simulate import simulate
from sim.validate.queues import (
    gamma_arrivals_wait,
    kiefer_wolfowitz,
    lindley,
    many_servers_wait,
    poisson_arrivals_wait,
)
from sim.validate.section import Check, Section, table
from workloads.arrivals import Arrivals

TITLE = "Queueing theory"
GRAIN = 1000  # tokens a second: services are whole tokens, of a mean of one second
BUDGET = 100 * GRAIN
SEEDS = range(20)
JOBS = 50_000  # a seed
FEWER = 5  # so many times fewer for several servers, which take so much longer
WARM_UP = 1000  # jobs that still feel the empty queue of the beginning
MOST_ERRORS = 3.0  # standard errors
EXACT = 1e-9  # of a second, and of the wait


class Server(NamedTuple):
    """A queue: how jobs arrive, cv^2 of the service, which has a mean of 1 s, and how many serve it."""

    load: Arrivals
    service_cv2: float = 1.0
    servers: int = 1

    @property
    def mean_wait(self) -> float:
        """Seconds in the queue, in theory."""
        rate = self.load.request_rate
        if self.servers > 1:
            assert self.load.arrival == "poisson" and self.service_cv2 == 1.0
            return many_servers_wait(self.servers, rate)
        if self.load.arrival == "gamma":
            assert self.service_cv2 == 1.0
            return gamma_arrivals_wait(rate, self.load.burstiness)
        return poisson_arrivals_wait(rate, 1.0, 1.0 + self.service_cv2)

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

    def waits(self, jobs: Batch) -> Floats:
        """Each job's wait by the recursion."""
        service = jobs.prompt_len / GRAIN
        if self.servers == 1:
            return lindley(jobs.arrival_time, service)
        return kiefer_wolfowitz(jobs.arrival_time, service, self.servers)


SERVERS = {
    "M/M/1 at .5": Server(Arrivals(request_rate=0.5)),
    "M/M/1 at .8": Server(Arrivals(request_rate=0.8)),
    "M/M/1 at .9": Server(Arrivals(request_rate=0.9)),
    "M/M/1 at .95": Server(Arrivals(request_rate=0.95)),
    "M/D/1 at .5": Server(Arrivals(request_rate=0.5), 0),
    "M/D/1 at .8": Server(Arrivals(request_rate=0.8), 0),
    "M/D/1 at .9": Server(Arrivals(request_rate=0.9), 0),
    "M/D/1 at .95": Server(Arrivals(request_rate=0.95), 0),
    "M/G/1 at .8, cv^2 .5": Server(Arrivals(request_rate=0.8), 0.5),
    "M/G/1 at .8, cv^2 2": Server(Arrivals(request_rate=0.8), 2),
    "M/G/1 at .8, cv^2 4": Server(Arrivals(request_rate=0.8), 4),
    "gamma arrivals at .8, burstiness .25": Server(
        Arrivals(request_rate=0.8, arrival="gamma", burstiness=0.25)
    ),
    "gamma arrivals at .8, burstiness .5": Server(
        Arrivals(request_rate=0.8, arrival="gamma", burstiness=0.5)
    ),
    "gamma arrivals at .8, burstiness 2": Server(Arrivals(request_rate=0.8, arrival="gamma", burstiness=2.0)),
    "M/M/4 at .8": Server(Arrivals(request_rate=3.2), servers=4),
    "M/M/8 at .8": Server(Arrivals(request_rate=6.4), servers=8),
}
COST = linear_cost(0.0, 1 / GRAIN, max_num_batched_tokens=BUDGET)


class Agreement(NamedTuple):
    """A mean in theory, and one mean for each seed."""

    what: str
    theory: float
    means: Sequence[float]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return float(np.mean(self.means))

    @property
    def standard_error(self) -> float:
        """Of the mean over the seeds, which are independent."""
        return float(np.std(self.means, ddof=1) / math.sqrt(len(self.means)))

    @property
    def errors(self) -> float:
        """How many standard errors the mean is above theory."""
        return (self.mean - self.theory) / self.standard_error

    @property
    def met(self) -> bool:
        """Whether theory is within MOST_ERRORS."""
        return abs(self.errors) < MOST_ERRORS

    def row(self) -> tuple[str, ...]:
        """The cells under HEADINGS."""
        figures = (f"{self.theory:.6g}", f"{self.mean:.5f}", f"{self.standard_error:.5f}")
        return (self.what, *figures, f"{self.errors:+.2f}")


HEADINGS = ("", "theory", "mean over the seeds", "standard error", "deviation, standard errors")


class Served(NamedTuple):
    """What became of jobs, in their order."""

    waits: Floats  # seconds until the first step
    ttft: Floats  # seconds until the first token
    hits: Ints  # tokens that were in the cache


# ---------------------------------------------------------------- the engine


def arrival_times(load: Arrivals, seed: int, num_jobs: int) -> Floats:
    """Seconds, of one seed."""
    return next(load.arrival_times(np.random.SeedSequence(seed), iter([num_jobs])))


def single_server(**changes: Any) -> EngineConfig:
    """One seat; a step takes whole prompts."""
    one = EngineConfig(
        block_size=1024, num_gpu_blocks=30_000, max_num_batched_tokens=BUDGET, max_num_seqs=1,
        max_model_len=131_072, enable_prefix_caching=False,
    )  # fmt: skip
    return one._replace(**changes)


def serve(jobs: Batch, config: EngineConfig, cost: StepCost, servers: int = 1) -> Served:
    """Run jobs through the engine, or through several that take their next job from one queue."""
    chunks: list[Records] = []
    cluster = Cluster(servers, CENTRAL_QUEUE) if servers > 1 else None
    simulate(iter([jobs]), config, cost, on_records=chunks.append, cluster=cluster)

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([chunk[name] for chunk in chunks])

    order = np.argsort(column("request_id"))
    arrival, started, first, hits = (
        column(name)[order]
        for name in ("arrival_time", "scheduled_time", "first_token_time", "num_cached_tokens")
    )
    return Served(started - arrival, first - arrival, hits)


def largest_difference(waits: Floats, expected: Floats) -> float:
    """Of waits that should be equal: seconds below a second, relative above."""
    return float((np.abs(waits - expected) / np.maximum(expected, 1.0)).max())


def wait(name: str, num_jobs: int = JOBS) -> tuple[Agreement, float]:
    """One of SERVERS over the seeds: its mean waits, and how far any job's is from Lindley's recursion."""
    server = SERVERS[name]
    means, worst = [], 0.0
    for seed in SEEDS:
        jobs = server.jobs(seed, num_jobs)
        waits = serve(jobs, single_server(), COST, server.servers).waits
        means.append(float(waits[WARM_UP:].mean()))
        worst = max(worst, largest_difference(waits, server.waits(jobs)))
    return Agreement(name, server.mean_wait, means), worst


# ---------------------------------------------------------------- a cache before the server


class Prefill(NamedTuple):
    """A prefill-only server of `speed` tokens/s: a hit, with probability `hit_rate`, is a shorter service."""

    speed: float = 10_000.0
    shared: int = 2048  # tokens
    own: int = 128
    hit_rate: float = 0.8
    request_rate: float = 10.0

    def moments(self) -> tuple[float, float]:
        """Mean and mean square of the service."""
        hit, miss = self.own / self.speed, (self.shared + self.own) / self.speed
        p = self.hit_rate
        return p * hit + (1 - p) * miss, p * hit**2 + (1 - p) * miss**2

    def jobs(self, seed: int, num_jobs: int) -> tuple[Batch, Ints]:
        """Requests, and the tokens that each should find in the cache."""
        misses = np.random.default_rng([seed, 1]).random(num_jobs) >= self.hit_rate
        misses[0] = False  # it brings the prefix into the cache
        number = np.arange(1, num_jobs + 1)
        ids = np.stack([np.where(misses, number, 0), num_jobs + number], axis=1)
        lens = np.broadcast_to([self.shared, self.own + 1], (num_jobs, 2))
        arrival = arrival_times(Arrivals(request_rate=self.request_rate), seed, num_jobs)
        starts = np.arange(0, 2 * num_jobs + 1, 2)
        prompt_len = np.full(num_jobs, self.shared + self.own)
        batch = make_batch(arrival, prompt_len, np.ones(num_jobs), starts, ids.ravel(), lens.ravel())
        hits = np.where(misses, 0, self.shared)
        hits[0] = 0
        return batch, hits

    def cost(self) -> StepCost:
        """Of the server's steps."""
        return linear_cost(0.0, 1 / self.speed, max_num_batched_tokens=BUDGET)


PREFILL = Prefill()
PREFILL_SERVER = single_server(block_size=128, num_gpu_blocks=10_000, enable_prefix_caching=True)


def prefill(num_jobs: int = JOBS) -> tuple[list[Agreement], float]:
    """PREFILL over the seeds: mean waits and TTFT, and how far any wait is from Lindley's recursion."""
    waits, ttfts, worst = [], [], 0.0
    for seed in SEEDS:
        jobs, hits = PREFILL.jobs(seed, num_jobs)
        served = serve(jobs, PREFILL_SERVER, PREFILL.cost())
        service = (jobs.prompt_len - hits) / PREFILL.speed
        worst = max(worst, largest_difference(served.waits, lindley(jobs.arrival_time, service)))
        waits.append(float(served.waits[WARM_UP:].mean()))
        ttfts.append(float(served.ttft[WARM_UP:].mean()))
    mean, mean_square = PREFILL.moments()
    in_theory = poisson_arrivals_wait(PREFILL.request_rate, mean, mean_square)
    return [
        Agreement("prefill with hits of .8, wait", in_theory, waits),
        Agreement("prefill with hits of .8, TTFT", in_theory + mean, ttfts),
    ], worst


# ---------------------------------------------------------------- the page


def section(num_jobs: int = JOBS) -> Section:
    """All queues over all seeds."""
    counts = {name: num_jobs // (1 if one.servers == 1 else FEWER) for name, one in SERVERS.items()}
    found = [wait(name, count) for name, count in counts.items()]
    both, difference = prefill(num_jobs)
    found += [(one, difference) for one in both]
    worst = max(difference for _, difference in found)
    lindleys = Check(
        "queueing: each job's wait against the recursion",
        f"{worst:.0e}",
        f"<= {EXACT:.0e}",
        worst <= EXACT,
    )
    lines = [
        f"One seat, whole prompts, one output token. Seconds, over {len(SEEDS)} seeds fixed beforehand with "
        f"{num_jobs:,} jobs each (M/M/c: {num_jobs // FEWER:,}), the first {WARM_UP:,} left out; and how far "
        "any job's wait is from Lindley's recursion on the same draws (Kiefer's and Wolfowitz' for M/M/c: "
        "replicas with a central queue).",
        "",
        *table([*HEADINGS, "job by job"], [(*one.row(), f"{far:.0e}") for one, far in found]),
        "",
        f"The last two: {PREFILL.speed:,.0f} tokens/s, {PREFILL.shared} shared and {PREFILL.own} own tokens, "
        f"{PREFILL.request_rate:g} requests/s, hits by chance.",
    ]
    return Section(TITLE, [within_errors("queueing: mean waits", [one for one, _ in found]), lindleys], lines)


def within_errors(what: str, found: Sequence[Agreement]) -> Check:
    """The check that theory is within MOST_ERRORS of every mean."""
    worst = max(abs(one.errors) for one in found)
    return Check(
        f"{what}, {len(found)} figures against theory",
        f"worst {worst:.2f} standard errors",
        f"< {MOST_ERRORS:g}",
        all(one.met for one in found),
    )
