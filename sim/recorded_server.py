"""The server that a recording is of: its settings, for a scenario that simulates it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.hashing import ALGORITHMS

if TYPE_CHECKING:
    from sim.recording import Header
    from sim.scenario import Scenario

KIND = "recording"  # of the workload
RECORDED = "recorded"  # a cost: the durations of the recording's own steps


def filled_in(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A scenario's fields, those that are not given as the recorded server had them.

    For one whose workload is a recording; any other is returned as it is. Raises InputError if the
    recording cannot be read.
    """
    path = _path(data.get("workload", data.get("measure")))
    given = data.get("engine", {})
    if path is None or not isinstance(given, Mapping):
        return data
    from sim.recording import read_header

    header = read_header(path)
    return {
        "name": Path(path).name.partition(".")[0],
        "model": model_name(header),
        "gpu": device_name(header),
        "cost": RECORDED,
        **{field: value for field, value in data.items() if value is not None or field != "cost"},
        "engine": {**engine_fields(header), **given},
    }


def engine_fields(header: Header) -> dict[str, Any]:
    """The settings that the recorded scheduler used, by the names of a scenario's engine."""
    effective = header.effective
    fields: dict[str, Any] = {
        "block_size": effective.block_size,
        "num_gpu_blocks": effective.num_gpu_blocks,
        "tensor_parallel_size": effective.tensor_parallel_size,
        "kv_cache_dtype": "fp8" if effective.kv_cache_dtype.startswith("fp8") else "auto",
        "max_num_batched_tokens": effective.max_num_batched_tokens,
        "max_num_seqs": effective.max_num_seqs,
        "max_model_len": effective.max_model_len,
        "scheduling_policy": effective.policy,
        "enable_prefix_caching": effective.enable_prefix_caching,
        "enable_chunked_prefill": effective.chunked,
        "async_scheduling": effective.async_scheduling,
        "long_prefill_token_threshold": effective.long_prefill_token_threshold,
        "watermark": effective.watermark,
        "scheduler_reserve_full_isl": effective.reserve_full_isl,
        "max_loras": effective.max_loras or None,
    }
    if effective.hash_algo in ALGORITHMS:
        fields["prefix_caching_hash_algo"] = effective.hash_algo
    return fields


def told(scenario: Scenario) -> dict[str, Any]:
    """What a report says of the recorded server: engine fields that are as recorded, and those that are not.

    Empty where the workload is no recording.
    """
    path = _path(scenario.workload)
    if path is None:
        return {}
    from sim.recording import read_header

    recorded = engine_fields(read_header(path))
    here = {field: getattr(scenario.engine, field) for field in recorded}
    same = {field: value for field, value in recorded.items() if here[field] == value}
    changed = {field: {"recorded": recorded[field], "here": here[field]} for field in recorded.keys() - same}
    return {"recording": {"path": path, "as_recorded": same, "changed": dict(sorted(changed.items()))}}


def _path(workload: Any) -> str | None:
    """The file of a workload that is a recording, as it is written or checked; None of any other."""
    if isinstance(workload, Mapping):
        kind, path = workload.get("kind"), workload.get("path")
    else:
        kind, path = getattr(workload, "kind", None), getattr(workload, "path", None)
    return path if kind == KIND and isinstance(path, str) else None


def device_name(header: Header) -> str:
    """What the server ran on."""
    return header.device or "recorded server"


def model_name(header: Header) -> str:
    """A model's name: of a path or a name on a hub its end, of a configuration its type."""
    model = header.model
    name = model.get("model_type") if isinstance(model, Mapping) else model
    return str(name or "recorded model").rstrip("/").rpartition("/")[2]
