"""timings.csv as `prefixsim measure` or its user writes it: read, and checked row by row.

Nothing is guessed: a row that cannot be a kernel time in microseconds is refused by its line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sim.calibrate.csv_times import check_times
from sim.errors import InputError, suggestion
from sim.hardware import GpuSpec

SHAPES = {
    "gemm": ["m", "n", "k"],
    "decode_attention": ["batch", "kv", "num_heads", "num_kv_heads", "head_dim"],
    "prefill_attention": ["batch", "q", "c", "num_heads", "num_kv_heads", "head_dim"],
    "step": ["batch", "q", "c", "num_decodes", "decode_kv", "num_layers"],
    "allreduce": ["num_gpus", "elements"],
    "hash": ["block_size", "algorithm"],
}
# What else tells the points of an operation apart.
_APART = {
    "gemm": ["dtype"],
    "decode_attention": ["kv_dtype", "block_size", "kernel"],
    "prefill_attention": ["kv_dtype", "block_size", "kernel"],
    "step": ["dtype", "kv_dtype"],
}
TEXT = ["op", "device", "dtype", "kv_dtype", "algorithm", "kernel", "versions"]
SIZES = sorted({name for shape in SHAPES.values() for name in shape} - {"algorithm"})
_MAY_BE_ZERO = {"prefill_attention": {"c"}, "step": {"batch", "q", "c", "num_decodes", "decode_kv"}}
_LARGEST = 2**40
_LARGEST_BLOCK = 2**20  # tokens


def read_rows(path: Path, gpu: GpuSpec) -> pd.DataFrame:
    """The file's rows, numbers as numbers, with a column `line` of where each stands.

    Other columns than those of `prefixsim measure` are left out: they are the user's notes. Raises
    InputError, one line, for a file that is no such CSV, a missing column or cell, a number that is
    none or out of bounds, two rows of one point, rows of several devices, and times that the data
    sheet of `gpu` rules out.
    """
    lines = _lines(path)
    _, header = next(lines, (1, []))
    _check_header(path, header)
    at = {name: i for i, name in enumerate(header) if name in (*TEXT, *SIZES, "latency_us")}
    rows = []
    for line, cells in lines:
        if len(cells) != len(header):
            said = f"has {len(cells)} cells, the header {len(header)}"
            raise InputError(f"{path}:{line}: {said}; repair or remove the line")
        rows.append([*(cells[i] for i in at.values()), line])
    if not rows:
        raise InputError(f"{path}: has no rows; `prefixsim measure --out {path}` fills it")
    frame = pd.DataFrame(rows, columns=[*at, "line"])
    _check_ops(path, frame)
    for column in [name for name in at if name not in TEXT]:
        frame[column] = _numbers(path, frame, column)
    _check_cells(path, frame)
    check_times(path, frame, gpu)
    _check_once(path, frame)
    for kernels in (frame.op != "hash", frame.op == "hash"):  # of a GPU, and of a CPU
        if "device" in frame and len(devices := sorted(set(frame.device[kernels]) - {""})) > 1:
            raise InputError(f"{path}: device: rows of {' and '.join(devices)}; keep those of one")
    return frame


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The file's rows, blank lines left out, each with the line that it starts in."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None
    if (at := text.find("\0")) >= 0:
        line = 1 + text.count("\n", 0, at)
        raise InputError(f"{path}:{line}: not a CSV table: has a NUL byte; write it as UTF-8 text")
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    line = 1
    try:
        for cells in reader:
            if any(cells) or len(cells) > 1:
                yield line, [cell.strip() for cell in cells]
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}:{line}: not a CSV table: {error}") from None


def _check_header(path: Path, header: list[str]) -> None:
    for name, separator in (("semicolons", ";"), ("tabs", "\t")):
        if "op" not in header and any(separator in cell for cell in header):
            raise InputError(f"{path}:1: cells are separated by {name}; write the file with commas")
    for column in ("op", "latency_us"):
        if column not in header:
            wrong = suggestion("latency_us", header) if column == "latency_us" else ""
            raise InputError(f"{path}:1: no column {column}{wrong}; `prefixsim measure` writes such a file")
    for name in header:
        if name and header.count(name) > 1:
            raise InputError(f"{path}:1: {header.count(name)} columns named {name}; keep one of them")


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
    """Each row has the sizes of its operation; sizes are whole and within bounds."""
    if "block_size" in frame:
        _check_whole(path, frame[frame.block_size.notna()], "block_size", 1, _LARGEST_BLOCK)
    for op, rows in frame.groupby("op"):
        for column in SHAPES[str(op)]:
            if column not in frame:
                raise InputError(f"{path}:1: no column {column}, which rows of {op} need")
            if column not in TEXT:
                least = 0 if column in _MAY_BE_ZERO.get(str(op), ()) else 1
                _check_whole(path, rows, column, least, _LARGEST)
    steps = frame[frame.op == "step"]
    if len(steps) and len(idle := steps[steps.batch * steps.q + steps.num_decodes == 0]):
        raise InputError(f"{path}:{idle.line.iloc[0]}: is a step of no tokens; remove the line")


def _check_whole(path: Path, rows: pd.DataFrame, column: str, least: int, most: int) -> None:
    bad = rows[~(rows[column].between(least, most) & (rows[column] % 1 == 0))]
    if len(bad):
        row = bad.iloc[0]
        said = "nothing" if pd.isna(row[column]) else f"{row[column]:.15g}"
        raise InputError(
            f"{path}:{row.line}: {column}: should be a whole number from {least} to {most}, is {said}"
        )


def _check_once(path: Path, frame: pd.DataFrame) -> None:
    """No point stands there twice: which of the two would be right?"""
    for op, rows in frame.groupby("op"):
        columns = [name for name in (*SHAPES[str(op)], *_APART.get(str(op), ())) if name in frame]
        seen: dict[tuple[Any, ...], int] = {}
        for *point, line in rows[[*columns, "line"]].fillna(-1).itertuples(index=False, name=None):
            if (first := seen.setdefault(tuple(point), line)) != line:
                raise InputError(f"{path}:{line}: is the point of line {first} again; keep one of them")
