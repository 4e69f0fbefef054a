"""Resets of the prefix cache at given times, and the warm-up that the summary leaves out."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from simulation import Run, Segments, engine, linear, prompts, run
from test_fates import explained, fates
from test_known_answers import either_scheduling, fresh
from typer.testing import CliRunner

from sim.cli import app
from sim.errors import InputError
from sim.report import lines
from sim.request import Batch
from sim.scenario import Scenario
from sim.simulation import Result
from sim.simulation import run as run_scenario

HALF = 100  # requests of each half
BREAK = 500.0  # seconds: the first half has long ended
STEP = 1.0  # seconds


def twice(output_len: int = 1) -> Batch:
    """100 prompts of 1024 tokens at once, and the same again after a thousand seconds."""
    load = prompts(2 * fresh(0, HALF * [1024]), gap=0.0, output_len=output_len)
    return load._replace(arrival_time=np.repeat([0.0, 2 * BREAK], HALF))


# known-answers, 11
@either_scheduling
@pytest.mark.parametrize(("resets", "hit"), [([], 1008), ([BREAK], 0), ([BREAK, 2 * BREAK], 0)])
def test_warm_rerun(resets: list[float], hit: int, async_scheduling: bool) -> None:
    result = run(twice(), explained(async_scheduling=async_scheduling), reset_prefix_cache=resets)
    assert result.hits == HALF * [0] + HALF * [hit]
    assert result.totals.num_resets == len(resets)
    lost = {"evicted": 1008} if resets else {"hit": 1008}
    assert fates(result) == HALF * [{"cold": 1024}] + HALF * [{**lost, "last_token": 16}]
    assert result.totals.num_evictions == 0  # vLLM counts none for a reset


@either_scheduling
def test_a_reset_fails_while_blocks_are_in_use(async_scheduling: bool) -> None:
    config = engine(async_scheduling=async_scheduling)
    result = run(twice(output_len=5), config, reset_prefix_cache=[1e-3, 0.1])
    assert result.totals.num_resets == 0
    assert result.hits == HALF * [0] + HALF * [1008]


def steps_of_one_second(resets: list[float], **options: Any) -> Run:
    """One seat, three equal prompts, at 0, .5 and 10 s; each takes a step of a second."""
    load = prompts([[(0, 100)]] * 3, gap=0.0)
    load = load._replace(arrival_time=np.array([0.0, 0.5, 10.0]))
    config = engine(max_num_seqs=1)
    return run(load, config, linear(config, STEP, 0.0), reset_prefix_cache=resets, **options)


@pytest.mark.parametrize(
    ("reset", "hits"),
    [
        (0.0, [0, 96, 96]),  # of an empty cache
        (0.25, [0, 0, 96]),  # served when the step ends: the second has waited, without blocks
        (1.0, [0, 0, 96]),
        (1.25, [0, 96, 0]),
        (5.0, [0, 96, 0]),
        (10.0, [0, 96, 0]),  # before the arrival of the same instant is scheduled
        (20.0, [0, 96, 96]),
    ],
)
def test_a_reset_waits_for_the_end_of_a_step(reset: float, hits: list[int]) -> None:
    """vLLM's engine looks at its input between two steps (EngineCoreProc.run_busy_loop)."""
    result = steps_of_one_second([reset])
    assert result.totals.num_resets == 1
    assert result.hits == hits


def test_a_running_request_outlives_the_end_of_a_step() -> None:
    load = prompts([[(0, 100)]] * 2, output_len=3, gap=10.0)
    config = engine()
    result = run(load, config, linear(config, STEP, 0.0), reset_prefix_cache=[0.5, 1.5, 2.5])
    assert result.totals.num_resets == 1  # the third, served at the end
    assert result.hits == [0, 0]


def mixed_load() -> list[Segments]:
    rng = np.random.default_rng(5)
    return [[(int(group), 64), (1000 + i, 17)] for i, group in enumerate(rng.integers(0, 5, 200))]


@either_scheduling
@pytest.mark.parametrize("concurrency", [None, 2])
def test_however_cut_the_run_is_the_same(concurrency: int | None, async_scheduling: bool) -> None:
    config = explained(num_gpu_blocks=60, max_num_seqs=4, async_scheduling=async_scheduling)
    resets = np.random.default_rng(6).uniform(0.0, 2.0, 300).tolist()
    load = prompts(mixed_load(), output_len=3, gap=0.01)
    options = {"reset_prefix_cache": resets, "measure_from": 0.7, "concurrency": concurrency}
    whole = run(load, config, **options)
    cut = run(load, config, **options, horizon=lambda _: -math.inf)
    assert 0 < whole.totals.num_resets < len(resets)
    for name, column in whole.records.items():
        np.testing.assert_array_equal(cut.records[name], column)
    for before, again in itertools.pairwise([whole.totals, cut.totals]):
        assert before.num_resets == again.num_resets and before.busy_time == again.busy_time
        assert before.warm_up is not None and again.warm_up is not None
        assert before.warm_up.num_steps == again.warm_up.num_steps > 0
    without = run(load, config, **{**options, "measure_from": None})
    for name, column in whole.records.items():
        np.testing.assert_array_equal(without.records[name], column)


def scenario(**changes: Any) -> Scenario:
    """400 requests, one every 10 ms from 10 ms on, in a pool that holds 20 of 50 prefixes."""
    data: dict[str, Any] = {
        "name": "phases",
        "engine": {"block_size": 16, "num_gpu_blocks": 100},
        "cost": {"form": "whole_step", "base_us": 2000.0},
        "workload": {
            "kind": "shared_prefix", "num_requests": 400, "num_groups": 50, "prefix_len": 64,
            "suffix_len": 17, "output_len": 4, "request_rate": 100.0, "arrival": "constant",
        },
    }  # fmt: skip
    return Scenario.model_validate(data | changes)


def table(result: Result, *names: str) -> list[np.ndarray]:
    return [result.records.column(name) for name in names]


def test_the_summary_is_of_the_measured_requests(tmp_path: Path) -> None:
    begin = 1.505
    whole = run_scenario(scenario())
    part = run_scenario(scenario(measure_from=begin), folder=tmp_path)
    arrival, ttft, hit, prompt, finish, output = table(
        whole, "arrival_time", "ttft_ms", "num_cached_tokens", "prompt_len", "finish_time", "output_len"
    )
    late = arrival >= begin
    s = part.summary
    assert 0 < late.sum() < len(arrival)
    assert s["completed"] == late.sum() and s["num_requests_left_out"] == (~late).sum()
    assert s["mean_ttft_ms"] == pytest.approx(ttft[late].mean(), rel=1e-12)
    assert s["p99_ttft_ms"] == np.percentile(ttft[late], 99)
    assert s["duration"] == finish[late].max() - arrival[late].min()
    assert s["total_output_tokens"] == output[late].sum()
    assert s["prefix_cache_hits"] == hit[late].sum() == s["token_fates"]["hit"]
    assert s["prefix_cache_queries"] == prompt[late].sum() == sum(s["token_fates"].values())
    assert s["prefix_cache_hit_rate_with_warm_up"] == whole.summary["prefix_cache_hit_rate"]
    assert s["prefix_cache_hit_rate"] > s["prefix_cache_hit_rate_with_warm_up"]  # the cold start is out
    for name in ("num_steps", "num_evictions", "num_computed_tokens"):
        assert 0 < s[name] < whole.summary[name]
    assert s["p50_itl_ms"] == pytest.approx(2.0, rel=2e-3)
    assert part.records.num_rows == late.sum()
    assert pq.read_table(tmp_path / "requests.parquet").num_rows == len(arrival)
    text = "\n".join(line for _, line in lines(part))
    assert "Requests left out, having arrived before:" in text and f"{(~late).sum()}\n" in text
    assert "Hit rate without / with them (%):" in text


def test_an_arrival_at_the_instant_is_measured() -> None:
    (arrival,) = table(run_scenario(scenario()), "arrival_time")
    at = float(np.sort(arrival)[100])
    assert run_scenario(scenario(measure_from=at)).summary["num_requests_left_out"] == 100
    later = float(np.nextafter(at, math.inf))
    assert run_scenario(scenario(measure_from=later)).summary["num_requests_left_out"] == 101


def test_measured_from_the_beginning_is_the_whole_run() -> None:
    whole, part = run_scenario(scenario()).summary, run_scenario(scenario(measure_from=0.0)).summary
    assert part["num_requests_left_out"] == 0
    assert {name: part[name] for name in whole} == whole
    assert "measure_from" not in whole


def test_resets_are_reported() -> None:
    result = run_scenario(scenario(reset_prefix_cache=[0.0, 100.0]))
    assert result.summary["prefix_cache_resets"] == result.summary["prefix_cache_resets_asked"] == 2
    assert not any("resets" in text for text in result.summary["warnings"])
    text = "\n".join(line for _, line in lines(result))
    assert "Resets, done / asked for:" in text


def test_failed_resets_are_told() -> None:
    load = {**scenario().workload.model_dump(), "output_len": 100}
    result = run_scenario(scenario(reset_prefix_cache=[0.0, 1.0, 2.0], workload=load))
    assert result.summary["prefix_cache_resets"] == 1
    (told,) = (text for text in result.summary["warnings"] if "resets" in text)
    assert told.startswith("2 of 3 resets of the prefix cache failed")


def test_nothing_left_to_measure() -> None:
    with pytest.raises(InputError, match=r"measure_from: all 400 requests arrive before 1000 s"):
        run_scenario(scenario(measure_from=1000.0))


@pytest.mark.parametrize("field", ["reset_prefix_cache=[1, -2]", "reset_prefix_cache=5", "measure_from=-1"])
def test_bad_times(field: str) -> None:
    path = Path(__file__).resolve().parents[1] / "scenarios" / "shared_prefix.yaml"
    outcome = CliRunner().invoke(app, ["run", str(path), "--set", field])
    assert outcome.exit_code == 2
    assert field.partition("=")[0] in outcome.output
