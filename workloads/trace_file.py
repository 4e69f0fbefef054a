"""The file of a trace: its lines in chunks, plain or gzipped, and which format they are in."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Collection, Generator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, cast

from workloads.errors import WorkloadError

Format = Literal["mooncake", "segments", "delta", "npz", "azure", "csv", "recording"]

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
CONTENT: dict[str, Format] = {"hash_ids": "mooncake", "segments": "segments", "new_hash_ids": "delta"}


def find_format(path: str, *, skip_bad_lines: bool = False) -> Format:
    """Say what a file is, by its first bytes and its first row (the first that tells, if bad ones may be).

    Raises: WorkloadError for a file that cannot be read, holds no rows, or is none of them.
    """
    problem = no_requests(path)
    with contextlib.closing(read_chunks(path, 64)) as chunks:
        for before, lines in chunks:
            for number, line in enumerate(lines, before + 1):
                if not line.strip():
                    continue
                try:
                    return _format_of(f"{path}, line {number}", line)
                except WorkloadError as error:
                    problem = error
                    if not skip_bad_lines:
                        raise
    raise problem


def _format_of(where: str, line: bytes) -> Format:
    if line.startswith(b"PK\x03\x04"):  # what a zip archive begins with
        return "npz"
    if _header(line) == AZURE_HEADER:
        return "azure"
    row = parse_object(where, line)
    if isinstance(row.get("schema"), str):
        return "recording"
    found = [kind for field, kind in CONTENT.items() if field in row]
    if len(found) != 1:
        names = ", ".join(map(repr, list(row)[:8])) or "none"
        known = ", ".join(f"{field} ({kind})" for field, kind in CONTENT.items())
        raise WorkloadError(f"{where}: the format is unknown (fields: {names}): a row has one of {known}")
    return found[0]


def _header(line: bytes) -> tuple[str, ...]:
    fields = line.decode("utf-8-sig", "replace").split(",")
    return tuple(field.strip() for field in fields)


class _Twice(dict[str, Any]):
    """An object with fields that it gives more than once, and their names."""

    names: frozenset[str]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice = _Twice(found)
    names = [name for name, _ in pairs]
    twice.names = frozenset(name for name in found if names.count(name) > 1)
    return twice


def parse_object(where: str, line: bytes, fields: Collection[str] = ()) -> dict[str, Any]:
    """Read a line as one JSON object, in which each of `fields` stands once.

    Raises: WorkloadError that begins with `where`.
    """
    try:
        row = json.loads(line, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        text = line[:40].decode("utf-8", "replace").strip()
        reason = str(error).partition(":")[0]
        raise WorkloadError(f"{where}: not JSON ({reason}): {text!r}: mend or delete the line") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{where}: not a JSON object but {short(row)}: a line is {{…}}")
    if isinstance(row, _Twice) and (twice := sorted(row.names.intersection(fields))):
        raise WorkloadError(f"{where}: {twice[0]} is given twice: keep one of the two")
    return row


def no_requests(path: str) -> WorkloadError:
    return WorkloadError(f"{path}: the trace holds no requests: check workload.path")


def short(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def read_chunks(path: str, size: int) -> Generator[tuple[int, list[bytes]], None, None]:
    """Yield (number of lines before, at most `size` lines) through the file, gzipped or not.

    Raises: WorkloadError for a file that is missing, empty, unreadable or cut off.
    """
    done = 0
    lines: list[bytes] = []
    try:
        with Path(path).open("rb") as raw:
            stream: IO[bytes] = raw
            if raw.peek(2)[:2] == b"\x1f\x8b":  # what gzip begins with, whatever the file is called
                stream = BufferedReader(cast(Any, gzip.GzipFile(fileobj=raw)), 1 << 17)
            while True:
                lines = []
                lines.extend(islice(stream, size))  # keeps what came before an error
                if not lines:
                    break
                yield done, lines
                done += len(lines)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        where = f"{path}, after line {done + len(lines)}"
        reason = str(error).rstrip(".").lower()
        raise WorkloadError(f"{where}: the gzip data is damaged ({reason}): fetch the file again") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise WorkloadError(f"{path}: cannot read the trace: {reason}; check the path") from None
