"""What to time: operations and their shapes, for one rank of a model.

Matrix products have the shapes of the model's layers, attention those of its heads. Sequences of one
point are alike. The grid of a GPU is dense where an engine's steps lie, that of a CPU only as large
as seconds allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sim.errors import InputError
from sim.hardware import Dtype, ModelSpec
from sim.kernels import Kernels, kernels_of

GEMM_KERNELS = {"bf16": "torch.nn.functional.linear", "fp8": "torch._scaled_mm"}


class Point(NamedTuple):
    """One operation of one shape, as the columns of the CSV; None where a column does not apply."""

    op: str
    dtype: str | None = None  # weights and products
    kv_dtype: str | None = None
    m: int | None = None  # gemm: rows of the output, its tokens
    n: int | None = None
    k: int | None = None  # gemm: the sum runs over it
    batch: int | None = None  # sequences
    q: int | None = None  # new tokens a sequence
    c: int | None = None  # cached tokens a sequence, before them
    kv: int | None = None  # decode: KV tokens a sequence, the new one included
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None  # None: the kernel is not paged
    num_gpus: int | None = None
    elements: int | None = None
    num_tokens: int | None = None  # step: batch * q + num_decodes
    num_decodes: int | None = None
    decode_kv: int | None = None  # step: KV tokens of all decodes
    num_layers: int | None = None
    algorithm: str | None = None  # hash
    kernel: str | None = None


class Grid(NamedTuple):
    """Sizes to time, before the model's own limits."""

    tokens: tuple[int, ...]  # m of a layer's products
    outputs: tuple[int, ...]  # m of the LM head
    prefills: tuple[tuple[int, int, int], ...]  # batch, q, c
    decodes: tuple[tuple[int, int], ...]  # batch, kv
    steps: tuple[tuple[int, int, int, int, int], ...]  # batch, q, c of the prefills; decodes, kv of each


MOST_DECODE_TOKENS = 1 << 20  # of a batch: 4 GiB of one Llama-3.1-8B layer in bf16

CUDA = Grid(
    tokens=(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
            6144, 8192),
    outputs=(1, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512),
    prefills=(
        *((1, q, c) for q in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
          for c in (0, 512, 1024, 2048, 8192, 32768)),
        *((4, q, c) for q in (128, 512, 2048) for c in (0, 2048)),
    ),
    decodes=tuple(
        (batch, kv) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for kv in (128, 512, 1024, 2048, 4096, 8192, 32768, 131072) if batch * kv <= MOST_DECODE_TOKENS
    ),
    steps=(
        *((0, 0, 0, n, kv) for n, kv in ((1, 1024), (1, 8192), (8, 1024), (32, 1024), (64, 1024), (64, 4096),
                                         (128, 1024), (256, 512), (256, 1024))),
        *((1, q, c, 0, 0) for q, c in ((128, 0), (512, 0), (2048, 0), (8192, 0), (512, 2048), (2048, 2048),
                                       (2048, 8192))),
        (4, 512, 0, 0, 0),
        (1, 512, 0, 32, 1024), (1, 2048, 0, 64, 1024), (1, 512, 2048, 64, 1024), (1, 2048, 2048, 128, 1024),
    ),
)  # fmt: skip

CPU = Grid(
    tokens=(1, 2, 4, 8, 16, 32, 64),
    outputs=(1, 2, 4, 8, 16),
    prefills=(
        *((1, q, c) for q in (16, 32, 64, 128) for c in (0, 64, 256)),
        *((2, q, c) for q in (16, 64) for c in (0, 64)),
    ),
    decodes=tuple((batch, kv) for batch in (1, 2, 4, 8) for kv in (64, 128, 256, 512)),
    steps=((0, 0, 0, 1, 64), (0, 0, 0, 4, 128), (1, 32, 0, 0, 0), (1, 32, 64, 0, 0), (1, 32, 64, 4, 64)),
)

GRIDS = {"cuda": CUDA, "cpu": CPU}


def points(
    model: ModelSpec,
    grid: Grid,
    *,
    tp: int,
    weights: Dtype,
    kv_dtype: Dtype,
    kernels: Iterable[tuple[str, Iterable[int | None]]],
    step_kernel: str,
    num_layers: int,
) -> list[Point]:
    """All points of one rank, in the order they are timed. `kernels` names attention kernels and, for
    each, its block sizes. No whole steps with tp above 1 (their all-reduces are missing) or fp8 KV.

    Raises InputError for a mixture of experts and for a tp that does not divide the heads.
    """
    check_dense(model)
    rank = kernels_of(model, tp)
    found = list(_gemms(rank, grid, weights))
    for kernel, block_sizes in kernels:
        for block_size in block_sizes:
            common = _heads(rank)._replace(
                dtype="bf16", kv_dtype=kv_dtype, block_size=block_size, kernel=kernel
            )
            found.extend(_attention(common, grid, model.max_model_len))
    if tp == 1 and kv_dtype == "bf16":
        common = _heads(rank)._replace(
            op="step", dtype=weights, kv_dtype="bf16", num_layers=num_layers, kernel=step_kernel
        )
        found.extend(_steps(common, grid, model.max_model_len))
    return list(dict.fromkeys(found))  # two products of a small model may have one shape


def check_dense(model: ModelSpec) -> None:
    """Raise InputError for a mixture of experts."""
    if model.num_experts is not None:
        raise InputError(f"{model.name} is a mixture of experts, which measure cannot time: use a dense one")


def _gemms(rank: Kernels, grid: Grid, weights: Dtype) -> Iterator[Point]:
    for n, k in dict.fromkeys((gemm.n, gemm.k) for gemm in rank.gemms):
        for m in grid.tokens:
            yield Point("gemm", weights, m=m, n=n, k=k, kernel=GEMM_KERNELS[weights])
    for m in grid.outputs:  # the LM head stays bf16 in fp8 checkpoints
        head = rank.lm_head
        yield Point("gemm", "bf16", m=m, n=head.n, k=head.k, kernel=GEMM_KERNELS["bf16"])


def _attention(common: Point, grid: Grid, max_model_len: int) -> Iterator[Point]:
    for batch, q, c in grid.prefills:
        if q + c <= max_model_len:
            yield common._replace(op="prefill_attention", batch=batch, q=q, c=c)
    for batch, kv in grid.decodes:
        if kv <= max_model_len:
            yield common._replace(op="decode_attention", batch=batch, kv=kv)


def _steps(common: Point, grid: Grid, max_model_len: int) -> Iterator[Point]:
    for batch, q, c, num_decodes, kv in grid.steps:
        if max(q + c, kv) <= max_model_len:
            yield common._replace(
                batch=batch, q=q, c=c, num_tokens=batch * q + num_decodes, num_decodes=num_decodes,
                decode_kv=num_decodes * kv,
            )  # fmt: skip


def _heads(rank: Kernels) -> Point:
    return Point("", num_heads=rank.num_heads, num_kv_heads=rank.num_kv_heads, head_dim=rank.head_dim)
