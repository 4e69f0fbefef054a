"""From a scenario to numbers: names become data, `auto` becomes a pool size."""

from __future__ import annotations

from typing import NamedTuple

from sim.calibration import find_calibration, load_calibration
from sim.core import EngineConfig
from sim.cost import StepCost, compile_cost, linear_cost
from sim.errors import InputError
from sim.hardware import Dtype, ModelSpec, load_gpu, load_model, shipped
from sim.memory import kv_bytes_per_token
from sim.memory import num_gpu_blocks as pool_size
from sim.scenario import Scenario, WholeStep

DEFAULT_MAX_MODEL_LEN = 131_072  # tokens, where nobody knows the model


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


def resolve(scenario: Scenario) -> Resolved:
    """Turn `auto` into numbers and names into data. Raises InputError for names nobody knows."""
    try:
        return _resolve(scenario)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{scenario.name}: {error}") from None


def _resolve(scenario: Scenario) -> Resolved:
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
    if kv_bytes is not None and scenario.gpu in shipped("gpus"):
        step_time.warnings.extend(_beyond_memory(scenario, config, kv_bytes))
    return Resolved(scenario, config, step_time, kv_bytes, assumed)


def _beyond_memory(scenario: Scenario, config: EngineConfig, kv_bytes: int) -> list[str]:
    """A warning if the pool alone is larger than the GPU."""
    pool = config.num_gpu_blocks * config.block_size * kv_bytes
    memory = load_gpu(scenario.gpu).memory_bytes
    if pool <= memory:
        return []
    return [
        f"the KV pool takes {pool / 2**30:.0f} GiB and a {scenario.gpu} has {memory / 2**30:.0f}: "
        "no such server exists; lower engine.num_gpu_blocks or let it be auto"
    ]


def _step_time(scenario: Scenario, model: ModelSpec | None, weights: Dtype) -> StepTime:
    """The cost of a step: given in the scenario, or from the calibration it names or implies."""

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
