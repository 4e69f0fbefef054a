"""`prefixsim measure`: what it times computes the right thing, and its CSV survives whatever ends it."""

from __future__ import annotations

import csv
import errno
import importlib.util
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sim.measure
from sim.calibration import KernelCalibration, load_calibration
from sim.cli import app
from sim.errors import InputError
from sim.hardware import load_model
from sim.hashing import ALGORITHMS
from sim.measure import hash as hash_timing
from sim.measure.csv_file import COLUMNS, append, begin, measured, open_to_append
from sim.measure.grid import CPU, CUDA, Grid, Point, points
from sim.measure.timing import Timing, timing

TINY = """\
name: tiny
layers: 2
hidden_size: 64
intermediate_size: 160
num_attention_heads: 4
num_kv_heads: 2
head_dim: 16
vocab_size: 256
tied_embeddings: false
num_parameters: 109184
max_model_len: 96
"""
SMALL = Grid(tokens=(1, 4), outputs=(2,), prefills=((1, 8, 0), (2, 4, 24)), decodes=((2, 33),),
             steps=((1, 8, 16, 2, 20),))  # fmt: skip
ABOUT = {"device": "some device", "versions": "torch 0; cuda 0", "date": "2026-01-02"}
TIME = Timing(2.0, 1.0, 3.0, 10)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def cli(*words: str | Path) -> tuple[int, str]:
    """Exit status and stderr of `prefixsim measure WORDS`, run in this process."""
    result = CliRunner().invoke(app, ["measure", *map(str, words)])
    return result.exit_code, result.stderr


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def all_points(model: Path, grid: Grid = CPU) -> list[Point]:
    kernels: list[tuple[str, tuple[int | None, ...]]] = [
        ("sdpa", (None,)), ("sdpa_gather", (16, 32, 64, 128))
    ]  # fmt: skip
    return points(
        load_model(str(model)), grid, tp=1, weights="bf16", kv_dtype="bf16", kernels=kernels,
        step_kernel="sdpa", num_layers=2,
    )  # fmt: skip


# The grid


def test_prefill_over_context_and_every_block_size_are_timed(tiny: Path) -> None:
    wanted = all_points(tiny)
    prefills = [point for point in wanted if point.op == "prefill_attention"]
    assert {bool(point.c) for point in prefills} == {False, True}
    assert {point.block_size for point in prefills} == {None, 16, 32, 64, 128}
    assert {point.op for point in wanted} == {"gemm", "prefill_attention", "decode_attention", "step"}
    assert len(set(wanted)) == len(wanted)


def test_a_rank_has_its_share_of_the_model() -> None:
    wanted = points(
        load_model("llama-3.1-70b"), CUDA, tp=4, weights="fp8", kv_dtype="bf16", kernels=[("x", (16,))],
        step_kernel="x", num_layers=80,
    )  # fmt: skip
    products = {(point.n, point.k, point.dtype) for point in wanted if point.op == "gemm"}
    assert products == {
        (2560, 8192, "fp8"), (8192, 2048, "fp8"), (14336, 8192, "fp8"), (8192, 7168, "fp8"),
        (32064, 8192, "bf16"),
    }  # fmt: skip
    heads = {(one.num_heads, one.num_kv_heads, one.head_dim) for one in wanted if one.op != "gemm"}
    assert heads == {(16, 2, 128)}
    assert not any(point.op == "step" for point in wanted)  # its all-reduces are not timed


def test_no_sequence_is_longer_than_the_model_allows(tiny: Path) -> None:
    lengths = [(one.kv or 0, (one.q or 0) + (one.c or 0)) for one in all_points(tiny, CUDA)]
    assert max(max(pair) for pair in lengths) <= 96
    kv = {one.kv for one in all_points(tiny, CUDA._replace(decodes=((1, 96), (1, 97)))) if one.kv}
    assert kv == {96}


def test_a_step_counts_its_tokens(tiny: Path) -> None:
    step = next(point for point in all_points(tiny, SMALL) if point.op == "step")
    assert (step.batch, step.q, step.c, step.num_decodes) == (1, 8, 16, 2)
    assert (step.num_tokens, step.decode_kv) == (10, 40)


# The CSV


def test_percentiles_of_repeats() -> None:
    assert timing(np.arange(11.0, 22.0)) == Timing(16.0, 12.0, 20.0, 11)


def fill(path: Path, wanted: list[Point]) -> None:
    with open_to_append(path) as file:
        begin(file)
        for point in wanted:
            append(file, point, TIME, ABOUT)


def test_what_is_written_is_read_back(tmp_path: Path, tiny: Path) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    assert measured(path, wanted, "some device") == set()
    fill(path, wanted[:5])
    assert measured(path, wanted, "some device") == set(wanted[:5])
    first = rows(path)[0]
    assert tuple(first) == COLUMNS
    assert (first["op"], first["m"], first["q"]) == ("gemm", "1", "")
    assert [first[name] for name in Timing._fields] == ["2.0", "1.0", "3.0", "10"]
    assert {name: first[name] for name in ABOUT} == ABOUT


@pytest.mark.parametrize("cut", [1, 7, 60])
def test_a_half_written_last_line_is_dropped(tmp_path: Path, tiny: Path, cut: int) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    fill(path, wanted)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert measured(path, wanted, "some device") == set(wanted[:-1])
    fill(path, wanted[-1:])
    assert path.read_bytes() == whole


def test_a_line_cut_within_a_letter_is_dropped(tmp_path: Path, tiny: Path) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    fill(path, wanted[:3])
    whole = path.read_bytes()
    path.write_bytes(whole + "gemm,Gerä".encode()[:-1])
    assert measured(path, wanted, "some device") == set(wanted[:3])
    fill(path, [])
    assert path.read_bytes() == whole


def test_one_measure_at_a_time(tmp_path: Path, tiny: Path) -> None:
    """The second is told so before it reads or cuts what the first has half-written."""
    pytest.importorskip("fcntl")
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    with open_to_append(path) as file:
        begin(file)
        append(file, wanted[0], TIME, ABOUT)
        file.write(b"gemm,half a r")
        before = path.read_bytes()
        status, said = cli("--cpu-hash", "--out", path)
        assert status == 2 and said.count("\n") == 1
        assert f"{path}: another measure is writing it" in said
        assert path.read_bytes() == before
    assert cli("--cpu-hash", "--out", path)[0] == 0


def test_a_full_disk_is_told_and_leaves_no_empty_file(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    fill(tmp_path / "there.csv", wanted[:2])
    before = (tmp_path / "there.csv").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    status, said = cli("--cpu-hash", "--out", path)
    told = f"prefixsim: {path}: cannot be written: No space left on device; free some there; "
    assert status == 2 and said.startswith(told) and said.count("\n") == 1
    assert not path.exists()
    assert cli("--cpu-hash", "--out", tmp_path / "there.csv")[0] == 2
    assert (tmp_path / "there.csv").read_bytes().startswith(before)


def test_a_half_written_header_is_written_again(tmp_path: Path, tiny: Path) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    path.write_text("op,device,dty")
    assert measured(path, wanted, "some device") == set()
    fill(path, wanted)
    assert measured(path, wanted, "some device") == set(wanted)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("op,device", "op,gadget", "t.csv:1: has other columns"),
        ("gemm,some device", "gemm,other device", "t.csv:2: device: is 'other device', this is 'some"),
        (",128,64,", ",256,65,", "t.csv:2: is of another model"),
        ("bf16,,1,", "fp8,,1,", "t.csv:2: is of another model, tp, weight or KV type"),
        ("bf16,,1,", "bf16,,one,", "t.csv:2: m: should be a whole number or nothing, not 'one'"),
        (",2.0,", ",nan,", "t.csv:2: latency_us: should be a positive number, not 'nan'"),
        (",2.0,", ",-2.0,", "t.csv:2: latency_us: should be a positive number, not '-2.0'"),
        (",10,torch", ",torch", f"t.csv:2: has {len(COLUMNS) - 1} cells"),
    ],
)
def test_files_of_others_are_refused(tmp_path: Path, tiny: Path, old: str, new: str, said: str) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    fill(path, wanted)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        measured(path, wanted, "some device")
    assert said in str(error.value)


@pytest.mark.parametrize("content", [b"something else without a newline", b"a\nb\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_csv_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    status, said = cli("--cpu-hash", "--out", path)
    assert status == 2
    assert said.startswith("prefixsim: ") and said.count("\n") == 1 and "choose another --out" in said
    assert path.read_bytes() == content


def test_rows_of_other_operations_may_share_the_file(tmp_path: Path, tiny: Path) -> None:
    path, wanted = tmp_path / "t.csv", all_points(tiny, SMALL)
    fill(path, [Point("allreduce", dtype="bf16", num_gpus=2, elements=4096)])
    assert measured(path, wanted, "this device") == set()


# Hashes


def test_hashes_are_timed_by_algorithm_and_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hash_timing, "REPEATS", 9)
    path = tmp_path / "t.csv"
    status, said = cli("--cpu-hash", "--out", path)
    told = f"prefixsim: {path}: 20 points timed, 0 there before, 0 skipped"
    assert (status, said.splitlines()[0]) == (0, told)
    us = {(row["algorithm"], int(row["block_size"])): float(row["latency_us"]) for row in rows(path)}
    assert set(us) == {(algorithm, size) for algorithm in ALGORITHMS for size in (16, 32, 64, 128, 256)}
    for algorithm in ALGORITHMS:
        assert us[algorithm, 256] > us[algorithm, 16] > 0
    for row in rows(path):
        assert row["op"] == "hash" and "cbor2" in row["versions"] and int(row["repeats"]) == 9
        assert float(row["p10_us"]) <= float(row["latency_us"]) <= float(row["p90_us"])

    before = path.read_bytes()
    status, said = cli("--cpu-hash", "--out", path)
    assert (status, said) == (0, f"prefixsim: {path}: 0 points timed, 20 there before, 0 skipped\n")
    assert path.read_bytes() == before


# Bad input


def test_torch_is_asked_for_in_one_line(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "t.csv"
    assert cli("--device", "cpu", "--model", tiny, "--out", path) == (
        2, "prefixsim: measure needs torch: pip install 'prefixsim[measure]'\n"
    )  # fmt: skip
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu-hash", "--device", "cpu"], "--cpu-hash goes with --out only"),
        (["--cpu-hash", "--tp", "1"], "--cpu-hash goes with --out only"),
        (["--cpu-hash", "--kv", "bf16"], "--cpu-hash goes with --out only"),
        ([], "give either --model, as in --model llama-3.1-8b, or --cpu-hash"),
        (["--cpu-hash", "--model", "llama-3.1-8b"], "give either --model"),
        (["--model", "lama-3.1-8b"], "did you mean llama-3.1-8b?"),
        (["--device", "cpu", "--model", "llama-3.1-8b", "--weights", "fp8"], "a CPU has no fp8 kernels"),
        (["--device", "cpu", "--model", "llama-3.1-8b", "--kv", "fp8"], "a CPU has no fp8 kernels"),
    ],
)
def test_bad_input_is_told_in_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    path = tmp_path / "t.csv"
    status, text = cli(*words, "--out", path)
    assert status == 2 and said in text and text.count("\n") == 1
    assert not path.exists()


def test_a_mixture_of_experts_is_refused(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(TINY + "num_experts: 8\nnum_experts_per_tok: 2\nmoe_intermediate_size: 32\n")
    status, text = cli("--device", "cpu", "--model", tiny, "--out", tmp_path / "t.csv")
    assert status == 2 and "tiny is a mixture of experts" in text and text.count("\n") == 1


@pytest.mark.parametrize("tp", ["3", "0", "-1", "1000000000"])
def test_a_tp_that_does_not_divide_the_heads_is_refused(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, tp: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # torch is not looked for before
    status, text = cli("--device", "cpu", "--model", tiny, "--tp", tp, "--out", tmp_path / "t.csv")
    assert status == 2 and f"tp {tp} does not divide the 4 heads of tiny" in text and text.count("\n") == 1


@pytest.mark.parametrize("words", [["--cpu-hash"], ["--device", "cpu", "--model", "tiny.yaml"]])
def test_what_is_no_file_is_not_written(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    for out, told in (("/dev/null", "no regular file"), (".", "is a folder"), ("no/t.csv", "no folder")):
        status, said = cli(*words, "--out", out)
        assert status == 2 and told in said and said.count("\n") == 1
    status, said = cli("--device", "cpu", "--model", tiny, "--out", tiny)
    assert status == 2 and "is a file that is read" in said and tiny.read_text() == TINY


def test_noisy_points_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([Timing(2.0, 1.0, 2.1, 9)] * 3 + [Timing(2.0, 1.0, 2.0, 9)] * 17)
    monkeypatch.setattr(sim.measure, "time_hash", lambda point: next(times))
    status, said = cli("--cpu-hash", "--out", tmp_path / "t.csv")
    assert status == 0 and "3 of 20 points are too noisy to trust" in said.splitlines()[1]
    assert "a quiet machine helps" in said
    monkeypatch.setattr(sim.measure, "time_hash", lambda point: Timing(2.0, 1.0, 2.0, 9))
    assert "too noisy" not in cli("--cpu-hash", "--out", tmp_path / "quiet.csv")[1]


def test_a_missing_gpu_is_told(tmp_path: Path, tiny: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    status, text = cli("--model", tiny, "--out", tmp_path / "t.csv")
    assert status == 2 and "sees no CUDA device" in text and "--device cpu" in text


# Whole runs on the CPU


def start(tiny: Path, out: Path) -> subprocess.Popen[str]:
    words = ["measure", "--device", "cpu", "--model", str(tiny), "--out", str(out)]
    command = [sys.executable, "-m", "sim.cli", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)


def wait_for_rows(out: Path, number: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") <= number:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_run_goes_on_and_has_every_point_once(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of a busy machine wait for one another
    out = tmp_path / "timings.csv"
    process = start(tiny, out)
    wait_for_rows(out, 30, process)
    process.kill()
    process.communicate()
    with out.open("a") as file:
        file.write("gemm,half a row")  # as a kill in the middle of a write leaves it
    before = [tuple(row.values()) for row in rows(out)[:-1]]
    assert 30 <= len(before) < len(all_points(tiny))

    process = start(tiny, out)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 0
    wanted = all_points(tiny)
    assert f"{len(wanted) - len(before)} points timed, {len(before)} there before, 0 skipped" in said
    found = rows(out)
    assert [tuple(row.values()) for row in found[: len(before)]] == before
    device = found[0]["device"]
    assert measured(out, wanted, device) == set(wanted) and len(found) == len(wanted)
    assert set(Counter(row["device"] for row in found)) == {device}
    for row in found:
        assert 0 < float(row["p10_us"]) <= float(row["latency_us"]) <= float(row["p90_us"])
        assert int(row["repeats"]) >= 5 and row["versions"].startswith("torch ") and row["kernel"]
    assert {row["num_layers"] for row in found if row["op"] == "step"} == {"2"}


def test_what_is_measured_calibrates(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy")
    torch = pytest.importorskip("torch")
    from sim.measure import device

    torch.set_num_threads(1)
    monkeypatch.setitem(device.REPEATS, "cpu", (5, 5))
    monkeypatch.setattr(device, "CPU_SCRATCH_BYTES", 1 << 20)
    tiny.write_text(TINY.replace("max_model_len: 96", "max_model_len: 384"))  # over two lengths of context
    out, gpu, calibration = (tmp_path / name for name in ("timings.csv", "cpu.yaml", "calibration.yaml"))
    gpu.write_text("name: this-cpu\nmemory_bytes: 16000000000\nmemory_source: assumed\n")
    status, said = cli("--device", "cpu", "--model", tiny, "--out", out)
    assert status == 0, said
    words = ["calibrate", "--gpu", gpu, "--model", tiny, "--from-csv", out, "--out", calibration]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    fitted = load_calibration(str(calibration))
    assert isinstance(fitted, KernelCalibration) and fitted.gpu == "this-cpu"
    assert fitted.gemm.a > 0 and fitted.domain is not None and fitted.domain.max_context_len == 256
    assert set(fitted.attention["bf16"].decode.block_size_factor) == {16, 32, 64, 128}
    assert rows(out)[0]["device"] in fitted.provenance.source


def test_ctrl_c_leaves_a_file_to_go_on_from(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from sim.measure import device

    calls = iter([TIME] * 4)

    def time_call(*_: object) -> Timing:
        if (one := next(calls, None)) is None:
            raise KeyboardInterrupt
        return one

    monkeypatch.setattr(device, "time_call", time_call)
    monkeypatch.setitem(sim.measure.GRIDS, "cpu", SMALL)
    out = tmp_path / "timings.csv"
    said = f"interrupted; {out} keeps what was measured, and the same command goes on from there"
    assert cli("--device", "cpu", "--model", tiny, "--out", out) == (130, f"prefixsim: {said}\n")
    wanted = all_points(tiny, SMALL)
    assert measured(out, wanted, rows(out)[0]["device"]) == set(wanted[:4])


def test_a_point_without_memory_is_skipped_and_the_rest_timed(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from sim.measure import gemm

    real = gemm.gemm

    def short_of_memory(device: object, point: Point) -> object:
        if (point.m, point.n) == (4, 128):
            raise RuntimeError("out of memory\nand a long story")
        return real(device, point)  # type: ignore[arg-type]

    monkeypatch.setattr(gemm, "gemm", short_of_memory)
    monkeypatch.setitem(sim.measure.GRIDS, "cpu", SMALL)
    out = tmp_path / "t.csv"
    status, said = cli("--device", "cpu", "--model", tiny, "--out", out)
    number = len(all_points(tiny, SMALL))
    assert status == 0
    shape = "dtype bf16, m 4, n 128, k 64, kernel torch.nn.functional.linear"
    assert said.splitlines()[0] == f"prefixsim: skipped: gemm, {shape}: out of memory"
    assert f"{number - 1} points timed, 0 there before, 1 skipped" in said
    assert len(rows(out)) == number - 1

    monkeypatch.setattr(gemm, "gemm", real)
    _, said = cli("--device", "cpu", "--model", tiny, "--out", out)
    assert f"1 points timed, {number - 1} there before, 0 skipped" in said
