"""Workloads for tests: made from a mapping, and their requests as one batch or as rows."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from sim.request import Batch
from workloads import AnyWorkload
from workloads.base import Workload

SEED = np.random.SeedSequence(7)
_WORKLOADS = TypeAdapter[Any](AnyWorkload)


def make(spec: dict[str, Any]) -> Any:
    """The workload of a scenario's mapping."""
    return _WORKLOADS.validate_python(spec)


def whole(workload: Workload, block_size: int = 16, seed: np.random.SeedSequence = SEED) -> Batch:
    """All batches as one."""
    parts = list(workload.batches(seed, block_size))
    assert all(len(part.prompt_len) <= workload.chunk_size for part in parts)
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Batch._fields
        if name != "segment_start"
    }
    starts, base = [np.zeros(1, np.int64)], 0
    for part in parts:
        starts.append(part.segment_start[1:] + base)
        base += len(part.segment_id)
    return Batch(segment_start=np.concatenate(starts), **joined)


def rows(batch: Batch) -> list[list[tuple[int, int]]]:
    """Each request's segments as (id, length)."""
    pairs = list(zip(batch.segment_id.tolist(), batch.segment_len.tolist(), strict=True))
    return [pairs[a:b] for a, b in pairwise(batch.segment_start)]


def same(one: Batch, other: Batch, but: tuple[str, ...] = ()) -> bool:
    """Whether all columns are equal, but for those named."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in Batch._fields if name not in but
    )


def peak_memory(workload: Workload) -> int:
    """Most bytes allocated while all requests pass by."""
    tracemalloc.start()
    for _ in workload.batches(SEED, 16):
        pass
    _, top = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return top


def chi_square(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """Pearson's statistic in standard deviations from its mean: above 3 or so, they do not agree."""
    found, share = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    expected = share / share.sum() * found.sum()
    assert expected.min() >= 5
    freedom = len(expected) - 1
    return float((((found - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))
