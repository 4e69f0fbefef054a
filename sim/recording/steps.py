"""A recording's steps as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from sim.recording.calls import Add, calls
from sim.recording.lines import OutputLine, Schedule, Update
from sim.recording.progress import Lengths

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Steps(NamedTuple):
    """Row i is step i, also where it is empty; those that were scheduled and never updated are left out.

    Times in seconds since the recording began. The sums are those of sim.cost.gpu_time: a sequence with
    one token is a decode, over a KV length that counts this token; others are prefills of q tokens over c.
    """

    schedule_start: Floats
    schedule_end: Floats
    update_start: Floats
    update_end: Floats
    num_tokens: Ints
    num_seqs: Ints
    num_outputs: Ints  # sampled tokens
    num_decodes: Ints
    decode_kv: Ints
    num_prefills: Ints
    prefill_tokens: Ints  # sum of q
    prefill_squares: Ints  # sum of q * q
    prefill_cross: Ints  # sum of q * c
    prefill_context: Ints  # sum of c
    sum_kv: Ints  # KV lengths of all sequences, the new tokens included
    pairs: Ints  # of a query and a key it attends to
    running: Ints  # after schedule
    waiting: Ints
    free: Ints  # blocks, after schedule
    free_after: Ints  # after update
    num_preempted: Ints
    num_admitted: Ints  # first admissions and those after a preemption
    hit_tokens: Ints  # of all admissions
    num_ended: Ints
    prefix_cache_queries: Ints  # of first admissions, as vLLM counts them (at the update)
    prefix_cache_hits: Ints
    worker_cpu: Floats  # of the worker during the step; NaN but in version 1
    worker_wait: Floats  # how long the worker was ready and waited for a processor
    engine_wait: Floats  # how long the scheduler's process did


SCHEDULED = (
    "num_tokens", "num_seqs", "num_outputs", "num_decodes", "decode_kv", "num_prefills", "prefill_tokens",
    "prefill_squares", "prefill_cross", "prefill_context", "sum_kv", "pairs",
)  # fmt: skip


def read_steps(path: Path | str) -> Steps:
    """The steps of a recording; InputError if it is none."""
    rows: list[tuple[Any, ...]] = []
    lengths = Lengths()
    scheduled: dict[int, tuple[Schedule, tuple[int, ...]]] = {}
    for call in calls(path):
        if isinstance(call, Add):
            lengths.add(call)
        elif isinstance(call, OutputLine):
            del lengths.length[call.row]
        elif isinstance(call, Schedule):
            scheduled[call.step] = (call, shape(call, len(lengths.sampled(call))))
        elif isinstance(call, Update):
            rows.append(_row(*scheduled.pop(call.step), call))
    columns = np.array(rows, np.float64).reshape(len(rows), len(Steps._fields)).T
    kinds = get_type_hints(Steps)
    typed: Any = (
        column if kinds[name] == Floats else column.astype(np.int64)
        for name, column in zip(Steps._fields, columns, strict=True)
    )
    return Steps(*typed)


def shape(schedule: Schedule, num_outputs: int) -> tuple[int, ...]:
    """The sums of a step, in the order of SCHEDULED."""
    tokens = decodes = decode_kv = prefills = prefill = squares = cross = context = pairs = 0
    for _, new, computed in schedule.scheduled:
        tokens += new
        pairs += new * computed + new * (new + 1) // 2
        if new == 1:
            decodes += 1
            decode_kv += computed + 1
        else:
            prefills += 1
            prefill += new
            squares += new * new
            cross += new * computed
            context += computed
    sum_kv = decode_kv + prefill + context
    return (
        tokens, decodes + prefills, num_outputs, decodes, decode_kv, prefills, prefill, squares, cross,
        context, sum_kv, pairs,
    )  # fmt: skip


def _row(schedule: Schedule, sums: tuple[int, ...], update: Update) -> tuple[Any, ...]:
    times = [stamp * 1e-6 for stamp in (*schedule.t, *update.t)]
    admitted = [*schedule.new, *schedule.res]
    waits = [stamp * 1e-6 for stamp in update.w] if update.w else [np.nan] * 3
    return (
        *times, *sums, *schedule.q, schedule.fr, update.fr2, len(schedule.pre), len(admitted),
        sum(hit for _, hit in admitted), len(update.fin), update.pcs[1], update.pcs[2], *waits,
    )  # fmt: skip
