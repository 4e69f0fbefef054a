"""num_gpu_blocks by formula beside what vLLM's start-up logs say.

What vLLM holds while it profiles its sampler changed over time, in bytes for each (sequence,
vocabulary entry). Before 0.26 it was 14 for the logits (bf16, float32 and two more float32 copies)
and, on top, 24 for sorting them with their indices, or 8 for probabilities and noise once a Triton
kernel had replaced the sort, by 0.19. These sums are assumed. That of 38 explains the activation
peaks in the H100 logs of vLLM 0.11 (vocabularies of 128,256, 151,936 and 201,088) to 0.1 GiB; those
rows are therefore no independent check of that term, the others are. The RTX 4090 held 0.28 GiB more
than the formula says, for a reason its recording does not show; on its small pool that is 6 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

from sim.hardware import Count, Dtype, Strict, check, load_gpu, load_model
from sim.memory import GIB, SAMPLER_BYTES, num_gpu_blocks

_FILE = Path(__file__).with_suffix(".yaml")
_SAMPLER_SINCE = (((0, 26), SAMPLER_BYTES), ((0, 19), 22), ((0, 0), 38))  # by release, newest first
_GRAPH_ESTIMATE_SINCE = (0, 21)


class _Measured(Strict):
    """One entry of pool_sizes.yaml."""

    source: str
    vllm: str
    model: str
    gpu: str
    tp: Count = 1
    weights: Dtype = "bf16"
    gpu_memory_utilization: float
    block_size: Count = 16
    max_num_batched_tokens: Count
    max_num_seqs: Count
    max_model_len: Count
    eager: bool = False
    blocks: Count | None = None  # None: from kv_gib
    kv_gib: float = 0.0


class Row(NamedTuple):
    """One configuration: the blocks that vLLM had and those that the formula gives."""

    configuration: str
    vllm: str
    source: str
    block_size: int
    measured: int
    computed: int

    @property
    def difference(self) -> float:
        """Computed against measured, percent."""
        return 100.0 * (self.computed / self.measured - 1.0)


def rows() -> list[Row]:
    """All entries of pool_sizes.yaml, in its order. Raises InputError for a bad entry."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return [_row(check(_Measured, entry, _FILE, {})) for entry in entries]


def _row(entry: _Measured) -> Row:
    release = tuple(int(part) for part in entry.vllm.split(".")[:2])
    size = num_gpu_blocks(
        load_model(entry.model),
        load_gpu(entry.gpu),
        tp=entry.tp,
        block_size=entry.block_size,
        gpu_memory_utilization=entry.gpu_memory_utilization,
        weights=entry.weights,
        kv_dtype="bf16",
        max_num_batched_tokens=entry.max_num_batched_tokens,
        max_num_seqs=entry.max_num_seqs,
        max_model_len=entry.max_model_len,
        cuda_graph_estimate=release >= _GRAPH_ESTIMATE_SINCE and not entry.eager,
        sampler_bytes=next(held for since, held in _SAMPLER_SINCE if release >= since),
    )
    measured = entry.blocks or round(entry.kv_gib * GIB / size.bytes_per_block)
    tp = f" x {entry.tp}" if entry.tp > 1 else ""
    configuration = (
        f"{entry.model} {entry.weights}, {entry.gpu}{tp} at {entry.gpu_memory_utilization}, "
        f"{entry.max_num_batched_tokens} tokens, {entry.max_num_seqs} sequences"
    )
    return Row(configuration, entry.vllm, entry.source, entry.block_size, measured, size.num_gpu_blocks)
