"""timings.csv as `prefixsim measure` or its user writes it: read, and checked row by row.

Nothing is guessed: a row that cannot be a kernel time in microseconds is refused by its line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from sim.errors import InputError, suggestion
from sim.hardware import DTYPE_BYTES, GpuSpec

SHAPES = {
    "gemm": ["m", "n", "k"],
    "decode_attention": ["batch", "kv", "num_heads", "num_kv_heads", "head_dim"],
    "prefill_attention": ["batch", "q", "c", "num_heads", "num_kv_heads", "head_dim"],
    "step": ["batch", "q", "c", "num_decodes", "decode_kv", "num_layers"],
    "allreduce": ["num_gpus", "elements"],
    "hash": ["block_size", "algorithm"],
}
MAY_BE_ZERO = {"c", "batch", "q", "num_decodes", "decode_kv"}
TEXT = {"op", "device", "dtype", "kv_dtype", "algorithm", "kernel", "versions", "date"}
SHORTEST_US = 0.5  # no kernel is launched and done in less
FASTEST = 4.0  # times the data sheet's rates: neither clocks nor caches give more
SLOWEST_US = 60e6  # a minute for one kernel


def read_rows(path: Path, gpu: GpuSpec) -> pd.DataFrame:
    """The file's rows, numbers as numbers, with a column `line` of where each stands.

    Raises InputError, one line, for a file that is no such CSV, a missing column or cell, a number
    that is none, two rows of one point, rows of several devices, and times that the data sheet of
    `gpu` rules out (seconds or milliseconds in latency_us).
    """
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError(f"{path}: not a CSV table: {' '.join(str(error).split())}") from None
    for column in ("op", "latency_us"):
        if column not in frame:
            wrong = suggestion("latency_us", list(frame.columns)) if column == "latency_us" else ""
            raise InputError(f"{path}:1: no column {column}{wrong}; `prefixsim measure` writes such a file")
    frame["line"] = range(2, len(frame) + 2)
    if frame.empty:
        raise InputError(f"{path}: has no rows; `prefixsim measure --out {path}` fills it")
    _check_ops(path, frame)
    for column in [name for name in frame.columns if name not in TEXT | {"line"}]:
        frame[column] = _numbers(path, frame, column)
    _check_cells(path, frame)
    _check_times(path, frame, gpu)
    _check_once(path, frame)
    if "device" in frame and len(devices := sorted(set(frame.device[frame.op != "hash"]))) > 1:
        raise InputError(f"{path}: device: rows of {' and '.join(devices)}; keep those of one")
    return frame


def _check_ops(path: Path, frame: pd.DataFrame) -> None:
    for op, line in zip(frame.op, frame.line, strict=True):
        if op not in SHAPES:
            raise InputError(f"{path}:{line}: op: unknown value {op!r}{suggestion(op, SHAPES)}")


def _numbers(path: Path, frame: pd.DataFrame, column: str) -> pd.Series[float]:
    values = pd.to_numeric(frame[column].replace("", None), errors="coerce").astype(float)
    bad = frame[(frame[column] != "") & ~values.abs().lt(float("inf"))]
    if len(bad):
        row = bad.iloc[0]
        raise InputError(f"{path}:{row.line}: {column}: should be a number, not {row[column]!r}")
    return values


def _check_cells(path: Path, frame: pd.DataFrame) -> None:
    """Each row has the sizes of its operation, and they are whole and positive."""
    for op, rows in frame.groupby("op"):
        for column in SHAPES[str(op)]:
            if column not in frame:
                raise InputError(f"{path}:1: no column {column}, which rows of {op} need")
            if column in TEXT:
                continue
            least = 0 if column in MAY_BE_ZERO else 1
            bad = rows[~((rows[column] >= least) & (rows[column] % 1 == 0))]
            if len(bad):
                row = bad.iloc[0]
                said = "nothing" if pd.isna(row[column]) else f"{row[column]:g}"
                raise InputError(
                    f"{path}:{row.line}: {column}: should be a whole number from {least}, is {said}"
                )


def _check_times(path: Path, frame: pd.DataFrame, gpu: GpuSpec) -> None:
    """Times are microseconds: none beats the data sheet, none takes a minute."""
    bad = frame[~(frame.latency_us > 0)]
    if len(bad):
        row = bad.iloc[0]
        raise InputError(f"{path}:{row.line}: latency_us: should be above 0, is {row.latency_us:g}")
    kernels = frame[frame.op != "hash"]
    least = kernels.apply(lambda row: max(SHORTEST_US, _bound_us(row, gpu) / FASTEST), axis=1)
    fast = kernels[kernels.latency_us < least] if len(kernels) else kernels
    if len(fast):
        row = fast.iloc[0]
        raise InputError(
            f"{path}:{row.line}: latency_us: {row.latency_us:g} us is faster than {gpu.name} can be "
            f"(at least {least[fast.index[0]]:.3g} us for this {row.op}); {len(fast)} of {len(kernels)} "
            "rows are; are these seconds or milliseconds?"
        )
    slow = kernels[kernels.latency_us > SLOWEST_US]
    if len(slow):
        row = slow.iloc[0]
        raise InputError(
            f"{path}:{row.line}: latency_us: {row.latency_us:g} us is over a minute; nanoseconds?"
        )


def _bound_us(row: Any, gpu: GpuSpec) -> float:
    """The least time that the data sheet allows for a matrix product or attention; 0 without rates."""
    if gpu.memory_bandwidth is None or row.op not in ("gemm", "decode_attention", "prefill_attention"):
        return 0.0
    peak = max(gpu.peak_flops.values())
    if row.op == "gemm":
        size = DTYPE_BYTES["fp8"] * row.n * row.k
        return float(1e6 * max(2 * row.m * row.n * row.k / peak, size / gpu.memory_bandwidth))
    if row.op == "decode_attention":
        size = DTYPE_BYTES["fp8"] * 2 * row.batch * row.kv * row.num_kv_heads * row.head_dim
        return float(1e6 * size / gpu.memory_bandwidth)
    pairs = row.batch * (row.q * row.q / 2 + row.q * row.c)
    return float(1e6 * 4 * pairs * row.num_heads * row.head_dim / peak)


def _check_once(path: Path, frame: pd.DataFrame) -> None:
    """No point stands there twice: which of the two would be right?"""
    beside = {"line", "latency_us", "p10_us", "p90_us", "repeats", "versions", "date"}
    columns = [name for name in frame.columns if name not in beside]
    again = frame[frame.duplicated(columns)]
    if len(again):
        row = again.iloc[0]
        same = frame[(frame[columns].fillna(-1) == row[columns].fillna(-1)).all(axis=1)]
        first = same.line.iloc[0]
        raise InputError(f"{path}:{row.line}: is the point of line {first} again; keep one of them")
