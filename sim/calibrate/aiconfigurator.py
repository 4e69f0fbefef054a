"""Kernel times from NVIDIA's aiconfigurator-core package: Parquet tables measured kernel by kernel.

    <package>/systems/data/<gpu>/<family>/<framework>/<version>/<op>_perf.parquet

Latencies there are in ms, decode KV length is isl + step, and an all-reduce's message_size counts
elements (checked against the bus bandwidth). vLLM's tables are taken, of their newest version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd

from sim.calibrate.held_out import fit_error
from sim.calibrate.timings import ALLREDUCE, DECODE, EXPERTS, GEMM, PREFILL, Timings
from sim.calibration import Table
from sim.errors import InputError
from sim.hardware import Dtype, ModelSpec
from sim.kernels import Kernels

PACKAGE = "aiconfigurator-core"
DTYPES: dict[Dtype, str] = {"bf16": "bfloat16", "fp8": "fp8"}
ALIGNED = 8  # rows: products of others pay for it, and decode steps are padded up to a multiple
# Assumed: how unevenly tokens choose experts. The tables hold balanced, 1.01 and 1.2.
EXPERT_CHOICE = "power_law_1.01"
# Of fp8 experts vLLM's per-tensor kernel is slower than bf16's; published checkpoints scale by block.
EXPERT_DTYPES: dict[Dtype, str] = {"bf16": "bfloat16", "fp8": "fp8_block"}


def read_timings(
    gpu: str, model: ModelSpec, kernels: Kernels, *, tp: int, weights: Dtype, kv_dtypes: list[Dtype]
) -> Timings:
    """The package's measurements of this model's kernels on this GPU.

    Raises InputError if the package is not installed or does not hold a table that is needed.
    """
    data = _folder_of(gpu)
    tables: list[Table] = []
    notes: list[str] = []
    gemm = _read(data, "gemm", "gemm", tables)
    decode, prefill = {}, {}
    for kv_dtype in kv_dtypes:
        decode[kv_dtype] = _decode(data, kernels, kv_dtype, tables, notes)
        prefill[kv_dtype] = _prefill(data, kernels, kv_dtype, tables)
    return Timings(
        gemm=_gemm(gemm, weights, f"{weights} matrix products on {gpu}", tables),
        gemm_bf16=_gemm(gemm, "bf16", f"bf16 matrix products on {gpu}", tables),
        decode=decode,
        prefill=prefill,
        allreduce=_allreduce(data, tp, tables) if tp > 1 else None,
        experts=_experts(data, model, tp, weights, tables) if model.num_experts else None,
        steps=None,
        decode_factors={},
        prefill_factors={},
        hash_us_per_block=None,
        tables=tables,
        source=f"{PACKAGE} {importlib.metadata.version(PACKAGE)} (PyPI, NVIDIA)",
        licence="Apache-2.0",
        notes=notes,
        assumed=[],
    )


def package_folder() -> Path:
    """Where the package lies. Raises InputError if it is not installed. Loads none of its code."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"{PACKAGE} is not installed: pip install 'prefixsim[calibrate]'")
    return Path(spec.submodule_search_locations[0])


def _folder_of(gpu: str) -> Path:
    data = package_folder() / "systems" / "data" / gpu.replace("-", "_")
    if not data.is_dir():
        known = sorted(path.name.replace("_", "-") for path in data.parent.iterdir() if path.is_dir())
        raise InputError(f"{PACKAGE} has no tables of {gpu}; it has {', '.join(known)}")
    return data


def kv_dtypes_of(gpu: str) -> list[Dtype]:
    """The KV types whose attention the package holds for a GPU."""
    path = _newest(_folder_of(gpu), "attention", "generation_attention")
    found = set(pd.read_parquet(path, columns=["kv_cache_dtype"]).kv_cache_dtype)
    return [dtype for dtype, name in DTYPES.items() if name in found]


def _read(data: Path, family: str, op: str, tables: list[Table], framework: str = "vllm") -> pd.DataFrame:
    """One table, without what is not a number; notes where it came from in `tables`."""
    path = _newest(data, family, op, framework)
    relative = path.relative_to(data.parent.parent).as_posix()
    frame = pd.read_parquet(path)
    frame = frame[frame.latency.notna() & (frame.latency > 0) & (frame.latency < float("inf"))]
    frame = frame.assign(latency_us=1e3 * frame.latency)
    if all(table.path != relative for table in tables):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        of = f"{framework} {path.parent.name}"
        tables.append(Table(path=relative, sha256=digest, framework=of, kernel=""))
    frame.attrs["path"] = relative
    return frame


def _newest(data: Path, family: str, op: str, framework: str = "vllm") -> Path:
    def version(path: Path) -> list[int]:
        return [int(part) for part in path.parent.name.split(".") if part.isdigit()]

    paths = sorted((data / family / framework).glob(f"*/{op}_perf.parquet"), key=version)
    if not paths:
        raise InputError(f"{PACKAGE} has no {op} table of {framework} for {data.name.replace('_', '-')}")
    return paths[-1]


def _one_kernel(frame: pd.DataFrame, what: str, tables: list[Table]) -> pd.DataFrame:
    """The rows of the kernel that was timed most: a fit over two kernels is a fit to neither."""
    if frame.empty:
        raise InputError(f"{PACKAGE} has no rows of {what}")
    kernel = str(frame.kernel_source.mode()[0])
    for i, table in enumerate(tables):
        if table.path == frame.attrs["path"]:
            known = [name for name in table.kernel.split(", ") if name]
            names = known if kernel in known else [*known, kernel]
            tables[i] = table.model_copy(update={"kernel": ", ".join(names)})
    return frame[frame.kernel_source == kernel]


def _gemm(frame: pd.DataFrame, weights: Dtype, what: str, tables: list[Table]) -> pd.DataFrame:
    rows = frame[(frame.gemm_dtype == DTYPES[weights]) & (frame.m % ALIGNED == 0)]
    return _one_kernel(rows, what, tables)[GEMM]


def _attention(frame: pd.DataFrame, kernels: Kernels, kv_dtype: Dtype) -> pd.DataFrame:
    rows = frame[
        (frame.num_heads == kernels.num_heads)
        & (frame.num_key_value_heads == kernels.num_kv_heads)
        & (frame.head_dim == kernels.head_dim)
        & (frame.kv_cache_dtype == DTYPES[kv_dtype])
    ]
    return rows[rows.window_size == 0] if "window_size" in rows else rows


def _decode(
    data: Path, kernels: Kernels, kv_dtype: Dtype, tables: list[Table], notes: list[str]
) -> pd.DataFrame:
    """Decode attention; of heads that were not timed, that of more sequences with fewer heads each."""
    what = f"decode attention, {kernels.num_heads}/{kernels.num_kv_heads} heads, {kv_dtype} KV"
    frame = _read(data, "attention", "generation_attention", tables)
    for fold in range(1, kernels.num_kv_heads + 1):
        if kernels.num_kv_heads % fold == 0 and len(_folded(frame, kernels, kv_dtype, fold)):
            break
    rows = _one_kernel(_folded(frame, kernels, kv_dtype, fold), what, tables)
    if fold > 1:
        notes.append(f"{what}: {_fold_error(data, kernels, kv_dtype, fold)}")
    return rows[DECODE]


def _folded(frame: pd.DataFrame, kernels: Kernels, kv_dtype: Dtype, fold: int) -> pd.DataFrame:
    """The rows of 1/fold of the heads, each as one of 1/fold as many sequences."""
    heads, kv_heads = kernels.num_heads // fold, kernels.num_kv_heads // fold
    rows = _attention(frame, kernels._replace(num_heads=heads, num_kv_heads=kv_heads), kv_dtype)
    rows = rows[rows.batch_size >= fold]  # a part of one sequence is none
    return rows.assign(batch=rows.batch_size / fold, kv=rows.isl + rows.step)


def _fold_error(data: Path, kernels: Kernels, kv_dtype: Dtype, fold: int) -> str:
    """What folding costs, where SGLang's kernel was timed with all these heads."""
    told = f"n sequences stand for {fold} n with 1/{fold} of the heads, as these were not timed"
    frame = _read(data, "attention", "generation_attention", [], "sglang")
    whole, folded = (_folded(frame, kernels, kv_dtype, f).query("kv >= 64") for f in (1, fold))
    errors = []
    for kv, points in whole.groupby("kv"):
        near = folded[folded.kv == kv].sort_values("batch")
        points = points[points.batch.between(near.batch.min(), near.batch.max())]
        guess = np.interp(points.batch, near.batch, near.latency_us)
        errors += (guess / points.latency_us - 1.0).abs().tolist()
    if not errors:
        return told
    error = fit_error(np.array(errors))
    off = f"off by {error.mape} %, p95 {error.p95} % ({error.points} points)"
    return f"{told}; for SGLang's kernel that is {off}"


def _prefill(data: Path, kernels: Kernels, kv_dtype: Dtype, tables: list[Table]) -> pd.DataFrame:
    what = f"prefill attention, {kernels.num_heads}/{kernels.num_kv_heads} heads, {kv_dtype} KV"
    frame = _read(data, "attention", "context_attention", tables)
    rows = _one_kernel(_attention(frame, kernels, kv_dtype), what, tables)
    return rows.assign(batch=rows.batch_size, q=rows.isl, c=rows.step)[PREFILL]


def _allreduce(data: Path, tp: int, tables: list[Table]) -> pd.DataFrame:
    """Inside CUDA graphs, as vLLM runs decode steps and the pieces of the others."""
    frame = _read(data, "comm", "custom_allreduce", tables)
    rows = frame[(frame.num_gpus == tp) & (frame.backend == "vllm_graph")]
    rows.attrs["path"] = frame.attrs["path"]
    rows = _one_kernel(rows, f"all-reduce over {tp} GPUs", tables)
    return rows.assign(elements=rows.message_size)[ALLREDUCE].sort_values("elements")


def _experts(
    data: Path, model: ModelSpec, tp: int, weights: Dtype, tables: list[Table]
) -> pd.DataFrame:
    frame = _read(data, "moe", "moe", tables)
    rows = frame[
        (frame.moe_dtype == EXPERT_DTYPES[weights])
        & (frame.hidden_size == model.hidden_size)
        & (frame.inter_size == model.moe_intermediate_size)
        & (frame.topk == model.num_experts_per_tok)
        & (frame.num_experts == model.num_experts)
        & (frame.moe_tp_size == tp)
        & (frame.moe_ep_size == 1)
        & (frame.distribution == EXPERT_CHOICE)
    ]
    rows = _one_kernel(rows, f"{weights} experts of {model.name} at tp {tp}", tables)
    return rows[EXPERTS].sort_values("num_tokens")
