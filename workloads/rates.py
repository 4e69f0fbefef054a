"""Arrival times without end, in blocks: at one rate, or at a rate that changes.

Blocks have a fixed size of their own, so the times do not depend on how a workload cuts its
requests. Functions that take a generator draw from it as they go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from sim.request import Floats

BLOCK = 2048


def at_once() -> Iterator[Floats]:
    """Yield zeros: everything arrives at the start."""
    while True:
        yield np.zeros(BLOCK)


def even(rate: float) -> Iterator[Floats]:
    """Yield the times i / rate."""
    done = 0
    while True:
        yield np.arange(done, done + BLOCK) / rate
        done += BLOCK


def poisson(rng: np.random.Generator, rate: float = 1.0) -> Iterator[Floats]:
    """Yield the times of a Poisson process, in seconds for a rate a second."""
    return _sums(rng.standard_exponential(n) / rate for n in repeat(BLOCK))


def gamma(rng: np.random.Generator, rate: float, shape: float) -> Iterator[Floats]:
    """Yield times whose gaps are gamma distributed: their CV is shape**-0.5."""
    return _sums(rng.standard_gamma(shape, n) / (shape * rate) for n in repeat(BLOCK))


def piecewise(units: Iterator[Floats], pieces: Iterator[tuple[float, float]]) -> Iterator[Floats]:
    """Yield arrivals at a rate that is constant for a while: `pieces` yields (seconds, rate).

    `units` are the times of a Poisson process of rate 1. The integral of the rate maps arrivals to
    them, so its inverse maps them to arrivals: exactly, with no step of time anywhere.
    """
    starts: list[float] = []  # of the pieces from the one in which the last arrival fell
    masses: list[float] = []  # the integrated rate up to their starts
    rates: list[float] = []
    end = mass = 0.0  # of the last of them
    for block in units:
        while mass <= block[-1]:
            seconds, rate = next(pieces)
            starts.append(end)
            masses.append(mass)
            rates.append(rate)
            end += seconds
            mass += seconds * rate
        # The last piece that begins at or before a unit time: pieces of rate 0 are passed over.
        at = np.searchsorted(masses, block, side="right") - 1
        ends = np.array([*starts[1:], end])
        times = np.array(starts)[at] + (block - np.array(masses)[at]) / np.array(rates)[at]
        yield np.minimum(times, ends[at])  # rounding must not carry one past the next piece's first
        passed = int(at[-1])
        del starts[:passed], masses[:passed], rates[:passed]


def steps(schedule: Sequence[Sequence[float]]) -> Iterator[tuple[float, float]]:
    """Yield (seconds, rate) of a schedule of [second, rate from then on]; the last lasts for ever."""
    ends = [second for second, _ in schedule[1:]] + [math.inf]
    for (second, rate), end in zip(schedule, ends, strict=True):
        yield end - second, rate


def markov_states(
    rng: np.random.Generator, states: Sequence[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield (seconds, rate) of a Markov chain whose `states` are (rate, mean seconds in it).

    From a state it goes to each of the others with the same probability, so the share of time in
    a state is its mean sojourn's in the sum of all; it begins in one drawn by that share.
    """
    shares = np.cumsum([mean for _, mean in states])
    state = int(np.searchsorted(shares / shares[-1], rng.random(), side="right"))
    while True:
        rate, mean = states[state]
        yield mean * float(rng.standard_exponential()), rate
        other = int(rng.integers(len(states) - 1))
        state = other + (other >= state)


def diurnal(rng: np.random.Generator, rate: float, amplitude: float, period: float) -> Iterator[Floats]:
    """Yield Poisson arrivals at rate * (1 + amplitude * sin(2 pi t / period)), by thinning.

    Each arrival at the peak rate is kept with the ratio of the rate then to the peak.
    """
    for times in poisson(rng, rate * (1 + amplitude)):
        now = 1 + amplitude * np.sin(2 * math.pi * (times % period) / period)
        yield times[rng.random(BLOCK) * (1 + amplitude) < now]


def in_chunks(blocks: Iterator[Floats], counts: Iterator[int]) -> Iterator[Floats]:
    """Cut blocks anew: an array for each number in `counts`."""
    left = np.empty(0)
    for n in counts:
        while len(left) < n:
            left = np.concatenate([left, next(blocks)])
        yield left[:n]
        left = left[n:]


def _sums(blocks: Iterator[Floats]) -> Iterator[Floats]:
    """Yield running sums, which go through all blocks in one order. Modifies the blocks."""
    total = 0.0
    for block in blocks:
        block[0] += total
        sums = np.cumsum(block)
        total = float(sums[-1])
        yield sums
