"""The library: its examples run, its tables say what the command says, and it leaves nothing behind."""

from __future__ import annotations

import doctest
import io
import json
import math
import pydoc
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import sim
import sim.api
import sim.scenario
from sim import InputError, Run, Scenario, mrc, plan, run, sweep
from sim.cli import app

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT / "scenarios" / "shared_prefix.yaml"
FEW = "workload.num_requests=200"


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return Scenario.load(SHARED, FEW)


@pytest.fixture(scope="module")
def found(scenario: Scenario) -> Run:
    return run(scenario)


def printed(*arguments: str | Path) -> dict[str, Any]:
    """What the command prints as JSON."""
    result = CliRunner().invoke(app, [*map(str, arguments), "--format", "json"])
    assert result.exit_code in (0, 1), result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [sim, sim.api, sim.scenario], ids=lambda module: module.__name__)
def test_every_example_gives_what_it_says(module: ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert attempted > 0 and failed == 0


def test_help_tells_the_story() -> None:
    text = pydoc.plain(pydoc.render_doc(sim))
    assert text.index("one noun and four functions") < text.index("CLASSES")
    for name in ("run(", "sweep(", "mrc(", "plan("):
        assert f"\n    {name}" in text


def test_the_functions_are_typed_and_no_module_takes_their_names() -> None:
    code = "import sim.cli, sim.sweeps.execute, sim.curves.study, sim.planning.winners; from sim import *; "
    code += "print(*(f'{one.__module__}.{one.__name__}' for one in (run, sweep, mrc, plan)))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert process.stdout.split() == ["sim.api.run", "sim.api.sweep", "sim.api.mrc", "sim.api.plan"]
    for function in (sweep, mrc, plan):
        hints = get_type_hints(function, {**vars(sim.api), "pd": pd})
        assert hints["return"] is pd.DataFrame


def test_a_run_is_what_the_command_prints(found: Run) -> None:
    assert found.summary == printed("run", SHARED, "--set", FEW)
    shown = CliRunner().invoke(app, ["run", str(SHARED), "--set", FEW])
    assert shown.stdout == found.report + "\n"
    assert repr(found) == "<Run shared-prefix: 200 requests, hit rate 64.00 %, mean TTFT 38.92 ms, STABLE>"


def test_the_tables_of_a_run_are_the_files_of_the_command(found: Run, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(SHARED), "--set", FEW, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0
    pd.testing.assert_frame_equal(found.requests, pd.read_parquet(tmp_path / "out" / "requests.parquet"))
    pd.testing.assert_frame_equal(found.timeseries, pd.read_parquet(tmp_path / "out" / "timeseries.parquet"))


def test_each_column_and_figure_is_finite_where_it_is_defined(found: Run) -> None:
    for value in found.summary.values():
        assert not isinstance(value, float) or math.isfinite(value)
    assert np.isfinite(found.requests.to_numpy()).all()
    assert found.fates.sum() == found.requests["prompt_len"].sum() == found.summary["total_input_tokens"]
    assert found.fates.to_dict() == found.summary["token_fates"]
    docs = Run.__doc__ or ""
    for name in found.requests.columns:
        assert f"`{name}`" in docs or name == "num_sequences" or name.startswith("fate_"), name


def test_without_lookups_there_are_no_fates(scenario: Scenario) -> None:
    off = run(scenario.changed("engine.enable_prefix_caching=false"))
    assert off.fates.empty and not [name for name in off.requests if name.startswith("fate_")]
    assert repr(off).startswith("<Run shared-prefix: 200 requests, no prefix caching, mean TTFT")


def test_nothing_is_left_on_the_disk(
    scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("sim.records.ROW_GROUP", 50)  # the records go to a file
    assert len(run(scenario).requests) == 200
    sweep(scenario, {"engine.block_size": [16]}, seeds=1, jobs=1)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_scenario_is_one_read_with_set(scenario: Scenario) -> None:
    settings = (
        "engine.block_size=16",
        "cache={kind: radix}",
        "workload.prefix_len={distribution: constant, value: 9}",
    )
    assert scenario.changed(*settings) == Scenario.load(SHARED, FEW, *settings)
    assert scenario.changed() == scenario and scenario.engine.block_size == 64
    with pytest.raises(InputError, match=r"engine\.blok_size=2: engine\.blok_size: .*block_size"):
        scenario.changed("engine.blok_size=2")


def test_a_sweep_has_a_row_a_run_with_numbers_and_labels(scenario: Scenario) -> None:
    spread = {"label": "spread", "value": {"distribution": "uniform", "low": 100, "high": 300}}
    axes = {"engine.block_size": {"log_range": [16, 64, 2]}, "workload.prefix_len": [200, spread]}
    rows = sweep(scenario, axes, seeds=[3, 4], metrics=["prefix_cache_hits", "token_fates.cold"], jobs=1)
    assert list(rows) == [
        "point", "engine.block_size", "workload.prefix_len", "seed", "prefix_cache_hits", "token_fates.cold",
        "saturation", "completed", "failed", "error",
    ]  # fmt: skip
    assert rows["point"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and rows["seed"].tolist() == [3, 4] * 4
    assert rows["engine.block_size"].tolist() == [16] * 4 + [64] * 4
    assert rows["workload.prefix_len"].tolist() == [200, 200, "spread", "spread"] * 2
    last = scenario.changed("engine.block_size=64", "workload.prefix_len=200", "seed=4")
    assert rows["prefix_cache_hits"][5] == run(last).summary["prefix_cache_hits"]


def test_a_sweep_of_a_file_and_of_numpy_values(scenario: Scenario, tmp_path: Path) -> None:
    text = "name: s\nbase: base.yaml\naxes: {workload.request_rate: [2.0, 4.0]}\nseeds: 1\n"
    (tmp_path / "s.yaml").write_text(text)
    (tmp_path / "base.yaml").write_text(
        SHARED.read_text().replace("num_requests: 10000", "num_requests: 200")
    )
    of_file = sweep(tmp_path / "s.yaml", jobs=1)
    of_python = sweep(scenario, {"workload.request_rate": np.array([2.0, 4.0])}, seeds=np.arange(1), jobs=1)
    pd.testing.assert_frame_equal(of_file, of_python)


def test_what_a_sweep_cannot_be_is_told_in_one_line(scenario: Scenario, tmp_path: Path) -> None:
    for axes, metrics, told in (
        ({"engine.blok_size": [1]}, None, "did you mean block_size"),
        ({"engine.block_size": [0]}, None, "engine.block_size"),
        ({"engine.block_size": [16]}, ["mean_tft_ms"], "did you mean mean_ttft_ms"),
        ({}, None, "the grid is empty"),
    ):
        with pytest.raises(InputError, match=told) as error:
            sweep(scenario, axes, metrics=metrics, seeds=1, jobs=1)
        assert "\n" not in str(error.value) and str(error.value).startswith("sweep: ")
    with pytest.raises(InputError, match=r"give Scenario\.load of one"):
        sweep(SHARED, {"engine.block_size": [1]})


def test_a_curve_is_what_the_command_prints(scenario: Scenario) -> None:
    curve = mrc(scenario, [16, 64])
    told = printed("mrc", SHARED, "--set", FEW, "--block-size", "16,64")
    for one in told["curves"]:
        points = one.pop("curve")
        mine = curve[curve["block_size"] == one["block_size"]].drop(columns="block_size")
        assert mine.to_dict("records") == points
        assert curve.attrs["curves"][one["block_size"]] == one


def test_a_curve_at_capacities_has_fifo_and_belady(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"input_length": 1024, "output_length": 1}
    rows = [row | {"timestamp": i, "hash_ids": [i % 3, i % 3 + 9]} for i in range(9)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = mrc(trace, [512], at=[1, 3])
    told = printed("mrc", trace, "--block-size", "512", "--at", "1,3")
    assert curve.drop(columns="block_size").to_dict("records") == told["curve"]
    # Three prompts in turn: LRU has always just lost what comes next.
    assert curve["hit_tokens"].tolist() == [0, 0] and curve["belady_hit_tokens"][1] > 0
    with pytest.raises(InputError, match=r"give Scenario\.load"):
        mrc(SHARED)


def test_a_plan_is_what_the_command_finds(scenario: Scenario) -> None:
    promise = "ttft_p95=60ms"
    found = plan(scenario, promise, vary=["engine.block_size=16,64"], seeds=1, price=2.5, jobs=1)
    told = printed(
        "plan", SHARED, "--set", FEW, "--slo", promise, "--vary", "engine.block_size=16,64", "--seeds", "1",
        "--price", "2.5", "--jobs", "1",
    )  # fmt: skip
    assert found["kept"].all() and found.attrs["num_runs"] == told["num_runs"]
    for (_, row), winner in zip(found.iterrows(), told["winners"], strict=True):
        assert str(row["engine.block_size"]) == winner["values"]["engine.block_size"]
        assert row["request_rate"] == winner["values"]["request_rate"]
        assert row["p95_ttft_ms"] == winner["runs"][0]["p95_ttft_ms"] <= 60.0
        assert row["output_cost"] == winner["cost_per_million_tokens"]["output"]
        assert row["limited_by"] == winner["limited_by"]["by"]
    best = run(scenario.changed(*found["overrides"][0]))
    assert best.summary["p95_ttft_ms"] == found["p95_ttft_ms"][0]


def test_a_plan_that_nothing_keeps_has_the_nearest_miss(scenario: Scenario) -> None:
    found = plan(scenario, "ttft_p95=1us", seeds=1, jobs=1)
    assert found["kept"].tolist() == [False] and found["p95_ttft_ms"][0] > 1e-3
    with pytest.raises(InputError, match="no promise to keep"):
        plan(scenario)


def test_importing_the_library_is_instant() -> None:
    code = "import sys, time; t = time.perf_counter(); import sim; print(time.perf_counter() - t)"
    code += (
        "; print([name for name in ('numba', 'simpy', 'numpy', 'pandas', 'pydantic') if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True
    )
    seconds, loaded = process.stdout.splitlines()
    assert float(seconds) < 0.2 and loaded == "[]"


def test_what_is_printed_in_help_of_a_function_names_units_and_errors() -> None:
    for function in (run, sweep, mrc, plan):
        text = io.StringIO()
        with redirect_stdout(text):
            help(function)
        assert "Raises InputError" in text.getvalue() and ">>>" in text.getvalue()
