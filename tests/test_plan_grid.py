"""Bisection against looking everywhere: the same answers within 2 %, in a tenth of the runs or fewer.

`pytest -m slow tests/test_plan_grid.py -s` prints the answers and the runs that each took.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

import pytest

from sim.planning.evaluate import Bench, Point
from sim.planning.objective import parse_limits
from sim.planning.vary import parse_vary
from sim.planning.winners import Plan, make_plan
from sim.scenario_file import read
from sim.sweeps.processes import on_processes

SCENARIOS = Path(__file__).parent.parent / "scenarios"
STEP = 1.01  # between two values of a grid
SEEDS = (0, 1)

pytestmark = pytest.mark.slow


def bench(scenario: str, promise: list[str], *overrides: str) -> Bench:
    everywhere = functools.partial(on_processes, jobs=os.cpu_count() or 1)
    return Bench(
        read(SCENARIOS / scenario), overrides, parse_limits(promise), SEEDS, everywhere, {}, lambda one: None
    )


def ratios(low: float, high: float) -> list[float]:
    """The values from `low` to `high`, each STEP times the one before."""
    return list(itertools.takewhile(lambda value: value <= high, (low * STEP**i for i in itertools.count())))


def on_grid(grid: Bench, path: str, values: list[float], *fixed: str) -> list[float]:
    """The values that keep the promise, each of them run."""
    points = [Point(overrides=(f"{path}={value}", *fixed)) for value in values]
    return [value for value, one in zip(values, grid.evaluate(points), strict=True) if one.kept]


def check(name: str, plan: Plan, grid: Bench, answers: dict[str, tuple[float, float]]) -> None:
    """Compare each (plan's, grid's) answer, and the runs."""
    runs, all_runs = len(plan.evaluations) * len(SEEDS), len(grid.known) * len(SEEDS)
    for what, (mine, theirs) in answers.items():
        print(f"\n{name} {what}: plan {mine:.4g}, grid {theirs:.4g}, {mine / theirs - 1:+.2%}")
        assert abs(mine / theirs - 1.0) <= 0.02
    print(f"{name}: {runs} runs, grid {all_runs}")
    assert runs <= all_runs / 10


def test_the_highest_rate_of_a_shared_prefix() -> None:
    setting = ("shared_prefix.yaml", ["ttft_p95=2s", "tpot_p95=50ms"], "workload.num_requests=5000")
    plan, grid = make_plan(bench(*setting), parse_vary([])), bench(*setting)
    kept = on_grid(grid, "workload.request_rate", ratios(8.0, 32.0))
    assert plan.best is not None and plan.best.best is not None
    check("highest rate", plan, grid, {"": (plan.best.best.point.values[-1][1], max(kept))})


def test_the_smallest_pool_for_documents() -> None:
    setting = ("documents.yaml", ["ttft_p95=250ms"], "workload.num_requests=2000")
    plan = make_plan(bench(*setting), parse_vary(["engine.num_gpu_blocks=1000..8000"]))
    grid = bench(*setting)
    blocks = [float(value) for value in dict.fromkeys(map(round, ratios(1000, 8000)))]
    kept = on_grid(grid, "engine.num_gpu_blocks", [int(value) for value in blocks])
    assert plan.best is not None and plan.best.best is not None
    check("smallest pool", plan, grid, {"": (plan.best.best.point.values[-1][1], min(kept))})


def test_the_best_block_size_for_documents() -> None:
    sizes = ("16", "512")
    setting = ("documents.yaml", ["ttft_p95=250ms"], "workload.num_requests=5000")
    plan = make_plan(bench(*setting), parse_vary([f"engine.block_size={','.join(sizes)}"]))
    grid = bench(*setting)
    best_of = {
        size: max(on_grid(grid, "workload.request_rate", ratios(6.0, 20.0), f"engine.block_size={size}"))
        for size in sizes
    }
    found = {
        winner.choice[0][1]: winner.best.point.values[-1][1]
        for winner in plan.winners
        if winner.best is not None
    }
    check("highest rate, block size", plan, grid, {size: (found[size], best_of[size]) for size in sizes})
    assert next(iter(found)) == max(best_of, key=lambda size: best_of[size])
