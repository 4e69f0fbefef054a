"""Pool size from first principles: exact arithmetic, and one measured engine's block count."""

from __future__ import annotations

import pytest

from sim.hardware import Dtype, load_gpu, load_model
from sim.memory import PoolSize, kv_bytes_per_token, max_concurrency, num_gpu_blocks, weight_bytes


def size_of(
    model: str = "llama-3.1-8b",
    gpu: str = "h100-sxm",
    *,
    tp: int = 1,
    weights: Dtype = "bf16",
    kv_dtype: Dtype = "bf16",
    utilization: float = 0.92,
    block_size: int = 16,
    max_model_len: int = 32768,
) -> PoolSize:
    return num_gpu_blocks(
        load_model(model),
        load_gpu(gpu),
        tp=tp,
        block_size=block_size,
        gpu_memory_utilization=utilization,
        weights=weights,
        kv_dtype=kv_dtype,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        max_model_len=max_model_len,
    )


def test_known_answer_15() -> None:
    assert kv_bytes_per_token(load_model("llama-3.1-8b"), tp=1, kv_dtype="bf16") == 131_072
    assert max_concurrency(127_626, block_size=16, max_model_len=2048) == pytest.approx(997.08, abs=0.005)
    assert max_concurrency(1952, block_size=16, max_model_len=20_000) == pytest.approx(1.56, abs=0.005)


def test_kv_heads_are_split_then_replicated() -> None:
    model = load_model("llama-3.1-70b")
    per_token = [kv_bytes_per_token(model, tp=tp, kv_dtype="fp8") for tp in (1, 4, 8, 16)]
    assert per_token == [163_840, 40_960, 20_480, 20_480]


def test_parameters_follow_from_the_sizes() -> None:
    for name in ("llama-3.1-8b", "llama-3.1-70b"):
        m = load_model(name)
        attention = 2 * m.hidden_size * m.head_dim * (m.num_attention_heads + m.num_kv_heads)
        layer = attention + 3 * m.hidden_size * m.intermediate_size + 2 * m.hidden_size
        assert m.num_parameters == 2 * m.vocab_size * m.hidden_size + m.layers * layer + m.hidden_size
    assert weight_bytes(load_model("llama-3.1-8b"), tp=1, weights="bf16") == 16_060_522_496
    assert weight_bytes(load_model("llama-3.1-70b"), tp=4, weights="fp8") == pytest.approx(18.16e9, rel=1e-3)


def test_the_parts_add_up() -> None:
    size = size_of()
    rest = size.requested - size.weights - size.activations - size.other - size.graphs - size.kv_cache
    assert 0 <= rest < size.bytes_per_block == 16 * 131_072
    assert size.num_gpu_blocks // 4 == size_of(block_size=64).num_gpu_blocks


def test_against_a_measured_rtx_4090() -> None:
    """A public vLLM 0.19.0 run (no graph estimate yet): 2,588 blocks of 16; the estimate is 2,606."""
    size = num_gpu_blocks(
        load_model("llama-3.1-8b"),
        load_gpu("rtx-4090"),
        tp=1,
        block_size=16,
        gpu_memory_utilization=0.9,
        weights="bf16",
        kv_dtype="bf16",
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_model_len=32768,
        cuda_graph_estimate=False,
    )
    assert size.requested == 22_725_564_826
    assert size.num_gpu_blocks == pytest.approx(2588, rel=0.02)


def test_what_does_not_fit_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="weights of llama-3.1-70b need 131.4 GiB .* raise tp"):
        size_of("llama-3.1-70b")
    with pytest.raises(ValueError, match="max_model_len 131072 needs 8193: lower max_model_len"):
        size_of(gpu="rtx-4090", utilization=0.9, max_model_len=131_072)
    with pytest.raises(ValueError, match="has room for 0 blocks"):
        size_of(gpu="rtx-4090", utilization=0.7)
    with pytest.raises(ValueError, match="tp 3 does not divide the 32 heads"):
        size_of(tp=3)
    with pytest.raises(ValueError, match="gpu_memory_utilization 92"):
        size_of(utilization=92)


def test_the_pool_must_hold_one_request_and_the_null_block() -> None:
    blocks = size_of().num_gpu_blocks
    assert size_of(max_model_len=(blocks - 1) * 16).num_gpu_blocks == blocks
    with pytest.raises(ValueError, match=f"needs {blocks + 1}"):
        size_of(max_model_len=(blocks - 1) * 16 + 1)
