"""`prefixsim mrc`: options, the shape of what it prints and writes, messages."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_workloads_trace import mooncake, write
from typer.testing import CliRunner, Result

from sim.cli import app
from sim.curves.figure import sides_of
from sim.result_folder import MRC_FILES

SCENARIO = """\
model: llama-3.1-8b
cost: {base_us: 5000, token_us: 50}
engine: {block_size: 16, num_gpu_blocks: 101, max_model_len: 800}
workload:
  {kind: shared_prefix, num_groups: 6, prefix_len: 96, suffix_len: 40, output_len: 10, request_rate: 12,
   num_requests: 60}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return write(tmp_path, *[mooncake(timestamp=1000 * i, hash_ids=[i % 3, i % 5]) for i in range(30)])


def mrc(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["mrc", *map(str, arguments)])


def json_of(*arguments: str | Path) -> dict[str, Any]:
    result = mrc(*arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_one_block_size_is_one_object(trace: str) -> None:
    found = json_of(trace)
    assert found["block_size"] == 512  # what the trace's ids stand for
    points = found["curve"]
    # Each content but its first use: 512 tokens of blocks 0, 1 and 2; ranks 3, 6, 6, …
    assert found["ceiling_hit_tokens"] == 27 * 512
    assert found["ceiling"] == 27 * 512 / (30 * 600)
    assert points[0] == {"blocks": 0, "tokens": 0, "hit_tokens": 0, "hit_rate": 0.0}
    assert points[-1]["hit_tokens"] == found["ceiling_hit_tokens"]
    assert all(
        before["hit_tokens"] < after["hit_tokens"] and after["tokens"] == 512 * after["blocks"]
        for before, after in pairwise(points)
    )
    assert found["knee"] == points[-1]["blocks"] == 3
    assert found["working_set"].keys() == {"60", "600"}


def test_several_block_sizes_are_a_list(trace: str) -> None:
    found = json_of(trace, "--block-size", "512,256")
    assert list(found) == ["curves"]
    assert [one["block_size"] for one in found["curves"]] == [512, 256]
    assert found["curves"][0] == json_of(trace, "--block-size", "512")
    assert any("lower bounds" in text for text in found["curves"][1]["assumed"])


def test_given_capacities_with_bounds_for_scale(trace: str) -> None:
    found = json_of(trace, "--at", "1,3", "--count", "whole-ids")
    assert [one["blocks"] for one in found["curve"]] == [1, 3]
    for one in found["curve"]:
        assert one["fifo_hit_rate"] <= one["belady_hit_rate"]
        assert one["hit_tokens"] <= one["belady_hit_tokens"] <= found["ceiling_hit_tokens"]


def test_the_null_block_is_one_of_num_gpu_blocks(trace: str) -> None:
    plain, null = json_of(trace, "--at", "2"), json_of(trace, "--at", "3", "--null-block")
    assert (null["knee"], null["knee_tokens"]) == (plain["knee"] + 1, plain["knee_tokens"])
    assert null["curve"][0] == plain["curve"][0] | {"blocks": 3}
    assert "num_gpu_blocks, the null block among them" in " ".join(null["assumed"])


def test_a_scenario_knows_what_a_block_weighs(scenario: str) -> None:
    found = json_of(scenario)
    assert found["block_size"] == 16
    assert found["pool"]["blocks"] == 100
    assert found["pool"]["gib"] == 100 * 16 * 131_072 / 2**30
    assert not found["outputs"] and json_of(scenario, "--outputs")["outputs"]
    assert json_of(scenario, "--set", "engine.block_size=32")["block_size"] == 32


def test_timed_runs_stand_beside_the_curve(scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = mrc(scenario, "--timed", "3", "--out", out, "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("timed run") == 3
    found = json.loads(result.stdout)
    assert found["outputs"]  # as the engine keeps them
    timed = found["timed"]
    assert len(timed["points"]) == 3
    for point in timed["points"]:
        assert point["gap"] == pytest.approx(100 * (point["curve_hit_rate"] - point["hit_rate"]))
        assert point["tokens"] == 16 * point["blocks"]
    gaps = [point["gap"] for point in timed["points"]]
    assert (timed["mean_gap"], timed["max_gap"]) == (pytest.approx(sum(gaps) / 3), max(gaps))
    assert {path.name for path in out.iterdir()} == MRC_FILES
    assert json.loads((out / "mrc.json").read_text()) == found
    rows = list(csv.DictReader((out / "timed.csv").open()))
    assert [int(row["hit_tokens"]) for row in rows] == [point["hit_tokens"] for point in timed["points"]]


def test_the_folder_holds_the_whole_curve_and_may_be_written_again(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = json_of(trace, "--block-size", "512,256")
    for _ in range(2):
        assert mrc(trace, "--block-size", "512,256", "--at", "2", "--out", out).exit_code == 0
        rows = list(csv.DictReader((out / "mrc.csv").open()))
        found = [[int(row[key]) for key in ("block_size", "blocks", "hit_tokens")] for row in rows]
        assert found == [
            [curve["block_size"], one["blocks"], one["hit_tokens"]]
            for curve in whole["curves"]
            for one in curve["curve"]
        ]
        assert (out / "mrc.png").read_bytes().startswith(b"\x89PNG")
    (out / "notes.txt").write_text("mine")
    refused = mrc(trace, "--out", out)
    assert refused.exit_code == 2 and "notes.txt" in refused.stderr


def test_names_of_marks_that_are_close_stand_on_either_side() -> None:
    assert sides_of([10.0, 100.0, 101.0, 1000.0], np.log(1e4)) == [-1, -1, 1, -1]
    assert sides_of([100.0, 101.0, 102.0], np.log(1e4)) == [-1, 1, -1]
    assert sides_of([100.0, 101.0, 150.0, 600.0], np.log(1e4)) == [-1, 1, 1, -1], "a name is there"
    assert sides_of([], 1.0) == []


def test_table(scenario: str) -> None:
    shown = mrc(scenario, "--at", "50,90").stdout
    for text in (
        "Ceiling:",
        "Knee (99 % of it):",
        "GiB",
        "fifo hit rate",
        "The scenario's pool:",
        "assumed: ",
    ):
        assert text in shown


def test_nothing_ever_hits(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), mooncake(hash_ids=[3, 4]))
    found = json_of(path)
    assert (found["ceiling"], found["knee"], found["knee_gib"]) == (0.0, None, None)
    assert mrc(path, "--out", tmp_path / "out").exit_code == 0


def test_plain_python_gives_the_same(trace: str) -> None:
    options = ["--block-size", "512,256", "--at", "1,2,5"]
    plain = subprocess.run(
        [sys.executable, "-m", "sim.cli", "mrc", trace, *options, "--format", "json"],
        capture_output=True,
        check=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[1],
    ).stdout
    assert json.loads(plain) == json_of(trace, *options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["NONE"], "cannot read the trace: no such file"),
        (["NONE.yaml"], "cannot read the scenario: no such file"),
        (["EMPTY"], "the trace holds no requests"),
        (["TRACE", "--block-size", "0"], "--block-size 0: should be different whole numbers, 1 to"),
        (["TRACE", "--block-size", "64,64"], "--block-size 64,64: should be different"),
        (["TRACE", "--block-size", "100"], "set --block-size to a multiple of 512, or to one of 1, 2, 4"),
        (["TRACE", "--at", "0"], "--at 0: should be different whole numbers, 1 to"),
        (["TRACE", "--at", "1", "--null-block"], "whole numbers, 2 to"),
        (["TRACE", "--last", "31"], "--last 31: TRACE has 30 requests; ask for at most so many"),
        (["TRACE", "--timed", "4"], "is a trace, which names no engine; give a scenario"),
        (["TRACE", "--long-requests", "refuse"], "name some with --at"),
        (["TRACE", "--set", "trace_block=16"], "did you mean trace_block_size?"),
        (["TRACE", "--count", "whole-ids", "--outputs"], "leave --outputs and --timed out"),
        (["TRACE", "--count", "whole-ids", "--block-size", "64"], "leave --block-size out"),
        (["SCENARIO", "--count", "whole-ids"], "has no ids of blocks"),
        (["SCENARIO", "--timed", "3", "--last", "5"], "leave --last out, or set measure_from"),
        (["SCENARIO", "--set", "engine.enable_prefix_caching=false"], "so nothing ever hits"),
        (["SCENARIO", "--set", "cache=radix"], "not of radix; --set cache=apc"),
        (["SCENARIO", "--set", "cache=contiguous", "--timed", "3"], "not of contiguous; --set cache=apc"),
        (["SCENARIO", "--set", "cluster.replicas=2"], "a curve is of one pool; --set cluster.replicas=1"),
        (["SCENARIO", "--set", "reset_prefix_cache=[3]"], "a curve knows no resets"),
        (
            ["SCENARIO", "--set", "measure_from=3", "--set", "workload.concurrency=2", "--set",
             "workload.request_rate=inf"],
            "closed loop",
        ),
        (["SCENARIO", "--set", "engine.max_model_len=100"], "no request is left to count"),
        (["TRACE", "--out", "TRACE"], "there is a file of that name"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    trace: str, scenario: str, tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    names = {
        "TRACE": trace,
        "SCENARIO": scenario,
        "EMPTY": str(tmp_path / "empty.jsonl"),
        "NONE": str(tmp_path / "none.jsonl"),
        "NONE.yaml": str(tmp_path / "none.yaml"),
    }
    before = sorted(tmp_path.iterdir())
    result = mrc(*[names.get(one, one) for one in arguments])
    assert result.exit_code == 2
    assert says.replace("TRACE", trace) in result.stderr
    assert [line for line in result.stderr.splitlines() if "compiling" not in line][1:] == []
    assert result.stdout == ""
    assert sorted(tmp_path.iterdir()) == before
