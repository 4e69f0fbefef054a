"""Models and GPUs as small YAML files, and how a name finds its file.

A user adds a model or a GPU by writing a file of the same shape and naming its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sim.errors import InputError, describe, suggestion

Dtype = Literal["bf16", "fp8"]
DTYPE_BYTES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}

Count = Annotated[int, Field(gt=0)]
T = TypeVar("T", bound=BaseModel)

_HERE = Path(__file__).parent


class Strict(BaseModel):
    """A frozen model that refuses unknown fields, other types, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSpec(Strict):
    """A dense decoder with grouped-query attention (sizes as in its config.json)."""

    name: str
    layers: Count
    hidden_size: Count
    intermediate_size: Count
    num_attention_heads: Count
    num_kv_heads: Count
    head_dim: Count
    vocab_size: Count
    tied_embeddings: bool  # the LM head shares the embedding's weights
    num_parameters: Count
    max_model_len: Count


class GpuSpec(Strict):
    """One GPU. `memory_source` says whether the driver or the data sheet gave the bytes."""

    name: str
    memory_bytes: Count
    memory_source: str


def load_model(name: str) -> ModelSpec:
    """Read a model by its name (sim/models/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("models", "model", name)
    return check(ModelSpec, read_yaml(path), path)


def load_gpu(name: str) -> GpuSpec:
    """Read a GPU by its name (sim/gpus/NAME.yaml) or by the path of a .yaml file.

    Raises InputError for an unknown name (with the nearest valid one and the list) or a bad file.
    """
    path = find("gpus", "GPU", name)
    return check(GpuSpec, read_yaml(path), path)


def shipped(folder: str) -> list[str]:
    """Names of the files this package ships in sim/FOLDER, sorted."""
    return sorted(path.stem for path in (_HERE / folder).glob("*.yaml"))


def find(folder: str, kind: str, name: str) -> Path:
    """The file of `name`: a path if it ends in .yaml or .yml, else one shipped in sim/FOLDER.

    Raises InputError for an unknown name, with the nearest valid one and the list.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    names = shipped(folder)
    if name not in names:
        nearest = suggestion(name, names)
        known = "" if "there are" in nearest else f" (of {', '.join(names)})"
        raise InputError(f"unknown {kind} {name!r}{nearest}{known}; a path of a .yaml file will do too")
    return _HERE / folder / f"{name}.yaml"


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in one YAML file. Raises InputError, one line: the file, the line, the problem."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else f"{path}"
        raise InputError(f"{at}: not valid YAML: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: should be a mapping of fields, like the files in sim/models")
    return data


def check(model: type[T], data: dict[str, Any], path: Path) -> T:
    """`data` as a `model`. Raises InputError, one line: the file, the field, the problem."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, model, data, lambda _: str(path))) from error
