"""The scenario: what a YAML file may say.

sim/scenario_file.py reads it, sim/resolve.py turns it into numbers, sim/simulation.py runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from sim.cache_kinds import APC, AnyCache
from sim.hashing import Algorithm
from sim.recorded_server import RECORDED, filled_in
from sim.section import Section
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
    ] = Field("round_robin", description="which replica gets a request, see docs/replicas.md")  # fmt: skip
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
    """One run: a load, an engine, and the machine under it.

    From a file, `Scenario.load("scenarios/multi_turn.yaml", "engine.block_size=16")`, or in Python with
    the fields of such a file, `Scenario(workload={...}, engine={...})`; only `workload` has no default.
    A scenario never changes: `changed` gives another one. Lengths are in tokens, rates in requests or
    sessions a second, times in seconds, but for limits of `slo`, in milliseconds. `prefixsim schema`
    lists all fields. Raises pydantic.ValidationError, a ValueError, for fields and values there are not.
    """

    model_config = ConfigDict(json_schema_extra=lambda schema: _with_phases(schema))

    name: str = "scenario"
    model: str = "llama-3.1-8b"
    gpu: str = "h100-sxm"
    seed: Annotated[int, Field(ge=0)] = 0
    engine: Engine = Engine()
    cluster: Cluster = Cluster()
    cache: AnyCache = APC
    # A calibration's name or file, `roofline`, `table` or `recorded`; None: that of gpu and model, else a
    # roofline; of a recording `recorded`.
    cost: str | WholeStep | None = None
    prime: AnyWorkload | None = None  # runs first, in an engine of its own, to warm the cache
    # The measured requests. Beside `prime` the file calls them `measure`.
    workload: AnyWorkload = Field(validation_alias=AliasChoices("workload", "measure"))
    slo: SloLimits | None = None
    reset_prefix_cache: list[Seconds] = []  # vLLM's call at these times; it fails while blocks are in use
    measure_from: Seconds | None = None  # the summary is of requests that arrive from then on

    @classmethod
    def load(cls, path: str | Path, *overrides: str) -> Scenario:
        """The scenario in a YAML file, with fields set as by the command's `--set`.

        Raises InputError, one line that names the file, the line, the field and the remedy.
        """
        from sim.scenario_file import load  # which is above this file

        return load(path, overrides)

    def changed(self, *overrides: str) -> Scenario:
        """This scenario with fields set as by `--set`, such as "engine.block_size=16", values in YAML.

        >>> one = Scenario(workload={"kind": "fourteen_tokens"})
        >>> one.engine.block_size, one.changed("engine.block_size=16").engine.block_size
        (64, 16)

        Raises InputError, one line, for what is no field or no value of it.
        """
        from sim.scenario_file import check, draft_of, override

        draft = draft_of(self)
        for text in overrides:
            override(draft, text)
        return check(draft)

    @model_validator(mode="before")
    @classmethod
    def _one_load(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if (why := misfit(data)) is not None:
            raise ValueError(": ".join(why))
        return filled_in(data)

    @model_validator(mode="after")
    def _has_recorded_steps(self) -> Scenario:
        if self.cost == RECORDED and self.workload.kind != "recording":
            raise ValueError(
                f"cost: {RECORDED} is of a recording's own steps, and the workload is {self.workload.kind}: "
                "set workload.kind to recording, or make a calibration with calibrate --from-recording"
            )
        return self

    @model_validator(mode="after")
    def _cache_can_do_it(self) -> Scenario:
        if (why := self.cache.misfit(self)) is not None:
            raise ValueError(why)
        return self

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        if self.prime is None:
            del data["prime"]
            return data
        return {"measure" if name == "workload" else name: value for name, value in data.items()}


def _with_phases(schema: dict[str, Any]) -> None:
    """Say in a JSON Schema what misfit refuses."""
    fields = schema["properties"]
    (prime,) = [part for part in fields["prime"].pop("anyOf") if part.get("type") != "null"]
    del fields["prime"]["default"]
    fields["prime"] |= prime
    fields["measure"] = {**fields["workload"], "title": "Measure"}
    schema["required"].remove("workload")
    schema["oneOf"] = [{"required": ["workload"]}, {"required": ["prime", "measure"]}]
    schema["dependentRequired"] = {"prime": ["measure"], "measure": ["prime"]}


def misfit(data: Mapping[str, Any]) -> tuple[str, str] | None:
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
