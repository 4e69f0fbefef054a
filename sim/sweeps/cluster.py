"""Where runs happen on several machines: a Dask cluster that somebody started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from sim.errors import InputError

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = 10  # seconds, for a scheduler or a first worker to answer
AHEAD = 2  # tasks sent out for each thread of the workers


@contextlib.contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client of the scheduler at `address`. Raises InputError, one line, if nobody answers there."""
    where = f"--cluster {address}"
    try:
        from distributed import Client
    except ImportError:
        raise InputError(f"{where}: needs Dask: pip install 'prefixsim[cluster]'") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters is told in one line
    try:
        asyncio.run(_answers(address))
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    # A time-out is an OSError; what another service says reads as a message of impossible length.
    except (OSError, ValueError, TypeError, MemoryError):
        raise InputError(
            f"{where}: no Dask scheduler answers there within {PATIENCE} s; start one with `dask scheduler`"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError:
            raise InputError(f"{where}: the scheduler has no workers; start some: `dask worker`") from None
        yield client


async def _answers(address: str) -> None:
    """Raise what Dask does if nobody there speaks its language; a Client for such leaves a trace at exit."""
    from distributed.comm.core import connect

    (await connect(address, timeout=PATIENCE)).abort()  # type: ignore[no-untyped-call]


def on_cluster(
    function: Callable[[T], R], items: Sequence[T], *, client: Client
) -> Iterator[tuple[int, R | None]]:
    """Yield (i, function(items[i])) as they come; None for an item that brought workers down.

    A worker that goes away loses nothing: Dask gives its tasks to others.
    """
    from distributed import KilledWorker, as_completed

    left = iter(enumerate(items))
    numbers: dict[str, int] = {}
    running = as_completed(loop=client.loop)

    def send(count: int) -> None:
        for _, (i, item) in zip(range(count), left, strict=False):
            future = client.submit(function, item, pure=False)
            numbers[future.key] = i
            running.add(future)

    send(AHEAD * max(sum(client.nthreads().values()), 1))
    for future in running:
        i = numbers.pop(future.key)
        try:
            result = future.result()
        except KilledWorker:
            result = None
        send(1)
        yield i, result
