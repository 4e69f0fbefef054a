"""Calibration files: what a step of one model on one GPU costs, and where that is known from.

A file in sim/calibrations holds coefficients in microseconds, per GPU rank. Form `kernels` adds up
fits of measured kernels; form `whole_step` is fitted to the steps of a running engine. What is
assumed and not measured stands in `assumed`, which every report repeats.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sim.errors import InputError, suggestion
from sim.hardware import Count, Dtype, Strict, check, find, read_yaml

Nonnegative = Annotated[float, Field(ge=0)]


class Saturating(Strict):
    """(a^p + (b*m)^p)^(1/p): flat at `a` while weights are being read, then `b` a row."""

    a: Annotated[float, Field(gt=0)]
    b: Nonnegative
    p: Annotated[float, Field(ge=1)]


class DecodeAttention(Strict):
    """d0 + d1*n + d2*S a layer, n sequences over S cached tokens in all."""

    d0: Nonnegative
    d1: Nonnegative
    d2: Nonnegative


class PrefillAttention(Strict):
    """a0 + sum of a1*q + a2*(q*q/2 + q*c/kappa) + a3*c a layer, q new tokens over c cached ones."""

    a0: Nonnegative
    a1: Nonnegative
    a2: Nonnegative
    a3: Nonnegative
    kappa: Annotated[float, Field(gt=0)]


class Elementwise(Strict):
    """e0 + e1*M a layer: norms, rotary embedding, activation."""

    e0: Nonnegative
    e1: Nonnegative


class Allreduce(Strict):
    """Measured time by message size in ELEMENTS; a layer has two, of M*hidden_size each."""

    points: Annotated[dict[Count, Nonnegative], Field(min_length=1)]


class Cpu(Strict):
    """o0 + o1*n a step of n sequences: schedule, update, launch."""

    o0: Nonnegative
    o1: Nonnegative


class FrontEnd(Strict):
    """One thread before the waiting queue: alpha_us a request, and hashing each full block."""

    alpha_us: Nonnegative = 0.0
    hash_us_per_block: dict[Count, Nonnegative] = {}  # by block size; empty: not charged


class Provenance(Strict):
    """Where the numbers come from and how good they are known to be."""

    source: str
    licence: str
    tables: list[str] = []
    note: str


class _Common(Strict):
    gpu: str
    model: str
    tp: Count
    weights: Dtype
    kv_dtype: Dtype
    kv_bytes_per_token_per_gpu: Count
    front_end: FrontEnd
    assumed: list[str]
    provenance: Provenance

    @property
    def name(self) -> str:
        """`<gpu>_<model>_tp<N>_<weights>`, the name of its file."""
        return _name(self.gpu, self.model, self.tp, self.weights)


class KernelCalibration(_Common):
    """Coefficients of a step as the sum of its kernels (a layer's, times `layers`)."""

    form: Literal["kernels"]
    layers: Count
    hidden_size: Count
    gemm: Saturating  # QKV, O, gate/up and down of one layer
    lm_head: Saturating
    decode_attention: DecodeAttention
    prefill_attention: PrefillAttention
    elementwise: Elementwise
    allreduce: Annotated[Allreduce | None, Field(validate_default=True)] = None  # with tp > 1
    cpu: Cpu
    block_size_factor: Annotated[float, Field(gt=0)]  # on attention, against the measured block size

    @model_validator(mode="after")
    def _with_tp(self) -> KernelCalibration:
        if (self.tp > 1) != (self.allreduce is not None):
            raise ValueError("allreduce: should be there with tp above 1, and only then")
        return self


class WholeStepCalibration(_Common):
    """base_us + token_us*M + decode_context_us*S + seq_us*n, for a whole step."""

    form: Literal["whole_step"]
    base_us: Nonnegative
    token_us: Nonnegative
    decode_context_us: Nonnegative
    seq_us: Nonnegative


Calibration = KernelCalibration | WholeStepCalibration

_FORMS: dict[str, type[KernelCalibration] | type[WholeStepCalibration]] = {
    "kernels": KernelCalibration,
    "whole_step": WholeStepCalibration,
}


def find_calibration(gpu: str, model: str, *, tp: int, weights: Dtype) -> Calibration:
    """The shipped calibration of this GPU, model, tensor-parallel size and weight type.

    Raises InputError if there is none, with the nearest and the list.
    """
    return load_calibration(_name(gpu, model, tp, weights))


def load_calibration(name: str) -> Calibration:
    """Read a calibration by its name (sim/calibrations/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("calibrations", "calibration", name)
    data = read_yaml(path)
    form = data.get("form")
    if not isinstance(form, str) or form not in _FORMS:
        raise InputError(f"{path}: form: unknown value {form!r}{suggestion(str(form), _FORMS)}")
    return check(_FORMS[form], data, path)


def _name(gpu: str, model: str, tp: int, weights: str) -> str:
    return f"{gpu}_{model}_tp{tp}_{weights}"
