"""The notebooks run as scripts, and their pictures of the library's tables are the commands' own."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("marimo")

from sim import Scenario, run, sweep
from sim.explore.notebook import of_sweep, records_of, with_trace
from sim.sweeps.execute import run_sweep
from sim.sweeps.figures import figure_of
from sim.sweeps.processes import on_processes
from sim.sweeps.schema import plan_of

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SLOW = ("04_ttft_under_load", "05_prefix_lengths", "06_three_systems", "07_capacity_plan")
TINY = Scenario(name="tiny", workload={"kind": "fourteen_tokens", "num_requests": 20, "request_rate": 8})


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(NOTEBOOKS.glob("*.py"))
    ],
)
def test_a_notebook_runs_as_a_script(path: Path) -> None:
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_each_notebook_says_what_to_look_for_and_stands_in_the_list() -> None:
    listed = (NOTEBOOKS / "README.md").read_text()
    for path in NOTEBOOKS.glob("*.py"):
        assert "**Look for**" in path.read_text(), path
        assert f"[{path.name}]({path.name})" in listed


def test_the_picture_of_a_table_is_that_of_the_sweep(tmp_path: Path) -> None:
    axes = {"engine.enable_prefix_caching": [True, False], "engine.block_size": [2, 4, 16]}
    metrics = ["prefix_cache_hit_rate", "lost_tail_tokens"]  # None without caching
    data = {"name": "tiny", "base": TINY.model_dump(), "axes": axes, "seeds": 2, "metrics": metrics}
    ran = run_sweep(plan_of(data, tmp_path), tmp_path / "out", partial(on_processes, jobs=1))
    assert ran.errors == []
    drawn = figure_of(ran)
    assert drawn is not None
    assert of_sweep(sweep(TINY, axes, seeds=2, metrics=metrics, jobs=1), "tiny") == drawn[1]


def test_a_trace_of_the_users_takes_the_workloads_place(tmp_path: Path) -> None:
    path = tmp_path / 'my "trace".jsonl'
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n')
    found = with_trace(TINY, str(path))
    assert (found.workload.kind, found.workload.path) == ("trace", str(path))
    assert found.engine == TINY.engine
    assert with_trace(TINY, "") is TINY
    assert with_trace(TINY, None) is TINY


def test_requests_are_read_by_column() -> None:
    requests = run(TINY).requests
    assert (records_of(requests).column("ttft_ms") == requests["ttft_ms"]).all()
