"""The kernels that one rank runs for a model: which matrix products, which attention, how many bytes.

Sizes follow vLLM's layers: QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, and a
key/value head copied to several ranks where there are more ranks than heads.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.errors import InputError
from sim.hardware import ModelSpec

VOCAB_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


class Gemm(NamedTuple):
    """One matrix product of M rows: (M, k) times (k, n)."""

    name: str
    n: int
    k: int


class Kernels(NamedTuple):
    """What one layer runs on one rank, and the LM head after the last."""

    gemms: tuple[Gemm, ...]  # in the weights' type
    router: Gemm | None  # of a mixture of experts, in bf16
    lm_head: Gemm  # in bf16
    num_heads: int
    num_kv_heads: int
    head_dim: int
    elementwise_bytes: int  # read and written for a token: norms, rotary embedding, activation


def kernels_of(model: ModelSpec, tp: int) -> Kernels:
    """The kernels of one of `tp` ranks. Raises InputError where vLLM could not split the model so."""
    check_split(model, tp)
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.num_kv_heads // tp)
    hidden, width = model.hidden_size, model.head_dim
    attention = (
        Gemm("qkv", (heads + 2 * kv_heads) * width, hidden),
        Gemm("o", hidden, heads * width),
    )
    router = None
    gemms: tuple[Gemm, ...]
    if model.num_experts is None:
        intermediate = model.intermediate_size // tp
        gemms = (
            *attention,
            Gemm("gate_up", 2 * intermediate, hidden),
            Gemm("down", hidden, intermediate),
        )
        activation = 3 * intermediate  # reads gate and up, writes one
    else:
        assert model.num_experts_per_tok is not None and model.moe_intermediate_size is not None
        gemms = attention
        router = Gemm("router", model.num_experts, hidden)
        activation = 0  # inside the fused experts
    # Two norms read and write hidden states and residual; the rotary embedding reads and writes
    # queries and keys; keys and values are read and written once into the cache.
    values = 8 * hidden + 2 * (heads + kv_heads) * width + 4 * kv_heads * width + activation
    return Kernels(
        gemms=gemms,
        router=router,
        lm_head=Gemm("lm_head", padded_vocab_size(model) // tp, hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        elementwise_bytes=2 * values,
    )


def padded_vocab_size(model: ModelSpec) -> int:
    """Rows of the embedding and the LM head as vLLM pads them, of all GPUs together."""
    return -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def check_split(model: ModelSpec, tp: int) -> None:
    """Raises InputError where vLLM could not split the model over tp GPUs."""
    sizes = {
        "heads": model.num_attention_heads,
        "KV heads": max(model.num_kv_heads, tp),  # copied where there are fewer than GPUs
        "MLP columns": model.moe_intermediate_size or model.intermediate_size,
        "padded vocabulary rows": padded_vocab_size(model),
    }
    for what, size in sizes.items():
        if tp < 1 or size % tp:
            raise InputError(f"tp {tp} does not divide the {size} {what} of {model.name}")
    if tp > model.num_kv_heads and tp % model.num_kv_heads:
        raise InputError(f"tp {tp} is no multiple of the {model.num_kv_heads} KV heads of {model.name}")
