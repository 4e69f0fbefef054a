"""Which replica gets a request: each router is a function of the request and of the replicas' views.

A view is what the router knows; with a view delay it is up to that old. Of equal replicas the one
with the smaller number is chosen. `central_queue` is no function: it holds requests back until a
replica has a place, see sim/replicas.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sim.content_key import weigh
from sim.request import Floats, Ints

AFFINITY_TOKENS = 256  # of a prompt's beginning, by which prefix_affinity tells prefixes apart
LOAD_BOUND = 1.25  # of the mean: no replica of prefix_affinity gets more outstanding requests
OVERLAP_WEIGHT, FREE_KV_WEIGHT, QUEUE_WEIGHT = 3.0, 2.0, 2.0  # of kv_aware, as llm-d measured it


class Arrival(NamedTuple):
    """A request at the router."""

    number: int  # how many came to the router before it
    session_id: int  # -1: none
    prefix_key: int  # of its first AFFINITY_TOKENS tokens, LoRA and cache_salt
    prompt_len: int  # tokens
    draws: tuple[float, float]  # two random numbers in [0, 1)


class Views(NamedTuple):
    """What the router knows of the replicas, by their number; only what it asked for is filled in."""

    outstanding: Ints  # requests sent there that have not ended
    waiting: Ints  # requests of them that its scheduler has not admitted, or has preempted
    kv_usage: Floats  # the share of its KV blocks that requests hold
    cached_tokens: Ints  # leading tokens of this prompt in its cache


def round_robin(request: Arrival, views: Views) -> int:
    """One after the other."""
    return request.number % len(views.outstanding)


def random(request: Arrival, views: Views) -> int:
    """Any, with equal chances."""
    return int(request.draws[0] * len(views.outstanding))


def least_outstanding(request: Arrival, views: Views) -> int:
    """The one with the fewest requests."""
    return int(views.outstanding.argmin())


def power_of_two(request: Arrival, views: Views) -> int:
    """Of two drawn at random, the one with fewer requests (Mitzenmacher, 2001)."""
    n = len(views.outstanding)
    one = int(request.draws[0] * n)
    other = (one + 1 + int(request.draws[1] * (n - 1))) % n
    return min(one, other, key=lambda replica: (views.outstanding[replica], replica))


def session_affinity(request: Arrival, views: Views) -> int:
    """All of a session to one replica, whatever its load; requests without a session in turn."""
    if request.session_id < 0:
        return round_robin(request, views)
    return int(_ranked(request.session_id, len(views.outstanding))[0])


def prefix_affinity(request: Arrival, views: Views) -> int:
    """Equal beginnings to one replica, unless it has more than its share: then to the next in rank.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), with each
    key's own ranking of the replicas (rendezvous hashing) in place of a ring.
    """
    n = len(views.outstanding)
    bound = math.ceil(LOAD_BOUND * (int(views.outstanding.sum()) + 1) / n)
    ranked = _ranked(request.prefix_key, n)
    fits = views.outstanding[ranked] < bound
    return int(ranked[fits.argmax()])


def kv_aware(request: Arrival, views: Views) -> int:
    """The best score: overlap with its cache, less its load.

    That of llm-d's precise prefix-cache scheduling (its report 73-capacity): the share of the prompt
    that its cache has, its share of free KV, and how short its queue is between the shortest, 1, and
    the longest, 0, each with its weight.
    """
    overlap = views.cached_tokens / request.prompt_len
    longest, shortest = views.waiting.max(), views.waiting.min()
    queue = (longest - views.waiting) / max(longest - shortest, 1)  # all equal: no difference
    score = OVERLAP_WEIGHT * overlap + FREE_KV_WEIGHT * (1.0 - views.kv_usage) + QUEUE_WEIGHT * queue
    return int(score.argmax())


Router = Callable[[Arrival, Views], int]
ROUTERS: dict[str, Router] = {
    router.__name__: router
    for router in (
        round_robin, random, least_outstanding, power_of_two, session_affinity, prefix_affinity, kv_aware,
    )
}  # fmt: skip
CENTRAL_QUEUE = "central_queue"


def _ranked(key: int, num_replicas: int) -> Ints:
    """All replicas in the order that a key likes them, different for each key (rendezvous hashing)."""
    weights = np.empty(num_replicas, np.int64)
    weigh(key, weights)
    return np.argsort(weights, kind="stable")
