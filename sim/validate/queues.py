"""Queues on paper: mean waits in theory, and the recursions that give each job's wait."""

from __future__ import annotations

import heapq

import numpy as np

from sim.request import Floats


def poisson_arrivals_wait(rate: float, mean: float, mean_square: float) -> float:
    """Pollaczek and Khinchine: the mean wait for one server, by moments of its service in seconds."""
    return rate * mean_square / (2 * (1 - rate * mean))


def gamma_arrivals_wait(rate: float, shape: float) -> float:
    """The mean wait of G/M/1 with gamma gaps between arrivals and exponential services of 1 s.

    A job finds a queue with the probability s that solves s = E[exp(-(1 - s) gap)].
    """
    found = 0.5
    for _ in range(10_000):
        found = (1 + (1 - found) / (shape * rate)) ** -shape
    return found / (1 - found)


def many_servers_wait(servers: int, rate: float) -> float:
    """The mean wait of M/M/c, Erlang's C formula; services of 1 s."""
    blocked = 1.0  # Erlang's B
    for busy in range(1, servers + 1):
        blocked = rate * blocked / (busy + rate * blocked)
    waits = blocked / (1 - rate / servers * (1 - blocked))
    return waits / (servers - rate)


def lindley(arrival_time: Floats, service: Floats) -> Floats:
    """Each job's wait: what is left of the former's wait and service when it arrives."""
    waits = [0.0]
    for gap, former in zip(np.diff(arrival_time).tolist(), service.tolist(), strict=False):
        waits.append(max(0.0, waits[-1] + former - gap))
    return np.array(waits)


def kiefer_wolfowitz(arrival_time: Floats, service: Floats, servers: int) -> Floats:
    """Each job's wait for the first of several servers to be free: Lindley's recursion for more than one."""
    free = [0.0] * servers
    waits = []
    for arrival, seconds in zip(arrival_time.tolist(), service.tolist(), strict=True):
        start = max(arrival, free[0])
        waits.append(start - arrival)
        heapq.heapreplace(free, start + seconds)
    return np.array(waits)
