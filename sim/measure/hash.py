"""What hashing a block costs on this machine's CPU, by algorithm and block size."""

from __future__ import annotations

import functools
import platform
import time
from importlib.metadata import version

import numpy as np

from sim.hashing import ALGORITHMS, block_hashes, none_hash
from sim.measure.grid import Point
from sim.measure.timing import Timing, timing

BLOCK_SIZES = (16, 32, 64, 128, 256)
PROMPT_TOKENS = 8192
VOCAB_SIZE = 128_256
REPEATS = 50
KERNEL = "sim.hashing.block_hashes"


def hash_points() -> list[Point]:
    """All algorithms at all block sizes."""
    return [
        Point("hash", block_size=block_size, algorithm=algorithm, kernel=KERNEL)
        for algorithm in ALGORITHMS
        for block_size in BLOCK_SIZES
    ]


def hash_versions() -> str:
    """Of what the time depends on."""
    libraries = "; ".join(f"{name} {version(name)}" for name in ("cbor2", "xxhash"))
    return f"python {platform.python_version()}; {libraries}"


def time_hash(point: Point) -> Timing:
    """Microseconds a block, over the hashes of a whole prompt of random tokens."""
    assert point.block_size is not None
    algorithm = next(algo for algo in ALGORITHMS if algo == point.algorithm)
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=PROMPT_TOKENS).tolist()
    hashes = functools.partial(
        block_hashes, tokens, point.block_size, algo=algorithm, none_hash=none_hash(algorithm, "0")
    )
    num_blocks = len(hashes())  # warms up
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        hashes()
        times.append((time.perf_counter_ns() - start) / 1e3 / num_blocks)
    return timing(times)
