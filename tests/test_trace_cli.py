"""`prefixsim trace`: options, output, messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_workloads_trace import mooncake, write
from typer.testing import CliRunner, Result

from sim.cli import app
from sim.trace.fetch import SOURCES


def trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["trace", *arguments])


def test_describe_json(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), mooncake(timestamp=500))
    result = trace("describe", path, "--format", "json", "--block-size", "512", "--block-size", "64")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert list(figures["ideal_hit_rate"]) == ["512", "64"]
    assert figures["requests"] == 2


def test_describe_table(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), "", mooncake(timestamp=500), "{")
    result = trace("describe", path, "--skip-bad-lines")
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    for text in ("Requests 2", "0.4267", "whole ids: 0.5000", "skipped 1 bad lines", "line 4: not JSON"):
        assert text in shown


def test_fields_are_those_of_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,p,o\n1,64,1\n2,64,1\n")
    columns = "columns={arrival_time: t, prompt_len: p, output_len: o}"
    model = ["--set", "prefix_model.num_groups=1", "--set", "prefix_model.prefix_len=32"]
    options = ["--set", columns, *model, "--block-size", "16", "--format", "json"]
    result = trace("describe", str(path), *options)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["ideal_hit_rate"] == {"16": 32 / 128}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["describe", "NONE"], "cannot read the trace: no such file"),
        (["describe", "FILE", "--set", "trace_block=16"], "unknown field; did you mean trace_block_size?"),
        (["describe", "FILE", "--set", "nothing"], "should read field=value"),
        (["describe", "FILE", "--set", "path.a=1"], "path has no fields"),
        (["describe", "FILE", "--set", "limit=0"], "greater than 0"),
        (["describe", "FILE"], "line 2: not JSON"),
        (["convert", "FILE", "OUT", "--to", "segments", "--block-size", "4"], "segments have no block size"),
        (["convert", "FILE", "OUT"], "line 2: not JSON"),
        (["fetch", "azure"], "unknown trace 'azure'"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], says: str) -> None:
    names = {
        "FILE": write(tmp_path, mooncake(), "{"),
        "OUT": str(tmp_path / "out.jsonl"),
        "NONE": str(tmp_path / "none"),
    }
    result = trace(*[names.get(one, one) for one in arguments])
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]


def test_convert(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl.gz"
    result = trace("convert", write(tmp_path, mooncake(), "{"), str(out), "--skip-bad-lines")
    assert result.exit_code == 0, result.stderr
    assert "skipped 1 bad lines" in result.stderr
    assert f"written: {out}" in result.stderr
    assert out.exists()


def test_fetch_lists_what_there_is() -> None:
    result = trace("fetch")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(SOURCES)


@pytest.mark.parametrize("command", ["describe", "convert"])
def test_what_a_recording_warns_of_is_a_line(tmp_path: Path, command: str) -> None:
    path = Path(__file__).parent / "recordings" / "mixed.jsonl.gz"
    out = [str(tmp_path / "out.jsonl"), "--to", "segments"] if command == "convert" else []
    result = trace(command, str(path), *out)
    assert result.exit_code == 0, result.output
    warned = [line for line in result.stderr.splitlines() if "aborted" in line]
    assert warned == [
        f"prefixsim: warning: {path}: 3 requests were aborted: "
        "in steps that are not recorded, each ends by itself a token later"
    ]
    assert "WorkloadWarning" not in result.stderr
