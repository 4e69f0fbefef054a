"""Recordings of a real vLLM: what its scheduler decided and how long its steps took, read back.

    read_header(path)    the server: versions, settings
    calls(path)          the calls of its scheduler in order, as a stream
    read_requests(path)  a row a request: lengths, times, contents
    read_steps(path)     a row a step: times, sizes, queues, free blocks

Two formats are read, docs/recordings.md has every field: `prefixsim_recording/2`, lines that the
recorder writes while the server runs (sim/integrations/vllm_recorder.py), and `vllm_cpu_truth/1`,
one object a file. What is no recording, or one of an engine that is not modelled, is an InputError of one
line; one that was cut off is read up to its last whole step, with a RecordingWarning.
"""

from __future__ import annotations

from sim.recording.calls import Add, Call, calls
from sim.recording.header import Header
from sim.recording.lines import Abort, End, OutputLine, Reset, Schedule, Update
from sim.recording.requests import Requests, read_requests
from sim.recording.source import RecordingWarning, read_header
from sim.recording.steps import Steps, read_steps

__all__ = [
    "Abort",
    "Add",
    "Call",
    "End",
    "Header",
    "OutputLine",
    "RecordingWarning",
    "Requests",
    "Reset",
    "Schedule",
    "Steps",
    "Update",
    "calls",
    "read_header",
    "read_requests",
    "read_steps",
]
