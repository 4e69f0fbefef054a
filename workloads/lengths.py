"""How long prompts and answers are: a number of tokens, or a distribution of it."""

from __future__ import annotations

import csv
import math
from array import array
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    model_serializer,
    model_validator,
)

from sim.request import Ints
from workloads.base import Spec
from workloads.errors import WorkloadError
from workloads.popularity import draw_ranks, zipf_bounds

MAX_LEN = 2**31 - 1  # tokens; more is a mistake, and sums of lengths must fit in int64
MOST_RANKS = 2**20  # lengths of a zipf distribution: their table lies in memory

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
    """Lognormal with the given mean, rounded, at least 1. `sigma` is the deviation of the logarithm.

    With `high`, a longer length is drawn again, as a benchmark drops requests that are too long: the
    mean of what is left is then below `mean`.
    """

    distribution: Literal["lognormal"]
    mean: float = Field(ge=1, le=MAX_LEN, allow_inf_nan=False, description="tokens, before rounding and high")
    sigma: float = Field(ge=0, le=10, allow_inf_nan=False)
    high: Tokens | None = None

    @model_validator(mode="after")
    def _mostly_kept(self) -> Self:
        median = math.exp(self._mu)
        if self.high is not None and self.high < median:
            raise ValueError(
                f"high {self.high} is below the median {median:.0f} of the lengths, so most would be "
                "drawn again: raise it or lower mean"
            )
        return self

    @property
    def _mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    @property
    def lowest(self) -> int:
        return 1

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        tokens = np.clip(np.rint(rng.lognormal(self._mu, self.sigma, n)), 1, MAX_LEN)
        if self.high is not None:
            limit = max(self.high, 1)
            while (over := np.flatnonzero(tokens > limit)).size:
                tokens[over] = np.clip(np.rint(rng.lognormal(self._mu, self.sigma, over.size)), 1, MAX_LEN)
        return tokens.astype(np.int64)


class Zipf(Spec):
    """Each whole number from `low` to `high`, the i-th of them with weight i**-alpha: mostly short."""

    distribution: Literal["zipf"]
    low: Tokens = 1
    high: Tokens
    alpha: float = Field(1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}: exchange them")
        if self.high - self.low >= MOST_RANKS:
            raise ValueError(f"low to high are more than {MOST_RANKS} lengths: narrow them")
        return self

    @property
    def lowest(self) -> int:
        return self.low

    @cached_property
    def bounds(self) -> array[float]:
        """The cumulative probabilities (not as an ndarray, which would make == of two Zipfs fail)."""
        return array("d", zipf_bounds(self.high - self.low + 1, self.alpha).tobytes())

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        return self.low + draw_ranks(rng, np.frombuffer(self.bounds), n)


class Empirical(Spec):
    """The lengths in a column of a CSV file with a header, each row equally often."""

    distribution: Literal["empirical"]
    path: Annotated[str, StringConstraints(min_length=1)]
    column: str

    @model_validator(mode="after")
    def _readable(self) -> Self:
        assert self.tokens
        return self

    @cached_property
    def tokens(self) -> array[int]:
        """The column's values. Raises: WorkloadError naming the first line that holds no length."""
        return read_lengths(self.path, self.column)

    @property
    def lowest(self) -> int:
        return min(self.tokens)

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        values = np.frombuffer(self.tokens, np.int64)
        return values[rng.integers(0, len(values), n)]


def read_lengths(path: str, column: str) -> array[int]:
    """Return a column of a CSV file as numbers of tokens. Raises: WorkloadError, one line."""
    lengths = array("q")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if column not in (reader.fieldnames or []):
                names = ", ".join(reader.fieldnames or []) or "none"
                raise WorkloadError(f"{path}: no column {column!r} in line 1: name one of: {names}")
            if (reader.fieldnames or []).count(column) > 1:
                raise WorkloadError(f"{path}, line 1: two columns are named {column!r}: rename all but one")
            for row in reader:
                text = (row[column] or "").strip()
                if not (text.isascii() and text.isdigit() and len(text) < 11 and int(text) <= MAX_LEN):
                    raise WorkloadError(
                        f"{path}, line {reader.line_num}: {column} is {text[:20]!r}:"
                        f" it must be a whole number of tokens from 0 to {MAX_LEN}"
                    )
                lengths.append(int(text))
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read it: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: not a CSV file of UTF-8 text: {error}") from None
    if not lengths:
        raise WorkloadError(f"{path}: column {column!r} holds no lengths: add a row")
    return lengths


def _number_is_constant(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"distribution": "constant", "value": value}
    if not isinstance(value, (dict, Spec)):
        raise ValueError(
            f"{value!r} is no length: write a whole number of tokens,"
            " or {distribution: constant|uniform|lognormal|zipf|empirical, …}"
        )
    return value


def _at_least_one(length: Distribution) -> Distribution:
    if length.lowest < 1:
        raise ValueError("a length of 0 is possible here: it must be at least 1 token")
    return length


Distribution = Annotated[
    Constant | Uniform | Lognormal | Zipf | Empirical, Field(discriminator="distribution")
]
LengthOrZero = Annotated[Distribution, BeforeValidator(_number_is_constant)]
Length = Annotated[Distribution, BeforeValidator(_number_is_constant), AfterValidator(_at_least_one)]
