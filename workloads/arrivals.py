"""When requests arrive: at a rate (open loop), or when a client is ready (closed loop)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from sim.request import Floats
from workloads.base import Spec
from workloads.streams import Stream, generator


def _infinity(value: object) -> object:
    """Read the words for infinity that `--set` and JSON can carry; YAML's own is `.inf`."""
    words = ("inf", "infinity", ".inf")
    return math.inf if isinstance(value, str) and value.strip().lower() in words else value


Rate = Annotated[float, BeforeValidator(_infinity), Field(gt=0)]


class ClosedLoop(Spec):
    """`concurrency` users, each of whom sends its next request a think time after the last ended."""

    concurrency: PositiveInt | None = Field(
        None, le=1 << 20, description="users of a closed loop; none: open loop"
    )
    think_time: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds, mean")
    think_time_distribution: Literal["constant", "exponential"] = "constant"

    @model_validator(mode="after")
    def _think_time_needs_users(self) -> Self:
        if self.think_time and self.concurrency is None:
            raise ValueError("think_time has no effect without concurrency: set concurrency, or drop it")
        return self

    def think_times(self, seed: np.random.SeedSequence) -> Iterator[float]:
        """Yield think times in seconds, without end. Does not modify `seed`."""
        if self.think_time == 0 or self.think_time_distribution == "constant":
            yield from repeat(self.think_time)
        rng = generator(seed, Stream.THINK_TIMES)
        while True:
            yield from (rng.standard_exponential(1024) * self.think_time).tolist()


class Arrivals(ClosedLoop):
    """Arrivals of an open loop, or of a closed one where `concurrency` is set."""

    request_rate: Rate = Field(math.inf, description="requests per second; inf: all at once")
    arrival: Literal["poisson", "constant", "gamma"] = "poisson"
    burstiness: float = Field(1.0, gt=0, allow_inf_nan=False, description="shape of gamma; 1: Poisson")

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.concurrency is not None and math.isfinite(self.request_rate):
            raise ValueError("clients set the pace with concurrency: drop it, or set request_rate to inf")
        if self.burstiness != 1 and self.arrival != "gamma":
            raise ValueError(f"burstiness has no effect on {self.arrival} arrivals: set arrival: gamma")
        return self

    def arrival_times(self, seed: np.random.SeedSequence, counts: Iterator[int]) -> Iterator[Floats]:
        """Yield the arrival times in seconds, an array for each number in `counts`.

        All 0 in a closed loop and at an infinite rate. The times do not depend on how `counts`
        cuts them. Poisson and gamma arrivals begin with a gap, constant ones at 0.
        """
        rng = generator(seed, Stream.ARRIVALS)
        now, done = 0.0, 0
        for n in counts:
            if math.isinf(self.request_rate):
                yield np.zeros(n)
            elif self.arrival == "constant":
                yield np.arange(done, done + n) / self.request_rate
            else:
                if self.arrival == "poisson":
                    gaps = rng.standard_exponential(n) / self.request_rate
                else:
                    gaps = rng.standard_gamma(self.burstiness, n) / (self.burstiness * self.request_rate)
                gaps[0] += now  # so that the sum runs through all chunks in one order
                times = np.cumsum(gaps)
                now = float(times[-1])
                yield times
            done += n
