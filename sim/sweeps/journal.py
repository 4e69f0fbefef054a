"""What a killed sweep keeps: a line for each finished run, on the disk before the next one counts."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sim.errors import InputError
from sim.out_file import reason


class Record(NamedTuple):
    """A finished run: its key, see key.py, its figures, and its error where it failed."""

    key: str
    figures: dict[str, Any]
    error: str


class Journal:
    """An open journal; `records` are those it had when it was opened, by key."""

    def __init__(self, path: Path, file: int, records: dict[str, Record]) -> None:
        self.records = records
        self._path = path
        self._file = file

    def append(self, record: Record) -> None:
        """Add a record, on the disk on return. Raises InputError, and adds nothing, if it cannot be."""
        begin = os.lseek(self._file, 0, os.SEEK_END)
        left = memoryview((json.dumps(record._asdict(), allow_nan=False) + "\n").encode())
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, begin)
            raise InputError(
                f"{self._path}: cannot be written: {reason(error)}; what was written stays, --resume goes on"
            ) from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """The file of a journal, made if there is none, and others kept out. Modifies nothing in it.

    Raises InputError, one line, if it cannot be opened or another process has it.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {reason(error)}") from None
    try:
        _lock(file, path)
        yield file
    finally:
        os.close(file)


def journal(file: int, path: Path, *, resume: bool) -> Journal:
    """A journal to add to, in a file that is `locked`; begun anew unless `resume`."""
    records, end = read_journal(path) if resume else ({}, 0)
    os.ftruncate(file, end)  # a line that was torn must not become the head of the next
    return Journal(path, file, records)


def read_journal(path: Path) -> tuple[dict[str, Record], int]:
    """The whole records of a journal by key, and how many bytes they take; none if there is no file."""
    records: dict[str, Record] = {}
    end = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            records[record.key] = record
            end += len(line)
    return records, end


def _lock(file: int, path: Path) -> None:
    """Keep others out until the file is closed, where the system can. Raises InputError if it is taken."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another sweep writes there; wait for it, or give another --out") from None
    except OSError:
        return  # a file system without locks
