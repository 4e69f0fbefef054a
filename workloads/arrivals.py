"""When requests arrive: at a rate (open loop), or when a client is ready (closed loop)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from sim.request import Floats
from workloads import rates
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


class RateState(Spec):
    """A state of a Markov-modulated Poisson process."""

    rate: float = Field(ge=0, allow_inf_nan=False, description="requests per second")
    mean_sojourn: float = Field(gt=0, allow_inf_nan=False, description="seconds; exponential")


# What only one kind of arrival reads: its field, and the value that stands for not given.
_ONLY_FOR: dict[str, tuple[str, object]] = {
    "burstiness": ("gamma", 1.0),
    "states": ("mmpp", None),
    "schedule": ("step", None),
    "amplitude": ("diurnal", None),
    "period": ("diurnal", 86_400.0),
}


class Arrivals(ClosedLoop):
    """Arrivals of an open loop, or of a closed one where `concurrency` is set.

    poisson, constant and gamma arrive at `request_rate`. At a rate that changes they are Poisson:
    mmpp stays in each of `states` for an exponential time, then goes to any other; step follows
    `schedule`; diurnal is a sine wave around `request_rate` that begins at the mean and rises.
    """

    request_rate: Rate = Field(math.inf, description="requests per second; inf: all at once")
    arrival: Literal["poisson", "constant", "gamma", "mmpp", "step", "diurnal"] = "poisson"
    burstiness: float = Field(1.0, gt=0, allow_inf_nan=False, description="shape of gamma; 1: Poisson")
    states: list[RateState] | None = Field(None, min_length=2, description="of mmpp")
    schedule: list[list[float]] | None = Field(
        None, min_length=1, description="of step: [second, requests per second from then on]"
    )
    amplitude: float | None = Field(None, gt=0, le=1, description="of diurnal: swing / mean rate")
    period: float = Field(86_400.0, gt=0, allow_inf_nan=False, description="of diurnal: seconds")

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.concurrency is not None and math.isfinite(self.request_rate):
            raise ValueError("clients set the pace with concurrency: drop it, or set request_rate to inf")
        for field, (arrival, not_given) in _ONLY_FOR.items():
            if getattr(self, field) != not_given and self.arrival != arrival:
                raise ValueError(
                    f"{field} has no effect on {self.arrival} arrivals: set arrival: {arrival}"
                )
        if self.arrival in ("mmpp", "step"):
            if self.concurrency is not None:
                raise ValueError("clients set the pace with concurrency: drop it, or drop arrival")
            if math.isfinite(self.request_rate):
                field = "states" if self.arrival == "mmpp" else "schedule"
                raise ValueError(f"request_rate has no effect beside {field}: drop it, or scale the rates")
        return self

    @model_validator(mode="after")
    def _changing_rates(self) -> Self:
        if self.arrival == "mmpp":
            _check_states(self.states)
        elif self.arrival == "step":
            _check_schedule(self.schedule)
        elif self.arrival == "diurnal" and (self.amplitude is None or math.isinf(self.request_rate)):
            raise ValueError("diurnal arrivals need a finite request_rate (their mean) and an amplitude")
        return self

    def arrival_times(self, seed: np.random.SeedSequence, counts: Iterator[int]) -> Iterator[Floats]:
        """Yield the arrival times in seconds, an array for each number in `counts`.

        All 0 in a closed loop and at an infinite rate. The times do not depend on how `counts`
        cuts them. Constant arrivals begin at 0, the others with a gap.
        """
        return rates.in_chunks(self._times(seed), counts)

    def _times(self, seed: np.random.SeedSequence) -> Iterator[Floats]:
        rng = generator(seed, Stream.ARRIVALS)
        if self.states is not None:
            states = [(state.rate, state.mean_sojourn) for state in self.states]
            changes = rates.markov_states(generator(seed, Stream.RATE_STATES), states)
            return rates.piecewise(rates.poisson(rng), changes)
        if self.schedule is not None:
            return rates.piecewise(rates.poisson(rng), rates.steps(self.schedule))
        if math.isinf(self.request_rate):
            return rates.at_once()
        if self.arrival == "constant":
            return rates.even(self.request_rate)
        if self.amplitude is not None:
            return rates.diurnal(rng, self.request_rate, self.amplitude, self.period)
        if self.arrival == "gamma":
            return rates.gamma(rng, self.request_rate, self.burstiness)
        return rates.poisson(rng, self.request_rate)


def _check_states(states: list[RateState] | None) -> None:
    if states is None:
        raise ValueError("mmpp arrivals need states: [{rate: 2, mean_sojourn: 60}, …], two or more")
    arrivals = sum(state.rate * state.mean_sojourn for state in states) / len(states)
    if arrivals < 1e-4:
        raise ValueError(
            f"the states change after {arrivals:.3g} arrivals in the mean, too often to follow one by one:"
            " raise rate or mean_sojourn"
        )


def _check_schedule(schedule: list[list[float]] | None) -> None:
    if schedule is None:
        raise ValueError("step arrivals need a schedule: [[0, 5], [600, 20], …], seconds and rates")
    for i, entry in enumerate(schedule):
        if len(entry) != 2 or not all(0 <= value < math.inf for value in entry):
            raise ValueError(f"schedule has {entry}: write [second, requests per second], finite and from 0")
        if (entry[0] != 0) if i == 0 else (entry[0] <= schedule[i - 1][0]):
            raise ValueError(f"schedule has {entry} as entry {i + 1}: seconds begin at 0 and increase")
    if schedule[-1][1] == 0:
        raise ValueError("the schedule ends at rate 0, so the last requests would never come: end above 0")
