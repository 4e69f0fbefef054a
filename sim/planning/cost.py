"""What tokens cost at a planned load."""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.errors import InputError
from sim.planning.evaluate import Evaluation


class Cost(NamedTuple):
    """In the currency of the price, for a million tokens."""

    output: float  # of output tokens, the prompts' cost in them
    total: float  # of prompt and output tokens together


def check_price(price: float | None) -> None:
    """Raise InputError where a price is none."""
    if price is not None and not 0.0 < price < math.inf:
        raise InputError(f"--price {price:g}: should be above 0, for an hour of one GPU")


def cost(best: Evaluation, price: float, gpus: int) -> Cost:
    """The cost at a point, `price` an hour for each GPU, by the mean throughput of its seeds."""
    a_second = price * gpus / 3600.0
    return Cost(*(a_second / best.mean(f"{name}_throughput") * 1e6 for name in ("output", "total_token")))
