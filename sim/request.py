"""Requests as columns: what a workload hands to the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OWN = 2**62 + 2**61  # segment ids from here up: what requests have of their own, under names that last
ABORTED = 2  # in a record's `refused`: ended from outside, before its first token; 1: it can never run


class Batch(NamedTuple):
    """A run of n requests in arrival order, as columns.

    A request's tokens (prompt, then output) are the concatenation of its segments: row i owns
    `segment_id[segment_start[i]:segment_start[i + 1]]`. Equal segment ids name equal token
    sequences, the shorter one a prefix of the longer; different ids name sequences that differ
    in their first token. A negative id is one request's own: nothing else names its tokens, so
    no history of them is kept. No token exists anywhere.
    """

    arrival_time: Floats  # seconds, not decreasing; ignored by a closed loop
    prompt_len: Ints  # tokens, at least 1
    output_len: Ints  # tokens the model will emit, at least 1
    max_tokens: Ints  # the request's limit; above output_len: it ends by a stop token
    priority: Ints  # smaller is more urgent
    namespace: Ints  # one number for each distinct (LoRA, cache_salt); 0: neither
    lora: Ints  # adapter number, 0: none
    session_id: Ints  # -1: none
    tenant: Ints  # -1: none
    prefix_group: Ints  # -1: none
    n: Ints  # answers to the prompt, sampled apart: 1, or parallel sampling
    beam_width: Ints  # candidates of a beam search, 1: none; not above 1 beside an n above 1
    segment_start: Ints  # n + 1 row starts into the two below
    segment_id: Ints
    segment_len: Ints  # tokens; a request's sum is prompt_len + output_len


ROWS = tuple(name for name in Batch._fields if not name.startswith("segment_"))  # one entry a request


def named(segment_id: Ints) -> Ints:
    """The ids with names for what requests have of their own, equal names in equal runs."""
    return np.where(segment_id < 0, OWN - 1 - segment_id, segment_id)


def make_batch(
    arrival_time: npt.ArrayLike,
    prompt_len: npt.ArrayLike,
    output_len: npt.ArrayLike,
    segment_start: npt.ArrayLike,
    segment_id: npt.ArrayLike,
    segment_len: npt.ArrayLike,
    **optional: npt.ArrayLike,
) -> Batch:
    """Build a Batch; `optional` names its other columns (arrays or scalars).

    Defaults: max_tokens = output_len, priority = namespace = lora = 0, n = beam_width = 1, the rest
    -1. The columns are checked for shape and for segments that add up to the request's tokens.
    """
    arrival = np.ascontiguousarray(arrival_time, np.float64)

    def column(value: Any) -> Ints:
        return np.ascontiguousarray(np.broadcast_to(np.asarray(value, np.int64), len(arrival)))

    prompt, output = column(prompt_len), column(output_len)
    defaults: dict[str, Any] = {
        "max_tokens": output, "priority": 0, "namespace": 0, "lora": 0,
        "session_id": -1, "tenant": -1, "prefix_group": -1, "n": 1, "beam_width": 1,
    }  # fmt: skip
    assert not set(optional) - set(defaults), f"unknown columns: {set(optional) - set(defaults)}"
    starts = np.ascontiguousarray(segment_start, np.int64)
    lens = np.ascontiguousarray(segment_len, np.int64)
    totals = np.diff(np.concatenate([[0], np.cumsum(lens)])[starts])
    assert np.array_equal(totals, prompt + output), "segments do not add up to prompt + output"
    return Batch(
        arrival_time=arrival,
        prompt_len=prompt,
        output_len=output,
        segment_start=starts,
        segment_id=np.ascontiguousarray(segment_id, np.int64),
        segment_len=lens,
        **{name: column(optional.get(name, value)) for name, value in defaults.items()},
    )


class Session(NamedTuple):
    """Requests of which some wait for the ends of others: a dialogue, an agent, a tree of thoughts."""

    start: float  # seconds, not decreasing from session to session; ignored by a closed loop
    requests: Batch  # its arrival times are ignored
    after: tuple[tuple[int, ...], ...]  # of each, the earlier rows whose ends it waits for; (): the start
    delay: Floats  # seconds from then to its arrival


Batches = Iterator[Batch]
