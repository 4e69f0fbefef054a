"""Calibration files: what a step of one model on one GPU costs, and where that is known from.

A file in sim/calibrations holds coefficients in microseconds, per GPU rank. Form `kernels` adds up
fits of measured kernels; form `whole_step` is fitted to the steps of a running engine. What is
assumed and not measured stands in `assumed`, which every report repeats; how far off the fits are
stands in `errors`, and how far they reach in `domain`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sim.errors import InputError, suggestion
from sim.front_end import FrontEnd
from sim.hardware import Count, Dtype, Strict, check, find, read_yaml, shipped
from sim.yaml_lines import Lines

# Bounds far beyond any device, so that no product of them is infinite.
Nonnegative = Annotated[float, Field(ge=0, le=1e12)]
Positive = Annotated[float, Field(ge=1e-12, le=1e12)]


class Saturating(Strict):
    """(a^p + (b*m)^p)^(1/p): flat at `a` while weights are being read, then `b` a row."""

    a: Positive
    b: Nonnegative
    p: Annotated[float, Field(ge=1, le=1e6)]


class DecodeAttention(Strict):
    """d0 + d1*n + d2*S a layer, n sequences over S cached tokens in all."""

    d0: Nonnegative
    d1: Nonnegative
    d2: Nonnegative
    block_size_factor: dict[Count, Positive] = {}  # by KV block size; empty: 1, assumed


class PrefillAttention(Strict):
    """a0 + sum of a1*q + a2*(q*q/2 + q*c/kappa) + a3*c a layer, q new tokens over c cached ones."""

    a0: Nonnegative
    a1: Nonnegative
    a2: Nonnegative
    a3: Nonnegative
    kappa: Positive
    block_size_factor: dict[Count, Positive] = {}  # by KV block size; empty: 1, assumed


class Attention(Strict):
    """Attention of one layer over KV of one type."""

    decode: DecodeAttention
    prefill: PrefillAttention


class Elementwise(Strict):
    """e0 + e1*M a layer: norms, rotary embedding, activation."""

    e0: Nonnegative
    e1: Nonnegative


class Experts(Strict):
    """Measured time of a layer's routed experts by tokens M, linear between the points."""

    points: Annotated[dict[Count, Nonnegative], Field(min_length=1)]


class Allreduce(Strict):
    """Measured time by message size in ELEMENTS; a layer has two, of M*hidden_size each."""

    points: Annotated[dict[Count, Nonnegative], Field(min_length=1)]


class Cpu(Strict):
    """o0 + o1*n a step of n sequences: schedule, update, launch."""

    o0: Nonnegative
    o1: Nonnegative


class Domain(Strict):
    """How far the measurements reach; beyond, a step's time is extrapolated."""

    max_tokens: Count  # M, scheduled tokens of a step
    max_decodes: Count  # n, decoding sequences of a step
    min_kv_len: Count  # KV tokens of one decoding sequence
    max_kv_len: Count
    max_decode_kv: Count  # S, KV tokens of all decoding sequences of a step
    max_query_len: Count  # q, new tokens of one prefill
    max_context_len: Annotated[int, Field(ge=0)]  # c, cached tokens before them


class FitError(Strict):
    """Relative errors of one component, percent."""

    points: Count
    mape: Nonnegative
    p95: Nonnegative


class Table(Strict):
    """One file that coefficients were fitted to."""

    path: str
    sha256: str
    framework: str  # whose kernels were timed, with its version
    kernel: str


class Provenance(Strict):
    """Where the numbers come from."""

    source: str
    licence: str
    date: str  # of the fit
    tables: list[Table] = []
    note: str


class _Common(Strict):
    gpu: str
    model: str
    tp: Count
    weights: Dtype
    front_end: FrontEnd
    domain: Domain | None = None  # None: nothing was measured
    errors: dict[str, FitError] = {}  # by component, see provenance.note
    assumed: list[str]
    provenance: Provenance

    @property
    def name(self) -> str:
        """`<gpu>/<model>_tp<N>_<weights>`, the name of its file."""
        return name_of(self.gpu, self.model, self.tp, self.weights)


class KernelCalibration(_Common):
    """Coefficients of a step as the sum of its kernels (a layer's, times `layers`)."""

    form: Literal["kernels"]
    layers: Count
    hidden_size: Count
    gemm: Saturating  # QKV, O, gate/up and down of one layer; with experts: QKV, O and the router
    experts: Experts | None = None
    lm_head: Saturating
    attention: Annotated[dict[Dtype, Attention], Field(min_length=1)]  # by KV type
    elementwise: Elementwise
    allreduce: Annotated[Allreduce | None, Field(validate_default=True)] = None  # with tp > 1
    cpu: Cpu

    @property
    def kv_dtypes(self) -> list[Dtype]:
        """The KV types whose attention was timed."""
        return list(self.attention)

    @model_validator(mode="after")
    def _with_tp(self) -> KernelCalibration:
        if (self.tp > 1) != (self.allreduce is not None):
            raise ValueError("allreduce: should be there with tp above 1, and only then")
        return self


class WholeStepCalibration(_Common):
    """base_us + token_us*M + decode_context_us*S + seq_us*n, for a whole step.

    A fit to recorded steps tells more apart: kv_us for each token of KV of all sequences, decoding or
    not; pair_us for each pair of a new token and one that it attends to, itself included; prefill_us for
    a step with prefill; between_us from one step to the next, under async scheduling while the GPU works.
    """

    form: Literal["whole_step"]
    kv_dtype: Dtype
    base_us: Nonnegative
    token_us: Nonnegative
    decode_context_us: Nonnegative
    seq_us: Nonnegative
    kv_us: Nonnegative = 0.0
    pair_us: Nonnegative = 0.0
    prefill_us: Nonnegative = 0.0
    between_us: Nonnegative = 0.0

    @property
    def kv_dtypes(self) -> list[Dtype]:
        """The KV type of the steps."""
        return [self.kv_dtype]


Calibration = KernelCalibration | WholeStepCalibration

_FORMS: dict[str, type[KernelCalibration] | type[WholeStepCalibration]] = {
    "kernels": KernelCalibration,
    "whole_step": WholeStepCalibration,
}


def find_calibration(gpu: str, model: str, *, tp: int, weights: Dtype) -> Calibration:
    """The shipped calibration of this GPU, model, tensor-parallel size and weight type.

    Raises InputError if there is none, with the nearest and the list.
    """
    return load_calibration(name_of(gpu, model, tp, weights))


def has_calibration(gpu: str, model: str, *, tp: int, weights: Dtype) -> bool:
    """Whether this package ships a calibration of them."""
    return name_of(gpu, model, tp, weights) in shipped("calibrations")


def load_calibration(name: str) -> Calibration:
    """Read a calibration by its name (sim/calibrations/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("calibrations", "calibration", name)
    lines: Lines = {}
    data = read_yaml(path, "the calibration", lines)
    form = data.get("form")
    if not isinstance(form, str) or form not in _FORMS:
        raise InputError(f"{path}: form: unknown value {form!r}{suggestion(str(form), _FORMS)}")
    return check(_FORMS[form], data, path, lines)


def name_of(gpu: str, model: str, tp: int, weights: str) -> str:
    """`<gpu>/<model>_tp<N>_<weights>`."""
    return f"{gpu}/{model}_tp{tp}_{weights}"
