"""A run of a real vLLM engine, as LLMServingSim records it: three files beside each other.

    NAME-requests.jsonl     a request a line: its lengths, when the client sent it, the engine's stamps
    NAME-meta.json          the engine's configuration
    NAME-timeseries.csv     running, waiting and KV use, every second

each plain or with .gz. `find_run` takes the first and finds the others.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from sim.core import EngineConfig
from sim.errors import InputError, describe
from sim.hardware import Dtype
from sim.request import Ints

Floats = npt.NDArray[np.float64]

# Bounds far beyond any engine, so that nothing computed from a damaged file overflows or takes years.
Stamp = Annotated[float, Field(ge=0, le=1e10)]  # seconds
Tokens = Annotated[int, Field(gt=0, lt=2**31)]
Budget = Annotated[int, Field(gt=0, le=2**20)]
JITTER = 1.0  # seconds by which the client's clock and the engine's may drift apart in a run


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
    input_toks: Tokens
    output_toks: Tokens
    arrival_time: Stamp  # the client's clock
    queued_ts: Stamp  # the engine's clock from here on
    scheduled_ts: Stamp
    first_token_ts: Stamp
    last_token_ts: Stamp


class _EngineArguments(_Part):
    tensor_parallel_size: Annotated[int, Field(gt=0, le=1024)]
    max_num_seqs: Budget
    max_num_batched_tokens: Budget
    max_model_len: Tokens
    dtype: Literal["bfloat16"]
    kv_cache_dtype: Literal["auto", "fp8"]


class _Cache(_Part):
    num_gpu_blocks: Annotated[int, Field(gt=1, le=2**31)]
    block_size: Budget
    enable_prefix_caching: bool


class _Scheduler(_Part):
    async_scheduling: bool
    enable_chunked_prefill: bool
    scheduler_reserve_full_isl: bool
    long_prefill_token_threshold: Annotated[int, Field(ge=0, lt=2**31)]
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
    beside = meta_file(requests)
    meta = _as(_Meta, _json(str(beside), _text(beside)), str(beside))
    numbered = [
        (number, _as(_Request, _json(f"{requests}:{number}", line), f"{requests}:{number}"))
        for number, line in enumerate(_text(requests).splitlines(), 1)
    ]
    if not numbered:
        raise InputError(f"{requests}: holds no requests")
    numbered.sort(key=lambda one: one[1].arrival_time)
    rows = [row for _, row in numbered]
    for number, row in numbered:
        _check_order(f"{requests}:{number}", row, rows[0])
        _check_length(f"{requests}:{number}", row, meta.engine_kwargs.max_model_len)

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
    reader = csv.DictReader(_text(path).splitlines())
    for name in _Tick.model_fields:
        if (reader.fieldnames or []).count(name) > 1:
            raise InputError(f"{path}:1: two columns are named {name}; keep one of them")
    ticks = [
        _as(
            _Tick,
            {name: _number(row[name]) for name in _Tick.model_fields if name in row},
            f"{path}:{number}",
        )
        for number, row in enumerate(reader, 2)
    ]
    columns = ([getattr(tick, name) for tick in ticks] for name in _Tick.model_fields)
    time, running, waiting, percent = (np.array(column, np.float64) for column in columns)
    return Ticks(time + run.started_time, running, waiting, percent / 100.0)


def meta_file(requests: Path) -> Path:
    """The file of the engine's configuration, by the requests file. Raises InputError if it is absent."""
    return _beside(requests, "meta.json")


def _check_order(place: str, row: _Request, first: _Request) -> None:
    """A request arrives, is queued, scheduled, and has its tokens, in this order. Raises InputError."""
    stamps = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    for earlier, later in itertools.pairwise(stamps):
        if getattr(row, later) < getattr(row, earlier):
            raise InputError(
                f"{place}: {later}: {getattr(row, later)} is before {earlier}, {getattr(row, earlier)}; "
                "repair or remove the line"
            )
    early = (row.arrival_time - first.arrival_time) - (row.queued_ts - first.queued_ts)
    if early > JITTER:
        raise InputError(
            f"{place}: queued_ts: is {early:.3g} s before the request arrived, by the clocks of the request "
            "that arrived first; repair or remove the line"
        )


def _check_length(place: str, row: _Request, most: int) -> None:
    if row.input_toks + row.output_toks > most:
        raise InputError(
            f"{place}: input_toks, output_toks: {row.input_toks} and {row.output_toks} are together above "
            f"the engine's max_model_len of {most}; are these files of one run?"
        )


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
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "not a whole gzip file"
        raise InputError(f"{path}: cannot be read: {reason.lower()}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text") from None


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
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
