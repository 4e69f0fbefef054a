"""The samples of a run: their instants, their values, and how they thin out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from simulation import Run, engine, prompts, run
from typer.testing import CliRunner

from sim.cli import app
from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.request import make_batch
from sim.timeseries import FIRST_INTERVAL, LATEST, SAMPLES, time_series

NAMES = [
    "time", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_evictions",
    "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_scheduled_tokens",
]  # fmt: skip
SECOND = linear_cost(1.0, 0.0, max_num_batched_tokens=8192)  # every step takes one second


def series_of(result: Run, config: EngineConfig) -> dict[str, np.ndarray]:
    series = time_series(result.totals.samples, config.num_gpu_blocks - 1)
    assert list(series) == NAMES
    return series


@pytest.mark.parametrize("start", [0.0, 1.5 * FIRST_INTERVAL])  # the first sample at an even, an odd instant
def test_a_run_by_hand(start: float) -> None:
    """A: 20 tokens and 3 answers, from the start. B: 8 tokens and 1 answer, arrived meanwhile, behind it."""
    config = engine(block_size=4, num_gpu_blocks=11, max_num_seqs=1)
    two = make_batch([start, start + 0.5], [20, 8], [3, 1], [0, 1, 2], [7, 7], [23, 9])
    series = series_of(run(two, config, SECOND), config)
    step = np.ceil(series["time"] - start).astype(int)  # a sample at the end of a step still sees that step
    assert set(step.tolist()) - {0} == {1, 2, 3, 4}
    expected = {  # before the first arrival, in A's prefill, its two decodes, and in B's prefill
        "num_requests_running": [0, 1, 1, 1, 1],
        "num_requests_waiting": [0, 0, 1, 1, 0],  # B comes to the scheduler when A's first step ends
        "kv_cache_usage_perc": [0.0, 0.5, 0.6, 0.6, 0.2],  # of 10 blocks
        "num_evictions": [0, 0, 0, 0, 0],
        "num_preemptions": [0, 0, 0, 0, 0],
        "prefix_cache_queries": [0, 20, 20, 20, 28],
        "prefix_cache_hits": [0, 0, 0, 0, 4],  # B hits the first of its two blocks
        "num_scheduled_tokens": [0, 20, 21, 22, 26],
    }
    for name, values in expected.items():
        assert series[name].tolist() == np.array(values)[step].tolist(), name


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_evictions_and_preemptions_are_counted_when_they_happen(async_scheduling: bool) -> None:
    config = engine(block_size=4, num_gpu_blocks=12, max_num_seqs=4, async_scheduling=async_scheduling)
    result = run(prompts([[(i, 16)] for i in range(6)], output_len=9, gap=0.25), config, SECOND)
    series = series_of(result, config)
    assert result.totals.num_preemptions > 0 and result.totals.num_evictions > 0
    for name in NAMES[4:]:
        assert series[name][0] == 0 and (np.diff(series[name]) >= 0).all(), name
        changes = np.flatnonzero(np.diff(series[name]))
        # in force after an end of step, so first seen one interval later
        assert (series["time"][changes] % 1.0 == 0).all(), name
    totals = result.totals
    assert series["num_preemptions"][-1] == totals.num_preemptions
    assert series["num_evictions"][-1] == totals.num_evictions
    assert series["num_scheduled_tokens"][-1] == totals.num_scheduled_tokens
    assert series["prefix_cache_queries"][-1] == totals.prefix_cache_queries
    assert series["kv_cache_usage_perc"].max() == totals.max_blocks_used / 11


def lone(arrivals: list[float], output_len: int = 4) -> Run:
    """Requests of one token that are served at once, a second a step."""
    n = len(arrivals)
    batch = make_batch(arrivals, [1] * n, [output_len] * n, range(n + 1), range(n), [1 + output_len] * n)
    return run(batch, engine(), SECOND)


@pytest.mark.parametrize(
    ("arrival", "output_len", "start", "interval", "count"),
    [
        (0.0, 3, 0.0, FIRST_INTERVAL, 3 * 1024 + 1),
        (0.0, 4, 0.0, 2 * FIRST_INTERVAL, 4 * 512 + 1),
        # the instant before the arrival is an odd multiple, and does not survive the doubling
        (1.5 * FIRST_INTERVAL, 3, FIRST_INTERVAL, FIRST_INTERVAL, 3 * 1024 + 1),
        (1.5 * FIRST_INTERVAL, 4, 2 * FIRST_INTERVAL, 2 * FIRST_INTERVAL, 4 * 512),
        # nothing is spent on the time before the first arrival
        (1e9 + 0.5, 3, 1e9 + 0.5, FIRST_INTERVAL, 3 * 1024 + 1),
        (0.0, 4094, 0.0, 1.0, 4095),
        (0.0, 4095, 0.0, 2.0, 2048),
    ],
)
def test_the_interval_doubles_when_the_table_is_full(
    arrival: float, output_len: int, start: float, interval: float, count: int
) -> None:
    samples = lone([arrival], output_len).totals.samples
    assert (samples.start, samples.interval, len(samples.table)) == (start, interval, count)


def test_idle_time_is_bounded_memory() -> None:
    config = engine()
    result = lone([0.0, 1e9])
    series = series_of(result, config)
    assert SAMPLES // 2 <= len(series["time"]) < SAMPLES
    assert np.log2(result.totals.samples.interval) % 1 == 0
    assert (series["num_requests_running"][1:] == 0).all()
    assert series["num_scheduled_tokens"][1:].tolist() == [4] * (len(series["time"]) - 1)


def test_no_samples_after_the_latest_instant() -> None:
    series = series_of(lone([0.0, 3 * LATEST]), engine())
    assert LATEST / 2 < series["time"][-1] <= LATEST
    assert len(lone([LATEST]).totals.samples.table) == 1
    for arrival in (2 * LATEST, 1e300):  # whose instant no int64 counts
        assert len(lone([arrival]).totals.samples.table) == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_integral_of_the_used_blocks(async_scheduling: bool) -> None:
    config = engine(num_gpu_blocks=200, max_num_seqs=8, async_scheduling=async_scheduling)
    rng = np.random.default_rng(3)
    load = prompts([[(i % 5, 64), (100 + i, int(rng.integers(1, 400)))] for i in range(60)], gap=0.3,
                   output_len=50)  # fmt: skip
    result = run(load, config, linear_cost(0.01, 1e-4, max_num_batched_tokens=8192))
    series = series_of(result, config)
    integral = series["kv_cache_usage_perc"].sum() * 199 * result.totals.samples.interval
    assert integral == pytest.approx(result.totals.usage_time, rel=0.01)


def test_the_file_of_a_run(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "engine: {num_gpu_blocks: 100}\n"
        "cost: {base_us: 1000, token_us: 10}\n"
        "workload: {kind: shared_prefix, num_requests: 20, prefix_len: 64, suffix_len: 16, output_len: 9,"
        " request_rate: 50}\n"
    )
    done = CliRunner().invoke(app, ["run", str(scenario), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    table = pq.read_table(tmp_path / "out" / "timeseries.parquet")
    assert table.column_names == NAMES
    assert table["num_requests_running"].to_pylist()[0] == 0
    assert max(table["num_requests_running"].to_pylist()) > 0
    assert max(table["kv_cache_usage_perc"].to_pylist()) <= 1.0
    again = CliRunner().invoke(app, ["run", str(scenario), "--out", str(tmp_path / "out")])
    assert again.exit_code == 0, "a result folder with a time series is replaced"
