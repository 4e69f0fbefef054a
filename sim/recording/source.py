"""A recording as checked lines, whatever its version and however it ends."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sim.errors import InputError, describe
from sim.recording import v1
from sim.recording.header import V1, Header, header_of
from sim.recording.lines import KINDS, AddLine, AnyLine, Schedule, Triple
from sim.recording.text import chunks, text_lines

FIRST_FIELD = re.compile(rb'\s*\{\s*"(\w+)"\s*:')
HEAD = 1 << 16  # bytes in which a file says what it is
LOST = "lines are missing; record again"


class RecordingWarning(UserWarning):
    """A recording that ends before its server did."""


class Source(NamedTuple):
    """A recording, to be read as often as one likes."""

    path: Path
    header: Header
    unit: str  # what lines() numbers: "line" or "step"
    lines: Callable[[Iterable[str]], Iterator[tuple[int, AnyLine]]]  # numbered; of these first fields

    def error(self, number: int, what: str) -> InputError:
        """What is wrong there, in one line."""
        return InputError(f"{self.path}: {self.unit} {number}: {what}")


def schema_of(path: Path) -> str | None:
    """The `schema` near a file's beginning, None if there is none. InputError if it cannot be read."""
    head = b""
    for chunk in chunks(path):
        head += chunk
        if len(head) >= HEAD:
            break
    found = re.search(rb'"schema"\s*:\s*"([^"]*)"', head[:HEAD])
    return found[1].decode(errors="replace") if found else None


def read_header(path: Path | str) -> Header:
    """What a recording says of its server; InputError if it is none, or of an engine that is not modelled."""
    return open_recording(path).header


def read_names(path: Path) -> list[str]:
    """vLLM's ids of all requests, in order of arrival at the scheduler."""
    return [line.id for _, line in open_recording(path).lines(["add"]) if isinstance(line, AddLine)]


def open_recording(path: Path | str) -> Source:
    """A recording of either version; InputError as read_header."""
    path = Path(path)
    schema = schema_of(path)
    if schema is None:
        raise InputError(f'{path}: not a recording: it has no "schema"; give what the vLLM recorder wrote')
    return _open_v1(path) if schema == V1 else _open_v2(path)


def _open_v1(path: Path) -> Source:
    """A file of version 1, loaded whole."""
    try:
        document, cut = v1.parse(b"".join(chunks(path)).decode())
        if not isinstance(document, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not JSON, or cut off before its first step ({error}); copy the file again"
        ) from None
    header = header_of(document, path)

    def lines(kinds: Iterable[str]) -> Iterator[tuple[int, AnyLine]]:
        wanted = frozenset(kinds)
        number = 0
        try:
            for line in v1.retold(document, cut):
                kind = next(iter(line))
                if kind in wanted:
                    yield number, _checked(KINDS[kind], line, f"{path}: step {number}")
                number += kind == "u"
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise InputError(f"{path}: step {number}: malformed ({reason}); copy the file again") from None

    return Source(path, header, "step", lines)


def _open_v2(path: Path) -> Source:
    """A file of version 2, read as a stream."""
    first = next(text_lines(path), b"")
    header = header_of(_object(first, f"{path}: line 1"), path)

    def lines(kinds: Iterable[str]) -> Iterator[tuple[int, AnyLine]]:
        wanted = frozenset(kinds)
        before: list[Triple] = []  # what the last step scheduled
        scheduled = 0
        for number, line in enumerate(text_lines(path), 1):
            found = FIRST_FIELD.match(line)
            kind = found[1].decode() if found else ""
            if number == 1 or (kind in KINDS and kind not in wanted):
                continue
            where = f"{path}: line {number}"
            if not line.endswith(b"\n") and not _is_whole(line):
                break  # cut off
            data = _object(line, where)
            if kind not in KINDS:
                raise InputError(f"{where}: begins with none of the fields {', '.join(KINDS)}; record again")
            if kind == "s":
                if data.get("i") != scheduled:
                    raise InputError(f"{where}: step {data.get('i')} where {scheduled} is due: {LOST}")
                scheduled += 1
                data["s"] = expanded(data["s"], before)
            checked = _checked(KINDS[kind], data, where)
            yield number, checked
            if isinstance(checked, Schedule):
                before = checked.scheduled

    return Source(path, header, "line", lines)


def expanded(scheduled: Any, before: Sequence[Triple]) -> Any:
    """A step's list of requests in full; what is not a list of the expected kind is left for the check.

    An entry that is a number refers to the list of the step before: k > 0, its next k requests decode another
    token; k < 0, its next -k are not in this step, as are those left over at the end.
    """
    if not isinstance(scheduled, list):
        return scheduled
    full: list[Any] = []
    at = 0
    for entry in scheduled:
        if type(entry) is not int or abs(entry) > len(before) - at:
            full.append(entry)
            continue
        if entry > 0:
            full += [(row, 1, computed + new) for row, new, computed in before[at : at + entry]]
        at += abs(entry)
    return full


def _checked(kind: type[AnyLine], data: dict[str, Any], where: str) -> AnyLine:
    """A line with its fields; InputError at the first that cannot be used."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, kind, data, lambda _: where)) from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); copy the file again") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: should be an object, not {str(data)[:40]}; copy the file again")
    return data


def _is_whole(line: bytes) -> bool:
    """Whether a line without an end is one nevertheless."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def warn_of_the_end(path: Path, steps: int, reason: str) -> None:
    """Tell that a recording has no last line, and why if it says so."""
    why = (
        f"the recorder gave up: {reason}"
        if reason
        else "the server was killed or still runs, or it is a part"
    )
    warnings.warn(
        f"{path}: cut off ({why}): read up to its last whole step, {steps} steps in all",
        RecordingWarning,
        stacklevel=3,
    )
