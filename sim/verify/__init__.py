"""Replay recorded decisions of the real vLLM through the core, and report the first difference."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.errors import InputError
from sim.verify.compare import Mismatch

KINDS = ("manager", "scheduler", "hashes")


def read_recording(path: Path) -> dict[str, Any]:
    """A recording, .json or .json.gz; InputError if it cannot be read or is none."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        recording = json.loads(data)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or 'the gzip stream is damaged'}") from None
    except (EOFError, zlib.error):
        raise InputError(f"{path}: the gzip stream is cut off or damaged; copy the file again") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); give a recording, .json or .json.gz") from None
    from sim.verify.engine_run import SCHEMA

    if isinstance(recording, dict) and (
        (recording.get("kind") in KINDS and is_list_of_mappings(recording.get("cases")))
        or recording.get("schema") == SCHEMA
    ):
        return recording
    kinds = ", ".join(KINDS)
    raise InputError(f'{path}: not a recording; it needs "kind" ({kinds}) or "schema" ({SCHEMA})')


def is_list_of_mappings(value: object) -> bool:
    """Whether a part of a recording is what `cases` should be."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def cases(recording: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The name and the replay of each case of a recording."""
    if "schema" in recording:
        from sim.verify.engine_run import replay_engine_run

        yield str(recording.get("name")), lambda: replay_engine_run(recording)
        return
    for case in recording["cases"]:
        yield str(case.get("name")), replay_of(recording, case)


def replay_of(recording: dict[str, Any], case: dict[str, Any]) -> Callable[[], None]:
    """How a case of this kind is replayed."""
    if recording["kind"] == "hashes":
        from sim.verify.hashes import replay_hashes

        return lambda: replay_hashes(case, recording["by_seed"])
    if recording["kind"] == "manager":
        from sim.verify.manager import replay_manager

        return lambda: replay_manager(case)
    from sim.verify.scheduler import replay_scheduler

    return lambda: replay_scheduler(case)


def replay_file(path: Path) -> Iterator[tuple[str, str | None]]:
    """Replay a recording; yields each case's name and its first difference, None where there is none.

    InputError if the file is no recording, or a case lacks what its kind needs.
    """
    for name, replay in cases(read_recording(path)):
        try:
            replay()
        except Mismatch as mismatch:
            yield name, str(mismatch)
        except Exception as error:  # a value of a wrong kind may surface anywhere, even in the compiler
            reason = str(error).partition("\n")[0]
            raise InputError(f"{path}: case {name}: malformed ({type(error).__name__}: {reason})") from error
        else:
            yield name, None


def main(files: Sequence[Path]) -> int:
    """Replay recordings, print the first difference of each failing case; 1 if there was any."""
    recordings = [Path(file) for file in files]
    for path in recordings:  # all are readable before the first minutes are spent
        if not path.is_file():
            raise InputError(f"{path}: no such file; give recordings, .json or .json.gz")
    total = mismatches = 0
    for path in recordings:
        for name, difference in replay_file(path):
            total += 1
            if difference is not None:
                mismatches += 1
                print(f"{path}: {name}: {difference}")
            elif sys.stderr.isatty():
                print(f"\r{total} cases", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{total} cases, {mismatches} mismatches")
    return int(mismatches > 0)
