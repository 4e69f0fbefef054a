"""Replay recorded decisions of the real vLLM through the core, and report the first difference."""

from __future__ import annotations

import gzip
import json
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sim.errors import InputError
from sim.out_file import reason
from sim.recording.source import RecordingWarning, schema_of
from sim.verify.compare import Mismatch

KINDS = ("manager", "scheduler", "hashes")


class Case(NamedTuple):
    """A recorded case, replayed."""

    name: str  # of the case; of a server's recording: its file
    difference: Mismatch | None
    steps: int | None = None  # of a server's recording, 0 where it differs


def read_cases(path: Path) -> dict[str, Any]:
    """A file of recorded cases, .json or .json.gz; InputError if it cannot be read or is none."""
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        recording = json.loads(data)
    except OSError as error:
        raise InputError(
            f"{path}: {reason(error) if error.errno else 'the gzip stream is damaged'}"
        ) from None
    except (EOFError, zlib.error):
        raise InputError(f"{path}: the gzip stream is cut off or damaged; copy the file again") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); give a recording") from None
    if (
        isinstance(recording, dict)
        and recording.get("kind") in KINDS
        and isinstance(recording.get("cases"), list)
        and all(isinstance(item, dict) for item in recording["cases"])
    ):
        return recording
    raise InputError(
        f'{path}: not a recording; it needs "schema", or "kind" ({", ".join(KINDS)}) and "cases"'
    )


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


def replay_file(path: Path) -> Iterator[Case]:
    """Replay a recording or a file of recorded cases; yields each case with its first difference.

    InputError if the file is neither, or a case lacks what its kind needs.
    """
    if schema_of(path) is not None:
        from sim.verify.engine_run import replay_recording

        try:
            progress = count_steps if sys.stderr.isatty() else None
            yield Case(str(path), None, replay_recording(path, progress))
        except Mismatch as mismatch:
            yield Case(str(path), mismatch, 0)
        return
    recording = read_cases(path)
    for case in recording["cases"]:
        name = str(case.get("name"))
        try:
            replay_of(recording, case)()
        except Mismatch as mismatch:
            yield Case(name, mismatch)
        except Exception as error:  # a value of a wrong kind may surface anywhere, even in the compiler
            what = str(error).partition("\n")[0]
            raise InputError(f"{path}: case {name}: malformed ({type(error).__name__}: {what})") from error
        else:
            yield Case(name, None)


def count_steps(steps: int) -> None:
    """Show how far a replay is."""
    if steps % 1000 == 0:
        print(f"\r{steps} steps", end="", file=sys.stderr, flush=True)


def main(files: Sequence[Path], as_json: bool = False) -> int:
    """Replay recordings and print the first difference of each failing case; 1 if there was any.

    A server's recording has a line also where it agrees. With `as_json` one JSON object says it all.
    """
    recordings = [Path(file) for file in files]
    for path in recordings:  # all are readable before the first minutes are spent
        if not path.is_file():
            raise InputError(f"{path}: no such file; give recordings, plain or gzipped")
    found: list[dict[str, Any]] = []
    total = mismatches = 0
    for path in recordings:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RecordingWarning)
            for case in replay_file(path):
                total += 1
                mismatches += case.difference is not None
                if case.steps is not None and sys.stderr.isatty():
                    print("\r", end="", file=sys.stderr)
                for warning in told:
                    print(f"prefixsim: {warning.message}", file=sys.stderr)
                if as_json:
                    found.append(as_dict(path, case))
                elif case.difference is not None:
                    place = "" if case.name == str(path) else f"{case.name}: "
                    print(f"{path}: {place}{case.difference}")
                elif case.steps is not None:
                    print(f"{path}: {case.steps} steps, 0 differences")
                elif sys.stderr.isatty():
                    print(f"\r{total} cases", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        print(json.dumps({"cases": total, "mismatches": mismatches, "results": found}))
    else:
        print(f"{total} cases, {mismatches} mismatches")
    return int(mismatches > 0)


def as_dict(path: Path, case: Case) -> dict[str, Any]:
    """A replayed case for `--format json`."""
    shown: dict[str, Any] = {
        "path": str(path),
        "name": case.name,
        "steps": case.steps,
        "first_difference": None,
    }
    if case.difference is not None:
        one = case.difference
        shown["first_difference"] = {
            "step": one.step, "field": one.field, "recorded": one.recorded, "replayed": one.replayed
        }  # fmt: skip
    return shown
