"""Kernel times of one model from a timings.csv: the rows that belong to it, and whether they suffice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd

from sim.calibrate.csv_rows import read_rows
from sim.calibrate.fit import fit_prefill
from sim.calibrate.timings import ALLREDUCE, DECODE, GEMM, PREFILL, STEP, Timings
from sim.calibration import Table
from sim.errors import InputError, suggestion
from sim.hardware import Dtype, GpuSpec, ModelSpec
from sim.hashing import Algorithm
from sim.kernels import Gemm, Kernels

LEAST_ROWS = 5  # of a matrix product's m: three coefficients, and a fold to hold out
LEAST_POINTS = 6  # of attention
VISIBLE = 1e-3  # part of a prefill's time that the term of its square takes at least, somewhere
LEAST_SIZES = 3  # of an all-reduce: the inner ones are held out


def read_csv(
    path: Path,
    gpu: GpuSpec,
    model: ModelSpec,
    kernels: Kernels,
    *,
    tp: int,
    weights: Dtype,
    kv_dtypes: list[Dtype],
    assume_kappa: bool,
) -> Timings:
    """The measurements in a CSV of this model's kernels.

    kv_dtypes: those to take; empty: those that the file has. Raises InputError, one line, for what
    read_rows refuses and for what is missing: a product, attention of the model's heads, points.
    """
    if model.num_experts:
        raise InputError(f"{path}: {model.name} has routed experts, which such a file does not hold")
    rows = read_rows(path, gpu)
    notes: list[str] = []
    gemm = _gemms(path, rows, kernels.gemms, weights)
    lm_head = _gemms(path, rows, [kernels.lm_head], "bf16")
    asked = kv_dtypes or _kv_dtypes(path, rows)
    decode, decode_factors = {}, {}
    prefill, prefill_factors = {}, {}
    for kv_dtype in asked:
        of = _attention(path, rows, "decode_attention", kernels, kv_dtype)
        decode[kv_dtype], decode_factors[kv_dtype] = _one_kernel(of, DECODE, "decode", notes)
        _enough(path, decode[kv_dtype], ["batch", "kv"], "decode_attention", kv_dtype)
        of = _attention(path, rows, "prefill_attention", kernels, kv_dtype)
        prefill[kv_dtype], prefill_factors[kv_dtype] = _one_kernel(of, PREFILL, "prefill", notes)
        _with_context(path, prefill[kv_dtype], kv_dtype, assume_kappa)
        _enough(path, prefill[kv_dtype], ["q"], "prefill_attention", kv_dtype)
        _grows(path, prefill[kv_dtype], kv_dtype, assume_kappa)
    names = sorted(set(rows.get("kernel", pd.Series(dtype=str))) - {""})
    table = Table(
        path=path.name,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        framework="; ".join(sorted(set(rows.get("versions", pd.Series(dtype=str))) - {""})) or "not said",
        kernel=", ".join(names) or "not said",
    )
    devices = sorted(set(rows.device[rows.op != "hash"]) - {""}) if "device" in rows else []
    return Timings(
        gemm=gemm,
        gemm_bf16=lm_head,
        decode=decode,
        prefill=prefill,
        allreduce=_allreduce(path, rows, tp) if tp > 1 else None,
        experts=None,
        steps=_steps(rows, weights),
        decode_factors=decode_factors,
        prefill_factors=prefill_factors,
        hash_us_per_block=_hash_times(path, rows),
        tables=[table],
        source=f"measured on {' and '.join(devices) or 'a device not named'}, {path.name}",
        licence="the measurer's",
        notes=notes,
        assumed=_other_device(devices, gpu),
    )


def _other_device(devices: list[str], gpu: GpuSpec) -> list[str]:
    """What to say of times that another device seems to have taken."""
    chip = gpu.name.split("-")[0].lower()
    others = [device for device in devices if chip not in device.lower().replace(" ", "")]
    return [f"{gpu.name} takes as long as the {device} that was timed" for device in others]


def _gemms(path: Path, rows: pd.DataFrame, gemms: Sequence[Gemm], weights: Dtype) -> pd.DataFrame:
    """Rows of these products. Each has to be there, at the same sizes m as the others."""
    found = _of_type(path, rows[rows.op == "gemm"], "dtype", weights)
    if found.empty:
        raise InputError(f"{path}: no rows of gemm; `prefixsim measure --model` appends them to this file")
    common: set[float] | None = None
    for gemm in gemms:
        sizes = set(found.m[(found.n == gemm.n) & (found.k == gemm.k)])
        common = sizes if common is None else common & sizes
        if len(common) < LEAST_ROWS:
            shared = "" if common == sizes else " in common with the products before it"
            raise InputError(
                f"{path}: gemm {gemm.name} (n {gemm.n}, k {gemm.k}, {weights}): {len(common)} sizes m"
                f"{shared}, at least {LEAST_ROWS} are needed"
            )
    shapes = {(gemm.n, gemm.k) for gemm in gemms}
    mine = [shape in shapes for shape in zip(found.n, found.k, strict=True)]
    return found[mine][GEMM].astype({"m": int, "n": int, "k": int})


def _of_type(path: Path, rows: pd.DataFrame, column: str, dtype: Dtype) -> pd.DataFrame:
    """Rows of this type; where the file does not say the type, all."""
    if column not in rows or (rows[column] == "").all():
        return rows
    found = rows[rows[column] == dtype]
    if found.empty and len(rows):
        others = ", ".join(sorted(set(rows[column]) - {""}))
        op = rows.op.iloc[0]
        raise InputError(f"{path}: no rows of {op} with {column} {dtype}; the file has {others}")
    return found


def _kv_dtypes(path: Path, rows: pd.DataFrame) -> list[Dtype]:
    known: list[Dtype] = list(get_args(Dtype))
    named = set(rows.kv_dtype[rows.op == "decode_attention"]) if "kv_dtype" in rows else set()
    return [one for one in known if one in named] or ["bf16"]


def _attention(
    path: Path, rows: pd.DataFrame, op: str, kernels: Kernels, kv_dtype: Dtype
) -> pd.DataFrame:
    heads = (kernels.num_heads, kernels.num_kv_heads, kernels.head_dim)
    found = _of_type(path, rows[rows.op == op], "kv_dtype", kv_dtype)
    if found.empty:
        raise InputError(f"{path}: no rows of {op}; a step's time needs them")
    mine = found[
        (found.num_heads == heads[0]) & (found.num_kv_heads == heads[1]) & (found.head_dim == heads[2])
    ]
    if mine.empty:
        raise InputError(
            f"{path}: no rows of {op} with {heads[0]} heads, {heads[1]} KV heads of {heads[2]}, "
            "as this model has at this tp"
        )
    return mine


def _one_kernel(
    rows: pd.DataFrame, columns: list[str], what: str, notes: list[str]
) -> tuple[pd.DataFrame, dict[int, float]]:
    """The kernel and KV block size with most rows, and other block sizes' times over its own."""
    if "kernel" in rows and rows.kernel.nunique() > 1:
        paged = rows[rows.block_size.notna()] if "block_size" in rows else rows
        kernel = str((paged if len(paged) else rows).kernel.mode()[0])
        others = ", ".join(sorted(set(rows.kernel) - {kernel}))
        notes.append(f"{what} attention is that of {kernel}; left out: {others}")
        rows = rows[rows.kernel == kernel]
    if "block_size" not in rows or rows.block_size.isna().all():
        return rows[columns], {}
    rows = rows[rows.block_size.notna()]
    reference = int(rows.block_size.mode()[0])
    mine = rows[rows.block_size == reference]
    factors: dict[int, float] = {}
    for size in sorted(set(rows.block_size.astype(int))):
        both = rows[rows.block_size == size].merge(mine, on=columns[:-1], suffixes=("", "_reference"))
        if len(both):
            factors[size] = round(float(np.median(both.latency_us / both.latency_us_reference)), 4)
    return mine[columns], factors if len(factors) > 1 else {}


def _enough(path: Path, rows: pd.DataFrame, varied: list[str], op: str, kv_dtype: Dtype) -> None:
    few = [column for column in varied if rows[column].nunique() < 3]
    if len(rows) < LEAST_POINTS or few:
        seen = ", ".join(f"{rows[column].nunique()} of {column}" for column in varied)
        raise InputError(
            f"{path}: {op}, {kv_dtype} KV: {len(rows)} points with {seen}; needed are "
            f"{LEAST_POINTS} points and 3 values of each"
        )


def _with_context(path: Path, rows: pd.DataFrame, kv_dtype: Dtype, assume_kappa: bool) -> None:
    """Prefill over context is not to be had from prefill without: off by half (cost model)."""
    what = f"{path}: prefill_attention, {kv_dtype} KV"
    if assume_kappa:  # only points without context are fitted to
        alone = rows[rows.c == 0]
        if len(alone) < LEAST_POINTS or alone.q.nunique() < 3:
            raise InputError(
                f"{what}: {len(alone)} points without cached context (c = 0) with {alone.q.nunique()} of q; "
                f"--assume-kappa needs {LEAST_POINTS} points and 3 values; measure more prompt lengths"
            )
        return
    over = rows[rows.c > 0]
    if over.q.nunique() < 2 or over.c.nunique() < 2:
        raise InputError(
            f"{what}: {len(over)} points over cached context (c > 0); "
            "needed are 2 values of q and of c, as q 256 and 1024 over c 1024 and 2048; without them, "
            "--assume-kappa assumes what context costs"
        )


def _grows(path: Path, rows: pd.DataFrame, kv_dtype: Dtype, assume_kappa: bool) -> None:
    """Attention's time grows with the square of the prompt; without that, longer ones would cost nothing."""
    if assume_kappa:
        rows = rows[rows.c == 0]
    fit = fit_prefill(rows, 1.0 if assume_kappa else None)
    pairs = rows.batch * (rows.q * rows.q / 2 + rows.q * rows.c / fit.kappa)
    if (fit.a2 * pairs / rows.latency_us).max() < VISIBLE:
        raise InputError(
            f"{path}: prefill_attention, {kv_dtype} KV: times do not grow with q; measure longer prompts"
        )


def _allreduce(path: Path, rows: pd.DataFrame, tp: int) -> pd.DataFrame:
    found = rows[rows.op == "allreduce"]
    found = found[found.num_gpus == tp] if len(found) else found
    if len(found) < LEAST_SIZES:
        raise InputError(
            f"{path}: allreduce over {tp} GPUs: {len(found)} sizes, at least {LEAST_SIZES} are needed"
        )
    return found.astype({"elements": int})[ALLREDUCE].sort_values("elements")


def _steps(rows: pd.DataFrame, weights: Dtype) -> pd.DataFrame | None:
    found = rows[rows.op == "step"]
    if "dtype" in found and len(found):
        found = found[(found["dtype"] == weights) | (found["dtype"] == "")]
    return found[STEP] if len(found) else None


def _hash_times(path: Path, rows: pd.DataFrame) -> dict[Algorithm, dict[int, float]] | None:
    found = rows[rows.op == "hash"]
    times: dict[Algorithm, dict[int, float]] = {}
    known: tuple[Algorithm, ...] = get_args(Algorithm)
    for name, line in zip(found.get("algorithm", []), found.line, strict=False):
        if name not in known:
            raise InputError(f"{path}:{line}: algorithm: unknown value {name!r}{suggestion(name, known)}")
    for algorithm in known:
        rows_of = found[found.algorithm == algorithm] if len(found) else found
        if len(rows_of):
            sizes, us = rows_of.block_size.astype(int).tolist(), rows_of.latency_us.round(4).tolist()
            times[algorithm] = dict(zip(sizes, us, strict=True))
    return times or None
