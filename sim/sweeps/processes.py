"""Where runs happen on one machine: joblib's processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

IDLE = 20  # seconds until a process without work ends, as all do whose sweep was killed
AHEAD = 2  # tasks sent out for each process, so that none waits for its next


class Everywhere(Protocol):
    """Calls a function with each item, in any order: `on_processes`, or `on_cluster` of cluster.py."""

    def __call__(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[tuple[int, Any]]: ...


def on_processes(
    function: Callable[[T], R], items: Sequence[T], *, jobs: int | None
) -> Iterator[tuple[int, R | None]]:
    """Yield (i, function(items[i])) as they come; None for an item whose process died.

    `jobs` None is one for each processor that this process may use. With one job all happens in this
    process. Closing the iterator ends what still runs.
    """
    from joblib import cpu_count

    processors = cpu_count()
    jobs = min(jobs or processors, max(processors, len(items)))  # all are started, with work or without
    if jobs == 1:
        yield from ((i, function(item)) for i, item in enumerate(items))
        return
    left = dict(enumerate(items))
    while left:
        try:
            for i, result in _parallel(function, list(left.items()), jobs):
                del left[i]
                yield i, result
        except BrokenExecutor:
            # Whoever brought its process down was among the first: each of them alone shows which.
            for i in list(left)[: AHEAD * jobs]:
                yield i, _alone(function, left.pop(i))


def _parallel(function: Callable[[T], R], items: list[tuple[int, T]], jobs: int) -> Iterator[tuple[int, R]]:
    from joblib import Parallel, delayed

    workers = Parallel(
        n_jobs=jobs,
        return_as="generator_unordered",
        batch_size=1,
        pre_dispatch=AHEAD * jobs,
        idle_worker_timeout=IDLE,
    )
    yield from workers(delayed(_numbered)(function, i, item) for i, item in items)


def _alone(function: Callable[[T], R], item: T) -> R | None:
    try:
        [(_, result)] = _parallel(function, [(0, item)], 2)  # of one, joblib would make this process do it
    except BrokenExecutor:
        return None
    return result


def _numbered(function: Callable[[T], R], i: int, item: T) -> tuple[int, R]:
    return i, function(item)
