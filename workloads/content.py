"""Segments: which tokens requests have in common, without any token."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

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
    arrival_time: Floats, group: Ints, prefix_len: Ints, suffix_len: Ints, output_len: Ints, own_id: Ints
) -> Batch:
    """Build requests of a prefix that their group shares, and an own rest (suffix and output).

    The prefix is the segment with the group's number, the rest the segment `own_id`; all arrays
    have one entry a request.
    """
    n = len(group)
    ids, lens = np.empty((n, 2), np.int64), np.empty((n, 2), np.int64)
    ids[:, 0], ids[:, 1] = group, own_id
    lens[:, 0], lens[:, 1] = prefix_len, suffix_len + output_len
    start = np.arange(0, 2 * n + 1, 2)
    start, flat_ids, flat_lens = without_empty(start, ids.ravel(), lens.ravel())
    return make_batch(
        arrival_time, prefix_len + suffix_len, output_len, start, flat_ids, flat_lens, prefix_group=group
    )
