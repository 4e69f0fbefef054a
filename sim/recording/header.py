"""What a recording says of the server: the first line, checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from sim.errors import InputError, describe

V1 = "vllm_cpu_truth/1"
V2 = "prefixsim_recording/2"

Whole = Annotated[int, Strict(), Field(ge=0, lt=2**53)]  # of tokens, blocks, requests, microseconds
Time = Annotated[int, Strict(), Field(gt=-(2**53), lt=2**53)]  # microseconds since the recording began
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]

# groups of KV cache whose blocks are not those of full attention
UNLIKE_FULL_ATTENTION = ("SlidingWindow", "ChunkedLocal", "Mamba", "CrossAttention")


class Line(BaseModel):
    """A part of a recording; fields of later recorders are left unread."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Effective(Line):
    """The settings that the scheduler really used (lengths in tokens), named as in the recording."""

    block_size: Annotated[int, Strict(), Field(ge=1, le=2**20)]
    num_gpu_blocks: Annotated[int, Strict(), Field(ge=2, le=2**28)]  # the null block included
    max_num_seqs: Annotated[int, Strict(), Field(ge=1, le=2**20)]
    max_num_batched_tokens: Annotated[int, Strict(), Field(ge=1, le=2**28)]
    max_model_len: Annotated[int, Strict(), Field(ge=1, le=2**28)]
    policy: Literal["fcfs", "priority"]
    chunked: Flag
    enable_prefix_caching: Flag
    async_scheduling: Flag
    reserve_full_isl: Flag
    watermark: Annotated[float, Field(ge=0, le=1)]
    long_prefill_token_threshold: Whole = 0
    hash_block_size: Whole | None = None
    hash_algo: Text = "sha256"
    max_loras: Whole | None = None
    kv_groups: list[Text] = Field(default_factory=list)
    scheduler_base: Text = ""
    tensor_parallel_size: Whole = 1
    kv_cache_dtype: Text = "auto"
    log_stats: Flag = True  # else statistics are not there
    max_num_scheduled_tokens: Whole | None = None  # of a step, instead of max_num_batched_tokens
    max_num_active_seqs: Whole | None = None  # requests that run at once, instead of max_num_seqs
    long_prefill_token_threshold_adaptive: Flag = False
    prefill_schedule_interval: Whole = 1
    pipeline_parallel_size: Whole = 1
    num_spec_tokens: Whole = 0
    kv_connector: Text | None = None


class Content(Line):
    """How the content of requests is written down."""

    form: Literal["hashed", "token_ids", "segments"]  # segments: version 1
    tokens: Annotated[int, Strict(), Field(ge=1, le=2**20)] = 1  # of a chunk


class Header(Line):
    """The server of a recording and its settings."""

    schema_version: Text = Field(alias="schema")
    name: Text = ""
    versions: dict[str, Text | None] = Field(default_factory=dict)
    model: Any = None  # its name, or its configuration
    device: Text = ""
    effective: Effective
    content: Content
    free0: list[Whole] | None = None  # the free queue at the beginning, head first; None: 1, 2, ... in order
    wall: Text = ""  # when the recording began, UTC
    loadavg: list[float] = Field(default_factory=list)  # of the machine, every 5 s; version 1 only

    @property
    def is_async(self) -> bool:
        """Whether vLLM's AsyncScheduler decided; on a CPU it may, with `async_scheduling` off."""
        return self.effective.async_scheduling or self.effective.scheduler_base == "AsyncScheduler"

    @property
    def version(self) -> int:
        """Of the format: 1 or 2."""
        return 1 if self.schema_version == V1 else 2

    def block_ids(self) -> list[int]:
        """vLLM's block for each block of an engine whose free queue begins 1, 2, ... in order."""
        return [0, *(self.free0 or range(1, self.effective.num_gpu_blocks))]


def header_of(data: Mapping[str, Any], path: Path) -> Header:
    """A recording's first line; InputError if it is none, or of an engine that is not modelled."""
    schema = data.get("schema")
    if schema not in (V1, V2):
        raise InputError(
            f"{path}: a recording of format {schema!r}; this version reads {V2} and {V1}: "
            "record again with the recorder that comes with it"
        )
    if schema == V1:
        data = {**data, "content": {"form": "segments"}}
    try:
        header = Header.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, Header, data, lambda _: f"{path}: header")) from None
    _refuse_other_engines(header, path)
    ids = header.free0
    if ids is not None and sorted(ids) != list(range(1, header.effective.num_gpu_blocks)):
        raise InputError(
            f"{path}: header: free0: should hold each block from 1 to num_gpu_blocks - 1 once: "
            "a recording begins while nothing runs"
        )
    return header


def _refuse_other_engines(header: Header, path: Path) -> None:
    """Raise InputError for a server whose decisions the simulator does not make."""
    effective = header.effective
    groups = effective.kv_groups
    hash_block = effective.hash_block_size
    found = None
    if len(groups) > 1:
        found = f"a model with {len(groups)} KV cache groups"
    elif groups and any(word in groups[0].partition("(")[0] for word in UNLIKE_FULL_ATTENTION):
        found = f"a model whose KV cache is of {groups[0].partition('(')[0]}"
    elif effective.num_spec_tokens > 0:
        found = "a server with speculative decoding"
    elif effective.kv_connector:
        found = f"a server with a KV connector ({effective.kv_connector})"
    elif effective.pipeline_parallel_size > 1:
        found = f"a server with pipeline_parallel_size {effective.pipeline_parallel_size}"
    elif effective.prefill_schedule_interval > 1:
        found = f"a server with prefill_schedule_interval {effective.prefill_schedule_interval}"
    elif effective.long_prefill_token_threshold_adaptive:
        found = "a server with long_prefill_token_threshold_adaptive"
    elif hash_block not in (None, effective.block_size):
        found = f"a server that hashes blocks of {hash_block} tokens and allocates {effective.block_size}"
    if found:
        raise InputError(
            f"{path}: {found} was recorded, which is not modelled: record one with a single KV cache group "
            "of full attention, without speculative decoding, KV connector, pipeline or such settings"
        )
