"""The same load side by side: the list of values, the same arrivals, the table, the files, bad input."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from sim.cli import app
from sim.compare import FIGURES, folder_names, lines, load_all, split
from sim.errors import InputError
from sim.plots import ttft_cdfs
from sim.result_folder import RESULT_FILES

SCENARIO = """\
seed: 3
cost: {base_us: 5000, token_us: 50}
engine: {block_size: 16, num_gpu_blocks: 60, max_model_len: 800}
workload:
  {kind: shared_prefix, num_groups: 3, prefix_len: 96, suffix_len: 40, output_len: 10, request_rate: 12,
   num_requests: 60}
slo: {ttft: 15}
"""
CACHING = "engine.enable_prefix_caching=false,true"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def prefixsim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("16,32,64", ["16", "32", "64"]),
        ("a, b", ["a", "b"]),
        ("[1,2],[3, 4]", ["[1,2]", "[3, 4]"]),
        ("{low: 1, high: 2},{low: [1,2], high: 3}", ["{low: 1, high: 2}", "{low: [1,2], high: 3}"]),
        ("'a,b',\"c],d\"", ["'a,b'", '"c],d"']),
        ("1,", ["1", ""]),
        ("7", ["7"]),
    ],
)
def test_values_are_cut_at_commas_outside_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split(text) == values


def test_each_run_is_the_run_with_that_value(scenario: Path) -> None:
    result = prefixsim("run", scenario, "--set", "seed=5", "--compare", CACHING, "--format", "json")
    assert result.exit_code == 0, result.output
    both = json.loads(result.stdout)
    assert both["compare"] == "engine.enable_prefix_caching"
    assert [run["value"] for run in both["runs"]] == ["false", "true"]
    for run in both["runs"]:
        alone = ("--set", "seed=5", "--set", f"engine.enable_prefix_caching={run['value']}")
        assert run["summary"] == json.loads(prefixsim("run", scenario, *alone, "--format", "json").stdout)
    off, on = (run["summary"] for run in both["runs"])
    assert not off["prefix_cache_hit_rate"] and on["prefix_cache_hit_rate"] > 0.5
    assert on["mean_ttft_ms"] < off["mean_ttft_ms"]


def test_table_has_a_column_for_each_value(scenario: Path) -> None:
    result = prefixsim("run", scenario, "--compare", "engine.num_gpu_blocks=60,600")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["engine.num_gpu_blocks", "60", "600"] in rows
    summaries = [
        json.loads(
            prefixsim("run", scenario, "--set", f"engine.num_gpu_blocks={n}", "--format", "json").stdout
        )
        for n in (60, 600)
    ]
    small, large = summaries
    assert small["num_evictions"] > large["num_evictions"] == 0
    assert ["Evicted", "blocks:", str(small["num_evictions"]), "0"] in rows
    rates = [f"{100 * s['prefix_cache_hit_rate']:.2f}" for s in summaries]
    assert ["Hit", "rate", "(%):", *rates] in rows
    for label, key in (("Mean TTFT (ms):", "mean_ttft_ms"), ("P99 E2EL (ms):", "p99_e2el_ms")):
        assert [*label.split(), *(f"{s[key]:.2f}" for s in summaries)] in rows
    assert any(row[:3] == ["Request", "goodput", "(req/s):"] for row in rows)
    assert ["Load:", small["saturation"], large["saturation"]] in rows


def test_what_is_assumed_or_warned_of_names_its_values() -> None:
    head = dict.fromkeys(FIGURES, 1.0) | {"name": "n", "model": "m", "gpu": "g", "seed": 0}
    head |= {"cache": "apc", "metadata": "cached blocks"}
    one = head | {"assumed": ["both", "one only"], "warnings": []}
    two = head | {"assumed": ["both"], "warnings": ["two only"]}
    texts = [text for _, text in lines("f", {"a": one, "b": two})]
    assert texts[-3:] == ["assumed: both", "assumed (a): one only", "warning (b): two only"]


def test_folder_holds_each_run_and_the_comparison_and_is_replaced(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        result = prefixsim("run", scenario, "--compare", CACHING, "--out", out)
        assert result.exit_code == 0, result.output
    names = ["enable_prefix_caching=false", "enable_prefix_caching=true"]
    assert sorted(path.name for path in out.iterdir()) == sorted(["compare.csv", "compare.png", *names])
    arrivals = []
    with open(out / "compare.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, name in zip(rows, names, strict=True):
        assert {path.name for path in (out / name).iterdir()} == RESULT_FILES
        summary = json.loads((out / name / "summary.json").read_text())
        assert f"={row['engine.enable_prefix_caching']}" in name
        assert {key: row[key] for key in FIGURES} == {key: str(summary[key]) for key in FIGURES}
        table = pq.read_table(out / name / "requests.parquet").sort_by("request_id")
        arrivals.append(table.select(["arrival_time", "prompt_len", "output_len"]))
    assert arrivals[0] == arrivals[1], "the same load"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert prefixsim("run", scenario, "--out", out).exit_code == 0, "a single run may replace a comparison"
    assert {path.name for path in out.iterdir()} == RESULT_FILES


def test_what_no_run_wrote_is_not_replaced(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prefixsim("run", scenario, "--compare", CACHING, "--out", out).exit_code == 0
    mine = out / "enable_prefix_caching=true" / "notes.txt"
    mine.write_text("mine")
    result = prefixsim("run", scenario, "--compare", CACHING, "--out", out)
    assert result.exit_code == 2 and "which no run wrote" in result.stderr
    assert mine.read_text() == "mine"
    (tmp_path / "photos" / "summer").mkdir(parents=True)
    assert "summer" in prefixsim("run", scenario, "--out", tmp_path / "photos").stderr


def test_folders_have_harmless_names_unlike_each_other() -> None:
    values = ["16", "{a: 1}", "{a; 1}", "../x", "y" * 200]
    names = folder_names("workload.suffix_len", values)
    assert names[0] == "suffix_len=16"
    assert len(set(names)) == len(names)
    assert not any("/" in name or len(name) > 64 for name in names)
    assert folder_names("a", ["x y", "x/y", "x:y"]) == ["a=x_y", "a=x_y#2", "a=x_y#3"]


def test_figure_has_a_curve_for_each_run_with_its_quantiles() -> None:
    axes = ttft_cdfs(Figure().subplots(), {"a": np.array([1e3, 2e3, np.nan, 3e3]), "b": np.array([5.0])})
    first, second = axes.get_lines()
    assert (first.get_label(), second.get_label()) == ("a", "b")
    assert np.interp(50.0, first.get_ydata(), first.get_xdata()) == 2.0
    assert set(np.asarray(second.get_xdata())) == {0.005}
    assert first.get_color() != second.get_color()


@pytest.mark.parametrize(
    ("compared", "words"),
    [
        ("engine.block_size=16", "should read path=value,value"),
        ("engine.block_size", "should read path=value,value"),
        ("engine.block_size=16,", "should read path=value,value"),
        ("=1,2", "should read path=value,value"),
        ("engine.block_size=16,32,16", "twice"),
        ("engine.block_sise=16,32", "did you mean block_size?"),
        ("engine.block_size=16,x", "--compare engine.block_size=x"),
        ("gpu=h100-sxm,h100-sxn", "h100-sxm"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    scenario: Path, compared: str, words: str, tmp_path: Path
) -> None:
    result = prefixsim(
        "run", scenario, "--set", "engine.num_gpu_blocks=auto", "--compare", compared, "--out", tmp_path / "o"
    )
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line and "--set" not in line.replace("--set engine.num", "")
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_overrides_come_before_the_values(scenario: Path) -> None:
    field, scenarios = load_all(scenario, ["engine.block_size=32", "seed=9"], "engine.block_size=8,16")
    assert field == "engine.block_size"
    assert {value: one.engine.block_size for value, one in scenarios.items()} == {"8": 8, "16": 16}
    assert {one.seed for one in scenarios.values()} == {9}
    with pytest.raises(InputError):
        load_all(scenario, [], "engine.block_size=8")
