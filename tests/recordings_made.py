"""Recordings that tests make and read: golden cases written down, a small one, and `prefixsim verify`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import recorded
from recorded import Line
from typer.testing import CliRunner

from sim.cli import app
from sim.core import EngineConfig
from sim.verify import scheduler as scheduler_module
from sim.verify.contents import crc
from sim.verify.scheduler import replay_scheduler

HERE = Path(__file__).parent
MEASURED = {path.name.partition(".")[0]: path for path in sorted((HERE / "measured").glob("*.json.gz"))}


def verify(*files: Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, files)])


def refused(path: Path, *words: str) -> str:
    """Whatever reads it refuses a file, in one line."""
    result = verify(path)
    assert result.exit_code == 2, result.output
    (line,) = [text for text in result.stderr.splitlines() if "compiling" not in text]
    assert line.startswith(f"prefixsim: {path}: ") and len(line) < 500, line
    for word in words:
        assert word in line, line
    return line


def golden_cases(file: str) -> list[Any]:
    data: Any = json.loads(gzip.decompress((HERE / "golden" / f"{file}.json.gz").read_bytes()))
    return data["cases"]  # type: ignore[no-any-return]


def golden_case(name: str) -> Any:
    files = ("golden_scheduler_targeted", "golden_scheduler_resets", "golden_scheduler")
    return next(case for file in files for case in golden_cases(file) if case["name"] == name)


def written(case: Any, monkeypatch: pytest.MonkeyPatch, form: str = "hashed") -> list[dict[str, Any]]:
    """The lines of a recording of what vLLM decided in a golden case."""
    monkeypatch.setattr(scheduler_module, "SchedulerReplay", recorded.RecordingReplay)
    monkeypatch.setattr(recorded.RecordingReplay, "form", form)
    replay_scheduler(case)  # raises where vLLM decided otherwise
    return recorded.RecordingReplay.last.finished()


SMALL = "rand15"  # 9 requests in blocks of 1, one adapter at a time, preemptions, aborts, resets, stop tokens


def small_header(**effective: Any) -> Line:
    """A first line; blocks of 8, chunks of 4."""
    line: Line = json.loads(json.dumps(recorded.header_of(EngineConfig(8, 50, 64, 8, 400))))
    line["effective"] |= effective
    line["content"]["tokens"] = 4
    return line


def two_steps() -> list[Line]:
    """A request of 12 tokens that generates 2, in blocks of 8; then a reset."""
    ids = recorded.chunk_ids(range(14), 4)
    free = [2, *range(3, 50), 1]  # its last block has no hash, so it goes to the head
    return [
        {"add": 0, "t": 5, "id": "a", "arr": 1, "np": 12, "max": 2, "c": "".join(ids[:3])},
        {
            "s": [[0, 12, 0]],
            "i": 0,
            "t": [10, 11],
            "new": [[0, 0]],
            "nb": 2,
            "bcrc": crc([1, 2]),
            "fr": 47,
            "q": [1, 0],
        },
        {"u": 0, "t": [20, 21], "fr2": 47, "pcs": [1, 12, 0, 0, 0, 0]},
        {"s": [[0, 1, 12]], "i": 1, "t": [30, 31], "fr": 47, "q": [1, 0]},
        {"u": 1, "t": [40, 41], "fin": [0], "fr2": 49},
        {"o": 0, "t": 41, "n": 14},
        {"reset": True, "t": 45},
        {"end": True, "t": 50, "end_free": crc(free), "steps": 2},
    ]


def small_recording() -> list[Line]:
    """The lines of a short recording with nearly all that lines may say."""
    with pytest.MonkeyPatch.context() as patch:
        return written(golden_case(SMALL), patch)
