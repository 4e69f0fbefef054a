"""The notebooks run as scripts, and their pictures of the library's tables are the commands' own."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("marimo")

from sim import Scenario, run, sweep
from sim.explore.notebook import of_runs, of_sweep, of_table, records_of, results_of, with_trace
from sim.plots import GRID, GROUND, INK, SOFT, svg
from sim.sweeps.execute import run_sweep
from sim.sweeps.figures import panels_of
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


def test_the_panels_of_a_table_are_those_of_the_sweep(tmp_path: Path) -> None:
    axes = {"engine.enable_prefix_caching": [True, False], "engine.block_size": [2, 4, 16]}
    metrics = ["prefix_cache_hit_rate", "lost_tail_tokens"]  # None without caching
    data = {"name": "tiny", "base": TINY.model_dump(), "axes": axes, "seeds": 2, "metrics": metrics}
    ran = run_sweep(plan_of(data, tmp_path), tmp_path / "out", partial(on_processes, jobs=1))
    assert ran.errors == []
    frame = sweep(TINY, axes, seeds=2, metrics=metrics, jobs=1)
    panels, own = panels_of(ran), panels_of(results_of(frame, "tiny"))
    assert list(panels) == list(own) == metrics
    for metric in metrics:
        assert svg(panels[metric], (5, 3), metric) == svg(own[metric], (5, 3), metric)
    html = of_sweep(frame, "tiny")
    assert html.count("<figure>") == 2 and 'aria-label="Hit rate (%), tiny"' in html
    assert "var(--grid)" in html and "currentColor" in html, "in the page's colours"
    assert not any(colour in html for colour in (INK, SOFT, GRID, GROUND))


def test_a_table_of_runs_has_names_units_and_digits() -> None:
    axes = {"engine.enable_prefix_caching": [True, False]}
    metrics = ["prefix_cache_hit_rate", "mean_ttft_ms"]
    html = of_runs(sweep(TINY.changed("engine.block_size=4"), axes, seeds=1, metrics=metrics, jobs=1), "t")
    heads = re.findall(r'<th scope="col">(.*?)</th>', html)
    assert heads == ["prefix caching", "Hit rate (%)", "Mean TTFT (ms)"]
    rows = re.findall(r"<tr><th scope=\"row\">(on|off)</th><td>([\d.]+)</td><td>([\d.]+)</td></tr>", html)
    assert [row[:2] for row in rows] == [("on", f"{100 * 19 / 20 * 8 / 14:.1f}"), ("off", "0.000")]
    numbers = pd.DataFrame({"x": [0.12345, 2.06412, 26.438, 129.24, 12345.678, float("nan")]})
    assert re.findall(r'<th scope="row">(.*?)</th>', of_table("n", numbers)) == [
        "0.123", "2.06", "26.4", "129", "12,346", "-",
    ]  # fmt: skip


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
