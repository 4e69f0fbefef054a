"""From the checked rows of a trace to requests: ids kept apart, segments laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim.request import Batch, Floats, Ints, make_batch
from workloads.content import Numbering, without_empty
from workloads.trace_rows import Rows

# Content ids of a trace stand for themselves from 0 up to here; others are numbered from here on,
# and content that the trace does not name counts down from -1: no two can ever meet.
PLAIN_IDS = 2**62


class Contents:
    """The numbers of a trace's contents; of several traces, if they mean the same by equal names.

    The placeholder tokens of a multimodal item are a content of their own for each identifier. As
    vLLM's block hashes cover the identifiers of all items that have a token in the block
    (v1/core/kv_cache_utils.generate_block_hash_extra_keys), that gives the same blocks.
    """

    def __init__(self) -> None:
        self.items: dict[int, tuple[int, str | int]] = {}  # number: the file's id, and the identifier
        self._numbers = Numbering(PLAIN_IDS)

    def numbers(self, ids: npt.NDArray[Any], items: list[Any]) -> Ints:
        """The number of each segment; `items` has an identifier or None for each, or is empty.

        Remembers what it has not met before.
        """
        odd = (ids < 0) | (ids >= PLAIN_IDS)
        if not odd.any() and not items:
            return ids.astype(np.int64, copy=False)
        numbers = ids.tolist()
        for i, one in enumerate(numbers):
            if items and items[i] is not None:
                numbers[i] = self._numbers((one, items[i]))
                self.items[numbers[i]] = (one, items[i])
            elif odd[i]:
                numbers[i] = self._numbers(one)
        return np.array(numbers, np.int64)


class BatchBuilder:
    """Builds Batches from a trace's rows, and remembers which number stands for which name."""

    def __init__(self, block: int | None, output_len: int | None, contents: Contents) -> None:
        self._block = block
        self._output_len = output_len
        self._contents = contents
        self._fresh = 0
        self._sessions = Numbering()
        self._loras = Numbering(1)
        self._namespaces = Numbering(1)
        self.empty_outputs = 0  # requests whose output_length 0 became 1
        self.num_items = 0  # multimodal ones

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
        items = _items_of(rows)
        self.num_items += sum(item is not None for item in items)
        ids[given] = self._contents.numbers(rows.ids, items)
        ids[last] = np.arange(-1 - self._fresh, -1 - self._fresh - n, -1)
        self._fresh += n
        if self._block is not None:
            lens[:] = self._block
            named = counts * self._block
            partial = named > rows.prompt_len  # the last id stands for less than a block
            lens[last[partial] - 1] -= (named - rows.prompt_len)[partial]
            lens[last] = rows.prompt_len + output - np.minimum(named, rows.prompt_len)
            return start, ids, lens
        assert rows.lens is not None
        # The trace's segments as far as the output goes; what is longer than recorded is new.
        kept = rows.prompt_len + np.minimum(output, rows.output_len)
        ends = np.concatenate([[0], np.cumsum(rows.lens)])
        begin = ends[:-1] - np.repeat(ends[rows.start[:-1]], counts)
        lens[given] = np.clip(np.repeat(kept, counts) - begin, 0, rows.lens)
        lens[last] = rows.prompt_len + output - np.minimum(kept, np.diff(ends[rows.start]))
        return without_empty(start, ids, lens)

    def _names(self, optional: dict[str, list[Any]]) -> dict[str, Any]:
        columns: dict[str, Any] = {}
        if "priority" in optional:
            columns["priority"] = [priority or 0 for priority in optional["priority"]]
        for name in ("n", "beam_width"):
            if name in optional:
                columns[name] = [1 if count is None else count for count in optional[name]]
        if "session_id" in optional:
            columns["session_id"] = [-1 if s is None else self._sessions(s) for s in optional["session_id"]]
        if "prefix_group" in optional:
            columns["prefix_group"] = optional["prefix_group"]
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


def _items_of(rows: Rows) -> list[Any]:
    """The identifier of each segment that is a multimodal item, None for the others; empty without any."""
    counts = np.diff(rows.start).tolist()
    of_rows = rows.optional.get("mm", [])
    return [item for items, count in zip(of_rows, counts, strict=False) for item in items or [None] * count]
