"""A run of a real vLLM engine, as LLMServingSim records it: three files beside each other.

    NAME-requests.jsonl     a request a line: its lengths, when the client sent it, the engine's stamps
    NAME-meta.json          the engine's configuration
    NAME-timeseries.csv     running, waiting and KV use, every second

each plain or with .gz. `find_run` takes the first and finds the others.
"""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from sim.core import EngineConfig
from sim.errors import InputError, describe
from sim.hardware import Count, Dtype
from sim.request import Ints

Floats = npt.NDArray[np.float64]


class MeasuredRun(NamedTuple):
    """Requests in order of arrival; times in SECONDS since the first of them arrived.

    The engine's stamps and the arrivals come from two clocks. The first request sets them against
    each other: an idle engine queues it at once.
    """

    vllm: str
    started_time: float  # when the run was started: before the first arrival
    config: EngineConfig
    tp: int
    weights: Dtype
    kv_dtype: Dtype
    prompt_len: Ints
    output_len: Ints
    arrival_time: Floats
    queued_time: Floats
    scheduled_time: Floats
    first_token_time: Floats
    last_token_time: Floats


class Ticks(NamedTuple):
    """What the engine said of itself every second."""

    time: Floats  # seconds since the first arrival
    num_running: Floats
    num_waiting: Floats
    kv_cache_usage_perc: Floats  # of 1


class _Part(BaseModel):
    """A part of a file whose other fields do not matter."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class _Request(_Part):
    input_toks: Count
    output_toks: Count
    arrival_time: float
    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float


class _EngineArguments(_Part):
    tensor_parallel_size: Count
    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count
    dtype: Literal["bfloat16"]
    kv_cache_dtype: Literal["auto", "fp8"]


class _Cache(_Part):
    num_gpu_blocks: Annotated[int, Field(gt=1)]
    block_size: Count
    enable_prefix_caching: bool


class _Scheduler(_Part):
    async_scheduling: bool
    enable_chunked_prefill: bool
    scheduler_reserve_full_isl: bool
    long_prefill_token_threshold: int
    policy: Literal["fcfs", "priority"]


class _Resolved(_Part):
    scheduler_config: _Scheduler


class _Meta(_Part):
    vllm_version: str
    started_at: Annotated[AwareDatetime, Field(strict=False)]
    engine_kwargs: _EngineArguments
    kv_cache: _Cache
    resolved_config: _Resolved


class _Tick(_Part):
    t: float
    running: float
    waiting: float
    kv_cache_pct: float


P = TypeVar("P", bound=_Part)


def read_run(requests: Path) -> MeasuredRun:
    """Read a run by its requests file. Raises InputError, one line: the file, the line, the field."""
    beside = _beside(requests, "meta.json")
    rows = [
        _as(_Request, _json(f"{requests}:{number}", line), f"{requests}:{number}")
        for number, line in enumerate(_text(requests).splitlines(), 1)
    ]
    if not rows:
        raise InputError(f"{requests}: holds no requests")
    rows.sort(key=lambda row: row.arrival_time)
    meta = _as(_Meta, _json(str(beside), _text(beside)), str(beside))

    def column(name: str, origin: float) -> Floats:
        return np.array([getattr(row, name) for row in rows], np.float64) - origin

    engine = rows[0].queued_ts
    return MeasuredRun(
        meta.vllm_version,
        meta.started_at.timestamp() - rows[0].arrival_time,
        _config(meta),
        meta.engine_kwargs.tensor_parallel_size,
        "bf16",
        "fp8" if meta.engine_kwargs.kv_cache_dtype == "fp8" else "bf16",
        np.array([row.input_toks for row in rows], np.int64),
        np.array([row.output_toks for row in rows], np.int64),
        column("arrival_time", rows[0].arrival_time),
        column("queued_ts", engine),
        column("scheduled_ts", engine),
        column("first_token_ts", engine),
        column("last_token_ts", engine),
    )


def read_ticks(requests: Path, run: MeasuredRun) -> Ticks:
    """The time series beside the requests file of `run`. Raises InputError as `read_run` does."""
    path = _beside(requests, "timeseries.csv")
    ticks = [
        _as(_Tick, {name: _number(value) for name, value in row.items()}, f"{path}:{number}")
        for number, row in enumerate(csv.DictReader(_text(path).splitlines()), 2)
    ]
    columns = ([getattr(tick, name) for tick in ticks] for name in _Tick.model_fields)
    time, running, waiting, percent = (np.array(column, np.float64) for column in columns)
    return Ticks(time + run.started_time, running, waiting, percent / 100.0)


def _config(meta: _Meta) -> EngineConfig:
    engine, cache, scheduler = meta.engine_kwargs, meta.kv_cache, meta.resolved_config.scheduler_config
    return EngineConfig(
        block_size=cache.block_size,
        num_gpu_blocks=cache.num_gpu_blocks,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_model_len=engine.max_model_len,
        long_prefill_token_threshold=scheduler.long_prefill_token_threshold,
        priority_policy=scheduler.policy == "priority",
        reserve_full_isl=scheduler.scheduler_reserve_full_isl,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        async_scheduling=scheduler.async_scheduling,
    )


def _beside(requests: Path, ending: str) -> Path:
    """The run's other file, plain or compressed."""
    stem, found, _ = requests.name.rpartition("requests.jsonl")
    if not found:
        raise InputError(f"{requests}: a run is named by its file NAME-requests.jsonl, plain or .gz")
    plain, packed = (requests.with_name(stem + ending + suffix) for suffix in ("", ".gz"))
    if not plain.exists() and not packed.exists():
        raise InputError(f"{plain}: no such file, nor with .gz; it belongs beside {requests.name}")
    return plain if plain.exists() else packed


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
        raise InputError(f"{path}: cannot be read: {reason.lower()}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(f"{place}: not valid JSON") from None


def _as(part: type[P], data: Any, place: str) -> P:
    if not isinstance(data, dict):
        raise InputError(f"{place}: should be an object of named fields")
    try:
        return part.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, part, data, lambda _: place)) from None


def _number(text: str | None) -> float | str | None:
    try:
        return float(text or "")
    except ValueError:
        return text
