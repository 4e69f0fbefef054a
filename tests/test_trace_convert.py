"""Traces converted: what comes back is the same load, whole or not at all."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_workloads_trace import batches, contents, hit_tokens, mooncake, segments, shipped, write

from sim.errors import InputError
from sim.trace.convert import convert
from workloads import Trace, WorkloadError
from workloads.trace_batches import PLAIN_IDS

NAMED = {"session_id": "s", "cache_salt": "x", "lora": 3, "priority": -1}


def read(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_mooncake_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    rows = [
        mooncake(**NAMED),
        mooncake(timestamp=1.5, output_length=0, hash_ids=[2**64 - 1, -3]),
        mooncake(timestamp=7, session_id="t"),
    ]
    out = tmp_path / name
    convert(Trace(path=write(tmp_path, *rows)), out, "mooncake")
    assert read(out) == [{**row, "block_size": 512} for row in rows]
    assert (out.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    again = tmp_path / f"again-{name}"
    convert(Trace(path=str(out)), again, "mooncake")
    assert again.read_bytes() == out.read_bytes()


def test_segments_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [segments(**NAMED), segments(arrival_time=2, segments=[[1, 10]])]
    out = tmp_path / "out.jsonl"
    convert(Trace(path=write(tmp_path, *rows)), out, "segments")
    assert read(out) == rows


def test_ids_become_segments(tmp_path: Path) -> None:
    rows = [mooncake(), mooncake(timestamp=1000, hash_ids=[1, -5]), mooncake(timestamp=2000, output_length=0)]
    path = write(tmp_path, *rows)
    out = tmp_path / "out.jsonl"
    reader = convert(Trace(path=path), out, "segments")
    assert reader.empty_outputs == 1
    assert [row["arrival_time"] for row in read(out)] == [0, 1, 2]
    for block in (8, 64, 512):
        with pytest.warns(UserWarning, match="output_length 0"):
            original = hit_tokens(batches(path, block), block, outputs=False)
        assert hit_tokens(batches(str(out), block), block, outputs=False) == original


@pytest.mark.parametrize("block", [1, 3, 4, 16])
def test_segments_become_ids(tmp_path: Path, block: int) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        pairs = np.column_stack([rng.integers(0, 3, 3), rng.integers(1, 20, 3)]).tolist()
        total = sum(n for _, n in pairs)
        rows.append(segments(arrival_time=i, input_length=total - 1, output_length=1, segments=pairs))
    path, out = write(tmp_path, *rows), tmp_path / "out.jsonl"
    convert(Trace(path=path), out, "mooncake", block_size=block)
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // block) for row in read(out))
    expected = hit_tokens(batches(path, block), block, outputs=False)
    assert expected > 0
    assert hit_tokens(batches(str(out), block), block, outputs=False) == expected


@pytest.mark.parametrize("target", ["mooncake", "segments"])
def test_recorded_sessions_convert(tmp_path: Path, target: Any) -> None:
    source, out = shipped("kct60_delta.jsonl.gz"), tmp_path / "out.jsonl.gz"
    convert(Trace(path=source, limit=150), out, target)
    before = batches(source, output_len=1, limit=150)
    after = batches(str(out), output_len=1)
    for name in ("prompt_len", "session_id"):
        columns = [np.concatenate([getattr(batch, name) for batch in parts]) for parts in (before, after)]
        assert np.array_equal(*columns)
    times = [np.concatenate([batch.arrival_time for batch in parts]) for parts in (before, after)]
    assert times[0] == pytest.approx(times[1], abs=1e-9)
    named = [
        [[pair for pair in row if 0 <= pair[0] < PLAIN_IDS] for _, row in contents(parts)]
        for parts in (before, after)
    ]
    assert named[0] == named[1]


def test_csv_becomes_mooncake(tmp_path: Path) -> None:
    source = tmp_path / "t.csv"
    source.write_text("t,p,o\n0,40,1\n0.25,40,2\n")
    columns = {"arrival_time": "t", "prompt_len": "p", "output_len": "o"}
    trace = Trace(path=str(source), columns=columns, prefix_model={"num_groups": 1, "prefix_len": 20})
    convert(trace, tmp_path / "out.jsonl", "mooncake", block_size=16)
    first, second = read(tmp_path / "out.jsonl")
    assert (second["timestamp"], second["input_length"], second["output_length"]) == (250, 40, 2)
    assert first["hash_ids"][0] == second["hash_ids"][0]
    assert len({*first["hash_ids"], *second["hash_ids"]}) == 5


def test_nothing_half_written(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), mooncake(timestamp=1, input_length=0))
    out = tmp_path / "out" / "t.jsonl"
    with pytest.raises(InputError, match="there is no folder .*out"):
        convert(Trace(path=path), out, "mooncake")
    out.parent.mkdir()
    out.write_text("before")
    with pytest.raises(WorkloadError, match="line 2: input_length is 0"):
        convert(Trace(path=path), out, "mooncake")
    with pytest.raises(InputError, match="ids stand for 512 tokens, not 16: drop --block-size"):
        convert(Trace(path=path, limit=1), out, "mooncake", block_size=16)
    assert [one.name for one in out.parent.iterdir()] == ["t.jsonl"]
    assert out.read_text() == "before"
    reader = convert(Trace(path=path, skip_bad_lines=True), out, "mooncake")
    assert reader.skipped.count == 1
    assert len(read(out)) == 1
