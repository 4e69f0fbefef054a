"""Sessions as delta-coded JSONL: a turn says how much of the last prompt it keeps, and what it adds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sim.request import Ints
from workloads.content import Numbering
from workloads.errors import WorkloadError
from workloads.jsonl import is_name, is_real, is_whole
from workloads.sessions import Sessions
from workloads.skipped import Skipped
from workloads.trace_file import parse_object, read_chunks, short
from workloads.trace_rows import Layout

LAYOUT = Layout("t", "input_length", "output_length", 1.0)
_FIELDS = "session_id, t, input_length, output_length, keep and new_hash_ids"
_KNOWN = (
    "session_id", "t", "input_length", "output_length", "keep", "new_hash_ids", "think_time", "api_time",
)  # fmt: skip
_CHUNK = 2048  # lines


def read_delta(path: str, skipped: Skipped) -> Sessions:
    """Read `session_id`, `t` (seconds on the session's clock), `input_length`, `output_length`,
    `keep` and `new_hash_ids`, and `think_time`, `api_time` (seconds or null) if there.

    A prompt is the first `keep` ids of the session's previous prompt, then the new ones. Ids are
    the session's own: 1 in one session is not 1 in another. Raises: WorkloadError that names the
    line; where bad lines are skipped, the later turns of their session cannot be known and are
    skipped too. Modifies `skipped`.
    """
    table = _Table(path)
    for before, lines in read_chunks(path, _CHUNK):
        for number, line in enumerate(lines, before + 1):
            if line.strip():
                try:
                    table.add(number, line)
                except WorkloadError as error:
                    skipped.add(error)
    return table.sessions()


class _Table:
    """Collects the turns of a file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = Numbering()
        self._names: list[str | int] = []
        self._last: list[list[tuple[int, int]] | None] = []  # pieces of each session's last prompt
        self._columns: list[tuple[int, int, float, int, int, float, float]] = []
        self._pieces: list[tuple[int, int]] = []
        self._first_piece = [0]
        self._ids: list[int] = []

    def add(self, number: int, line: bytes) -> None:
        """Take in one line. Raises: WorkloadError; of the line only its session is remembered then."""
        where = f"{self._path}, line {number}"
        row = parse_object(where, line, _KNOWN)
        session = self._session(where, row)
        last, self._last[session] = self._last[session], None
        if last is None:
            raise WorkloadError(f"{where}: a line of its session before it is bad: mend that one")
        values = [
            _field(where, row, name, is_whole, "a whole number")
            for name in ("input_length", "output_length", "keep")
        ]
        time = float(_field(where, row, "t", is_real, "a finite number"))
        think, service = (_seconds(where, row, name) for name in ("think_time", "api_time"))
        new = _field(where, row, "new_hash_ids", _are_ids, "a list of whole numbers from 0 to 4294967295")
        kept = _first(last, values[2])
        if kept is None:
            have = sum(end - begin for begin, end in last)
            raise WorkloadError(
                f"{where}: keep is {values[2]}: it must be from 0 to {have}, the ids of the last prompt"
            )
        begin, end = len(self._ids), len(self._ids) + len(new)
        if kept and kept[-1][1] == begin:  # what goes on where the last piece ends is one piece
            begin = kept.pop()[0]
        pieces = [*kept, (begin, end)]
        self._ids += new
        self._pieces += pieces
        self._first_piece.append(len(self._pieces))
        self._last[session] = pieces
        self._columns.append((number, session, time, values[0], values[1], think, service))

    def _session(self, where: str, row: dict[str, Any]) -> int:
        name = _field(where, row, "session_id", is_name, "a string or a whole number")
        session = self._numbers(name)
        if session == len(self._names):
            self._names.append(name)
            self._last.append([])
        return session

    def sessions(self) -> Sessions:
        columns = np.array(self._columns, np.float64).reshape(-1, 7).T  # line numbers and tokens are exact

        def whole(i: int) -> Ints:
            return np.asarray(columns[i], np.int64)

        return Sessions(
            line=whole(0),
            session=whole(1),
            time=columns[2],
            prompt_len=whole(3),
            output_len=whole(4),
            think_time=columns[5],
            service_time=columns[6],
            pieces=np.array(self._pieces, np.int64).reshape(-1, 2),
            first_piece=np.array(self._first_piece, np.int64),
            ids=np.array(self._ids, np.int64),
            own_ids=True,
            names=self._names,
            layout=LAYOUT,
        )


def _first(pieces: list[tuple[int, int]], count: int) -> list[tuple[int, int]] | None:
    """The pieces of the first `count` ids; None if there are not so many."""
    kept = []
    left = count
    for begin, end in pieces:
        if left <= 0:
            break
        kept.append((begin, min(end, begin + left)))
        left -= end - begin
    return kept if left <= 0 <= count else None


def _field(where: str, row: dict[str, Any], name: str, check: Any, wanted: str) -> Any:
    if name not in row:
        raise WorkloadError(f"{where}: {name} is missing: a row has {_FIELDS}")
    if not check(row[name]):
        raise WorkloadError(f"{where}: {name} is {short(row[name])}: it must be {wanted}")
    return row[name]


def _seconds(where: str, row: dict[str, Any], name: str) -> float:
    if row.get(name) is None:
        return math.nan
    return float(_field(where, row, name, is_real, "a number of seconds, or null"))


def _are_ids(value: Any) -> bool:
    return type(value) is list and all(type(one) is int and 0 <= one < 2**32 for one in value)
