"""A step's time from a GPU's data sheet, for models and GPUs that nobody calibrated.

The same form and the same coefficients as sim/calibration.py, but from sizes and rates: what a kernel
must read over the memory bandwidth, what it must multiply over the peak rate, each at an efficiency
that is ASSUMED. The efficiencies stand for all GPUs together, near the middle of what the shipped fits
of measured kernels reach (LLaMA-13B, Llama-3.1 and Qwen3 on A100, H100, H200 and B200, and some on an
L40S that were too poor to ship). They are therefore no independent check of those fits. Share of the
data sheet's rate in those fits, lowest to highest (median):

                                          bf16                 fp8
    weights read, launches taken off      .73 - 1.01 (.85)     .44 - .84 (.68)
    matrix products                       .63 -  .93 (.79)     .34 - .68 (.54)
    products of routed experts            .22 -  .47 (.36)     .11 - .21 (.16)
    KV read                               .69 - 1.77 (.91)     above 1: from the L40S's cache
    attention's products                  .53 -  .72 (.69)
    all-reduce over NVLink                .63 - 1.04 (.74)

It differs from those fits by 8 % in the mean over decode steps of 1 to 256 sequences, prefills of 128
to 8,192 tokens and mixtures; by 22 % for the worst pair (B200, fp8, tp 8: too fast) and 43 % for the
worst step (B200, experts, tp 2): tests/test_roofline.py. Expect more where no fit is near. An earlier
choice of the efficiencies, from eight of the fits, met the other dense models' on NVLink unseen and was
off by 9 %.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.calibration import (
    Allreduce,
    Attention,
    Cpu,
    DecodeAttention,
    Elementwise,
    Experts,
    KernelCalibration,
    PrefillAttention,
    Provenance,
    Saturating,
)
from sim.errors import InputError
from sim.front_end import FrontEnd
from sim.hardware import DTYPE_BYTES, Dtype, GpuSpec, ModelSpec
from sim.kernels import Gemm, Kernels, kernels_of

# Assumed, see above. Fractions of the data sheet's rates, and microseconds.
WEIGHTS_EFFICIENCY: dict[Dtype, float] = {"bf16": 0.85, "fp8": 0.70}
PRODUCT_EFFICIENCY: dict[Dtype, float] = {"bf16": 0.80, "fp8": 0.55}
EXPERTS_EFFICIENCY: dict[Dtype, float] = {"bf16": 0.36, "fp8": 0.17}  # products of routed experts
KV_EFFICIENCY = 0.90
ATTENTION_EFFICIENCY = 0.65
ELEMENTWISE_EFFICIENCY = 0.80
NVLINK_EFFICIENCY = 0.74
PCIE_EFFICIENCY = 0.50
SHARPNESS = 1.7  # p of Saturating: how soon reading and multiplying overlap
KERNEL_US = 4.0  # one matrix product, however small
EXPERTS_US = 12.0  # the routed experts of a layer, however few
ATTENTION_US = 12.0  # one attention kernel, however small
ELEMENTWISE_US = 12.5  # norms, rotary embedding and activation of a layer
ALLREDUCE_US = 6.0  # one all-reduce, however small

MOST_TOKENS = 1 << 15  # of a step, up to where the experts' time is tabulated
MOST_ELEMENTS = 1 << 30  # of an all-reduce; its time is linear in between


def has_rates(gpu: GpuSpec) -> bool:
    """Whether the GPU's file has what a roofline needs."""
    return gpu.memory_bandwidth is not None


def roofline(model: ModelSpec, gpu: GpuSpec, *, tp: int, weights: Dtype) -> KernelCalibration:
    """The coefficients of one GPU of `tp`, in microseconds. All of them are assumed.

    Raises InputError for a GPU without rates, without one for `weights`, or with tp above 1 without
    an interconnect.
    """
    _check_rates(gpu, tp, weights)
    kernels = kernels_of(model, tp)
    router = [kernels.router] if kernels.router else []
    return KernelCalibration(
        form="kernels",
        gpu=gpu.name,
        model=model.name,
        tp=tp,
        weights=weights,
        layers=model.layers,
        hidden_size=model.hidden_size,
        gemm=_products(gpu, [*kernels.gemms, *router], weights),
        experts=_experts(model, gpu, tp, weights),
        lm_head=_products(gpu, [kernels.lm_head], "bf16"),
        attention={kv: _attention(gpu, kernels, kv) for kv in DTYPE_BYTES},
        elementwise=elementwise(gpu, kernels),
        allreduce=_allreduce(gpu, tp) if tp > 1 else None,
        cpu=Cpu(o0=0.0, o1=0.0),
        front_end=FrontEnd(),
        assumed=["every time of a step: a roofline from the GPU's data sheet, at assumed efficiencies"],
        provenance=Provenance(
            source=gpu.rates_source or "",
            licence="facts",
            date="computed when the scenario was resolved",
            note="roofline from data sheet, nothing measured",
        ),
    )


def elementwise(gpu: GpuSpec, kernels: Kernels) -> Elementwise:
    """Assumed, in fits of kernels too: a fixed time a layer, and the traffic at a share of the bandwidth."""
    if gpu.memory_bandwidth is None:
        return Elementwise(e0=ELEMENTWISE_US, e1=0.0)
    traffic = kernels.elementwise_bytes / (gpu.memory_bandwidth * ELEMENTWISE_EFFICIENCY) * 1e6
    return Elementwise(e0=ELEMENTWISE_US, e1=traffic)


def _check_rates(gpu: GpuSpec, tp: int, weights: Dtype) -> None:
    """Raises InputError, naming the field to add to the GPU's file."""
    if not has_rates(gpu):
        raise InputError(f"{gpu.name}: a roofline needs memory_bandwidth and peak_flops in the GPU's file")
    if weights not in gpu.peak_flops:
        raise InputError(f"{gpu.name}: no peak_flops for {weights} weights; use others or another GPU")
    if tp > 1 and gpu.interconnect_bandwidth is None:
        raise InputError(f"{gpu.name}: tp {tp} needs interconnect_bandwidth in the GPU's file")


def _products(gpu: GpuSpec, gemms: Sequence[Gemm], weights: Dtype) -> Saturating:
    """Matrix products one after the other: all weights read, two operations each for every row."""
    parameters = sum(gemm.n * gemm.k for gemm in gemms)
    reading = _reading_us(gpu, parameters, weights) + len(gemms) * KERNEL_US
    multiplying = 2 * parameters / (gpu.peak_flops[weights] * PRODUCT_EFFICIENCY[weights]) * 1e6
    return Saturating(a=reading, b=multiplying, p=SHARPNESS)


def _experts(model: ModelSpec, gpu: GpuSpec, tp: int, weights: Dtype) -> Experts | None:
    """Routed experts by tokens, each token choosing its own at random: the more, the more are read."""
    if not (model.num_experts and model.num_experts_per_tok and model.moe_intermediate_size):
        return None
    one = 3 * model.hidden_size * model.moe_intermediate_size / tp
    share = model.num_experts_per_tok / model.num_experts
    points = {}
    for tokens in (1 << power for power in range(MOST_TOKENS.bit_length())):
        touched = model.num_experts * (1.0 - (1.0 - share) ** tokens)
        operations = 2 * one * model.num_experts_per_tok * tokens
        reading = _reading_us(gpu, one * touched, weights) + EXPERTS_US
        multiplying = operations / (gpu.peak_flops[weights] * EXPERTS_EFFICIENCY[weights]) * 1e6
        points[tokens] = (reading**SHARPNESS + multiplying**SHARPNESS) ** (1.0 / SHARPNESS)
    return Experts(points=points)


def _reading_us(gpu: GpuSpec, parameters: float, weights: Dtype) -> float:
    assert gpu.memory_bandwidth is not None
    return parameters * DTYPE_BYTES[weights] / (gpu.memory_bandwidth * WEIGHTS_EFFICIENCY[weights]) * 1e6


def _attention(gpu: GpuSpec, kernels: Kernels, kv_dtype: Dtype) -> Attention:
    """Decode reads K and V of every token; prefill multiplies each pair of query and key twice."""
    assert gpu.memory_bandwidth is not None
    kv_bytes = 2 * kernels.num_kv_heads * kernels.head_dim * DTYPE_BYTES[kv_dtype]
    reading = kv_bytes / (gpu.memory_bandwidth * KV_EFFICIENCY) * 1e6
    a_pair = 4 * kernels.num_heads * kernels.head_dim
    multiplying = a_pair / (gpu.peak_flops["bf16"] * ATTENTION_EFFICIENCY) * 1e6
    return Attention(
        decode=DecodeAttention(d0=ATTENTION_US, d1=0.0, d2=reading),
        prefill=PrefillAttention(a0=ATTENTION_US, a1=0.0, a2=multiplying, a3=0.0, kappa=1.0),
    )


def _allreduce(gpu: GpuSpec, tp: int) -> Allreduce:
    """A ring: each GPU sends 2 (tp - 1) / tp of the message, in bf16; over PCIe all share one path.

    Of the L40S, whose measured all-reduce takes as long with the same total, not with the same share.
    """
    assert gpu.interconnect_bandwidth is not None
    sent = MOST_ELEMENTS * DTYPE_BYTES["bf16"] * 2 * (tp - 1) / tp
    if gpu.shared_interconnect:
        sending = sent * tp / (gpu.interconnect_bandwidth * PCIE_EFFICIENCY) * 1e6
    else:
        sending = sent / (gpu.interconnect_bandwidth * NVLINK_EFFICIENCY) * 1e6
    return Allreduce(points={1: ALLREDUCE_US, MOST_ELEMENTS: ALLREDUCE_US + sending})
