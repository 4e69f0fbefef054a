"""Models and GPUs as small YAML files, and how a name finds its file.

A user adds a model or a GPU by writing a file of the same shape and naming its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.errors import MOST_NAMES, InputError, Location, describe, suggestion
from sim.yaml_lines import Lines, parse

Dtype = Literal["bf16", "fp8"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}

Count = Annotated[int, Field(gt=0, le=2**53)]
Rate = Annotated[float, Field(gt=0)]  # bytes or operations a second
T = TypeVar("T", bound=BaseModel)

_HERE = Path(__file__).parent


class Strict(BaseModel):
    """A frozen model that refuses unknown fields, other types, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSpec(Strict):
    """A decoder with grouped-query attention, dense or with routed experts (sizes as in its config.json)."""

    name: str
    layers: Count
    hidden_size: Count
    intermediate_size: Count  # unused where there are experts
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    tied_embeddings: bool  # the LM head shares the embedding's weights
    num_parameters: Count
    max_model_len: Count
    num_experts: Count | None = None  # of every layer; None: dense
    num_experts_per_tok: Count | None = None
    moe_intermediate_size: Count | None = None  # of one expert

    @model_validator(mode="after")
    def _experts(self) -> ModelSpec:
        experts = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        if any(experts) and not all(experts):
            names = "num_experts, num_experts_per_tok and moe_intermediate_size"
            raise ValueError(f"{names} belong together: give all three or none")
        if self.num_experts and self.num_experts_per_tok and self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is above num_experts ({self.num_experts})"
            )
        return self


class GpuSpec(Strict):
    """One GPU. `memory_source` says whether the driver or the data sheet gave the bytes.

    The rates are those of the data sheet, dense (no sparsity); with them sim/roofline.py can time
    models that nobody calibrated.
    """

    name: str
    memory_bytes: Count
    memory_source: str
    memory_bandwidth: Rate | None = None  # bytes/s
    peak_flops: dict[Dtype, Rate] = {}  # FLOP/s of matrix products, by type of the weights
    interconnect_bandwidth: Rate | None = None  # bytes/s to the other GPUs, each direction
    shared_interconnect: bool = False  # all GPUs' traffic takes one path through the host (PCIe)
    rates_source: str | None = None

    @model_validator(mode="after")
    def _rates(self) -> GpuSpec:
        rates = (self.memory_bandwidth, self.peak_flops, self.rates_source)
        if any(rates) and not all(rates):
            raise ValueError(
                "memory_bandwidth, peak_flops and rates_source belong together: give all three or none"
            )
        if self.peak_flops and "bf16" not in self.peak_flops:
            raise ValueError("peak_flops: bf16 is missing; attention and LM head are timed with it")
        return self


def load_model(name: str) -> ModelSpec:
    """Read a model by its name (sim/models/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("models", "model", name)
    return load_spec(ModelSpec, path, "the model")


def load_gpu(name: str) -> GpuSpec:
    """Read a GPU by its name (sim/gpus/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("gpus", "GPU", name)
    return load_spec(GpuSpec, path, "the GPU")


def shipped(folder: str) -> list[str]:
    """Names of the files this package ships in sim/FOLDER, sorted."""
    root = _HERE / folder
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def is_known(folder: str, name: str) -> bool:
    """Whether `name` is one shipped in sim/FOLDER, or the path of a file."""
    return name in shipped(folder) or name.endswith((".yaml", ".yml"))


def find(folder: str, kind: str, name: str) -> Path:
    """The file of `name`: a path if it ends in .yaml or .yml, else one shipped in sim/FOLDER.

    Raises InputError for an unknown name, with the nearest valid one and the list.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    names = shipped(folder)
    if name not in names:
        nearest = suggestion(name, names)
        listed = "there are" not in nearest and len(names) <= MOST_NAMES
        known = f" (of {', '.join(names)})" if listed else f" (see sim/{folder})"
        raise InputError(f"unknown {kind} {name!r}{nearest}{known}; a path of a .yaml file will do too")
    return _HERE / folder / f"{name}.yaml"


def read_yaml(path: Path, what: str, lines: Lines | None = None) -> dict[str, Any]:
    """The mapping in one YAML file; `lines` is filled with the place of each field.

    Raises InputError, one line: the file, the line, the problem, as for a scenario.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    return parse(text, str(path), {} if lines is None else lines, what, numbers=True)


def load_spec(model: type[T], path: Path, what: str) -> T:
    """The file as a `model`. Raises InputError, one line: the file, the line, the field, the problem."""
    lines: Lines = {}
    return check(model, read_yaml(path, what, lines), path, lines)


def check(model: type[T], data: dict[str, Any], path: Path, lines: Lines) -> T:
    """`data`, read from `path`, as a `model`; raises as `load_spec`."""

    def place(field: Location) -> str:
        while field and field not in lines:
            field = field[:-1]
        return lines.get(field, str(path))

    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, model, data, place)) from error
