"""Replay of recorded decisions: all agree, a changed one is found, a damaged file is one line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app

FOLDER = Path(__file__).parent
GOLDEN = sorted(FOLDER.glob("golden/*.gz"))
SERVERS = sorted(FOLDER.glob("measured/*.gz")) + sorted(FOLDER.glob("recordings/*.gz"))
RECORDINGS = GOLDEN + SERVERS
CASES = 181 + len(SERVERS)
BIG = "golden_scheduler_big.json.gz"  # half a minute in plain Python


def verify(*files: Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, files)])


def read(name: str) -> Any:
    (path,) = [one for one in RECORDINGS if one.name == name]
    return json.loads(gzip.decompress(path.read_bytes()))


def write(folder: Path, recording: Any) -> Path:
    path = folder / "recording.json"
    path.write_text(json.dumps(recording))
    return path


def test_all_recordings_agree() -> None:
    result = verify(*RECORDINGS)
    assert result.exit_code == 0, result.output
    *servers, last = result.stdout.splitlines()
    assert last == f"{CASES} cases, 0 mismatches"
    for path, line in zip(SERVERS, servers, strict=True):
        assert line.startswith(f"{path}: ") and line.endswith(" steps, 0 differences")
    assert f"{FOLDER / 'measured' / 'multi_turn.json.gz'}: 4486 steps, 0 differences" in servers


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([path for path in RECORDINGS if path.name != BIG], id="small"),
        pytest.param(RECORDINGS, id="all", marks=pytest.mark.slow),
    ],
)
def test_all_recordings_agree_in_plain_python(files: list[Path]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sim.cli", "verify", *files],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(" cases, 0 mismatches")
    assert done.stderr == ""


def test_one_changed_decision_of_the_scheduler_is_found(tmp_path: Path) -> None:
    recording = read("golden_scheduler.json.gz")
    del recording["cases"][1:]
    step = next(one for one in recording["cases"][0]["steps"] if one.get("s", {}).get("new"))
    step["s"]["new"][0][1] += 1  # one more hit token at an admission
    result = verify(write(tmp_path, recording))
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    for text in (
        f"{recording['cases'][0]['name']}: ",
        f"step {step['t']}, s.new[0]: recorded [",
        "replayed [",
    ):
        assert text in first
    assert last == "1 cases, 1 mismatches"


def test_one_changed_decision_of_the_engine_is_found(tmp_path: Path) -> None:
    recording = read("shared_ample.json.gz")
    index = len(recording["steps"]) // 2
    recording["steps"][index]["fr"] += 1
    wanted = recording["steps"][index]["fr"]
    result = verify(write(tmp_path, recording))
    assert result.exit_code == 1
    assert f"step {index}, fr: recorded {wanted}, replayed {wanted - 1}" in result.stdout


def test_a_case_that_ends_early_or_late_is_found(tmp_path: Path) -> None:
    recording = read("golden_scheduler_targeted.json.gz")
    case = recording["cases"][0]
    recording["cases"] = [case]
    last = case["steps"].pop()
    assert verify(write(tmp_path, recording)).exit_code == 1
    case["steps"] += [last, last]
    result = verify(write(tmp_path, recording))
    assert result.exit_code == 1 and "after the last" in result.stdout


def test_one_changed_block_of_the_manager_is_found(tmp_path: Path) -> None:
    recording = read("golden_manager.json.gz")
    case = recording["cases"][0]
    recording["cases"] = [case]
    assert verify(write(tmp_path, recording)).exit_code == 0
    _, answer = case["ops"][1]
    answer["s"]["free"][0] = 0
    result = verify(write(tmp_path, recording))
    assert result.exit_code == 1
    assert f"{case['name']}: step 1 (extend r0 " in result.stdout
    assert "s.free[0]: recorded 0, replayed 5" in result.stdout


def test_one_changed_hash_is_found(tmp_path: Path) -> None:
    recording = read("golden_hashes.json.gz")
    chains = recording["by_seed"]["0"]["sha256"]["chains"]
    name, chain = next((name, chain) for name, chain in chains.items() if chain)
    chain[-1] = chain[-1][:-1] + ("0" if chain[-1][-1] != "0" else "1")
    result = verify(write(tmp_path, recording))
    assert result.exit_code == 1
    assert f"{name}: step sha256, PYTHONHASHSEED 0, block {len(chain) - 1}: " in result.stdout
    assert result.stdout.endswith("21 cases, 1 mismatches\n")


GOOD = json.dumps({"kind": "manager", "cases": []}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\x00\xff\xfe\x80", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[]", "not a recording"),
        (b"null", "not a recording"),
        (b'{"kind": "engine", "cases": []}', "not a recording"),
        (b'{"kind": ["manager"], "cases": []}', "not a recording"),
        (b'{"kind": "manager"}', "not a recording"),
        (b'{"kind": "manager", "cases": {}}', "not a recording"),
        (b'{"schema": "vllm_cpu_truth/2"}', "a recording of format 'vllm_cpu_truth/2'"),
        (b'{"schema": "vllm_cpu_truth/1"}', "header: effective: this field is required"),
        (b'{"schema": "vllm_cpu_truth/1", "effective": 3}', "header: effective: should be a mapping"),
        (b'{"kind": "manager", "cases": [3]}', "not a recording"),
        (b'{"kind": "manager", "cases": [{}]}', "malformed"),
        (b'{"kind": "scheduler", "cases": [{"name": "a"}]}', "malformed"),
        (b'{"kind": "hashes", "cases": [{"name": "a"}]}', "malformed"),
        (gzip.compress(GOOD)[:-9], "cut off"),
        (gzip.compress(GOOD)[:20] + b"\x00" * 20, "damaged"),
        (gzip.compress(b"{"), "not JSON"),
    ],
)
def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "recording.json.gz"
    path.write_bytes(content)
    result = verify(path)
    assert result.exit_code == 2, result.output
    (line,) = [text for text in result.stderr.splitlines() if "compiling" not in text]
    assert line.startswith(f"prefixsim: {path}: ") and words in line and len(line) < 400


def test_a_file_that_is_not_there_is_told_before_any_replay(tmp_path: Path) -> None:
    result = verify(RECORDINGS[0], tmp_path / "none.json")
    assert result.exit_code == 2 and result.stdout == ""
    assert "none.json: no such file" in result.stderr
    assert verify(tmp_path).exit_code == 2
