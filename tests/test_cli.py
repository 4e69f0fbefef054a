"""The command's edge: results, result folder, bad input, interruption. The engine is a stand-in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_metrics import make_chunk, make_totals
from typer.testing import CliRunner

from sim.cli import app
from sim.engine import FATE_FIELDS
from sim.result_folder import RESULT_FILES, result_folder
from workloads import WorkloadError

SCENARIO = """\
engine: {block_size: 16, num_gpu_blocks: 100}
workload: {kind: fourteen_tokens, num_requests: 40, prompt_len: 64, shared_len: 48, request_rate: 5}
slo: {ttft: 2000}
"""


def fake_simulate(batches: Iterator[Any], config: Any, cost: Any, **rest: Any) -> Any:
    """One server, half a second a request; prompts above the model's length are refused."""
    now, done = 0.0, 0
    for batch in batches:
        n = len(batch.arrival_time)
        start = np.empty(n)
        for i, arrival in enumerate(batch.arrival_time):
            start[i] = max(now, arrival)
            now = start[i] + 0.5
        bad = batch.prompt_len >= config.max_model_len
        start[bad] = np.nan
        chunk = make_chunk(batch.arrival_time, start, start + 0.1, start + 0.5, batch.prompt_len, 5, bad)
        if config.token_fates:
            chunk |= {name: np.zeros(n, np.int64) for name in (*FATE_FIELDS, "prefix_cache_evicted")}
        rest["on_records"](chunk)
        done += n
        if rest["progress"] is not None:
            rest["progress"](done, now)
    return make_totals(num_steps=3, prefix_cache_queries=100, prefix_cache_hits=25, busy_time=now)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, where the command finds the engine."""
    module = ModuleType("sim.simulate")
    module.simulate = fake_simulate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sim.simulate", module)
    return module


@pytest.fixture
def scenario(tmp_path: Path, engine: ModuleType) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def prefixsim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    result = prefixsim(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [text for text in result.stderr.splitlines() if "compiling" not in text]
    assert line.startswith("prefixsim: ")
    return line


def test_table_has_the_benchmarks_headings(scenario: Path) -> None:
    result = prefixsim("run", scenario)
    assert result.exit_code == 0, result.output
    for text in (
        "= Serving Benchmark Result =", "-Time to First Token-", "-Time per Output Token (excl. 1st token)-",
        "-Inter-token Latency-", "-End-to-end Latency-", "-Prefix Cache-", "Hit rate (%):", "first admission",
        "Block size (tokens):", "kappa", "Request goodput", "OVERLOADED",
    ):  # fmt: skip
        assert text in result.stdout
    assert not any("  " * 40 in line for line in result.stdout.splitlines())


def test_json_is_one_object(scenario: Path) -> None:
    result = prefixsim("run", scenario, "--format", "json", "--set", "seed=3")
    summary = json.loads(result.stdout)
    assert summary["completed"] == 40 and summary["seed"] == 3
    assert summary["prefix_cache_hit_rate"] == 0.25
    assert summary["saturation"] == "OVERLOADED"


def test_folder_holds_a_run_that_repeats_to_the_byte(scenario: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("a", "deep/b", "c"))
    assert prefixsim("run", scenario, "--out", first).exit_code == 0
    assert prefixsim("run", scenario, "--out", second).exit_code == 0
    assert prefixsim("run", first / "scenario.yaml", "--out", third).exit_code == 0
    assert {path.name for path in first.iterdir()} == RESULT_FILES
    for name in RESULT_FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes() == (third / name).read_bytes(), (
            name
        )
    assert pq.read_table(first / "requests.parquet").num_rows == 40
    assert (first / "run.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*"))


def test_former_run_is_replaced_and_nothing_else(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prefixsim("run", scenario, "--out", out).exit_code == 0
    assert prefixsim("run", scenario, "--out", out, "--set", "seed=7").exit_code == 0
    assert json.loads((out / "summary.json").read_text())["seed"] == 7
    (out / "notes.txt").write_text("mine")
    assert "notes.txt" in refused("run", scenario, "--out", out)
    assert (out / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_place_that_cannot_be_written_is_refused_before_the_run(
    scenario: Path, tmp_path: Path, engine: ModuleType
) -> None:
    del engine.simulate  # type: ignore[attr-defined]
    (tmp_path / "file").write_text("")
    assert "file" in refused("run", scenario, "--out", tmp_path / "file")
    assert "cannot" in refused("run", scenario, "--out", tmp_path / "file" / "out")


def test_failure_leaves_no_folder(scenario: Path, tmp_path: Path, engine: ModuleType) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise WorkloadError("t.jsonl:7: no number")

    engine.simulate = broken  # type: ignore[attr-defined]
    assert "t.jsonl:7: no number" in refused("run", scenario, "--out", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.yaml"]


def test_interruption_leaves_no_folder(scenario: Path, tmp_path: Path, engine: ModuleType) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    engine.simulate = interrupted  # type: ignore[attr-defined]
    result = prefixsim("run", scenario, "--out", tmp_path / "out")
    assert result.exit_code == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.yaml"]


def test_bad_input_is_one_line(scenario: Path, tmp_path: Path) -> None:
    assert "did you mean block_size?" in refused("run", scenario, "--set", "engine.block_sise=1")
    assert "no such file" in refused("run", tmp_path / "none.yaml")
    assert "h100-sxm" in refused("run", scenario, "--set", "gpu=h100-sxn")
    broken = tmp_path / "broken.yaml"
    broken.write_text("workload: {kind: trace\nname: x")
    assert f"{broken}:2: not valid YAML" in refused("run", broken)


def test_refused_requests_are_named_and_only_all_of_them_fail_the_run(scenario: Path) -> None:
    mixed = "workload={kind: shared_prefix, num_requests: 40, prefix_len: 0, output_len: 1, "
    mixed += "suffix_len: {distribution: uniform, low: 10, high: 100}}"
    result = prefixsim(
        "run", scenario, "--set", mixed, "--set", "engine.max_model_len=50", "--format", "json"
    )
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert 0 < summary["failed"] < 40
    assert summary["completed"] + summary["failed"] == 40
    assert f"{summary['failed']} of 40 requests can never fit in 50 tokens" in result.stderr
    assert "none of the 40 requests can run" in refused("run", scenario, "--set", "engine.max_model_len=50")


def test_block_no_request_can_fill_is_told(scenario: Path) -> None:
    result = prefixsim("run", scenario, "--set", "engine.block_size=64", "--format", "json")
    assert "hits will be 0" in result.stderr
    assert "hits will be 0" in json.loads(result.stdout)["warnings"][0]
    off = ("--set", "engine.block_size=64", "--set", "engine.enable_prefix_caching=false")
    assert "hits will be 0" not in prefixsim("run", scenario, *off).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mrc"], "missing argument 'SCENARIO_OR_TRACE'; see prefixsim mrc --help"),
        (["mrc", "t.jsonl", "--last", "0"], "invalid value for '--last': .* 1; see prefixsim mrc --help"),
        (["mrc", "t.jsonl", "--count", "ids"], "'--count': 'ids' is not one of 'vllm', 'whole-ids'; see"),
        (["run", "s.yaml", "--lst", "3"], "no such option: --lst.*; see prefixsim run --help"),
        (["run", "s.yaml", "t.yaml"], r"unexpected extra argument\(s\) \(t.yaml\); see prefixsim run --help"),
        (["nosuch"], "no such command 'nosuch'; see prefixsim --help"),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="prefixsim")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("prefixsim: ")
    assert re.search(said, line)


def test_schema_is_json() -> None:
    assert "workload" in json.loads(prefixsim("schema").stdout)["properties"]


def test_the_folder_appears_only_when_all_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with result_folder(out) as folder:
        (folder / "summary.json").write_text("{}")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["summary.json"]
    assert out.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_help_starts_without_the_heavy_libraries() -> None:
    code = (
        "import sys; from sim.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numba', 'numpy', 'pandas', 'matplotlib', 'pyarrow', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
