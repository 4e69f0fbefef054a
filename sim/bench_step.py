"""How long one evaluation of a step's time takes, compiled: mixed steps, one after the other."""

from __future__ import annotations

import time

import numpy as np

from sim._jit import entry, verb
from sim.calibration import load_calibration
from sim.cost import StepCost, compile_cost, gpu_time
from sim.request import Ints

STEPS = 4096
ROUNDS = 100


@verb
def _sum_of_times(cost: StepCost, steps: Ints, rounds: int) -> float:
    """The steps' times, added up so that no evaluation can be left out."""
    total = 0.0
    for _ in range(rounds):
        for i in range(steps.shape[0]):
            total += gpu_time(
                cost, steps[i, 0], steps[i, 1], steps[i, 2], steps[i, 3], steps[i, 4],
                steps[i, 5], steps[i, 6], steps[i, 7], steps[i, 8],
            )  # fmt: skip
    return total


def step_time_ns(calibration: str) -> float:
    """Nanoseconds an evaluation, the best of three."""
    budget = 8192
    cost = compile_cost(
        load_calibration(calibration), max_num_batched_tokens=budget, block_size=16, kv_dtype="bf16"
    )
    rng = np.random.default_rng(0)
    decodes, query = rng.integers(1, 257, STEPS), rng.integers(1, 4097, STEPS)
    context, kv = rng.integers(0, 8193, STEPS), rng.integers(64, 4097, STEPS)
    one = np.ones(STEPS, np.int64)
    columns = (decodes + query, decodes + 1, decodes, decodes * kv, one)
    steps = np.stack([*columns, query, query * query, query * context, context], axis=1)
    run = entry(_sum_of_times)
    assert run(cost, steps, 1) > 0.0  # compiled by now

    def once() -> float:
        start = time.perf_counter()
        run(cost, steps, ROUNDS)
        return time.perf_counter() - start

    return 1e9 * min(once() for _ in range(3)) / (STEPS * ROUNDS)
