"""Attention kernels that may be installed, behind one signature.

A kernel's `plan` is called once for a batch of sequences that are alike, with the block table where
the kernel is paged, and gives a function of query, key and value. All tensors have tokens before
heads: query (batch, q, heads, dim); key and value (batch, c + q, kv heads, dim), or paged
(pages, block size, kv heads, dim). The q new tokens are the last of c + q and see no later ones.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sim.errors import InputError
from sim.measure.device import DTYPES, Device, Tensor, random
from sim.measure.grid import Point

BLOCK_SIZES = (16, 32, 64, 128)
WORKSPACE_BYTES = 256 << 20  # FlashInfer's partial results

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sequences(NamedTuple):
    """A batch of sequences that are alike, on one rank."""

    batch: int
    q: int  # new tokens of each
    c: int  # cached tokens of each, before them
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None = None
    kv_dtype: str = "bf16"

    @property
    def kv(self) -> int:
        """Tokens of each, the new ones included."""
        return self.c + self.q


class Kernel(NamedTuple):
    """An attention kernel and the block sizes it reads; (None,): it is not paged."""

    name: str
    block_sizes: tuple[int | None, ...]
    plan: Callable[[Sequences, Tensor], Attend]


def kernels(device: Device, kv_dtype: str) -> list[Kernel]:
    """What there is to time on a device: torch's own kernel, and the first paged one installed.

    Raises InputError where nothing reads KV of this type.
    """
    if kv_dtype == "fp8":
        if device.kind == "cpu" or not _installed("flashinfer"):
            raise InputError(
                "no attention kernel here reads fp8 KV: use --kv bf16, or a GPU with flashinfer installed"
            )
        return [Kernel("flashinfer", BLOCK_SIZES, flashinfer)]
    if device.kind == "cpu":
        return [unpaged(device), Kernel("sdpa_gather", BLOCK_SIZES, sdpa_gather)]
    if _installed("flashinfer"):
        return [unpaged(device), Kernel("flashinfer", BLOCK_SIZES, flashinfer)]
    if _installed("flash_attn_interface"):
        return [unpaged(device), Kernel("flash_attn_3", BLOCK_SIZES, flash_attn_3)]
    if _installed("flash_attn"):
        return [unpaged(device), Kernel("flash_attn_2", (256,), flash_attn_2)]  # pages in multiples of 256
    return [unpaged(device)]


def unpaged(device: Device) -> Kernel:
    """torch's own kernel, which is always there."""
    return Kernel("sdpa_flash" if device.kind == "cuda" else "sdpa", (None,), sdpa)


def attention(device: Device, point: Point, kernel: Kernel) -> Callable[[], Tensor]:
    """A call of `kernel` on random data of the point's shape, its pages in random order."""
    assert point.batch and point.num_heads and point.num_kv_heads and point.head_dim and point.kv_dtype
    q, c = (1, (point.kv or 1) - 1) if point.op == "decode_attention" else (point.q or 0, point.c or 0)
    heads, kv_heads, dim = point.num_heads, point.num_kv_heads, point.head_dim
    sequences = Sequences(point.batch, q, c, heads, kv_heads, dim, point.block_size, point.kv_dtype)
    query = random(device, point.batch, q, heads, dim)
    table = None
    rows = (point.batch, sequences.kv)
    if point.block_size is not None:
        pages = -(-sequences.kv // point.block_size)
        rows = (point.batch * pages, point.block_size)
        table = torch.randperm(rows[0], device=device.kind).view(point.batch, pages).int()
    key, value = (random(device, *rows, kv_heads, dim, dtype=point.kv_dtype) for _ in range(2))
    attend = kernel.plan(sequences, table)
    return lambda: attend(query, key, value)


def sdpa(sequences: Sequences, table: Tensor) -> Attend:
    """torch's scaled_dot_product_attention over contiguous KV; FlashAttention on a GPU."""
    del table

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mask = _mask(sequences.q, sequences.c, query.device)
        if query.device.type == "cpu":
            return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

    return attend


@functools.lru_cache(maxsize=4)
def _mask(q: int, c: int, device: torch.device) -> Tensor:
    """Which of c + q keys each of the last q tokens sees. None: all."""
    if q == 1:
        return None
    if device.type == "cuda":  # no tensor: the kernel aligns its causal mask with the last key itself
        return causal_lower_right(q, c + q)
    return torch.ones(q, c + q, dtype=torch.bool, device=device).tril(c)


def sdpa_gather(sequences: Sequences, table: Tensor) -> Attend:
    """Copy each sequence's pages together, then `sdpa`: a paged kernel for where there is none."""
    contiguous = sdpa(sequences, None)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gathered = (pool[table].flatten(1, 2)[:, : sequences.kv] for pool in (key, value))
        return contiguous(query, *gathered)

    return attend


def flashinfer(sequences: Sequences, table: Tensor) -> Attend:
    """FlashInfer's paged prefill and decode kernels."""
    import flashinfer as library

    batch, pages = table.shape
    device = table.device
    assert sequences.block_size is not None
    page_ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * pages
    last_page = sequences.kv - (pages - 1) * sequences.block_size
    last_pages = torch.full((batch,), last_page, dtype=torch.int32, device=device)
    heads = (sequences.num_heads, sequences.num_kv_heads, sequences.head_dim, sequences.block_size)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": DTYPES[sequences.kv_dtype]}
    if sequences.q == 1:
        # As in vLLM: tensor cores pay from four query heads a KV head on.
        grouped = sequences.num_heads // sequences.num_kv_heads >= 4
        workspace = _workspace(device)
        decode = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
        decode.plan(page_ends, table.flatten(), last_pages, *heads, **dtypes)
        return lambda query, key, value: decode.run(query.squeeze(1), (key, value)).unsqueeze(1)
    query_ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * sequences.q
    prefill = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(device), "NHD")
    prefill.plan(query_ends, page_ends, table.flatten(), last_pages, *heads, causal=True, **dtypes)
    return lambda query, key, value: prefill.run(query.flatten(0, 1), (key, value)).view(query.shape)


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def flash_attn_2(sequences: Sequences, table: Tensor) -> Attend:
    """FlashAttention-2's kernel over a paged cache."""
    from flash_attn import flash_attn_with_kvcache

    lengths = _lengths(sequences, table)
    return lambda query, key, value: flash_attn_with_kvcache(
        query, key, value, cache_seqlens=lengths, block_table=table, causal=True
    )


def flash_attn_3(sequences: Sequences, table: Tensor) -> Attend:
    """FlashAttention-3's kernel over a paged cache."""
    from flash_attn_interface import flash_attn_with_kvcache

    lengths = _lengths(sequences, table)
    return lambda query, key, value: flash_attn_with_kvcache(
        query, key, value, cache_seqlens=lengths, page_table=table, causal=True
    )


def _lengths(sequences: Sequences, table: Tensor) -> Tensor:
    return torch.full((sequences.batch,), sequences.kv, dtype=torch.int32, device=table.device)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
