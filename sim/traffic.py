"""A workload as `simulate` takes it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from sim.request import Batch, Session
from workloads import AnyWorkload, SessionWorkload, WorkloadWarning
from workloads.same_content import with_names


def requests(
    workload: AnyWorkload,
    seed: np.random.SeedSequence,
    block_size: int,
    *,
    names: bool = False,
    priorities: bool = True,
) -> Iterator[Batch] | Iterator[Session]:
    """The requests or sessions of a workload, lazily.

    names: what each request has of its own gets a name, so that another run can ask it again, and a
    history of it is kept. priorities: the scheduler reads them; where not, they are warned of.
    """
    if isinstance(workload, SessionWorkload):
        return workload.sessions(seed)  # in which all content has a name
    if workload.has_sessions:
        return _changed(workload.sessions(seed, block_size), names, priorities)
    batches = workload.batches(seed, block_size)
    if not priorities:
        batches = _told_of_priorities(batches)
    return map(with_names, batches) if names else batches


def _changed(sessions: Iterator[Session], names: bool, priorities: bool) -> Iterator[Session]:
    """The sessions of a mix or a recording with what `requests` does to batches done to theirs."""
    for session in sessions:
        batch = session.requests
        if not priorities and batch.priority.any():
            priorities = True  # told once
            _warn_of_priorities()
        yield session._replace(requests=with_names(batch) if names else batch)


def _told_of_priorities(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches as they are; warns, once, of priorities, which fcfs does not read."""
    told = False
    for batch in batches:
        if not told and batch.priority.any():
            told = True
            _warn_of_priorities()
        yield batch


def _warn_of_priorities() -> None:
    warnings.warn(
        "requests have priorities, which scheduling_policy fcfs does not read: set "
        "engine.scheduling_policy to priority",
        WorkloadWarning,
        stacklevel=3,
    )


def think_times(workload: AnyWorkload, seed: np.random.SeedSequence) -> Iterator[float] | None:
    """Of a closed loop of requests; sessions have pauses of their own."""
    if isinstance(workload, SessionWorkload) or workload.concurrency is None:
        return None
    return workload.think_times(seed)
