"""All that `prefixsim mrc` finds out: a curve for each block size, given capacities, timed runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.curves.bounds import belady_hits, fifo_hits, references
from sim.curves.curve import Curve, curve
from sim.curves.load import DEFAULT_BLOCK_SIZE, Load, Passed, one_pass
from sim.curves.timed import Point
from sim.errors import InputError
from sim.trace.describe import unknowns

Bools = npt.NDArray[np.bool_]


class Asked(NamedTuple):
    """What to find out of a load."""

    block_sizes: Sequence[int] = ()  # tokens; none: that of the trace's ids, else DEFAULT_BLOCK_SIZE
    at: Sequence[int] = ()  # usable blocks: capacities for FIFO and Belady too
    last: int | None = None  # so many requests count, the others only warm the cache
    measure_from: float | None = None  # seconds: requests that arrive before only warm the cache
    refuse_long: bool = False  # requests larger than the pool, as vLLM does, instead of keeping their head


class Capacity(NamedTuple):
    """Hits at one capacity, of LRU and for scale."""

    blocks: int  # usable ones
    hit_tokens: int
    fifo_hit_tokens: int
    belady_hit_tokens: int
    prompt_tokens: int  # of the requests that count and fit
    num_refused: int


class Study(NamedTuple):
    """What was found at one block size."""

    load: Load
    asked: Asked
    curve: Curve
    capacities: list[Capacity]  # those asked for
    timed: list[Point]
    notes: list[str]


def study(load: Load, asked: Asked, *, progress: Callable[[int], None] | None = None) -> list[Study]:
    """One study a block size, in one pass; `timed` is left empty.

    progress(requests read) is called now and then. Raises WorkloadError for bad data, InputError for
    what cannot be counted.
    """
    passed = one_pass(load, asked.block_sizes, progress=progress)
    sizes = asked.block_sizes or [passed.own_block or DEFAULT_BLOCK_SIZE]
    if load.whole_ids and list(sizes) != [passed.own_block]:
        raise InputError(
            f"--count whole-ids: {load.name} has ids of {passed.own_block} tokens, and they are the blocks; "
            "leave --block-size out"
        )
    counts = _that_count(load, asked, passed)
    studies = []
    for size in sizes:
        found = curve(load, passed, size, counts)
        at = _at(load, asked, passed, found, counts) if asked.at else []
        unknown = [] if passed.reader is None else unknowns(passed.reader, [size])
        studies.append(Study(load, asked, found, at, [], [*unknown, *passed.told]))
    return studies


def _that_count(load: Load, asked: Asked, passed: Passed) -> Bools:
    """Which requests' hits count; the others warm the cache."""
    n = len(passed.prompt)
    counts = np.ones(n, np.bool_)
    if asked.last is not None:
        if asked.last > n:
            raise InputError(f"--last {asked.last}: {load.name} has {n} requests; ask for at most so many")
        counts[: n - asked.last] = False
    if asked.measure_from is not None:
        counts &= passed.arrival >= asked.measure_from
    if not (counts & ~passed.refused).any():
        raise InputError(
            f"{load.name}: no request is left to count: measure_from and max_model_len leave out all of {n}; "
            "lower the one or raise the other"
        )
    return counts


def _at(load: Load, asked: Asked, passed: Passed, found: Curve, counts: Bools) -> list[Capacity]:
    """The capacities asked for. Where long requests are refused, each that is too small has its own pass."""
    size = found.block_size
    uses = references(load, passed, found, counts)
    capacities = []
    for blocks in asked.at:
        here, uses_here = found, uses
        if asked.refuse_long and blocks < found.longest:
            smaller = load._replace(room=blocks * size)
            left = one_pass(smaller, (size,))
            here = curve(smaller, left, size, counts)
            uses_here = references(smaller, left, here, counts)
        capacities.append(
            Capacity(
                blocks=blocks,
                hit_tokens=int(here.hit_tokens(np.array([blocks]))[0]),
                fifo_hit_tokens=fifo_hits(uses_here, size, blocks),
                belady_hit_tokens=belady_hits(uses_here, size, blocks),
                prompt_tokens=here.prompt_tokens,
                num_refused=here.num_refused,
            )
        )
    return capacities
