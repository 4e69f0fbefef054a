"""One record for all samples of a request, made when the last of them has ended.

A request is scheduled when its first sample is, and its hit and the fates of its tokens are those of
the sample admitted first; its first token is the earliest, its end the last; what samples looked up,
found in the cache and would have found in a pool that never evicts, their preemptions and evictions
add up. One that goes ahead with the prompt counts as a sample in all, but the token that it samples is
nobody's first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim.samples import goes_ahead, request_of, sample_of

Records = dict[str, npt.NDArray[Any]]
SUMMED = {
    "num_preemptions", "num_evictions", "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evicted",
}  # fmt: skip


class SampleRecords:
    """Holds the records of an engine's samples back until their request has ended."""

    def __init__(self) -> None:
        self._held: Records | None = None

    def joined(self, chunk: Records) -> Records:
        """The records of requests that have ended with this chunk of samples, in the order of their ends.

        The chunk itself, where no request has several samples and none is held. Modifies nothing of it.
        """
        if self._held is None and not (chunk["n"] > 1).any():
            return chunk
        if self._held is not None:
            chunk = {name: np.concatenate([self._held[name], column]) for name, column in chunk.items()}
        numbers = request_of(chunk["request_id"])
        _, request = np.unique(numbers, return_inverse=True)
        counts = np.bincount(request, ~goes_ahead(chunk["request_id"], chunk["n"]))
        has_ended = counts[request] == chunk["n"]
        self._held = None if has_ended.all() else _rows(chunk, np.flatnonzero(~has_ended))
        ended = np.flatnonzero(has_ended)
        return _one_each(chunk, ended, request[ended]) if len(ended) else _rows(chunk, ended)


def _one_each(chunk: Records, ended: npt.NDArray[Any], request: npt.NDArray[Any]) -> Records:
    """One row for each different number in `request`, of the rows `ended` of the chunk."""
    sample, scheduled = sample_of(chunk["request_id"][ended]), chunk["scheduled_time"][ended]
    is_ahead = goes_ahead(chunk["request_id"][ended], chunk["n"][ended])
    by_admission = np.lexsort((sample, ~is_ahead, scheduled, request))
    start = np.flatnonzero(np.diff(request[by_admission], prepend=-1))
    order = ended[by_admission]
    found = _rows(chunk, order[start])
    found["request_id"] = request_of(found["request_id"])
    first_token = np.where(is_ahead[by_admission], np.inf, chunk["first_token_time"][order])
    found["first_token_time"] = np.minimum.reduceat(first_token, start)
    found["output_len"] = np.maximum.reduceat(chunk["output_len"][order], start)
    found["finish_time"] = np.maximum.reduceat(chunk["finish_time"][order], start)
    for name in SUMMED & chunk.keys():
        found[name] = np.add.reduceat(chunk[name][order], start)
    return _rows(found, np.argsort(np.maximum.reduceat(order, start)))


def _rows(chunk: Records, rows: npt.NDArray[Any]) -> Records:
    return {name: column[rows] for name, column in chunk.items()}
