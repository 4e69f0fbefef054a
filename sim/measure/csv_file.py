"""timings.csv: one row a measured point, appended as soon as it is known, and read to go on.

Each row reaches the disk before the next point is timed, so that whatever ends a run leaves a file
that the same command completes. Only the last line can be half-written; it is dropped.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from sim.errors import InputError
from sim.measure.grid import Point
from sim.measure.timing import Timing
from sim.out_file import reason

COLUMNS = ("op", "device", *Point._fields[1:], *Timing._fields, "versions", "date")
_HEADER = ",".join(COLUMNS)
_TEXT = frozenset({"op", "dtype", "kv_dtype", "algorithm", "kernel"})  # of Point; the rest are counts
# What tells models, ranks and types apart. Rows that differ only in the rest belong together.
_FAMILY = ("op", "dtype", "kv_dtype", "n", "k", "num_heads", "num_kv_heads", "head_dim")
_REMEDY = ": choose another --out"
_DIGITS = 15  # of a count, at most
_OR_OTHER = ", or choose another --out"


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
    for number, cells in _rows(path, lines):
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


@contextlib.contextmanager
def open_to_append(path: Path) -> Iterator[BinaryIO]:
    """The file to append to, made if need be; nobody else can open it so meanwhile.

    To be followed by `measured`, which refuses files that are not ours to change, and `begin`. A
    file that was made and got no rows is removed. Raises InputError, one line.
    """
    made = not path.exists()
    try:
        file = path.open("ab", buffering=0)  # so that nothing is left to write on closing
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {reason(error)}") from None
    with file:
        _lock(file)
        try:
            yield file
        finally:
            if made and os.fstat(file.fileno()).st_size <= len(_HEADER) + 1:
                path.resolve().unlink()


def begin(file: BinaryIO) -> None:
    """Cut a half-written last line off the opened file, and write the header if it has none."""
    try:
        size = sum(len(line.encode()) + 1 for line in _whole_lines(Path(file.name)))
        file.truncate(size)
    except OSError as error:
        raise InputError(f"{file.name}: cannot be written: {reason(error)}") from None
    if size == 0:
        _write(file, COLUMNS)


def append(file: BinaryIO, point: Point, timing: Timing, about: Mapping[str, str]) -> None:
    """Write one row and wait until it is on the disk. `about`: device, versions, date."""
    row = {**point._asdict(), **timing._asdict(), **about}
    _write(file, ["" if row[name] is None else row[name] for name in COLUMNS])


def _lock(file: BinaryIO) -> None:
    """Raise InputError if another process appends to the file. Without fcntl or such locks, go without."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{file.name}: another measure is writing it: wait for its end{_OR_OTHER}") from None
    except (ImportError, OSError):
        pass


def _write(file: BinaryIO, cells: Iterable[object]) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    rest = text.getvalue().encode()
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError as error:
        raise InputError(
            f"{file.name}: cannot be written: {reason(error)}; the same command goes on from there"
        ) from None


def _whole_lines(path: Path) -> list[str]:
    """The lines that end in a newline. Raises InputError for a file that did not begin as ours."""
    try:
        whole, newline, rest = path.read_bytes().rpartition(b"\n")
        text = whole.decode("utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text{_REMEDY}") from None
    if not newline and not _HEADER.encode().startswith(rest):
        raise InputError(f"{path}:1: is no timings.csv{_REMEDY}")
    return text.split("\n") if newline else []


def _rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The rows after the header with their line numbers."""
    try:
        yield from enumerate(csv.reader(lines[1:]), 2)
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV table: {error}{_REMEDY}") from None


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
        if cell and name not in _TEXT and not (cell.isascii() and cell.isdigit() and len(cell) <= _DIGITS):
            raise InputError(f"{where}: {name}: should be a whole number or nothing, not {cell!r}")
        values[name] = (cell if name in _TEXT else int(cell)) if cell else None
    return Point(**values)  # type: ignore[arg-type]


def _family(point: Point) -> tuple[object, ...]:
    return tuple(getattr(point, name) for name in _FAMILY)
