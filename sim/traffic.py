"""A workload as `simulate` takes it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sim.request import Batch, Session
from workloads import AnyWorkload, SessionWorkload
from workloads.same_content import with_names


def requests(
    workload: AnyWorkload, seed: np.random.SeedSequence, block_size: int, *, names: bool = False
) -> Iterator[Batch] | Iterator[Session]:
    """The requests or sessions of a workload, lazily.

    names: what each request has of its own gets a name, so that another run can ask it again, and a
    history of it is kept.
    """
    if isinstance(workload, SessionWorkload):
        return workload.sessions(seed)  # in which all content has a name
    batches = workload.batches(seed, block_size)
    return map(with_names, batches) if names else batches


def think_times(workload: AnyWorkload, seed: np.random.SeedSequence) -> Iterator[float] | None:
    """Of a closed loop of requests; sessions have pauses of their own."""
    if isinstance(workload, SessionWorkload) or workload.concurrency is None:
        return None
    return workload.think_times(seed)
