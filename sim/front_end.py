"""The front end: one thread that hashes prompts and queues them in order of arrival.

It stands before the waiting queue, so a long prompt delays those behind it. What hashing costs is a
property of the CPU and of vLLM's prefix_caching_hash_algo, not of the GPU: sim/hash_times.yaml has
measured times, which a calibration may replace by its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from sim.errors import InputError
from sim.hardware import Count, Strict, load_spec
from sim.hashing import ALGORITHMS, Algorithm

Nonnegative = Annotated[float, Field(ge=0, le=1e12)]
UsPerBlock = Annotated[dict[Count, Nonnegative], Field(min_length=1)]  # by tokens a block

_FILE = Path(__file__).parent / "hash_times.yaml"


class FrontEnd(Strict):
    """What the front end takes for a request: alpha_us, and the hashing of each full block.

    reply_us is from a token of the engine to the client that sees it.
    """

    alpha_us: Nonnegative = 0.0
    reply_us: Nonnegative = 0.0
    hash_us_per_block: dict[Algorithm, UsPerBlock] | None = None  # None: as shipped; {}: not charged


class HashTime(Strict):
    """The measured times of one algorithm, in microseconds."""

    us_per_block: UsPerBlock
    source: str


class HashTimes(Strict):
    """The shipped file: every algorithm of vLLM's."""

    sha256: HashTime
    sha256_cbor: HashTime
    xxhash: HashTime
    xxhash_cbor: HashTime


def hash_time_us(front_end: FrontEnd, algo: Algorithm, block_size: int, calibration: str) -> float:
    """Microseconds to hash one full block of `block_size` tokens; 0 where hashing is not charged.

    Raises InputError if `calibration`, whose front end it is, has its own times but not of `algo`.
    """
    own = front_end.hash_us_per_block
    if own is None:
        return between(shipped_times(algo).us_per_block, block_size)
    if not own:
        return 0.0
    if algo not in own:
        raise InputError(
            f"{calibration}: front_end.hash_us_per_block: no times of {algo}, only of {', '.join(own)}; add "
            "them, leave the field out for the shipped times, or set engine.prefix_caching_hash_algo"
        )
    return between(own[algo], block_size)


def shipped_times(algo: Algorithm) -> HashTime:
    """What sim/hash_times.yaml says of an algorithm."""
    assert algo in ALGORITHMS
    times: HashTime = getattr(load_spec(HashTimes, _FILE, "the table of hash times"), algo)
    return times


def between(points: Mapping[int, float], x: int) -> float:
    """The line through the two points nearest around x, also outside them; at least 0."""
    sizes = sorted(points)
    if len(sizes) < 2:
        return float(points[sizes[0]])
    right = min(max(int(np.searchsorted(sizes, x)), 1), len(sizes) - 1)
    x0, x1 = sizes[right - 1], sizes[right]
    y = points[x0] + (points[x1] - points[x0]) * (x - x0) / (x1 - x0)
    return max(float(y), 0.0)
