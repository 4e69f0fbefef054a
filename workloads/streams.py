"""Random streams seeded apart: each random quantity draws from its own generator."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

PRIME = int.from_bytes(b"prime")  # begins the spawn key of a seed that `of_prime` made


class Stream(IntEnum):
    """One number for each random quantity. Never renumber: the number is part of the seed."""

    ARRIVALS = 0
    THINK_TIMES = 1
    GROUPS = 2
    PREFIX_LEN = 3
    SUFFIX_LEN = 4
    OUTPUT_LEN = 5
    RATE_STATES = 6
    DOCUMENTS = 7
    DOCUMENT_LEN = 8
    DOCUMENT_ORDER = 9
    EXAMPLES = 10
    EXAMPLE_LEN = 11
    TENANTS = 12
    SESSIONS = 13
    TURNS = 14
    USER_LEN = 15
    PAUSES = 16
    ROUTER = 17
    PROMPTS = 18
    BEAMS = 19


def stream_seed(seed: np.random.SeedSequence, stream: Stream) -> np.random.SeedSequence:
    """Return the stream's own seed. Does not modify `seed`.

    It is what `seed.spawn` would give as child number `stream`; spawn itself counts its calls
    inside `seed`, so a second run with the same object would draw other numbers.
    """
    key = (*seed.spawn_key, int(stream))
    return np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)


def generator(seed: np.random.SeedSequence, stream: Stream) -> np.random.Generator:
    """Return the stream's own generator, at its start. Does not modify `seed`."""
    return np.random.default_rng(stream_seed(seed, stream))


def pool_generator(seed: np.random.SeedSequence, stream: Stream) -> np.random.Generator:
    """Return the generator of what a pool is made of: the same where the cache is primed and measured."""
    if seed.spawn_key[:1] == (PRIME,):
        key = seed.spawn_key[1:]
        seed = np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)
    return generator(seed, stream)


def of_prime(seed: np.random.SeedSequence) -> np.random.SeedSequence:
    """Return the seed of the requests that prime a cache, which are not those measured after them."""
    key = (PRIME, *seed.spawn_key)
    return np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)
