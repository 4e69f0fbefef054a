"""How long one engine step takes, from a calibration.

    T = L * [G(M) + A_decode + A_prefill + E(M) + 2*AR(M*hidden)] + H(n_out)

M scheduled tokens (of a pure decode step those of its CUDA graph), G the
layer's matrix products, A attention, E element-wise kernels, AR all-reduce (tensor parallel only),
H the LM head. Everything that depends on M alone becomes a table once, in NumPy; the verbs look up,
multiply and add, so that compiled and plain runs agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim._jit import verb
from sim.calibration import Calibration, KernelCalibration, Saturating, WholeStepCalibration
from sim.front_end import hash_time_us
from sim.grid import NO_GRID, on_grid
from sim.hardware import Dtype
from sim.hashing import Algorithm

__all__ = ["Calibration", "StepCost", "compile_cost", "cpu_time", "front_end_time", "gpu_time", "linear_cost"]

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_BEYOND = 1e300  # more than any step has; infinity times 0 would be no number
_EVERYWHERE = (_BEYOND, _BEYOND, 0.0, _BEYOND, _BEYOND, _BEYOND, _BEYOND)
# vLLM captures decode graphs at 1, 2, 4, multiples of 8 up to 256 and of 16 up to this many sequences
# (VllmConfig._set_cudagraph_sizes); larger batches run as they are.
_LARGEST_GRAPH = 512


class StepCost(NamedTuple):
    """A calibration ready for the core: microseconds inside, seconds out of the verbs.

    Tables have max_num_batched_tokens + 1 rows, with 0 at row 0. Attention coefficients hold
    all layers.
    """

    token_us: Floats  # by scheduled tokens, a step with prefill
    decode_us: Floats  # by sequences, a pure decode step
    output_us: Floats  # by sampled tokens
    decode_grid: Floats  # table mode: by sequences and KV length; else empty
    prefill_grid: Floats  # table mode: by sequences and new tokens; else empty
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
    max_tokens: float  # how far the calibration was measured, see Domain; 1e300: not said
    max_decodes: float
    min_kv_len: float
    max_kv_len: float
    max_decode_kv: float
    max_query_len: float
    max_context_len: float
    reply_us: float  # from a token of the engine to the client


def compile_cost(
    calibration: Calibration,
    *,
    max_num_batched_tokens: int,
    block_size: int,
    kv_dtype: Dtype,
    hash_algo: Algorithm = "sha256",
) -> StepCost:
    """Evaluate a calibration for one engine configuration."""
    front_end = calibration.front_end
    hash_us = hash_time_us(front_end, hash_algo, block_size, calibration.name)
    if isinstance(calibration, WholeStepCalibration):
        cost = _whole_step(
            calibration.base_us,
            calibration.token_us,
            calibration.decode_context_us,
            calibration.seq_us,
            max_num_batched_tokens,
            kv_us=calibration.kv_us,
            pair_us=calibration.pair_us,
            prefill_us=calibration.prefill_us,
            between_us=calibration.between_us,
        )
    else:
        cost = _kernels(calibration, max_num_batched_tokens, block_size, kv_dtype)
    cost = cost._replace(
        front_end_us=float(front_end.alpha_us),
        hash_us_per_block=hash_us,
        reply_us=float(front_end.reply_us),
    )
    if calibration.domain is None:
        return cost
    reach: dict[str, Any] = {name: float(bound) for name, bound in calibration.domain}
    return cost._replace(**reach)


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

    num_tokens M scheduled tokens; num_outputs rows of the LM head. num_decodes sequences
    have one scheduled token each, over decode_kv cached tokens in all (their own included);
    num_prefills others have q new tokens over c computed ones, given as sum q, q*q, q*c and c.
    """
    if num_tokens == 0:
        return 0.0
    us = cost.decode_us[num_decodes] if num_prefills == 0 else cost.token_us[num_tokens]
    us = us + cost.output_us[num_outputs] + cost.seq_us * (num_decodes + num_prefills)
    if num_decodes > 0 and cost.decode_grid.shape[0] > 0:
        us = us + on_grid(cost.decode_grid, num_decodes, decode_kv / num_decodes)
    elif num_decodes > 0:
        us = us + (cost.d0 + cost.d1 * num_decodes + cost.d2 * decode_kv)
    if num_prefills > 0:
        if cost.prefill_grid.shape[0] > 0:  # as many sequences as would have these sums, all alike
            query_len = prefill_squares / prefill_tokens
            us = us + on_grid(cost.prefill_grid, prefill_tokens / query_len, query_len)
        else:
            us = us + (cost.a0 + cost.a1 * prefill_tokens + cost.a2 * (0.5 * prefill_squares))
        us = us + (cost.a2_context * prefill_cross + cost.a3 * prefill_context)
    return float(us * 1e-6)


@verb
def front_end_time(cost: StepCost, num_blocks: int) -> float:
    """SECONDS the front-end thread takes for a request with so many full prompt blocks to hash."""
    return (cost.front_end_us + cost.hash_us_per_block * num_blocks) * 1e-6


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
    terms = (seq_us, d0, d1, d2, a0, a1, a2, a2_context, a3, cpu0_us, cpu1_us)
    scalars = (*terms, 0.0, 0.0, *_EVERYWHERE, 0.0)
    # float(): an integer field would be another type to the compiler, and another compilation.
    return StepCost(
        token_us, decode_us, output_us, NO_GRID, NO_GRID, *(float(value) for value in scalars)
    )


def _whole_step(
    base_us: float,
    token_us: float,
    decode_context_us: float,
    seq_us: float,
    max_num_batched_tokens: int,
    *,
    kv_us: float = 0.0,
    pair_us: float = 0.0,
    prefill_us: float = 0.0,
    between_us: float = 0.0,
) -> StepCost:
    """Prefill of q tokens over c: q + c tokens of KV, q*c + q*(q+1)/2 pairs; a decode over k: k of both."""
    num_tokens = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
    table = or_zero(num_tokens, base_us + token_us * num_tokens.astype(np.float64))
    return _step_cost(
        token_us=table,
        decode_us=table.copy(),
        output_us=np.zeros_like(table),
        seq_us=seq_us,
        d2=decode_context_us + kv_us + pair_us,
        a0=prefill_us,
        a1=kv_us + pair_us / 2,
        a2=pair_us,
        a2_context=pair_us,
        a3=kv_us,
        cpu0_us=between_us,
    )


def _kernels(
    calibration: KernelCalibration, max_num_batched_tokens: int, block_size: int, kv_dtype: Dtype
) -> StepCost:
    attention = calibration.attention[kv_dtype]
    decode, prefill = attention.decode, attention.prefill
    decode_layers = calibration.layers * _factor(decode.block_size_factor, block_size)
    prefill_layers = calibration.layers * _factor(prefill.block_size_factor, block_size)
    num_tokens = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
    padded = pad_decodes(num_tokens)
    return _step_cost(
        token_us=layers_us(calibration, num_tokens, saturating(calibration.gemm, num_tokens)),
        decode_us=layers_us(calibration, padded, saturating(calibration.gemm, padded)),
        output_us=or_zero(num_tokens, saturating(calibration.lm_head, num_tokens)),
        d0=decode_layers * decode.d0,
        d1=decode_layers * decode.d1,
        d2=decode_layers * decode.d2,
        a0=prefill_layers * prefill.a0,
        a1=prefill_layers * prefill.a1,
        a2=prefill_layers * prefill.a2,
        a2_context=prefill_layers * prefill.a2 / prefill.kappa,
        a3=prefill_layers * prefill.a3,
        cpu0_us=calibration.cpu.o0,
        cpu1_us=calibration.cpu.o1,
    )


def pad_decodes(num_seqs: Counts) -> Counts:
    """Rows of a pure decode step: those of the smallest CUDA graph that holds it."""
    multiple = np.where(num_seqs <= 256, 8, 16)
    padded = -(-num_seqs // multiple) * multiple
    small = np.where(num_seqs <= 2, num_seqs, 4)
    return np.where(num_seqs <= 4, small, np.where(num_seqs <= _LARGEST_GRAPH, padded, num_seqs))


def layers_us(calibration: KernelCalibration, num_tokens: Counts, gemm_us: Floats) -> Floats:
    """Microseconds of all layers' work that depends on the token count alone; 0 without tokens.

    gemm_us: of one layer's matrix products, beside num_tokens.
    """
    elementwise = calibration.elementwise
    layer = gemm_us + elementwise.e0 + elementwise.e1 * num_tokens
    if calibration.experts is not None:
        layer = layer + measured(calibration.experts.points, num_tokens)
    if calibration.allreduce is not None:
        layer = layer + 2.0 * measured(calibration.allreduce.points, num_tokens * calibration.hidden_size)
    return or_zero(num_tokens, calibration.layers * layer)


def or_zero(count: Counts, values: Floats) -> Floats:
    """The values, 0 where the count is."""
    return np.where(count > 0, values, 0.0)


def saturating(fit: Saturating, rows: Counts) -> Floats:
    """(a^p + (b*rows)^p)^(1/p), with the larger term taken out: fits reach p = 22 and may go higher."""
    linear = fit.b * rows.astype(np.float64)
    large, small = np.maximum(fit.a, linear), np.minimum(fit.a, linear)
    result: Floats = large * (1.0 + (small / large) ** fit.p) ** (1.0 / fit.p)
    return result


def measured(points: Mapping[int, float], x: Counts) -> Floats:
    """Linear between measured points: latency + size/bandwidth is exact there, and too high log-log.

    Below the first its time is kept (all latency); above the last, time grows in proportion.
    """
    sizes = np.array(sorted(points), np.float64)
    times = np.array([points[size] for size in sorted(points)], np.float64)
    size = x.astype(np.float64)
    result: Floats = np.interp(size, sizes, times) * np.maximum(size / sizes[-1], 1.0)
    return result


def _factor(points: Mapping[int, float], block_size: int) -> float:
    """Attention time at this KV block size over that of the measured one; 1 (assumed) if none is known."""
    sizes = sorted(points)
    return float(np.interp(block_size, sizes, [points[size] for size in sizes])) if sizes else 1.0
