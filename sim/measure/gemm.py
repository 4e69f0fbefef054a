"""Matrix products as a decoder has them: tokens by weights."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from sim.measure.device import Device, Tensor, random
from sim.measure.grid import Point


def gemm(device: Device, point: Point) -> Callable[[], Tensor]:
    """A call of the product (m, k) by (n, k) transposed; an fp8 one takes tokens already in fp8."""
    assert point.m and point.n and point.k and point.dtype
    tokens = random(device, point.m, point.k, dtype=point.dtype)
    weights = random(device, point.n, point.k, dtype=point.dtype)
    return lambda: product(tokens, weights)


def linear(tokens: Tensor, weights: Tensor) -> Tensor:
    """tokens (m, k) in bf16 by weights (n, k) transposed, in bf16; tokens follow fp8 weights into fp8."""
    return product(tokens.to(weights.dtype), weights)


def product(tokens: Tensor, weights: Tensor) -> Tensor:
    """tokens (m, k) by weights (n, k) of the same type, transposed; the result (m, n) in bf16."""
    if weights.dtype is not torch.float8_e4m3fn:
        return F.linear(tokens, weights)
    one = _one(weights.device)
    return torch._scaled_mm(
        tokens, weights.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
