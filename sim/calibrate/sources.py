"""The two sources of a calibration: NVIDIA's measured tables, and a user's own CSV."""

from __future__ import annotations

from pathlib import Path

from sim.calibrate import aiconfigurator
from sim.calibrate.build import build
from sim.calibrate.from_csv import read_csv
from sim.calibrate.steps import step_error
from sim.calibrate.table_mode import table_cost
from sim.calibration import KernelCalibration
from sim.cost import StepCost
from sim.hardware import Dtype, GpuSpec, ModelSpec
from sim.hashing import Algorithm
from sim.kernels import kernels_of


def from_aiconfigurator(
    gpu: GpuSpec, model: ModelSpec, *, tp: int, weights: Dtype, kv_dtypes: list[Dtype], date: str
) -> KernelCalibration:
    """Fit NVIDIA's tables; kv_dtypes empty: all that they hold for the GPU.

    Raises InputError if the package or a table is missing.
    """
    kernels = kernels_of(model, tp)
    kv_dtypes = kv_dtypes or aiconfigurator.kv_dtypes_of(gpu.name)
    timings = aiconfigurator.read_timings(
        gpu.name, model, kernels, tp=tp, weights=weights, kv_dtypes=kv_dtypes
    )
    fitted = build(gpu, model, kernels, timings, tp=tp, weights=weights, date=date)
    errors = {
        f"step_against_tables_{kv}": step_error(fitted, timings, kernels, kv) for kv in fitted.kv_dtypes
    }
    return fitted.model_copy(update={"errors": {**fitted.errors, **errors}})


def table_mode(
    gpu: GpuSpec,
    model: ModelSpec,
    *,
    tp: int,
    weights: Dtype,
    kv_dtype: Dtype,
    max_num_batched_tokens: int,
    block_size: int,
    hash_algo: Algorithm,
) -> tuple[KernelCalibration, StepCost]:
    """NVIDIA's tables themselves as step time, with the fit that fills what they do not hold.

    Raises InputError if the package or a table is missing.
    """
    kernels = kernels_of(model, tp)
    timings = aiconfigurator.read_timings(
        gpu.name, model, kernels, tp=tp, weights=weights, kv_dtypes=[kv_dtype]
    )
    fitted = build(gpu, model, kernels, timings, tp=tp, weights=weights, date="")
    cost = table_cost(
        fitted,
        timings,
        kernels,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_dtype=kv_dtype,
        hash_algo=hash_algo,
    )
    return fitted, cost


def from_csv(
    path: Path,
    gpu: GpuSpec,
    model: ModelSpec,
    *,
    tp: int,
    weights: Dtype,
    kv_dtypes: list[Dtype],
    assume_kappa: bool,
    date: str,
) -> KernelCalibration:
    """Fit a timings.csv. Raises InputError, one line, for a file that is wrong or does not suffice."""
    kernels = kernels_of(model, tp)
    timings = read_csv(
        path,
        gpu,
        model,
        kernels,
        tp=tp,
        weights=weights,
        kv_dtypes=kv_dtypes,
        assume_kappa=assume_kappa,
    )
    return build(
        gpu, model, kernels, timings, tp=tp, weights=weights, date=date, assume_kappa=assume_kappa
    )
