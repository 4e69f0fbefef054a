"""What a recording warns of, as lines to show."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from sim.recording.source import RecordingWarning


@contextlib.contextmanager
def told_by_recording(told: list[str]) -> Iterator[None]:
    """Collect in `told` what recordings that are read in the block warn of, each text once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        yield
    for one in caught:
        if not issubclass(one.category, RecordingWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif (text := str(one.message)) not in told:
            told.append(text)
