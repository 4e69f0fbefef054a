"""A calibration from a user's CSV: known coefficients are found again, and bad files are told by line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.calibrate.csv_rows import read_rows
from sim.calibrate.csv_times import check_times
from sim.calibrate.fit import fit_prefill
from sim.calibrate.sources import from_csv
from sim.calibrate.write import to_text, write
from sim.calibration import KernelCalibration, load_calibration
from sim.errors import InputError
from sim.hardware import load_gpu, load_model
from sim.kernels import kernels_of

pytest.importorskip("scipy", reason="needs the extra [calibrate]")

MODEL, GPU = load_model("llama-3.1-8b"), load_gpu("h100-sxm")
KERNELS = kernels_of(MODEL, 1)
A, B, P = 160.0, 0.55, 2.3  # of a layer's products
D0, D1, D2 = 11.0, 0.12, 0.0013
A0, A1, A2, KAPPA, A3 = 12.0, 0.014, 2.4e-5, 1.6, 0.002
E0, E1 = 15.0, 0.05
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
Row = dict[str, Any]


def products(m: float) -> float:
    return float((A**P + (B * m) ** P) ** (1 / P))


def lm_head(m: float) -> float:
    return float((370.0**4 + (1.4 * m) ** 4) ** 0.25)


def decode(n: int, total: int) -> float:
    return D0 + D1 * n + D2 * total if n else 0.0


def prefill(batch: int, q: int, c: int) -> float:
    return A0 + batch * (A1 * q + A2 * (q * q / 2 + q * c / KAPPA) + A3 * c) if batch else 0.0


def gemm_rows() -> Iterator[Row]:
    whole = sum(gemm.n * gemm.k for gemm in KERNELS.gemms)
    sizes = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    for gemm in KERNELS.gemms:
        for m in sizes:
            share = gemm.n * gemm.k / whole
            yield {"op": "gemm", "m": m, "n": gemm.n, "k": gemm.k, "latency_us": share * products(m)}
    for m in sizes[:7]:
        head = KERNELS.lm_head
        yield {"op": "gemm", "m": m, "n": head.n, "k": head.k, "latency_us": lm_head(m)}


def attention_rows(block_size: int, slower: float) -> Iterator[Row]:
    common = {**HEADS, "kv_dtype": "bf16", "block_size": block_size, "kernel": "paged"}
    for batch in (1, 4, 16, 64, 256):
        for kv in (128, 512, 2048, 8192):
            row = {"op": "decode_attention", "batch": batch, "kv": kv, **common}
            yield {**row, "latency_us": slower * decode(batch, batch * kv)}
    for batch, q in ((1, 64), (1, 256), (1, 1024), (1, 4096), (4, 256), (4, 1024)):
        for c in (0, 1024, 2048, 8192):
            row = {"op": "prefill_attention", "batch": batch, "q": q, "c": c, **common}
            yield {**row, "latency_us": prefill(batch, q, c)}


def step_rows() -> Iterator[Row]:
    shapes = [(1, 512, 0, 0, 0), (1, 2048, 2048, 0, 0), (0, 0, 0, 8, 8192), (0, 0, 0, 128, 131072)]
    for batch, q, c, n, kv in [*shapes, (1, 1024, 0, 64, 65536), (2, 512, 1024, 32, 32768)]:
        tokens = batch * q + n
        layer = products(tokens) + decode(n, kv) + prefill(batch, q, c) + E0 + E1 * tokens
        row = {"op": "step", "batch": batch, "q": q, "c": c, "num_decodes": n, "decode_kv": kv}
        yield {**row, "num_layers": 8, "latency_us": 8 * layer + lm_head(batch + n)}


def all_rows() -> list[Row]:
    rows = [*gemm_rows(), *attention_rows(16, 1.0), *attention_rows(64, 0.8), *step_rows()]
    rows = [{"device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", **row} for row in rows]
    times = {16: 1.5, 64: 2.5}
    return [*rows, *({"op": "hash", "algorithm": "sha256", "block_size": size, "latency_us": us}
                     for size, us in times.items())]  # fmt: skip


def save(path: Path, rows: list[Row]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def calibrated(path: Path, *, assume_kappa: bool = False, tp: int = 1) -> KernelCalibration:
    options: Any = {"weights": "bf16", "kv_dtypes": [], "assume_kappa": assume_kappa, "date": "2026-01-01"}
    return from_csv(path, GPU, MODEL, tp=tp, **options)


def test_known_coefficients_are_found_again(tmp_path: Path) -> None:
    fitted = calibrated(save(tmp_path / "timings.csv", all_rows()))
    attention = fitted.attention["bf16"]
    found = {
        "gemm": (fitted.gemm.a, fitted.gemm.b, fitted.gemm.p),
        "decode": (attention.decode.d0, attention.decode.d1, attention.decode.d2),
        "prefill": (attention.prefill.a0, attention.prefill.a1, attention.prefill.a2),
        "context": (attention.prefill.kappa, attention.prefill.a3),
        "elementwise": (fitted.elementwise.e0, fitted.elementwise.e1),
    }
    assert found["gemm"] == pytest.approx((A, B, P), rel=1e-3)
    assert found["decode"] == pytest.approx((D0, D1, D2), rel=1e-3)
    assert found["prefill"] == pytest.approx((A0, A1, A2), rel=1e-3)
    assert found["context"] == pytest.approx((KAPPA, A3), rel=1e-3)
    assert found["elementwise"] == pytest.approx((E0, E1), rel=1e-2)
    assert all(error.mape < 0.1 for error in fitted.errors.values())
    assert set(fitted.errors) == {
        "gemm", "lm_head", "decode_attention_bf16", "prefill_attention_bf16", "prefill_over_context_bf16",
        "step_fitted",
    }  # fmt: skip


def test_block_sizes_and_hash_times_are_taken_over(tmp_path: Path) -> None:
    fitted = calibrated(save(tmp_path / "timings.csv", all_rows()))
    assert fitted.attention["bf16"].decode.block_size_factor == {16: 1.0, 64: 0.8}
    assert fitted.attention["bf16"].prefill.block_size_factor == {16: 1.0, 64: 1.0}
    assert fitted.front_end.hash_us_per_block == {"sha256": {16: 1.5, 64: 2.5}}


def test_what_was_measured_is_not_called_assumed(tmp_path: Path) -> None:
    whole = calibrated(save(tmp_path / "whole.csv", all_rows()))
    words = ("kappa", "element-wise", "block size")
    assert not any(word in text for text in whole.assumed for word in words)
    assert whole.domain is not None and whole.domain.max_context_len == 8192
    bare = [row for row in all_rows() if row["op"] != "step" and row.get("block_size") != 64]
    bare = [row for row in bare if not row.get("c")]
    assumed = calibrated(save(tmp_path / "bare.csv", bare), assume_kappa=True)
    for word in words:
        assert any(word in text for text in assumed.assumed)
    assert assumed.attention["bf16"].prefill.kappa == 1.15
    assert assumed.domain is not None and assumed.domain.max_context_len == 0


def test_the_file_written_is_the_calibration(tmp_path: Path) -> None:
    fitted = calibrated(save(tmp_path / "timings.csv", all_rows()))
    path = tmp_path / "mine.yaml"
    write(fitted, path)
    again = load_calibration(str(path))
    assert isinstance(again, KernelCalibration)
    assert to_text(again) == path.read_text() == to_text(fitted)
    assert again.gemm.a == pytest.approx(fitted.gemm.a, rel=1e-6)
    assert {one.name for one in tmp_path.iterdir()} == {"timings.csv", "mine.yaml"}


def without(rows: list[Row], **where: Any) -> list[Row]:
    return [row for row in rows if any(row.get(key) != value for key, value in where.items())]


def first(rows: list[Row], **change: Any) -> list[Row]:
    return [{**rows[0], **change}, *rows[1:]]


def one(rows: list[Row], op: str, **change: Any) -> list[Row]:
    """The rows, the first of an operation changed."""
    at = next(i for i, row in enumerate(rows) if row["op"] == op)
    return [*rows[:at], {**rows[at], **change}, *rows[at + 1 :]]


def less(rows: list[Row], column: str) -> list[Row]:
    return [{name: cell for name, cell in row.items() if name != column} for row in rows]


def test_no_context_rows_are_refused_unless_kappa_is_assumed(tmp_path: Path) -> None:
    rows = [row for row in all_rows() if not row.get("c")]
    path = save(tmp_path / "timings.csv", rows)
    with pytest.raises(InputError, match=r"0 points over cached context.*--assume-kappa"):
        calibrated(path)
    assert calibrated(path, assume_kappa=True).attention["bf16"].prefill.kappa == 1.15


@pytest.mark.parametrize("unit", [1e-6, 1e-3])
def test_other_units_are_told_by_what_the_data_sheet_allows(tmp_path: Path, unit: float) -> None:
    rows = all_rows()
    for row in rows[5:9]:
        row["latency_us"] *= unit
    with pytest.raises(InputError, match=r"timings.csv:7: latency_us: .* seconds or milliseconds\?"):
        calibrated(save(tmp_path / "timings.csv", rows))


def test_large_times_in_seconds_are_told_too(tmp_path: Path) -> None:
    """A kernel of 10 s in seconds would pass for 10 us, but not for a product of this size."""
    rows = all_rows()
    gate_up = KERNELS.gemms[2]
    row = next(row for row in rows if row["op"] == "gemm" and (row["m"], row["n"]) == (8192, gate_up.n))
    row["latency_us"] = 10.0
    with pytest.raises(InputError, match="faster than h100-sxm can be"):
        calibrated(save(tmp_path / "timings.csv", rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows, rows[3]], r"timings.csv:\d+: is the point of line 5 again"),
        (lambda rows: without(rows, op="decode_attention"), "no rows of decode_attention"),
        (lambda rows: without(rows, op="gemm", n=6144), r"gemm qkv \(n 6144, k 4096, bf16\): 0 sizes m"),
        (lambda rows: without(rows, op="gemm", n=128256), r"gemm lm_head .*: 0 sizes m"),
        (lambda rows: [r for r in rows if r.get("batch") in (None, 1)], r"needed are 6 points and 3 values"),
        (lambda rows: [{**r, "num_heads": 16} if "kv" in r else r for r in rows], "no rows .* with 32 heads"),
        (lambda rows: first(rows, op="gem"), r":2: op: unknown value 'gem'; did you mean gemm"),
        (lambda rows: first(rows, m=8.5), r":2: m: should be a whole number from 1 to \d+, is 8.5"),
        (lambda rows: first(rows, m=""), r":2: m: should be a whole number from 1 to \d+, is nothing"),
        (lambda rows: first(rows, m="many"), r":2: m: should be a number, not 'many'"),
        (lambda rows: first(rows, latency_us=-1), r":2: latency_us: should be above 0, is -1"),
        (lambda rows: first(rows, latency_us="nan"), r":2: latency_us: should be"),
        (lambda rows: first(rows, latency_us=1e9), r":2: latency_us: .* over a minute"),
        (lambda rows: first(rows, device="A100"), r"device: rows of A100 and NVIDIA H100"),
        (lambda rows: [{**r, "dtype": "fp8"} for r in rows], r"no rows of gemm with dtype bf16; .* has fp8"),
        (lambda rows: first(rows, m=2**40 + 1), r":2: m: should be .* to 1099511627776, is 1099511627777"),
        (lambda rows: first(rows, block_size=16.5), r":2: block_size: should be a whole number .*, is 16.5"),
        (lambda rows: first(rows, block_size=0), r":2: block_size: should be a whole number from 1 to"),
        (lambda rows: first(rows, block_size=2**20 + 1), r":2: block_size: .* 1048576, is 1048577"),
        (lambda rows: one(rows, "prefill_attention", q=0), r"\d: q: should be a whole number from 1"),
        (lambda rows: one(rows, "prefill_attention", batch=0), r"\d: batch: should be a whole number from 1"),
        (lambda rows: one(rows, "decode_attention", batch=0), r"\d: batch: should be a whole number from 1"),
        (lambda rows: one(rows, "step", batch=0), r"\d: is a step of no tokens"),
        (lambda rows: one(rows, "hash", latency_us=1.1e6), r"\d: latency_us: 1.1e\+06 us is over a second"),
        (lambda rows: [*rows, {**rows[-1], "device": "B"}], r":\d+: is the point of line \d+ again"),
        (lambda rows: [*rows, {**rows[3], "kernel": "other"}], r":\d+: is the point of line 5 again"),
        (lambda rows: less(rows, "latency_us"), "no column latency_us"),
        (lambda rows: less(rows, "kv"), "no column kv, which rows of"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_missing_is_said(tmp_path: Path, change: Any, message: str) -> None:
    path = save(tmp_path / "timings.csv", change(all_rows()))
    with pytest.raises(InputError, match=message) as caught:
        calibrated(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_kernel_or_type_is_another_point(tmp_path: Path) -> None:
    rows = all_rows()
    decode = next(row for row in rows if row["op"] == "decode_attention")
    save(tmp_path / "t.csv", [*rows, {**decode, "kernel": "other"}, {**rows[0], "dtype": "fp8"}])
    assert calibrated(tmp_path / "t.csv").gemm.a == pytest.approx(A, rel=1e-3)


def test_nanoseconds_are_told_by_what_the_data_sheet_allows(tmp_path: Path) -> None:
    rows = all_rows()
    for row in rows:
        row["latency_us"] *= 1000.0
    with pytest.raises(InputError, match=r":\d+: latency_us: .* us is slower than h100-sxm by a factor \d+"):
        calibrated(save(tmp_path / "timings.csv", rows))


def test_what_an_honest_kernel_may_take(tmp_path: Path) -> None:
    """A kernel that the data sheet bounds by `bound` may take 500 times as long, and a launch's 100 us."""
    row: Row = {"op": "gemm", "m": 8192, "n": 28672, "k": 4096}
    bound = 1e6 * 2 * row["m"] * row["n"] * row["k"] / max(GPU.peak_flops.values())
    rows = first(all_rows(), **row, latency_us=499.0 * (bound + 100.0))
    rows = [rows[0], *(other for other in rows[1:] if other.get("m") != 8192 or other.get("n") != 28672)]
    check_times(tmp_path / "t.csv", read_rows(save(tmp_path / "t.csv", rows), GPU), GPU)
    rows[0]["latency_us"] = 501.0 * (bound + 100.0)
    with pytest.raises(InputError, match="t.csv:2: .* by a factor 501"):
        read_rows(save(tmp_path / "t.csv", rows), GPU)
    unrated = GPU.model_copy(update={"memory_bandwidth": None, "peak_flops": {}})
    assert len(read_rows(tmp_path / "t.csv", unrated)) == len(rows)


@pytest.mark.parametrize("assume_kappa", [False, True])
@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_prefill_that_does_not_grow_as_attention_does(
    tmp_path: Path, assume_kappa: bool, slope: float
) -> None:
    rows = all_rows()
    for row in rows:
        if row["op"] == "prefill_attention":
            row["latency_us"] = 5000.0 + slope * row["batch"] * row["q"]
    said = "prefill_attention, bf16 KV: times do not grow with q; measure longer prompts"
    with pytest.raises(InputError, match=said):
        calibrated(save(tmp_path / "timings.csv", rows), assume_kappa=assume_kappa)


@pytest.mark.parametrize("cross", [0.0, 1e-6, 1e-3])
def test_a_fold_without_growth_has_a_fit(cross: float) -> None:
    """As the held-out folds of noisy times may be: the whole file is what is refused."""
    points = pd.DataFrame([row for row in all_rows() if row["op"] == "prefill_attention"])
    points["latency_us"] = 500.0 + cross * points.batch * points.q * points.c
    assert 1e-3 <= fit_prefill(points, None).kappa <= 1e3


def test_assumed_context_needs_prompts_without_it(tmp_path: Path) -> None:
    rows = [row for row in all_rows() if row["op"] != "prefill_attention" or row["c"] or row["q"] == 64]
    path = save(tmp_path / "timings.csv", rows)
    said = r"1 points without cached context \(c = 0\) with 1 of q; .*measure more prompt lengths"
    with pytest.raises(InputError, match=said):
        calibrated(path, assume_kappa=True)
    assert calibrated(path).attention["bf16"].prefill.kappa > 0


def test_two_all_reduces_hold_none_out(tmp_path: Path) -> None:
    rows = all_rows()
    rank = kernels_of(MODEL, 2)
    sizes = (8, 64, 512, 2048, 8192)
    common = {"op": "gemm", "dtype": "bf16", "latency_us": 900.0}
    rows += [{**common, "m": m, "n": one.n, "k": one.k} for one in (*rank.gemms, rank.lm_head) for m in sizes]
    rows = [{**row, "num_heads": 16, "num_kv_heads": 4} if "num_heads" in row else row for row in rows]
    for number in (2, 3):
        reduces = [
            {"op": "allreduce", "num_gpus": 2, "elements": 4096 << i, "latency_us": 9.0 + i}
            for i in range(number)
        ]
        path = save(tmp_path / "timings.csv", [*rows, *reduces])
        if number == 2:
            with pytest.raises(InputError, match="allreduce over 2 GPUs: 2 sizes, at least 3"):
                calibrated(path, tp=2)
        else:
            assert calibrated(path, tp=2).errors["allreduce"].points == 1


# The file as text


def edited(path: Path, change: Any) -> Path:
    """The file that `save` writes of all rows, its lines changed."""
    save(path, all_rows())
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [line.replace(",", ";") for line in lines], r":1: cells are separated by semicolons"),
        (lambda lines: [line.replace(",", "\t") for line in lines], r":1: cells are separated by tabs"),
        (lambda lines: [lines[0] + ",m", *(line + ",1" for line in lines[1:])], ":1: 2 columns named m"),
        (lambda lines: [*lines[:4], lines[4] + ",7", *lines[5:]], r":5: has \d+ cells, the header \d+"),
        (lambda lines: [*lines[:4], "gemm,x", *lines[5:]], r":5: has 2 cells, the header \d+"),
        (lambda lines: [lines[0], "", " ", lines[1].replace(",gemm", ",gem"), *lines[2:]], ":4: op: unknown"),
        (lambda lines: [*lines[:4], "a\0b", *lines[5:]], r":5: not a CSV table: has a NUL byte"),
        (lambda lines: [*lines[:4], '"open', *lines[5:]], r":5: not a CSV table: "),
    ],
)
def test_what_is_wrong_in_the_text_is_said_by_line(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=r"timings\.csv" + message) as caught:
        calibrated(edited(tmp_path / "timings.csv", change))
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    """After blank lines and a note of two lines, too."""
    rows = [{**row, "note": 'two\nlines, "quoted"' if i == 1 else ""} for i, row in enumerate(all_rows())]
    rows[4]["m"] = "many"
    path = save(tmp_path / "timings.csv", rows)
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], "", "", *lines[1:]]))
    at = 1 + next(i for i, line in enumerate(path.read_text().split("\n")) if "many" in line)
    assert at == 9  # its place, 6, two blank lines and one within the note
    with pytest.raises(InputError, match=rf"timings\.csv:{at}: m: should be a number"):
        read_rows(path, GPU)


def test_what_does_not_matter(tmp_path: Path) -> None:
    """A byte order mark, notes in columns of their own, and rows that do not name the device."""
    rows = [{**row, "line": "mine", "p10_us": "?", "": "x"} for row in all_rows()]
    for row in rows[::3]:
        row["device"] = ""
    path = save(tmp_path / "timings.csv", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    fitted = calibrated(path)
    assert fitted.gemm.a == pytest.approx(A, rel=1e-3)
    assert "measured on NVIDIA H100 80GB HBM3, timings.csv" in fitted.provenance.source


def test_tensor_parallel_needs_its_all_reduce(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gemm qkv \(n 3072"):
        calibrated(save(tmp_path / "timings.csv", all_rows()), tp=2)


@pytest.mark.parametrize("content", ["", "op\n", "op,latency_us\n", "\x00\x01", "a,b\n1,2,3\n4\n"])
def test_no_table_at_all(tmp_path: Path, content: str) -> None:
    path = tmp_path / "timings.csv"
    path.write_text(content)
    with pytest.raises(InputError, match="timings.csv"):
        calibrated(path)
    with pytest.raises(InputError, match="cannot be read"):
        calibrated(tmp_path / "none.csv")


def test_an_assumed_kappa_leaves_context_out_of_what_was_measured(tmp_path: Path) -> None:
    """Also where the file has context: then it is not fitted to, and reports say what rests on kappa."""
    fitted = calibrated(save(tmp_path / "timings.csv", all_rows()), assume_kappa=True)
    assert fitted.attention["bf16"].prefill.kappa == 1.15
    assert fitted.domain is not None and fitted.domain.max_context_len == 0
    assert "prefill_over_context_bf16" not in fitted.errors
    assert any("kappa" in text for text in fitted.assumed)


def test_the_cpu_that_hashed_is_not_the_gpu_that_was_timed(tmp_path: Path) -> None:
    rows = [{**row, "device": "AMD EPYC"} if row["op"] == "hash" else row for row in all_rows()]
    fitted = calibrated(save(tmp_path / "timings.csv", rows))
    assert "EPYC" not in fitted.provenance.source
    assert not any("EPYC" in text for text in fitted.assumed)
    rows[-1]["device"] = "another CPU"
    with pytest.raises(InputError, match="device: rows of AMD EPYC and another CPU; keep those of one"):
        calibrated(save(tmp_path / "timings.csv", rows))
