"""How long one engine step takes, from a calibration.

    T = L * [G(M) + A_decode + A_prefill + E(M) + 2*AR(M*hidden)] + H(n_out)

M scheduled tokens (a pure decode step padded up to a multiple of 8, as CUDA graphs are), G the
layer's matrix products, A attention, E element-wise kernels, AR all-reduce (tensor parallel only),
H the LM head. Everything that depends on M alone becomes a table once, in NumPy; the verbs look up,
multiply and add, so that compiled and plain runs agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim._jit import verb
from sim.calibration import Allreduce, Calibration, KernelCalibration, Saturating, WholeStepCalibration

__all__ = ["Calibration", "StepCost", "compile_cost", "cpu_time", "gpu_time", "linear_cost"]

Floats = npt.NDArray[np.float64]

_GRAPH_MULTIPLE = 8  # vLLM captures decode graphs at batch sizes 8 apart


class StepCost(NamedTuple):
    """A calibration ready for the core: microseconds inside, seconds out of the verbs.

    Tables have max_num_batched_tokens + 1 rows, with 0 at row 0. Attention coefficients hold
    all layers.
    """

    token_us: Floats  # by scheduled tokens, a step with prefill
    decode_us: Floats  # by sequences, a pure decode step
    output_us: Floats  # by sampled tokens
    seq_us: float  # a scheduled sequence
    d0: float  # a step with decodes
    d1: float  # a decoding sequence
    d2: float  # a token of decode context
    a0: float  # a step with prefill
    a1: float  # a prefill token q
    a2: float  # sum(q*q)/2
    a2_context: float  # sum(q*c), a2/kappa
    a3: float  # sum(c)
    cpu0_us: float  # a step
    cpu1_us: float  # a scheduled sequence
    front_end_us: float  # a request
    hash_us_per_block: float  # a full prompt block


def compile_cost(calibration: Calibration, *, max_num_batched_tokens: int, block_size: int) -> StepCost:
    """Evaluate a calibration for one engine configuration."""
    front_end = calibration.front_end
    hash_us = _linear(front_end.hash_us_per_block, block_size)
    if isinstance(calibration, WholeStepCalibration):
        cost = _whole_step(
            calibration.base_us,
            calibration.token_us,
            calibration.decode_context_us,
            calibration.seq_us,
            max_num_batched_tokens,
        )
    else:
        cost = _kernels(calibration, max_num_batched_tokens)
    return cost._replace(front_end_us=float(front_end.alpha_us), hash_us_per_block=hash_us)


def linear_cost(
    base_s: float,
    token_s: float,
    *,
    decode_context_s: float = 0.0,
    seq_s: float = 0.0,
    max_num_batched_tokens: int,
) -> StepCost:
    """A step of base + token*M + decode_context*S + seq*n SECONDS, no front end and no file."""
    coefficients = (base_s * 1e6, token_s * 1e6, decode_context_s * 1e6, seq_s * 1e6)
    return _whole_step(*coefficients, max_num_batched_tokens)


@verb
def gpu_time(
    cost: StepCost,
    num_tokens: int,
    num_outputs: int,
    num_decodes: int,
    decode_kv: int,
    num_prefills: int,
    prefill_tokens: int,
    prefill_squares: int,
    prefill_cross: int,
    prefill_context: int,
) -> float:
    """SECONDS the GPU takes for one step; 0 without tokens. Modifies nothing.

    num_tokens M scheduled tokens, of which num_outputs are sampled from. num_decodes sequences
    have one scheduled token each, over decode_kv cached tokens in all (their own included);
    num_prefills others have q new tokens over c computed ones, given as sum q, q*q, q*c and c.
    """
    if num_tokens == 0:
        return 0.0
    us = cost.decode_us[num_decodes] if num_prefills == 0 else cost.token_us[num_tokens]
    us = us + cost.output_us[num_outputs] + cost.seq_us * (num_decodes + num_prefills)
    if num_decodes > 0:
        us = us + (cost.d0 + cost.d1 * num_decodes + cost.d2 * decode_kv)
    if num_prefills > 0:
        us = us + (cost.a0 + cost.a1 * prefill_tokens + cost.a2 * (0.5 * prefill_squares))
        us = us + (cost.a2_context * prefill_cross + cost.a3 * prefill_context)
    return float(us * 1e-6)


@verb
def cpu_time(cost: StepCost, num_seqs: int) -> float:
    """SECONDS the CPU takes to schedule, launch and update a step of num_seqs; 0 without any."""
    if num_seqs == 0:
        return 0.0
    return (cost.cpu0_us + cost.cpu1_us * num_seqs) * 1e-6


def _step_cost(
    *,
    token_us: Floats,
    decode_us: Floats,
    output_us: Floats,
    seq_us: float = 0.0,
    d0: float = 0.0,
    d1: float = 0.0,
    d2: float = 0.0,
    a0: float = 0.0,
    a1: float = 0.0,
    a2: float = 0.0,
    a2_context: float = 0.0,
    a3: float = 0.0,
    cpu0_us: float = 0.0,
    cpu1_us: float = 0.0,
) -> StepCost:
    scalars = (seq_us, d0, d1, d2, a0, a1, a2, a2_context, a3, cpu0_us, cpu1_us, 0.0, 0.0)
    # float(): an integer field would be another type to the compiler, and another compilation.
    return StepCost(token_us, decode_us, output_us, *(float(value) for value in scalars))


def _whole_step(
    base_us: float, token_us: float, decode_context_us: float, seq_us: float, max_num_batched_tokens: int
) -> StepCost:
    num_tokens = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
    table = _or_zero(num_tokens, base_us + token_us * num_tokens.astype(np.float64))
    return _step_cost(
        token_us=table,
        decode_us=table.copy(),
        output_us=np.zeros_like(table),
        seq_us=seq_us,
        d2=decode_context_us,
    )


def _kernels(calibration: KernelCalibration, max_num_batched_tokens: int) -> StepCost:
    layers = calibration.layers
    attention = layers * calibration.block_size_factor
    decode, prefill = calibration.decode_attention, calibration.prefill_attention
    num_tokens = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
    padded = -(-num_tokens // _GRAPH_MULTIPLE) * _GRAPH_MULTIPLE
    return _step_cost(
        token_us=_layers_us(calibration, num_tokens),
        decode_us=_layers_us(calibration, padded),
        output_us=_or_zero(num_tokens, _saturating(calibration.lm_head, num_tokens)),
        d0=attention * decode.d0,
        d1=attention * decode.d1,
        d2=attention * decode.d2,
        a0=attention * prefill.a0,
        a1=attention * prefill.a1,
        a2=attention * prefill.a2,
        a2_context=attention * prefill.a2 / prefill.kappa,
        a3=attention * prefill.a3,
        cpu0_us=calibration.cpu.o0,
        cpu1_us=calibration.cpu.o1,
    )


def _layers_us(calibration: KernelCalibration, num_tokens: npt.NDArray[np.int64]) -> Floats:
    """Microseconds of all layers' work that depends on the token count alone."""
    elementwise = calibration.elementwise
    layer = _saturating(calibration.gemm, num_tokens) + elementwise.e0 + elementwise.e1 * num_tokens
    if calibration.allreduce is not None:
        layer = layer + 2.0 * _allreduce(calibration.allreduce, num_tokens * calibration.hidden_size)
    return _or_zero(num_tokens, calibration.layers * layer)


def _or_zero(count: npt.NDArray[np.int64], values: Floats) -> Floats:
    return np.where(count > 0, values, 0.0)


def _saturating(fit: Saturating, rows: npt.NDArray[np.int64]) -> Floats:
    """(a^p + (b*rows)^p)^(1/p), with the larger term taken out: fits reach p = 22 and may go higher."""
    linear = fit.b * rows.astype(np.float64)
    large, small = np.maximum(fit.a, linear), np.minimum(fit.a, linear)
    result: Floats = large * (1.0 + (small / large) ** fit.p) ** (1.0 / fit.p)
    return result


def _allreduce(table: Allreduce, elements: npt.NDArray[np.int64]) -> Floats:
    """Linear between the measured sizes: latency + size/bandwidth is exact there, and too high log-log.

    Below the first size its time is kept (all latency); above the last, time grows in proportion.
    """
    sizes = np.array(sorted(table.points), np.float64)
    times = np.array([table.points[size] for size in sorted(table.points)], np.float64)
    message = elements.astype(np.float64)
    beyond = np.maximum(message / sizes[-1], 1.0)
    result: Floats = np.interp(message, sizes, times) * beyond
    return result


def _linear(points: Mapping[int, float], x: int) -> float:
    """The line through the two points nearest around x, also outside them; at least 0, 0 if none."""
    sizes = sorted(points)
    if len(sizes) < 2:
        return float(points[sizes[0]]) if sizes else 0.0
    right = min(max(int(np.searchsorted(sizes, x)), 1), len(sizes) - 1)
    x0, x1 = sizes[right - 1], sizes[right]
    y = points[x0] + (points[x1] - points[x0]) * (x - x0) / (x1 - x0)
    return max(float(y), 0.0)
