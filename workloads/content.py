"""Segments: which tokens requests have in common, without any token.

Ids from 0 up name content that requests may share. Ids below 0 name a request's own content,
which no other request ever names.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
import numpy.typing as npt

from sim.request import Batch, Floats, Ints, make_batch


class Numbering:
    """Small numbers for values, in the order in which they are first seen."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        """Return the value's number, a new one if it has none. Modifies the numbering.

        1 and "1" are different values; so are True and 1.
        """
        return self._numbers.setdefault((type(value), value), self._first + len(self._numbers))


def chunk_counts(total: int, chunk: int) -> Iterator[int]:
    """Cut `total` requests into chunks: `chunk`, `chunk`, …, the rest."""
    for done in range(0, total, chunk):
        yield min(chunk, total - done)


def without_empty(start: Ints, ids: Ints, lens: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the segments without those of no token; `start` holds the n + 1 row starts."""
    if lens.all():
        return start, ids, lens
    kept = lens > 0
    return np.concatenate([[0], np.cumsum(kept)])[start], ids[kept], lens[kept]


def prefixed_batch(
    arrival_time: Floats,
    shared_id: Ints,
    shared_len: Ints,
    suffix_len: Ints,
    output_len: Ints,
    prefix_group: npt.ArrayLike,
    first: int,
    **optional: npt.ArrayLike,
) -> Batch:
    """Build requests of s segments that others may have too, and an own rest (suffix and output).

    `shared_id` and `shared_len` have shape (n, s), all others one entry a request; `first` is the
    number of the first request in its workload, which names the own segments; `optional` is make_batch's.
    """
    n, s = shared_id.shape
    ids, lens = np.empty((n, s + 1), np.int64), np.empty((n, s + 1), np.int64)
    ids[:, :s], ids[:, s] = shared_id, own_ids(first, n)
    lens[:, :s], lens[:, s] = shared_len, suffix_len + output_len
    start = np.arange(0, (s + 1) * n + 1, s + 1)
    start, flat_ids, flat_lens = without_empty(start, ids.ravel(), lens.ravel())
    prompt_len = shared_len.sum(axis=1) + suffix_len
    segments = start, flat_ids, flat_lens
    return make_batch(arrival_time, prompt_len, output_len, *segments, prefix_group=prefix_group, **optional)


def own_ids(first: int, n: int) -> Ints:
    """Return the ids of n requests' own segments, which no other request has: -1 - first, and down."""
    return np.arange(-1 - first, -1 - first - n, -1)


def pooled_batches(
    arrivals: Iterator[Floats],
    draw: Callable[[int], tuple[Ints, Ints]],
    *,
    item_len: Ints,
    system_prompt_len: int,
    draw_question: Callable[[int], Ints],
    draw_output: Callable[[int], Ints],
    **optional: npt.ArrayLike,
) -> Iterator[Batch]:
    """Yield requests of a system prompt, items of a pool, and a question of their own.

    `draw(n)` gives n requests' prefix groups, and their items by number, a row each, in the order
    of the prompt; `item_len` is in tokens by number, `optional` make_batch's.
    """
    done = 0
    for times in arrivals:
        n = len(times)
        group, chosen = draw(n)
        yield prefixed_batch(
            times,
            shared_id=np.insert(1 + chosen, 0, 0, axis=1),  # 0: the system prompt
            shared_len=np.insert(item_len[chosen], 0, system_prompt_len, axis=1),
            suffix_len=draw_question(n),
            output_len=draw_output(n),
            prefix_group=group,
            first=done,
            **optional,
        )
        done += n
