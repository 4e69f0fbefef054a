"""The scenario: a strict YAML file, what it resolves to, and its run.

Errors name the file, the line, the field and the remedy. `load` reads and checks, `resolve` turns
names and `auto` into numbers, `run` simulates. A scenario written out by `to_yaml`, with all its
defaults, runs again to the same bytes.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.errors import InputError, Location, describe
from workloads import AnyWorkload, WorkloadWarning

if TYPE_CHECKING:
    from sim.core import EngineConfig
    from sim.cost import StepCost
    from sim.hardware import Dtype, ModelSpec
    from sim.metrics import Records

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Milliseconds = Annotated[float, Field(gt=0.0)]

DEFAULT_MAX_MODEL_LEN = 131_072


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


class SloLimits(Section):
    """Goodput limits in milliseconds."""

    ttft: Milliseconds | None = None
    tpot: Milliseconds | None = None
    e2el: Milliseconds | None = None


class WholeStep(Section):
    """T = base_us + token_us * tokens + decode_context_us * decoded KV + seq_us * sequences."""

    form: Literal["whole_step"] = "whole_step"
    base_us: Annotated[float, Field(ge=0.0)] = 0.0
    token_us: Annotated[float, Field(ge=0.0)] = 0.0
    decode_context_us: Annotated[float, Field(ge=0.0)] = 0.0
    seq_us: Annotated[float, Field(ge=0.0)] = 0.0


class Scenario(Section):
    """One run: a load, an engine, and the machine under it."""

    name: str = "scenario"
    model: str = "llama-3.1-8b"
    gpu: str = "h100-sxm"
    seed: Annotated[int, Field(ge=0)] = 0
    engine: Engine = Engine()
    cache: Literal["apc"] = "apc"
    cost: str | WholeStep | None = None  # a calibration's name or file; None: the one for gpu and model
    workload: AnyWorkload
    slo: SloLimits | None = None


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`no` is a string, `1e3` a number), and the vLLM benchmark's `inf`."""


class _Dumper(yaml.SafeDumper):
    """Quotes exactly what _Loader would read as something else than a string."""


_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan|\.NaN"

for _yaml_class in (_Loader, _Dumper):
    _yaml_class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in (
        ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?[0-9]+", list("-+0123456789")),
        ("float", _NUMBER, list("-+0123456789.in")),
    ):
        _yaml_class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor(
    "tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=[in])", "", node.value.lower()))
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario and lay `overrides` ("engine.block_size=16", values in YAML) over it.

    Raises InputError with one line. A relative `workload.path` is looked for in the current
    directory first, then beside the scenario file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the scenario: {_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the scenario is not UTF-8 text ({error.reason})") from None
    lines: dict[Location, str] = {}
    data = _parse(text, str(path), lines)
    for override in overrides:
        _override(data, override, lines)
    data.setdefault("name", Path(path).stem)

    def where(location: Location) -> str:
        while location and location not in lines:
            location = location[:-1]
        return lines.get(location, str(path))

    _find_files(data, Path(path).parent, where)
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, Scenario, data, where)) from None


def _parse(text: str, source: str, lines: dict[Location, str]) -> dict[str, Any]:
    """The mapping in a YAML text; `lines` is filled with "source:line" for each path of keys."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{source}: the scenario is empty; `prefixsim schema` lists its fields")
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{source}:1: the scenario should be a mapping of fields such as `workload:`")
        _mark(root, (), source, lines)
        data: dict[str, Any] = loader.construct_document(root)
        return data
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{source}:{mark.line + 1}" if mark else source
        raise InputError(f"{at}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def _mark(node: yaml.Node, location: Location, source: str, lines: dict[Location, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = f"{source}:{key.start_mark.line + 1}"
            here = (*location, key.value if isinstance(key, yaml.ScalarNode) else "?")
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise InputError(f"{line}: a field name should be a word, not {key.value!r}")
            if here in lines:
                raise InputError(f"{line}: {'.'.join(map(str, here))}: given twice; keep one of the two")
            lines[here] = line
            _mark(value, here, source, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            lines[(*location, i)] = f"{source}:{item.start_mark.line + 1}"
            _mark(item, (*location, i), source, lines)


def _override(data: dict[str, Any], override: str, lines: dict[Location, str]) -> None:
    """Set one "path=value" in `data`; later findings under it are blamed on `--set`."""
    where = f"--set {override}"
    field, equals, text = override.partition("=")
    keys = tuple(field.strip().split("."))
    if not equals or not all(keys):
        raise InputError(f"{where}: should read path=value, as in engine.block_size=16")
    wrapped: dict[Location, str] = {}
    try:
        value = _parse(f"value: {text}", where, wrapped)["value"]
    except InputError as error:
        raise InputError(re.sub(r"^(--set .*):1: ", r"\1: ", str(error))) from None
    target: Any = data
    for depth, key in enumerate(keys[:-1]):
        if target.get(key) is None:  # absent, or the null of a scenario written out
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            owner = ".".join(keys[: depth + 1])
            raise InputError(f"{where}: {owner} is {target!r}, which has no fields")
    target[keys[-1]] = value
    for location in [one for one in lines if one[: len(keys)] == keys]:
        del lines[location]
    for depth in range(1, len(keys)):
        lines.setdefault(keys[:depth], where)  # a section that only the option speaks of
    lines[keys] = where


def _find_files(data: dict[str, Any], folder: Path, where: Callable[[Location], str]) -> None:
    """Replace relative paths by ones that exist, from here or from the scenario's folder."""
    workload = data.get("workload")
    name = workload.get("path") if isinstance(workload, dict) else None
    if isinstance(workload, dict) and isinstance(name, str):
        found = _found(name, folder)
        if found is None:
            looked = "" if Path(name).is_absolute() else f" here or in {folder}"
            remedy = "say where it is with --set workload.path=…"
            raise InputError(
                f"{where(('workload', 'path'))}: workload.path: no file {name}{looked}; {remedy}"
            )
        workload["path"] = found
    if isinstance(data.get("cost"), str):
        data["cost"] = _found(data["cost"], folder) or data["cost"]


def _found(name: str, folder: Path) -> str | None:
    if Path(name).is_file():
        return name
    beside = folder / name
    return str(beside) if beside.is_file() else None


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)


class StepTime(NamedTuple):
    """Where the time of a step comes from."""

    cost: StepCost
    name: str  # the calibration's, or that it is given in the scenario
    kv_dtype: Dtype
    assumed: list[str]  # what of it is not measured
    warnings: list[str]


class Resolved(NamedTuple):
    """A scenario's numbers: what the engine needs, and what the report says of them."""

    scenario: Scenario
    config: EngineConfig
    step_time: StepTime
    kv_bytes_per_token: int | None  # on one GPU; None: the model is not known
    assumed: list[str]


class Result(NamedTuple):
    """A finished run. `records` is closed, and is the caller's to discard."""

    resolved: Resolved
    summary: dict[str, Any]
    records: Records


def to_yaml(scenario: Scenario) -> str:
    """The scenario with all defaults printed; reading it back gives an equal scenario."""
    data = scenario.model_dump(mode="python")
    data["workload"] = {"kind": data["workload"]["kind"], **data["workload"]}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def resolve(scenario: Scenario) -> Resolved:
    """Turn `auto` into numbers and names into data. Raises InputError for names nobody knows."""
    try:
        return _resolve(scenario)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{scenario.name}: {error}") from None


def _resolve(scenario: Scenario) -> Resolved:
    from sim.core import EngineConfig
    from sim.hardware import load_gpu, load_model, shipped
    from sim.memory import kv_bytes_per_token
    from sim.memory import num_gpu_blocks as pool_size

    engine = scenario.engine
    tp, budget = engine.tensor_parallel_size, engine.max_num_batched_tokens
    weights: Dtype = "fp8" if engine.quantization == "fp8" else "bf16"
    # Where pool and step time are given as numbers, the model may be any word.
    needed = engine.num_gpu_blocks == "auto" or scenario.cost is None
    known = needed or scenario.model in shipped("models") or scenario.model.endswith((".yaml", ".yml"))
    model = load_model(scenario.model) if known else None
    step_time = _step_time(scenario, model, weights)
    assumed = step_time.assumed

    max_model_len = engine.max_model_len or (model.max_model_len if model else DEFAULT_MAX_MODEL_LEN)
    if not engine.enable_chunked_prefill:
        max_model_len = min(max_model_len, budget)  # a longer prompt would wait forever
    num_gpu_blocks = engine.num_gpu_blocks
    if num_gpu_blocks == "auto":
        assert model is not None
        num_gpu_blocks = pool_size(
            model,
            load_gpu(scenario.gpu),
            tp=tp,
            block_size=engine.block_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            weights=weights,
            kv_dtype=step_time.kv_dtype,
            max_num_batched_tokens=budget,
            max_num_seqs=engine.max_num_seqs,
            max_model_len=max_model_len,
        ).num_gpu_blocks
        assumed = [*assumed, "memory beside weights and KV (activations, CUDA libraries, graphs) by formula"]
    config = EngineConfig(
        block_size=engine.block_size,
        num_gpu_blocks=num_gpu_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=max_model_len,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        watermark=engine.watermark,
        max_loras=engine.max_loras or 0,
        priority_policy=engine.scheduling_policy == "priority",
        reserve_full_isl=engine.scheduler_reserve_full_isl,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        enable_prefix_caching=engine.enable_prefix_caching,
        async_scheduling=engine.async_scheduling,
        free_all_last=engine.free_order == "all_last",
    )
    kv_bytes = kv_bytes_per_token(model, tp=tp, kv_dtype=step_time.kv_dtype) if model else None
    return Resolved(scenario, config, step_time, kv_bytes, assumed)


def _step_time(scenario: Scenario, model: ModelSpec | None, weights: Dtype) -> StepTime:
    """The cost of a step: given in the scenario, or from the calibration it names or implies."""
    from sim.calibration import find_calibration, load_calibration
    from sim.cost import compile_cost, linear_cost
    from sim.hardware import load_gpu

    engine = scenario.engine
    tp, budget = engine.tensor_parallel_size, engine.max_num_batched_tokens
    kv_dtype: Dtype = "fp8" if engine.kv_cache_dtype == "fp8" else "bf16"
    if isinstance(scenario.cost, WholeStep):
        given = scenario.cost
        cost = linear_cost(
            given.base_us * 1e-6,
            given.token_us * 1e-6,
            decode_context_s=given.decode_context_us * 1e-6,
            seq_s=given.seq_us * 1e-6,
            max_num_batched_tokens=budget,
        )
        return StepTime(cost, "whole_step, given in the scenario", kv_dtype, [], [])
    warnings: list[str] = []
    if scenario.cost is not None:
        calibration = load_calibration(scenario.cost)
        asked = (scenario.gpu, model.name if model else scenario.model, tp, weights)
        if asked != (calibration.gpu, calibration.model, calibration.tp, calibration.weights):
            asked_for = f"{scenario.gpu}, {scenario.model}, tp {tp}, {weights}"
            warnings.append(f"step time is that of {calibration.name}, not of {asked_for}")
    else:
        assert model is not None
        calibration = find_calibration(load_gpu(scenario.gpu).name, model.name, tp=tp, weights=weights)
    assumed = list(calibration.assumed)
    if engine.kv_cache_dtype == "auto":
        kv_dtype = calibration.kv_dtype
    elif calibration.kv_dtype != kv_dtype:
        assumed.append(f"a step takes as long as with {calibration.kv_dtype} KV")
    cost = compile_cost(calibration, max_num_batched_tokens=budget, block_size=engine.block_size)
    return StepTime(cost, calibration.name, kv_dtype, assumed, warnings)


def run(
    scenario: Scenario, *, progress: Callable[[int, float], None] | None = None, folder: Path | None = None
) -> Result:
    """Simulate; records go to `folder`/requests.parquet if there is a folder.

    progress(requests done, simulated seconds) is called now and then. Raises InputError if no
    request can run, WorkloadError for bad data in the workload's files.
    """
    import numpy as np

    from sim.engine import simulate
    from sim.metrics import Records, Slo, summarize

    resolved = resolve(scenario)
    config = resolved.config
    workload = scenario.workload
    records = Records(folder / "requests.parquet" if folder else None)
    refused: list[int] = []
    num_refused = longest = 0

    def collect(chunk: dict[str, Any]) -> None:
        nonlocal num_refused, longest
        bad = chunk["request_id"][chunk["refused"] != 0]
        num_refused += len(bad)
        refused.extend(bad[: 10 - len(refused)].tolist())
        longest = max(longest, int(chunk["prompt_len"].max(initial=0)))
        records.append(chunk)

    seed = np.random.SeedSequence(scenario.seed)
    told: list[str] = []
    try:
        with _told_by_workload(told):
            totals = simulate(
                workload.batches(seed, config.block_size),
                config,
                resolved.step_time.cost,
                concurrency=workload.concurrency,
                think_times=workload.think_times(seed) if workload.concurrency else None,
                on_records=collect,
                progress=progress,
            )
        records.close()
        limit = min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size)
        if records.num_rows == 0:
            raise InputError(f"{scenario.name}: the workload has no requests")
        if num_refused == records.num_rows:
            raise InputError(
                f"{scenario.name}: none of the {num_refused} requests can run: the limit is {limit} tokens "
                f"(engine.max_model_len {config.max_model_len}, a pool of {config.num_gpu_blocks - 1} "
                f"blocks of {config.block_size}); raise the smaller"
            )
        slo = Slo(**scenario.slo.model_dump()) if scenario.slo else None
        figures = summarize(records, totals, config, slo)
    except BaseException:
        records.discard()
        raise
    notes = [*resolved.step_time.warnings, *told]
    if num_refused:
        named = ", ".join(map(str, refused)) + (", …" if num_refused > len(refused) else "")
        of_all = f"{num_refused} of {records.num_rows} requests"
        notes.append(f"{of_all} can never fit in {limit} tokens and were refused: {named}")
    if config.enable_prefix_caching and longest <= config.block_size:
        notes.append(
            f"no prompt is longer than one block of {config.block_size} tokens (the longest has {longest}): "
            "hits will be 0; lower engine.block_size"
        )
    head = {"name": scenario.name, "model": scenario.model, "gpu": scenario.gpu, "seed": scenario.seed}
    tail = {"calibration": resolved.step_time.name, "assumed": resolved.assumed, "warnings": notes}
    return Result(resolved, head | figures | tail, records)


@contextlib.contextmanager
def _told_by_workload(told: list[str]) -> Iterator[None]:
    """Collect the WorkloadWarnings of the block in `told`; others go where they always go."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WorkloadWarning)
        yield
    for one in caught:
        if issubclass(one.category, WorkloadWarning):
            told.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
