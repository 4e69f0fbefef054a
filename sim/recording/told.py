"""What a recording warns of, as lines to show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sim.recording.source import RecordingWarning
from sim.told import told_warnings


@contextlib.contextmanager
def told_by_recording(told: list[str]) -> Iterator[None]:
    """Collect in `told` what recordings that are read in the block warn of, each text once."""
    found: list[str] = []
    with told_warnings(RecordingWarning, found):
        yield
    told.extend(text for text in dict.fromkeys(found) if text not in told)
