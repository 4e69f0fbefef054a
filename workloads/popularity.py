"""How popular each of n things is: all alike, or by Zipf's law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Floats, Ints
from workloads.base import Spec

Popularity = Literal["uniform", "zipf"]
PoolSize = Annotated[int, Field(ge=1, le=2**24)]  # a table of it lies in memory
MOST_DRAWN = 256  # different things for one request: drawing k takes k**2 steps


def zipf_bounds(num: int, alpha: float) -> Floats:
    """Return the cumulative probabilities of ranks 0 … num - 1, whose weights are (rank + 1)**-alpha."""
    bounds = np.cumsum(np.arange(1, num + 1, dtype=np.float64) ** -alpha)
    bounds /= bounds[-1]  # the last bound is 1, above every draw
    return bounds


def draw_ranks(rng: np.random.Generator, bounds: Floats, n: int) -> Ints:
    """Draw n ranks with the given cumulative probabilities. Modifies `rng`: one number a rank."""
    return np.searchsorted(bounds, rng.random(n), side="right").astype(np.int64)


def draw_distinct(rng: np.random.Generator, bounds: Floats, n: int, k: int) -> Ints:
    """Draw n rows of k different ranks, shape (n, k), in the order drawn. Modifies `rng`.

    Each rank of a row is drawn by popularity among those that the row does not have yet. It takes
    exactly k random numbers a row, so that rows do not depend on how many are drawn at once.
    """
    assert k <= len(bounds)
    lower = np.concatenate([[0.0], bounds[:-1]])
    width = bounds - lower
    drawn = np.empty((n, k), np.int64)
    chances = rng.random((n, k))
    for j in range(k):
        taken = np.sort(drawn[:, :j], axis=1)
        place = chances[:, j] * (1.0 - width[taken].sum(axis=1))
        for rank in taken.T:  # step over the taken intervals, from the left
            place = np.where(place >= lower[rank], place + width[rank], place)
        drawn[:, j] = np.searchsorted(bounds, place, side="right")
        # Where next to nothing is left, rounding can point to a taken rank: the first free one has most.
        again = (drawn[:, j] == len(bounds)) | (taken == drawn[:, j, None]).any(axis=1)
        for row in np.flatnonzero(again):
            drawn[row, j] = _first_free(taken[row])
    return drawn


def _first_free(taken: Ints) -> int:
    """Return the smallest rank that is not in `taken`, which is sorted."""
    gaps = np.flatnonzero(taken != np.arange(len(taken)))
    return int(gaps[0]) if len(gaps) else len(taken)


class GroupPopularity(Spec):
    """How often each group is drawn."""

    group_popularity: Popularity = "uniform"
    zipf_alpha: float = Field(1.0, ge=0, allow_inf_nan=False, description="group i: weight (i + 1)**-alpha")

    @model_validator(mode="after")
    def _alpha_needs_zipf(self) -> Self:
        if self.zipf_alpha != 1 and self.group_popularity != "zipf":
            raise ValueError("zipf_alpha has no effect on uniform groups: set group_popularity: zipf")
        return self

    def groups(self, rng: np.random.Generator, num_groups: int) -> Callable[[int], Ints]:
        """Return the function that draws n group numbers from `rng`."""
        if self.group_popularity == "uniform":
            return lambda n: rng.integers(0, num_groups, n)
        bounds = zipf_bounds(num_groups, self.zipf_alpha)
        return lambda n: draw_ranks(rng, bounds, n)
