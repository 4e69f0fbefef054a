"""Where runs happen: in this process, or in joblib's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def on_processes(
    function: Callable[[T], R], items: Sequence[T], *, jobs: int
) -> Iterator[tuple[int, R | None]]:
    """Yield (i, function(items[i])) as they come. With one job all happens in this process."""
    if jobs == 1 or len(items) < 2:
        yield from ((i, function(item)) for i, item in enumerate(items))
        return
    from joblib import Parallel, delayed

    yield from enumerate(Parallel(n_jobs=jobs, batch_size=1)(delayed(function)(item) for item in items))
