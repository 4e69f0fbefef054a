"""Mooncake JSONL and JSONL of segments: lines to columns.

A chunk goes through Arrow's parser in one call. Whatever Arrow refuses, or takes more generously
than we do, goes line by line through the json module, which either understands it or names the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import json as arrow_json

from workloads.errors import WorkloadError
from workloads.trace_file import parse_object, short
from workloads.trace_rows import Layout, Rows

Kind = Literal["mooncake", "segments"]

# The fields that say when and what, by format; `input_length` and `output_length` stand in both.
TIME: dict[Kind, str] = {"mooncake": "timestamp", "segments": "arrival_time"}
CONTENT: dict[Kind, str] = {"mooncake": "hash_ids", "segments": "segments"}
NUMBERS, NAMES = ("block_size", "priority", "n", "beam_width"), ("session_id", "cache_salt", "lora")
ITEMS = "mm"  # of segments only: for each of them a name, or null
OPTIONAL: dict[Kind, tuple[str, ...]] = {  # a name is a string or a whole number
    "mooncake": NUMBERS + NAMES,
    "segments": (*NUMBERS, *NAMES, ITEMS),
}
_ARROW_TYPES = {int: pa.int64(), str: pa.string()}
LAYOUT: dict[Kind, Layout] = {
    "mooncake": Layout("timestamp", "input_length", "output_length", 1000.0),
    "segments": Layout("arrival_time", "input_length", "output_length", 1.0, has_all_tokens=True),
}


class Parser:
    """Turns lines of one file into Rows."""

    def __init__(self, path: str, kind: Kind) -> None:
        self.path = path
        self.kind = kind
        self._begun = False
        self._optional = OPTIONAL[kind]
        self._known = (TIME[kind], "input_length", "output_length", CONTENT[kind], *self._optional)
        self._types: dict[str, type] = {name: int if name in NUMBERS else str for name in self._optional}

    def parse(self, before: int, lines: Sequence[bytes]) -> Rows:
        """Parse lines, of which the first is number `before` + 1; blank ones are skipped.

        Remembers the types of optional fields. Raises: WorkloadError naming the first line that
        is not JSON, or where a field is missing or of a wrong type.
        """
        if not self._begun:
            self._begin(before, lines)
        fast = self._parse_fast(before, lines) if self._begun else None
        return self._parse_slowly(before, lines) if fast is None else fast

    def _begin(self, before: int, lines: Sequence[bytes]) -> None:
        """Learn the types of the optional fields from the first row."""
        for number, line in enumerate(lines, before + 1):
            if line.strip():
                row = self._object(number, line)
                self._learn({name: [row.get(name)] for name in self._optional})
                self._begun = True
                return

    def _learn(self, optional: dict[str, list[Any]]) -> None:
        for name, values in optional.items():
            if name == ITEMS:
                values = [one for row in values if isinstance(row, list) for one in row]
            kinds = {type(value) for value in values} & {int, str}
            if kinds and name not in NUMBERS:
                self._types[name] = kinds.pop()

    def _parse_fast(self, before: int, lines: Sequence[bytes]) -> Rows | None:
        """Parse by Arrow; None where the lines need a closer look."""
        block = b"".join(lines)
        n = len(lines)
        if bytes(map(itemgetter(0), lines)).count(b"{") < n:  # one object a line, so that numbers hold
            return None
        ids_type = pa.list_(pa.int64())
        fields = [
            (TIME[self.kind], pa.float64()),
            ("input_length", pa.int64()),
            ("output_length", pa.int64()),
            (CONTENT[self.kind], ids_type if self.kind == "mooncake" else pa.list_(ids_type)),
            *((name, _arrow_type(name, kind)) for name, kind in self._types.items()),
        ]
        try:
            if not block.isascii():
                block.decode()  # Arrow does not mind broken UTF-8 in a field's name
            table = arrow_json.read_json(
                pa.BufferReader(block),
                arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
                arrow_json.ParseOptions(pa.schema(fields), unexpected_field_behavior="ignore"),
            )
            columns = [column.combine_chunks() for column in table.columns]
            optional = {
                name: column.to_pylist()
                for name, column in zip(self._optional, columns[4:], strict=True)
                if column.null_count < n
            }
        except (pa.ArrowException, ValueError, OverflowError):
            return None
        content = columns[3]
        if table.num_rows != n or any(column.null_count for column in columns[:4]):
            return None
        start, ids, lens = content.offsets.to_numpy().astype(np.int64), content.values, None
        if ids.null_count:
            return None
        if self.kind == "segments":
            pairs = np.diff(ids.offsets.to_numpy())
            if (pairs != 2).any() or ids.values.null_count:
                return None
            flat = ids.values.to_numpy().reshape(-1, 2)
            ids, lens = flat[:, 0], np.ascontiguousarray(flat[:, 1])
        else:
            ids = ids.to_numpy()
        time, prompt, output = (column.to_numpy() for column in columns[:3])
        return Rows(np.arange(before + 1, before + n + 1), time, prompt, output, start, ids, lens, optional)

    def _parse_slowly(self, before: int, lines: Sequence[bytes]) -> Rows:
        """Parse line by line: raises the error that says what is wrong where."""
        kind = self.kind
        numbers: list[int] = []
        columns: list[list[Any]] = [[], [], []]
        counts: list[int] = []
        ids: list[Any] = []
        optional: dict[str, list[Any]] = {name: [] for name in self._optional}
        for number, line in enumerate(lines, before + 1):
            if not line.strip():
                continue
            row = self._object(number, line)
            numbers.append(number)
            columns[0].append(self._field(row, TIME[kind], number, is_real, "a finite number"))
            for column, name in zip(columns[1:], ("input_length", "output_length"), strict=True):
                column.append(self._field(row, name, number, is_whole, "a whole number"))
            wanted, check = (
                ("a list of whole numbers of at most 64 bits", _all_ids)
                if kind == "mooncake"
                else ("a list of pairs [id, length] of whole numbers", _all_pairs)
            )
            content = self._field(row, CONTENT[kind], number, check, wanted)
            counts.append(len(content))
            ids += content
            for name in self._optional:
                value = row.get(name)
                if value is not None:
                    self._field(row, name, number, *_KIND_OF.get(name, _NAME))
                optional[name].append(value)
        self._learn(optional)
        flat, lens = ids, None
        if kind == "segments":
            flat, lens = [pair[0] for pair in ids], np.array([pair[1] for pair in ids], np.int64)
        small = all(-(2**63) <= i < 2**63 for i in flat)
        return Rows(
            np.array(numbers, np.int64),
            np.array(columns[0], np.float64),
            np.array(columns[1], np.int64),
            np.array(columns[2], np.int64),
            np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64),
            np.array(flat, np.int64 if small else object),
            lens,
            {name: values for name, values in optional.items() if any(v is not None for v in values)},
        )

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        return parse_object(f"{self.path}, line {number}", line, self._known)

    def _field(
        self, row: dict[str, Any], name: str, number: int, check: Callable[[Any], bool], wanted: str
    ) -> Any:
        if name not in row:
            near = "; set workload.format if the trace is of another kind"
            raise self._error(number, f"{name} is missing", f"a row has {self._fields()}{near}")
        if not check(row[name]):
            raise self._error(number, f"{name} is {short(row[name])}", f"it must be {wanted}")
        return row[name]

    def _fields(self) -> str:
        kind = self.kind
        return f"{TIME[kind]}, input_length, output_length and {CONTENT[kind]}"

    def _error(self, number: int, problem: str, remedy: str) -> WorkloadError:
        return WorkloadError(f"{self.path}, line {number}: {problem}: {remedy}")


def is_whole(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def is_real(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN


def is_name(value: Any) -> bool:
    return type(value) is str or is_whole(value)


def _arrow_type(name: str, kind: type) -> pa.DataType:
    return pa.list_(_ARROW_TYPES[kind]) if name == ITEMS else _ARROW_TYPES[kind]


def _are_items(value: Any) -> bool:
    return type(value) is list and all(one is None or is_name(one) for one in value)


def _all_ids(value: Any) -> bool:
    return type(value) is list and all(type(i) is int and -(2**63) <= i < 2**64 for i in value)


def _all_pairs(value: Any) -> bool:
    return type(value) is list and all(_all_ids(p) and len(p) == 2 and is_whole(p[1]) for p in value)


# What an optional field must be: how it is checked, and how that is said.
_NAME = (is_name, "a string or a whole number")
_KIND_OF = dict.fromkeys(NUMBERS, (is_whole, "a whole number")) | {
    ITEMS: (_are_items, "a list that has a name (a string or a whole number) or null for each segment")
}
