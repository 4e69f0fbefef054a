"""Batches cut, joined, and merged in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sim.request import ROWS, Batch, Ints


def cut(batch: Batch, begin: int, end: int) -> Batch:
    """Return requests begin … end - 1 of a batch, as views. Does not modify it."""
    start = batch.segment_start[begin : end + 1]
    held = slice(start[0], start[-1])
    return Batch(
        **{name: getattr(batch, name)[begin:end] for name in ROWS},
        segment_start=start - start[0],
        segment_id=batch.segment_id[held],
        segment_len=batch.segment_len[held],
    )


def join(batches: Sequence[Batch]) -> Batch:
    """Return the requests of at least one batch, one after the other. Modifies none."""
    counts = np.concatenate([np.diff(batch.segment_start) for batch in batches])
    return Batch(
        **{name: np.concatenate([getattr(batch, name) for batch in batches]) for name in ROWS},
        segment_start=np.concatenate([[0], np.cumsum(counts)]),
        segment_id=np.concatenate([batch.segment_id for batch in batches]),
        segment_len=np.concatenate([batch.segment_len for batch in batches]),
    )


def by_arrival(batch: Batch) -> Batch:
    """Return the requests in order of arrival, those of one instant as they were. Modifies nothing."""
    return picked(batch, np.argsort(batch.arrival_time, kind="stable"))


def picked(batch: Batch, rows: Ints) -> Batch:
    """Return the requests of a batch by number, in the order of `rows`. Modifies nothing."""
    counts = np.diff(batch.segment_start)[rows]
    start = np.concatenate([[0], np.cumsum(counts)])
    held = np.arange(start[-1]) + np.repeat(batch.segment_start[:-1][rows] - start[:-1], counts)
    return Batch(
        **{name: getattr(batch, name)[rows] for name in ROWS},
        segment_start=start,
        segment_id=batch.segment_id[held],
        segment_len=batch.segment_len[held],
    )


def merged(sources: Sequence[Iterator[Batch]], size: int) -> Iterator[Batch]:
    """Yield the requests of all sources by arrival, at most `size` in a batch.

    At one instant, those of an earlier source come first, and each source keeps its own order,
    however it is cut. One batch of each source is held at a time.
    """
    held: dict[int, Batch] = {}
    while True:
        for i, source in enumerate(sources):
            if i not in held and (batch := next(source, None)) is not None:
                held[i] = batch
        if not held:
            return
        # What comes before the end of the first batch to end is complete.
        last, first_to_end = min((float(batch.arrival_time[-1]), i) for i, batch in held.items())
        ready = []
        for i, batch in list(held.items()):
            n = int(np.searchsorted(batch.arrival_time, last, "right" if i <= first_to_end else "left"))
            if n > 0:
                ready.append(cut(batch, 0, n))
                held[i] = cut(batch, n, len(batch.arrival_time))
            if len(held[i].arrival_time) == 0:
                del held[i]
        together = by_arrival(join(ready))
        for begin in range(0, len(together.arrival_time), size):
            yield cut(together, begin, min(begin + size, len(together.arrival_time)))
