"""From the rows of a trace to requests: values checked, ids kept apart, segments laid out."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.request import Batch, Floats, Ints, make_batch
from workloads.content import Numbering, without_empty
from workloads.errors import WorkloadError
from workloads.jsonl import TIME, Format, Rows
from workloads.lengths import MAX_LEN

Bools = npt.NDArray[np.bool_]

# Content ids of a trace stand for themselves from 0 up to here; others are numbered from here on,
# and content that the trace does not name counts down from -1: no two can ever meet.
PLAIN_IDS = 2**62


def check(path: str, kind: Format, rows: Rows, block: int | None, previous: float | None) -> None:
    """Raise WorkloadError for the first row whose values are impossible. Changes nothing.

    `block` is the tokens a hash id stands for (mooncake); `previous` the time of the row before,
    None where times need not be in order.
    """
    time, prompt, output, counts = rows.time, rows.prompt_len, rows.output_len, np.diff(rows.start)
    found: list[tuple[int, str]] = []

    def expect(good: Bools, problem: Callable[[int], str], remedy: str) -> None:
        if not good.all():
            row = int(np.argmin(good))
            found.append((row, f"{problem(row)}: {remedy}"))

    name = TIME[kind]
    expect(
        np.isfinite(time) & (time >= 0),
        lambda i: f"{name} is {time[i]:g}",
        f"it must be a finite number of {'ms' if kind == 'mooncake' else 's'}, from 0",
    )
    if previous is not None:
        before = np.concatenate([[previous], time[:-1]])
        expect(
            ~(time < before),
            lambda i: f"{name} {time[i]:.15g} comes after {before[i]:.15g}",
            "sort the file by time, or set workload.arrival to constant",
        )
    in_range = f"it must be a number of tokens from %d to {MAX_LEN}"
    expect((prompt >= 1) & (prompt <= MAX_LEN), lambda i: f"input_length is {prompt[i]}", in_range % 1)
    expect((output >= 0) & (output <= MAX_LEN), lambda i: f"output_length is {output[i]}", in_range % 0)
    if block is not None:
        needed = -(-prompt // block)
        expect(
            counts == needed,
            lambda i: (
                f"hash_ids has {counts[i]} ids, but {prompt[i]} tokens at {block} an id need {needed[i]}"
            ),
            "mend the row, or set workload.trace_block_size",
        )
        sizes = rows.optional.get("block_size", [])
        expect(
            np.array([size in (None, block) for size in sizes], np.bool_),
            lambda i: f"block_size is {sizes[i]}, not {block} as before",
            "a trace has one block size: split it, or set workload.trace_block_size",
        )
    if rows.lens is not None:
        lens = rows.lens
        wrong = np.cumsum((lens < 1) | (lens > MAX_LEN))
        expect(
            np.diff(np.concatenate([[0], wrong])[rows.start]) == 0,
            lambda i: f"segments has lengths {lens[rows.start[i] : rows.start[i + 1]][:8].tolist()}",
            in_range % 1,
        )
        totals = np.diff(np.concatenate([[0], np.cumsum(lens)])[rows.start])
        expect(
            totals == prompt + output,
            lambda i: (
                f"segments has {totals[i]} tokens, not input_length + output_length = {prompt[i] + output[i]}"
            ),
            "mend the row",
        )
    salts = rows.optional.get("cache_salt", [])
    expect(
        np.array([salt != "" for salt in salts], np.bool_),
        lambda i: "cache_salt is empty",
        "leave it out, or write null",
    )
    if found:
        row, problem = min(found, key=itemgetter(0))
        raise WorkloadError(f"{path}, line {rows.line[row]}: {problem}")


class BatchBuilder:
    """Builds Batches from a trace's rows, and remembers which number stands for which name."""

    def __init__(self, block: int | None, output_len: int | None) -> None:
        self._block = block
        self._output_len = output_len
        self._odd_ids = Numbering(PLAIN_IDS)
        self._fresh = 0
        self._sessions = Numbering()
        self._loras = Numbering(1)
        self._namespaces = Numbering(1)
        self.empty_outputs = 0  # requests whose output_length 0 became 1

    def build(self, rows: Rows, arrival_time: Floats) -> Batch:
        """Return the checked rows as requests that arrive at the given times."""
        n = len(rows.line)
        output = rows.output_len
        if self._output_len is not None:
            output = np.full(n, self._output_len, np.int64)
        elif not output.all():
            self.empty_outputs += int((output == 0).sum())
            output = np.maximum(output, 1)
        start, ids, lens = self._segments(rows, output)
        return make_batch(
            arrival_time, rows.prompt_len, output, start, ids, lens, **self._names(rows.optional)
        )

    def _segments(self, rows: Rows, output: Ints) -> tuple[Ints, Ints, Ints]:
        """Return (starts, ids, lengths): each row's own segments, then one that is only its own."""
        n, counts = len(rows.line), np.diff(rows.start)
        start = rows.start + np.arange(n + 1)
        last = start[1:] - 1
        given = np.ones(start[-1], np.bool_)
        given[last] = False
        ids, lens = np.empty(len(given), np.int64), np.empty(len(given), np.int64)
        ids[given] = self._content_ids(rows.ids)
        ids[last] = np.arange(-1 - self._fresh, -1 - self._fresh - n, -1)
        self._fresh += n
        if self._block is not None:
            lens[:] = self._block
            lens[last - 1] = rows.prompt_len - self._block * (counts - 1)
            lens[last] = output
            return start, ids, lens
        assert rows.lens is not None
        # The trace's segments as far as the output goes; what is longer than recorded is new.
        kept = rows.prompt_len + np.minimum(output, rows.output_len)
        begin = np.cumsum(rows.lens) - rows.lens
        begin -= np.repeat(begin[rows.start[:-1]], counts)
        lens[given] = np.clip(np.repeat(kept, counts) - begin, 0, rows.lens)
        lens[last] = rows.prompt_len + output - kept
        return without_empty(start, ids, lens)

    def _content_ids(self, ids: npt.NDArray[Any]) -> Ints:
        odd = (ids < 0) | (ids >= PLAIN_IDS)
        if not odd.any():
            return ids.astype(np.int64, copy=False)
        pairs = zip(ids.tolist(), odd.tolist(), strict=True)
        return np.array([self._odd_ids(one) if is_odd else one for one, is_odd in pairs], np.int64)

    def _names(self, optional: dict[str, list[Any]]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if "priority" in optional:
            columns["priority"] = [priority or 0 for priority in optional["priority"]]
        if "session_id" in optional:
            columns["session_id"] = [-1 if s is None else self._sessions(s) for s in optional["session_id"]]
        if "lora" in optional or "cache_salt" in optional:
            none = [None] * max(map(len, optional.values()))
            names, salts = optional.get("lora", none), optional.get("cache_salt", none)
            loras = [0 if name in (None, 0) else self._loras(name) for name in names]
            columns["lora"] = loras
            columns["namespace"] = [
                0 if lora == 0 and salt is None else self._namespaces((lora, type(salt), salt))
                for lora, salt in zip(loras, salts, strict=True)
            ]
        return columns
