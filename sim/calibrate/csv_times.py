"""Whether times of a timings.csv can be microseconds on the GPU that they are said to be of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from sim.errors import InputError
from sim.hardware import DTYPE_BYTES, GpuSpec

SHORTEST_US = 0.5  # no kernel is launched and done in less
FASTEST = 4.0  # times the data sheet's rates: neither clocks nor caches give more
SLOWEST = 500.0  # times what the data sheet allows and a launch: no kernel wastes more
LAUNCH_US = 100.0
LONGEST_US = 60e6  # a minute for one kernel
LONGEST_HASH_US = 1e6  # a second for a block
BOUND = ("gemm", "decode_attention", "prefill_attention")  # operations that the data sheet bounds


def check_times(path: Path, frame: pd.DataFrame, gpu: GpuSpec) -> None:
    """Raise InputError, one line, for times that are not positive or that the data sheet rules out."""
    for bad, said in (
        (frame[~(frame.latency_us > 0)], "should be above 0, is {:g}"),
        (_over(frame[frame.op != "hash"], LONGEST_US), "{:g} us is over a minute; nanoseconds?"),
        (_over(frame[frame.op == "hash"], LONGEST_HASH_US), "{:g} us is over a second a block; nanoseconds?"),
    ):
        if len(bad):
            row = bad.iloc[0]
            raise InputError(f"{path}:{row.line}: latency_us: {said.format(row.latency_us)}")
    kernels = frame[frame.op != "hash"]
    if len(kernels):
        bounds = kernels.apply(lambda row: _bound_us(row, gpu), axis=1)
        _check_fast(path, kernels, bounds, gpu)
        _check_slow(path, kernels, bounds, gpu)


def _over(rows: pd.DataFrame, most: float) -> pd.DataFrame:
    return rows[rows.latency_us > most]


def _check_fast(path: Path, kernels: pd.DataFrame, bounds: pd.Series[float], gpu: GpuSpec) -> None:
    least = (bounds / FASTEST).clip(lower=SHORTEST_US)
    fast = kernels[kernels.latency_us < least]
    if len(fast):
        row = fast.iloc[0]
        raise InputError(
            f"{path}:{row.line}: latency_us: {row.latency_us:g} us is faster than {gpu.name} can be "
            f"(at least {least[fast.index[0]]:.3g} us for this {row.op}); {len(fast)} of {len(kernels)} "
            "rows are; are these seconds or milliseconds?"
        )


def _check_slow(path: Path, kernels: pd.DataFrame, bounds: pd.Series[float], gpu: GpuSpec) -> None:
    """Where the data sheet bounds a kernel from below, a multiple of it does from above."""
    factor = (kernels.latency_us / (bounds + LAUNCH_US))[bounds > 0]
    slow = factor[factor > SLOWEST]
    if len(slow):
        row = kernels.loc[slow.index[0]]
        raise InputError(
            f"{path}:{row.line}: latency_us: {row.latency_us:g} us is slower than {gpu.name} by a factor "
            f"{slow.iloc[0]:.0f}; {len(slow)} of {len(kernels)} rows are; nanoseconds, or another device?"
        )


def _bound_us(row: Any, gpu: GpuSpec) -> float:
    """The least time that the data sheet allows for a matrix product or attention; 0 without rates."""
    if gpu.memory_bandwidth is None or row.op not in BOUND:
        return 0.0
    peak = max(gpu.peak_flops.values())
    if row.op == "gemm":
        size = DTYPE_BYTES["fp8"] * row.n * row.k
        return float(1e6 * max(2 * row.m * row.n * row.k / peak, size / gpu.memory_bandwidth))
    if row.op == "decode_attention":
        size = DTYPE_BYTES["fp8"] * 2 * row.batch * row.kv * row.num_kv_heads * row.head_dim
        return float(1e6 * size / gpu.memory_bandwidth)
    pairs = row.batch * (row.q * row.q / 2 + row.q * row.c)
    return float(1e6 * 4 * pairs * row.num_heads * row.head_dim / peak)
