"""timings.csv: one row a measured point, appended as soon as it is known, and read to go on.

Each row reaches the disk before the next point is timed, so that whatever ends a run leaves a file
that the same command completes. Only the last line can be half-written; it is dropped.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from sim.errors import InputError
from sim.measure.grid import Point
from sim.measure.timing import Timing

COLUMNS = ("op", "device", *Point._fields[1:], *Timing._fields, "versions", "date")
_HEADER = ",".join(COLUMNS)
_TEXT = frozenset({"op", "dtype", "kv_dtype", "algorithm", "kernel"})  # of Point; the rest are counts
# What tells models, ranks and types apart. Rows that differ only in the rest belong together.
_FAMILY = ("op", "dtype", "kv_dtype", "n", "k", "num_heads", "num_kv_heads", "head_dim")
_REMEDY = ": choose another --out"


def measured(path: Path, points: Sequence[Point], device: str) -> set[Point]:
    """The points that `path` holds already; none if there is no such file. Modifies nothing.

    Raises InputError, one line, for a file that is no timings.csv, that has a row nobody can read, or
    whose rows of the same operations are of another device than `device` or another model than
    that of `points`.
    """
    if not path.exists():
        return set()
    lines = _whole_lines(path)
    if not lines:
        return set()
    if lines[0] != _HEADER:
        raise InputError(f"{path}:1: has other columns than this version writes{_REMEDY}")
    families = {_family(point) for point in points}
    found = set()
    for number, cells in enumerate(csv.reader(lines[1:]), 2):
        point = _point(f"{path}:{number}", cells)
        row = dict(zip(COLUMNS, cells, strict=True))
        if point.op not in {one.op for one in points}:
            continue
        if row["device"] != device:
            raise InputError(f"{path}:{number}: device: is {row['device']!r}, this is {device!r}{_REMEDY}")
        if _family(point) not in families:
            raise InputError(f"{path}:{number}: is of another model, tp, weight or KV type{_REMEDY}")
        found.add(point)
    return found


def open_to_append(path: Path) -> TextIO:
    """The file to append rows to, with its header; a half-written last line is cut off.

    To be called after `measured`, which refuses files that are not ours to change.
    """
    size = sum(len(line.encode()) + 1 for line in _whole_lines(path)) if path.exists() else 0
    file = path.open("a", encoding="utf-8", newline="")
    file.truncate(size)
    if size == 0:
        _write(file, COLUMNS)
    return file


def append(file: TextIO, point: Point, timing: Timing, about: Mapping[str, str]) -> None:
    """Write one row and wait until it is on the disk. `about`: device, versions, date."""
    row = {**point._asdict(), **timing._asdict(), **about}
    _write(file, ["" if row[name] is None else row[name] for name in COLUMNS])


def _write(file: TextIO, cells: Iterable[object]) -> None:
    csv.writer(file, lineterminator="\n").writerow(cells)
    file.flush()
    os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[str]:
    """The lines that end in a newline. Raises InputError for a file that did not begin as ours."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text{_REMEDY}") from error
    *lines, rest = text.split("\n")
    if not lines and not _HEADER.startswith(rest):
        raise InputError(f"{path}:1: is no timings.csv{_REMEDY}")
    return lines


def _point(where: str, cells: Sequence[str]) -> Point:
    """The point of a row. Raises InputError for cells that are not what their columns say."""
    if len(cells) != len(COLUMNS):
        raise InputError(f"{where}: has {len(cells)} cells, not {len(COLUMNS)}: repair or remove the line")
    row = dict(zip(COLUMNS, cells, strict=True))
    try:
        latency = float(row["latency_us"])
    except ValueError:
        latency = math.nan
    if not 0 < latency < math.inf:
        raise InputError(f"{where}: latency_us: should be a positive number, not {row['latency_us']!r}")
    values: dict[str, str | int | None] = {}
    for name in Point._fields:
        cell = row[name]
        if cell and name not in _TEXT and not (cell.isascii() and cell.isdigit()):
            raise InputError(f"{where}: {name}: should be a whole number or nothing, not {cell!r}")
        values[name] = (cell if name in _TEXT else int(cell)) if cell else None
    return Point(**values)  # type: ignore[arg-type]


def _family(point: Point) -> tuple[object, ...]:
    return tuple(getattr(point, name) for name in _FAMILY)
