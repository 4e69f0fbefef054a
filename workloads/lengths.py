"""How long prompts and answers are: a number of tokens, or a distribution of it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from sim.request import Ints
from workloads.base import Spec

MAX_LEN = 2**31 - 1  # tokens; more is a mistake, and sums of lengths must fit in int64

Tokens = Annotated[int, Field(ge=0, le=MAX_LEN)]


class Constant(Spec):
    """Always `value` tokens; written as the bare number."""

    distribution: Literal["constant"] = "constant"
    value: Tokens

    @property
    def lowest(self) -> int:
        return self.value

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        return np.full(n, self.value, np.int64)

    @model_serializer
    def _as_number(self) -> int:
        return self.value


class Uniform(Spec):
    """Each whole number from `low` to `high`, both included, equally often."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: exchange them")
        return self

    @property
    def lowest(self) -> int:
        return self.low

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        return rng.integers(self.low, self.high, n, np.int64, endpoint=True)


class Lognormal(Spec):
    """Lognormal with the given mean, rounded, at least 1. `sigma` is the deviation of the logarithm."""

    distribution: Literal["lognormal"]
    mean: float = Field(ge=1, le=MAX_LEN, allow_inf_nan=False, description="tokens, before rounding")
    sigma: float = Field(ge=0, le=10, allow_inf_nan=False)

    @property
    def lowest(self) -> int:
        return 1

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        tokens = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, n)
        return np.clip(np.rint(tokens), 1, MAX_LEN).astype(np.int64)


def _number_is_constant(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"distribution": "constant", "value": value}
    if not isinstance(value, (dict, Spec)):
        raise ValueError(
            f"{value!r} is no length: write a whole number of tokens,"
            " or {distribution: constant|uniform|lognormal, …}"
        )
    return value


def _at_least_one(length: Distribution) -> Distribution:
    if length.lowest < 1:
        raise ValueError("a length of 0 is possible here: it must be at least 1 token")
    return length


Distribution = Annotated[Constant | Uniform | Lognormal, Field(discriminator="distribution")]
LengthOrZero = Annotated[Distribution, BeforeValidator(_number_is_constant)]
Length = Annotated[Distribution, BeforeValidator(_number_is_constant), AfterValidator(_at_least_one)]
