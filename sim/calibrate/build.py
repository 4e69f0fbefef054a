"""From measured kernel times to a calibration: the fits, their held-out errors, what is assumed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sim.calibrate.aiconfigurator import EXPERT_CHOICE
from sim.calibrate.curve import layer_curve, products_of_layer
from sim.calibrate.elementwise import with_elementwise
from sim.calibrate.fit import (
    decode,
    fit_decode,
    fit_prefill,
    fit_saturating,
    prefill,
)
from sim.calibrate.held_out import fit_error, held_out_errors, interpolation_errors
from sim.calibrate.timings import Timings
from sim.calibration import (
    Allreduce,
    Attention,
    Cpu,
    Domain,
    Experts,
    FitError,
    KernelCalibration,
    Provenance,
    Saturating,
)
from sim.cost import saturating
from sim.front_end import FrontEnd
from sim.hardware import Dtype, GpuSpec, ModelSpec
from sim.kernels import Kernels
from sim.roofline import ELEMENTWISE_US, elementwise

# Assumed where it was not measured: what prefill over cached context costs against new tokens.
KAPPA = 1.15
# Vidur's A100, of 32 query and 4 KV heads, with a3 = 0 and four points over context in the fit.
KAPPA_OF = {"a100-sxm": 1.94}
HELD_OUT = (
    "errors are of points that a fit did not see (four folds, each predicted from the others; of tables, "
    "each point from its neighbours), those of steps of the fit against what it was fitted to"
)

SHORTEST_KV = 64  # tokens; a shorter decode is all overhead, and few prompts are that short
LONG_PREFILL_US = 100.0  # below, a prefill's attention is mostly launch


def build(
    gpu: GpuSpec,
    model: ModelSpec,
    kernels: Kernels,
    timings: Timings,
    *,
    tp: int,
    weights: Dtype,
    date: str,
    assume_kappa: bool = False,
) -> KernelCalibration:
    """Fit every component and state its held-out error. Modifies nothing.

    assume_kappa: do not fit what cached context costs, even where it was measured.
    """
    errors: dict[str, FitError] = {}
    layer = products_of_layer(timings, kernels)
    gemm = _saturating("gemm", layer, errors)
    lm_head = _saturating("lm_head", layer_curve(timings.gemm_bf16, [kernels.lm_head]), errors)
    given = KAPPA_OF.get(gpu.name, KAPPA)
    attention = {kv: _attention(timings, kv, errors, given, assume_kappa) for kv in timings.decode}
    experts = None
    if timings.experts is not None:
        experts = Experts(points=_points(timings.experts, "num_tokens"))
        errors["experts"] = _interpolated(timings.experts, "num_tokens")
    allreduce = None
    if timings.allreduce is not None:
        allreduce = Allreduce(points=_points(timings.allreduce, "elements"))
        errors["allreduce"] = _interpolated(timings.allreduce, "elements")
    fitted = KernelCalibration(
        form="kernels",
        gpu=gpu.name,
        model=model.name,
        tp=tp,
        weights=weights,
        layers=model.layers,
        hidden_size=model.hidden_size,
        gemm=gemm,
        experts=experts,
        lm_head=lm_head,
        attention=attention,
        elementwise=elementwise(gpu, kernels),
        allreduce=allreduce,
        cpu=Cpu(o0=0.0, o1=0.0),
        front_end=FrontEnd(hash_us_per_block=timings.hash_us_per_block),
        domain=_domain(timings, layer, assume_kappa),
        errors=errors,
        assumed=_assumed(timings, attention, gpu, weights, assume_kappa),
        provenance=Provenance(
            source=timings.source,
            licence=timings.licence,
            date=date,
            tables=timings.tables,
            note="; ".join([HELD_OUT, *timings.notes]),
        ),
    )
    return fitted if timings.steps is None else with_elementwise(fitted, timings.steps)


def _saturating(name: str, curve: pd.Series[float], errors: dict[str, FitError]) -> Saturating:
    points = pd.DataFrame({"m": curve.index, "latency_us": curve.to_numpy(np.float64)})

    def fit(some: pd.DataFrame) -> Saturating:
        return fit_saturating(some.m.to_numpy(np.float64), some.latency_us.to_numpy(np.float64))

    unseen = held_out_errors(points, fit, lambda f, some: saturating(f, some.m.to_numpy(np.int64)))
    errors[name] = fit_error(unseen)
    return fit(points)


def _attention(
    timings: Timings, kv_dtype: Dtype, errors: dict[str, FitError], given: float, assume_kappa: bool
) -> Attention:
    decodes = timings.decode[kv_dtype]
    decodes = decodes[decodes.kv >= min(SHORTEST_KV, decodes.kv.max())]
    errors[f"decode_attention_{kv_dtype}"] = fit_error(held_out_errors(decodes, fit_decode, decode))
    prefills = timings.prefill[kv_dtype]
    if assume_kappa:
        prefills = prefills[prefills.c == 0]
    context = (prefills.c > 0).to_numpy()
    kappa = None if context.any() else given
    unseen = held_out_errors(prefills, lambda some: fit_prefill(some, kappa), prefill)
    long = (prefills.latency_us > LONG_PREFILL_US).to_numpy()
    if (long & ~context).any():
        errors[f"prefill_attention_{kv_dtype}"] = fit_error(unseen[long & ~context])
    if context.any():
        errors[f"prefill_over_context_{kv_dtype}"] = fit_error(unseen[context])
    decode_factor = timings.decode_factors.get(kv_dtype, {})
    prefill_factor = timings.prefill_factors.get(kv_dtype, {})
    return Attention(
        decode=fit_decode(decodes).model_copy(update={"block_size_factor": decode_factor}),
        prefill=fit_prefill(prefills, kappa).model_copy(update={"block_size_factor": prefill_factor}),
    )


def _points(frame: pd.DataFrame, x: str) -> dict[int, float]:
    """Times by size, each at most the next: more work is not done sooner."""
    times = frame.latency_us.iloc[::-1].cummin().iloc[::-1]
    return dict(zip(frame[x].tolist(), times.round(3).tolist(), strict=True))


def _interpolated(frame: pd.DataFrame, x: str) -> FitError:
    times = frame.latency_us.to_numpy(np.float64)
    return fit_error(interpolation_errors(frame[x].to_numpy(np.float64), times))


def _domain(timings: Timings, layer: pd.Series[float], assume_kappa: bool) -> Domain:
    most_tokens = int(layer.index.max())
    if timings.experts is not None:
        most_tokens = min(most_tokens, int(timings.experts.num_tokens.max()))
    decodes, prefills = (pd.concat(frames.values()) for frames in (timings.decode, timings.prefill))
    return Domain(
        max_tokens=most_tokens,
        max_decodes=int(decodes.batch.max()),
        min_kv_len=min(SHORTEST_KV, int(decodes.kv.max())),
        max_kv_len=int(decodes.kv.max()),
        max_decode_kv=int((decodes.batch * decodes.kv).max()),
        max_query_len=int(prefills.q.max()),
        max_context_len=0 if assume_kappa else int(prefills.c.max()),
    )


def _assumed(
    timings: Timings, attention: dict[Dtype, Attention], gpu: GpuSpec, weights: Dtype, assume_kappa: bool
) -> list[str]:
    texts = list(timings.assumed)
    if timings.steps is None:
        traffic = ", and their traffic at 80 % of the data sheet's bandwidth" if gpu.memory_bandwidth else ""
        texts.append(f"element-wise kernels take {ELEMENTWISE_US} us a layer{traffic} (e0, e1)")
    if assume_kappa or not any((frame.c > 0).any() for frame in timings.prefill.values()):
        kappa = KAPPA_OF.get(gpu.name, KAPPA)
        known = ", as measured on an A100 with other heads" if gpu.name in KAPPA_OF else ""
        costs = f"costs 1/{kappa} of as many new tokens (kappa = {kappa}, a3 = 0){known}"
        texts.append(f"prefill over cached context {costs}")
    if timings.experts is not None:
        texts.append(f"tokens choose experts by {EXPERT_CHOICE.replace('_', ' ')}")
    if weights == "fp8":
        texts.append("quantising activations to fp8 takes no time beside the products")
    texts += [
        "no CPU time for schedule, launch and update (O = 0)",
        "no front-end time a request beside hashing (alpha = 0)",
    ]
    if not any(one.decode.block_size_factor for one in attention.values()):
        texts.append("attention takes the same time at every KV block size (block_size_factor = 1)")
    return texts
