"""From a scenario to numbers: names become data, `auto` becomes a pool size."""

from __future__ import annotations

from typing import NamedTuple

from sim.core import EngineConfig
from sim.errors import InputError
from sim.hardware import Dtype, is_known, load_gpu, load_model
from sim.memory import kv_bytes_per_token
from sim.memory import num_gpu_blocks as pool_size
from sim.scenario import Scenario
from sim.step_time import StepTime, needs_model, step_time

DEFAULT_MAX_MODEL_LEN = 131_072  # tokens, where nobody knows the model


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
    needed = engine.num_gpu_blocks == "auto" or needs_model(scenario)
    model = load_model(scenario.model) if needed or is_known("models", scenario.model) else None
    timing = step_time(scenario, model, weights)
    assumed = timing.assumed

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
            kv_dtype=timing.kv_dtype,
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
        enable_prefix_caching=engine.enable_prefix_caching and scenario.cache.looks_up,
        async_scheduling=engine.async_scheduling,
        free_all_last=engine.free_order == "all_last",
    )
    kv_bytes = kv_bytes_per_token(model, tp=tp, kv_dtype=timing.kv_dtype) if model else None
    if kv_bytes is not None and is_known("gpus", scenario.gpu):
        timing.warnings.extend(_beyond_memory(scenario, config, kv_bytes))
    return Resolved(scenario, config, timing, kv_bytes, assumed)


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
