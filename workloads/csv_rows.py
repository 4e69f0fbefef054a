"""CSV traces: arrival times and lengths, without prefix identity."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import numpy as np
from pydantic import StringConstraints

from sim.request import Ints
from workloads.base import Spec
from workloads.content import Numbering
from workloads.errors import WorkloadError
from workloads.prefix_model import PrefixModel
from workloads.skipped import Skipped, good_parts
from workloads.trace_file import AZURE_HEADER, no_requests, read_chunks, short
from workloads.trace_rows import Layout, Rows

Name = Annotated[str, StringConstraints(min_length=1)]
_MICROSECONDS = 1_000_000


class Columns(Spec):
    """Which column of a CSV holds what."""

    arrival_time: Name  # seconds, or a date and time (ISO 8601): then the first request is at 0
    prompt_len: Name  # tokens
    output_len: Name  # tokens
    prefix_group: Name | None = None  # any text
    session_id: Name | None = None  # any text

    @property
    def layout(self) -> Layout:
        return Layout(self.arrival_time, self.prompt_len, self.output_len, 1.0)


AZURE_COLUMNS = Columns(
    arrival_time=AZURE_HEADER[0], prompt_len=AZURE_HEADER[1], output_len=AZURE_HEADER[2]
)


class CsvParser:
    """Turns lines of one CSV into Rows, whose shared prefixes are the model's."""

    def __init__(
        self, path: str, columns: Columns, model: PrefixModel | None, rng: np.random.Generator
    ) -> None:
        self._path = path
        self._columns = columns
        self._model = model
        self._rng = rng
        self._groups = Numbering()
        self._place: dict[str, int] = {}
        self._num_fields = 0
        self._epoch: int | None = None  # microseconds, of the first request; None: times are seconds
        self._begun = False

    def rows(self, chunk: int, skipped: Skipped) -> Iterator[Rows]:
        """Yield the file's rows. Modifies `skipped`. Raises: WorkloadError that names the line."""
        for before, lines in read_chunks(self._path, chunk):
            if not self._place:
                blank = next((i for i, line in enumerate(lines) if line.strip()), len(lines))
                if blank == len(lines):
                    continue
                self._read_header(before + blank + 1, lines[blank])
                before, lines = before + blank + 1, lines[blank + 1 :]
            if lines:
                found = good_parts(self._parse, before, lines, skipped)
                yield from map(self._with_content, found)
        if not self._place:
            raise no_requests(self._path)

    def _read_header(self, number: int, line: bytes) -> None:
        names = [name.strip() for name in next(csv.reader([line.decode("utf-8-sig", "replace")]))]
        for field, name in self._columns.model_dump().items():
            if name is None:
                continue
            if name not in names:
                raise WorkloadError(
                    f"{self._path}, line {number}: no column {name!r} for {field}: the header has"
                    f" {', '.join(names[:12])}; set workload.columns"
                )
            if names.count(name) > 1:
                raise WorkloadError(
                    f"{self._path}, line {number}: {names.count(name)} columns are named {name!r}, which is"
                    f" {field}: rename all but one"
                )
            self._place[field] = names.index(name)
        self._num_fields = len(names)

    def _parse(self, before: int, lines: Sequence[bytes]) -> Rows:
        numbers: list[int] = []
        times: list[float] = []
        lens: list[tuple[int, int]] = []
        names = [name for name in ("prefix_group", "session_id") if name in self._place]
        texts: dict[str, list[str]] = {name: [] for name in names}
        for number, line in enumerate(lines, before + 1):
            if not line.strip():
                continue
            try:
                fields = next(csv.reader([line.decode()]))
            except (UnicodeDecodeError, csv.Error) as error:
                raise self._error(number, f"not CSV in UTF-8 ({error})") from None
            if len(fields) != self._num_fields:
                raise self._error(number, f"{len(fields)} fields under a header of {self._num_fields}")
            numbers.append(number)
            prompt_len = self._whole(number, fields, "prompt_len")
            lens.append((prompt_len, self._whole(number, fields, "output_len")))
            times.append(self._time(number, fields))
            for name, column in texts.items():
                column.append(fields[self._place[name]].strip())
        prompt, output = np.array(lens, np.int64).reshape(-1, 2).T
        empty = np.zeros(0, np.int64)
        return Rows(
            line=np.array(numbers, np.int64),
            time=np.array(times, np.float64),
            prompt_len=np.ascontiguousarray(prompt),
            output_len=np.ascontiguousarray(output),
            start=np.zeros(len(numbers) + 1, np.int64),
            ids=empty,
            lens=empty,
            optional=dict(texts),
        )

    def _with_content(self, rows: Rows) -> Rows:
        """Number the groups, and give each row its group's segment as far as the model says."""
        n = len(rows.line)
        groups: Ints
        if "prefix_group" in rows.optional:
            groups = np.array([self._groups(name) for name in rows.optional["prefix_group"]], np.int64)
        elif self._model is not None:
            groups = self._model.draw(self._rng, n)
        else:
            return rows
        rows = rows._replace(optional=rows.optional | {"prefix_group": groups.tolist()})
        if self._model is None:
            return rows
        shared = self._model.shared_len(rows.prompt_len)
        return rows._replace(start=np.arange(n + 1), ids=groups, lens=shared)

    def _whole(self, number: int, fields: list[str], column: str) -> int:
        text = fields[self._place[column]].strip()
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 18:
            name = getattr(self._columns, column)
            raise self._error(number, f"{name} is {short(text)}: it must be a whole number of tokens")
        return int(text)

    def _time(self, number: int, fields: list[str]) -> float:
        text = fields[self._place["arrival_time"]].strip()
        name = self._columns.arrival_time
        try:
            seconds = float(text)
        except ValueError:
            seconds = None
        if not self._begun:
            self._epoch = None if seconds is not None else self._microseconds(number, text)
            self._begun = True
        if self._epoch is not None:
            return (self._microseconds(number, text) - self._epoch) / _MICROSECONDS
        if seconds is None:
            raise self._error(number, f"{name} is {short(text)}: it must be a number of seconds, as before")
        return seconds

    def _microseconds(self, number: int, text: str) -> int:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            wanted = "a number of seconds or a date and time, as in 2023-11-16 18:17:03.98"
            raise self._error(
                number, f"{self._columns.arrival_time} is {short(text)}: it must be {wanted}"
            ) from None
        zoned = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        past = zoned - datetime(1970, 1, 1, tzinfo=UTC)
        return (past.days * 86_400 + past.seconds) * _MICROSECONDS + past.microseconds

    def _error(self, number: int, problem: str) -> WorkloadError:
        remedy = "" if ": it must" in problem else ": mend or delete the line"
        return WorkloadError(f"{self._path}, line {number}: {problem}{remedy}")
