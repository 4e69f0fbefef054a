"""The block pool against cache theory: LRU under independent references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.engine import Records
from sim.request import Batch, Floats, Ints, make_batch
from sim.simulate import simulate
from sim.validate.queueing import HEADINGS, SEEDS, Agreement, within_errors
from sim.validate.section import Check, Section, table
from workloads.popularity import draw_ranks, zipf_bounds

TITLE = "Cache theory"
BLOCK = 2  # tokens: a prompt of whole blocks and one token more
TOLERANCE = 0.005  # of the hit rate
CHUNK = 20_000
WARM_UP = 0.2  # of the requests


class Zipf(NamedTuple):
    """Groups of Zipf popularity: `shared` blocks of the group, then `own` blocks of nobody else."""

    num_groups: int
    alpha: float
    capacity: int  # blocks
    shared: int = 1
    own: int = 0
    num_requests: int = 200_000

    @property
    def bounds(self) -> Floats:
        """The upper bounds of the groups in [0, 1)."""
        return zipf_bounds(self.num_groups, self.alpha)

    @property
    def in_theory(self) -> float:
        """The hit rate of the shared blocks by Che's approximation."""
        return che(self.bounds, self.capacity, self.shared, self.own)

    def reached(self, seed: int) -> float:
        """The hit rate of the shared blocks after the warm-up."""
        return shared_hit_rate(
            self.bounds, self.capacity, seed=seed, num_requests=self.num_requests, shared=self.shared,
            own=self.own,
        )  # fmt: skip

    def row(self, reached: float) -> tuple[str, ...]:
        """Its line in the table."""
        parts = (self.num_groups, f"{self.alpha:g}", f"{self.shared} + {self.own}", self.capacity)
        figures = (f"{self.in_theory:.6f}", f"{reached:.6f}", f"{reached - self.in_theory:+.6f}")
        return (*map(str, parts), *figures)


CASES = (
    Zipf(1000, 0.8, 100),
    Zipf(1000, 1.0, 100),
    Zipf(10_000, 0.8, 1000),
    Zipf(10_000, 1.0, 1000),
    Zipf(10_000, 1.2, 1000),
    Zipf(500, 1.0, 2000, shared=32, own=4, num_requests=100_000),
    Zipf(500, 1.0, 6000, shared=32, own=4, num_requests=100_000),
)
THREE = (0.5, 0.3, 0.2)  # popularities of three contents
EXACT = {1: 0.38, 2: 0.7192857}  # the hit rate at so many blocks, by the states of the list
EXACT_REQUESTS = 5000  # a seed


def references(ranks: Ints, shared: int, own: int) -> Iterator[Batch]:
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
    config = EngineConfig(
        block_size=BLOCK, num_gpu_blocks=capacity + 2, max_num_batched_tokens=8192, max_num_seqs=1,
        max_model_len=131_072,
    )  # fmt: skip
    cost = linear_cost(1e-3, 1e-5, max_num_batched_tokens=8192)
    chunks: list[Records] = []
    simulate(references(ranks, shared, own), config, cost, on_records=chunks.append)
    hits = np.concatenate([chunk["num_cached_tokens"] for chunk in chunks])  # one after the other
    return float(hits[int(WARM_UP * num_requests) :].mean()) / (BLOCK * shared)


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


def three_contents(capacity: int) -> Agreement:
    """The hit rate of THREE at `capacity` blocks over the seeds, against the exact one."""
    bounds = np.cumsum(THREE)
    rates = [shared_hit_rate(bounds, capacity, seed=seed, num_requests=EXACT_REQUESTS) for seed in SEEDS]
    return Agreement(f"capacity {capacity}", EXACT[capacity], rates)


def section() -> Section:
    """Hit rates beside Che's approximation, and beside exact ones."""
    reached = [(case, case.reached(seed=1)) for case in CASES]
    worst = max(abs(rate - case.in_theory) for case, rate in reached)
    exact = [three_contents(capacity) for capacity in EXACT]
    checks = [
        Check(
            f"cache: LRU hit rate, {len(CASES)} cases against Che's approximation",
            f"off by at most {worst:.4f}",
            f"<= {TOLERANCE:g}",
            worst <= TOLERANCE,
        ),
        within_errors("cache: LRU hit rate", exact),
    ]
    heads = ["groups", "Zipf alpha", "blocks, shared + own", "capacity", "Che", "simulated", "difference"]
    lines = [
        "Independent references, one after the other; the hit rate of shared blocks, without the first "
        f"{WARM_UP:.0%} of {CASES[0].num_requests:,} requests ({CASES[-1].num_requests:,} with chains of "
        "blocks).",
        "",
        *table(heads, [case.row(rate) for case, rate in reached]),
        "",
        f"Three contents of popularity {', '.join(f'{p:g}' for p in THREE)}, where LRU has an exact hit "
        f"rate, over {len(SEEDS)} seeds with {EXACT_REQUESTS:,} requests each:",
        "",
        *table(HEADINGS, [one.row() for one in exact]),
    ]
    return Section(TITLE, checks, lines)
