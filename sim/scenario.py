"""The scenario: what a YAML file may say, and how it is read.

Errors name the file, the line, the field and the remedy. sim/resolve.py turns a scenario into
numbers, sim/simulation.py runs it. One written out by `to_yaml`, with all its defaults, runs again
to the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from sim.errors import InputError, Location, describe
from sim.hashing import Algorithm
from sim.yaml_lines import Lines, dump, parse
from workloads import AnyWorkload

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Milliseconds = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]  # of simulated time, as arrival times are
Microseconds = Annotated[float, Field(ge=0.0, le=1e9)]

ROOFLINE = "roofline"  # a cost: from the GPU's data sheet
LOADS = ("workload", "prime", "measure")  # fields that hold a workload
TABLE = "table"  # a cost: aiconfigurator-core's tables, interpolated
SHORTEST_VIEW_DELAY = 1e-3  # seconds
FILE_FIELDS = ("model", "gpu", "cost")  # that may name a file of YAML instead
YAML = (".yaml", ".yml")


class Section(BaseModel):
    """A part of the scenario: unknown fields, other types, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Engine(Section):
    """vLLM's engine arguments, by vLLM's names."""

    preset: Literal["vllm-0.33"] | None = None  # that release's default where ours is another
    block_size: Count = 64  # tokens
    num_gpu_blocks: Annotated[int, Field(ge=2, le=2**31 - 1)] | Literal["auto"] = "auto"
    gpu_memory_utilization: Fraction = 0.92
    tensor_parallel_size: Count = 1
    quantization: Literal["fp8"] | None = None  # of the weights; None: bfloat16
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = "auto"
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**20)] = 8192
    max_num_seqs: Count = 256
    max_model_len: Count | None = None  # tokens; None: the model's
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: Algorithm = "sha256"  # for its time only: hits are exact with any
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0  # 0: off
    watermark: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    scheduler_reserve_full_isl: bool = True
    max_loras: Count | None = None  # None: no limit
    free_order: Literal["hashed_last", "all_last"] = "hashed_last"  # all_last: vLLM's older rule

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("preset") == "vllm-0.33":
            return {"block_size": 16, **data}
        return data

    @model_validator(mode="after")
    def _whole_prompts_fit(self) -> Engine:
        # vLLM's SchedulerConfig.verify_max_model_len
        budget, longest = self.max_num_batched_tokens, self.max_model_len
        if not self.enable_chunked_prefill and longest is not None and longest > budget:
            raise ValueError(
                f"max_num_batched_tokens ({budget}) is below max_model_len ({longest}) and "
                "enable_chunked_prefill is false, so long prompts would wait forever; raise the one "
                "or lower the other"
            )
        return self


class Cluster(Section):
    """Replicas of the engine, each on GPUs of its own, and the router before them."""

    replicas: int = Field(1, ge=1, le=1024)
    router: Literal[
        "round_robin", "random", "least_outstanding", "power_of_two", "central_queue", "session_affinity",
        "prefix_affinity", "kv_aware",
    ] = Field("round_robin", description="which replica gets a request, see sim/router.py")  # fmt: skip
    view_delay: Seconds = Field(
        0.0, description="seconds between two looks of the router at the replicas; 0: at each arrival"
    )

    @field_validator("view_delay")
    @classmethod
    def _looks_can_be_made(cls, delay: float) -> float:
        if 0.0 < delay < SHORTEST_VIEW_DELAY:
            raise ValueError(
                f"{delay:g} s is too short to look at the replicas one time after the other: write 0 to "
                f"look at each arrival, or at least {SHORTEST_VIEW_DELAY:g}"
            )
        return delay


class SloLimits(Section):
    """Goodput limits in milliseconds."""

    ttft: Milliseconds | None = None
    tpot: Milliseconds | None = None
    e2el: Milliseconds | None = None


class WholeStep(Section):
    """T = base_us + token_us * tokens + decode_context_us * decoded KV + seq_us * sequences."""

    form: Literal["whole_step"] = "whole_step"
    base_us: Microseconds = 0.0
    token_us: Microseconds = 0.0
    decode_context_us: Microseconds = 0.0
    seq_us: Microseconds = 0.0


class Scenario(Section):
    """One run: a load, an engine, and the machine under it."""

    model_config = ConfigDict(json_schema_extra=lambda schema: _with_phases(schema))

    name: str = "scenario"
    model: str = "llama-3.1-8b"
    gpu: str = "h100-sxm"
    seed: Annotated[int, Field(ge=0)] = 0
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    cache: Literal["apc"] = "apc"
    # A calibration's name or file, `roofline` or `table`; None: that of gpu and model, else a roofline.
    cost: str | WholeStep | None = None
    prime: AnyWorkload | None = None  # runs first, in an engine of its own, to warm the cache
    # The measured requests. Beside `prime` the file calls them `measure`.
    workload: AnyWorkload = Field(validation_alias=AliasChoices("workload", "measure"))
    slo: SloLimits | None = None
    reset_prefix_cache: list[Seconds] = []  # vLLM's call at these times; it fails while blocks are in use
    measure_from: Seconds | None = None  # the summary is of requests that arrive from then on

    @model_validator(mode="before")
    @classmethod
    def _one_load(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (misfit := _misfit(data)) is not None:
            raise ValueError(": ".join(misfit))
        return data

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        if self.prime is None:
            del data["prime"]
            return data
        return {"measure" if name == "workload" else name: value for name, value in data.items()}


def _with_phases(schema: dict[str, Any]) -> None:
    """Say in a JSON Schema what _misfit refuses."""
    fields = schema["properties"]
    (prime,) = [part for part in fields["prime"].pop("anyOf") if part.get("type") != "null"]
    del fields["prime"]["default"]
    fields["prime"] |= prime
    fields["measure"] = {**fields["workload"], "title": "Measure"}
    schema["required"].remove("workload")
    schema["oneOf"] = [{"required": ["workload"]}, {"required": ["prime", "measure"]}]
    schema["dependentRequired"] = {"prime": ["measure"], "measure": ["prime"]}


def _misfit(data: Mapping[str, Any]) -> tuple[str, str] | None:
    """The field that makes a scenario's load none, and why: it is `workload`, or `prime` and `measure`."""
    primed, measured = data.get("prime") is not None, "measure" in data
    if "workload" in data and (primed or measured):
        other = "measure" if measured else "prime"
        return other, "stands beside workload: give workload alone, or prime and measure"
    if primed and not measured:
        return "prime", "only warms the cache: give measure, the workload that is measured then"
    if measured and not primed:
        return "measure", "has no prime before it: give prime, or call it workload"
    return None


class Draft(NamedTuple):
    """A scenario as it is written: of what it says, nothing is checked yet."""

    data: dict[str, Any]
    lines: Lines  # where each field is written
    source: str
    folder: Path  # of the file: relative paths are looked for here too


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario and lay `overrides` ("engine.block_size=16", values in YAML) over it.

    Raises InputError with one line. A relative `path` anywhere in the workload is looked for in the
    current directory first, then beside the scenario file.
    """
    draft = read(path)
    for text in overrides:
        override(draft, text)
    return check(draft)


def read(path: str | Path) -> Draft:
    """Read a scenario's file. Raises InputError for one that cannot be read or is not YAML."""
    lines: Lines = {}
    data = parse(read_text(path, "the scenario"), str(path), lines)
    data.setdefault("name", Path(path).stem)
    return Draft(data, lines, str(path), Path(path).parent)


def read_text(path: str | Path, what: str) -> str:
    """The text of a file. Raises InputError, one line, that calls it `what`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read {what}: {_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {what} is not UTF-8 text ({error.reason})") from None


def to_yaml(scenario: Scenario) -> str:
    """The scenario with all defaults printed; reading it back gives an equal scenario."""
    data = scenario.model_dump(mode="python")
    for phase in LOADS:
        if phase in data:
            data[phase] = {"kind": data[phase]["kind"], **data[phase]}
    return dump(data)


def override(draft: Draft, text: str) -> None:
    """Set one "path=value" in `draft`; later findings under it are blamed on `--set`."""
    where = f"--set {text}"
    field, equals, written = text.partition("=")
    keys = tuple(field.strip().split("."))
    if not equals or not all(keys):
        raise InputError(f"{where}: should read path=value, as in engine.block_size=16")
    try:
        value = parse(f"value: {written}", where, {})["value"]
    except InputError as error:
        raise InputError(re.sub(r"^(--set .*):1: ", r"\1: ", str(error))) from None
    put(draft, keys, value, where)


def put(draft: Draft, keys: tuple[str, ...], value: Any, where: str) -> None:
    """Set a field in `draft`, making the sections it lies in; later findings there are blamed on `where`."""
    target: Any = draft.data
    for depth, key in enumerate(keys[:-1]):
        if target.get(key) is None:  # absent, or the null of a scenario written out
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            owner = ".".join(keys[: depth + 1])
            raise InputError(f"{where}: {owner} is {target!r}, which has no fields")
    target[keys[-1]] = value
    lines = draft.lines
    for location in [one for one in lines if one[: len(keys)] == keys]:
        del lines[location]
    for depth in range(1, len(keys)):
        lines.setdefault(keys[:depth], where)  # a section that only the option speaks of
    lines[keys] = where


def check(draft: Draft) -> Scenario:
    """The scenario that `draft` says. Modifies its data: files are named where they were found.

    Raises InputError, one line, for the first thing that is wrong with it.
    """
    lines = draft.lines

    def where(location: Location) -> str:
        while location and location not in lines:
            location = location[:-1]
        place = lines.get(location, draft.source)
        if place.startswith("--set "):
            return place
        # What is wrong with a whole section may be what an option laid over it.
        within = (text for at, text in lines.items() if location and at[: len(location)] == location)
        return " with ".join([place, *dict.fromkeys(text for text in within if text.startswith("--set "))])

    if (misfit := _misfit(draft.data)) is not None:
        raise InputError(f"{where(misfit[:1])}: {': '.join(misfit)}")
    _find_files(draft.data, draft.folder, where)
    try:
        return Scenario.model_validate(draft.data)
    except ValidationError as error:
        raise InputError(describe(error, Scenario, draft.data, where)) from None


def _find_files(data: dict[str, Any], folder: Path, where: Callable[[Location], str]) -> None:
    """Replace relative paths by ones that exist, from here or from the scenario's folder."""
    parts = [found for name in LOADS for found in _with_path(data.get(name), (name,))]
    for location, owner in parts:
        name = owner["path"]
        found = _found(name, folder)
        if found is None:
            looked = "" if Path(name).is_absolute() else f" here or in {folder}"
            field = ".".join(map(str, location))
            raise InputError(
                f"{where(location)}: {field}: no file {name}{looked}; say where it is with --set {field}=…"
            )
        owner["path"] = found
    for field in FILE_FIELDS:
        if isinstance(data.get(field), str) and data[field].endswith(YAML):
            data[field] = _found(data[field], folder) or data[field]


def anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the names of files that are there, from here or from `folder`, absolute. Modifies `data`.

    For a scenario that other processes run, or that is written elsewhere.
    """
    for owner, field in _naming(data):
        if (found := _found(owner[field], folder)) is not None:
            owner[field] = str(Path(found).resolve())


def named_files(scenario: Scenario) -> list[Path]:
    """The files that a scenario reads: of its workload, and its own model, GPU and cost."""
    found = [Path(owner[field]) for owner, field in _naming(scenario.model_dump(mode="python"))]
    return [path for path in found if path.is_file()]


def _naming(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the mappings that name a file, and the field that does."""
    for name in LOADS:
        for _, owner in _with_path(data.get(name), ()):
            yield owner, "path"
    for field in FILE_FIELDS:
        if isinstance(data.get(field), str) and data[field].endswith(YAML):
            yield data, field


def _with_path(part: Any, location: Location) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield the mappings in a part of the scenario that name a file, and where they name it."""
    if isinstance(part, dict):
        if isinstance(part.get("path"), str):
            yield (*location, "path"), part
        for key, value in part.items():
            yield from _with_path(value, (*location, key))


def _found(name: str, folder: Path) -> str | None:
    if Path(name).is_file():
        return name
    beside = folder / name
    return str(beside) if beside.is_file() else None


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)
