"""Pool size from first principles: exact arithmetic, and one measured engine's block count."""

from __future__ import annotations

import pytest

from sim.errors import InputError
from sim.hardware import Dtype, load_gpu, load_model, shipped
from sim.memory import (
    GIB,
    OTHER_BYTES,
    PoolSize,
    activation_bytes,
    kv_bytes_per_token,
    max_concurrency,
    num_gpu_blocks,
    padded_vocab_size,
    weight_bytes,
)
from sim.validate.pool_sizes import rows


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


@pytest.mark.parametrize("name", shipped("models"))
def test_parameters_follow_from_the_sizes(name: str) -> None:
    m = load_model(name)
    attention = 2 * m.hidden_size * m.head_dim * (m.num_attention_heads + m.num_kv_heads)
    norms = 2 * m.hidden_size + (2 * m.head_dim if name.startswith("qwen3") else 0)  # q and k norms
    if m.num_experts and m.moe_intermediate_size:
        mlp = m.num_experts * m.hidden_size * (1 + 3 * m.moe_intermediate_size)  # with the router
    else:
        mlp = 3 * m.hidden_size * m.intermediate_size
    tables = 2 * m.vocab_size * m.hidden_size
    assert not m.tied_embeddings
    assert m.num_parameters == tables + m.layers * (attention + mlp + norms) + m.hidden_size


@pytest.mark.parametrize(
    ("model", "tp", "weights", "gib"),
    [
        ("llama-3.1-8b", 1, "bf16", 14.9889),
        ("qwen3-8b", 1, "bf16", 15.2683),
        ("qwen3-32b", 1, "bf16", 61.03),
        ("qwen3-32b", 2, "bf16", 30.59),
        ("llama-3.1-70b", 2, "fp8", 33.88),
        ("qwen3-30b-a3b", 1, "bf16", 56.93),
    ],
)
def test_weights_against_start_up_logs(model: str, tp: int, weights: Dtype, gib: float) -> None:
    """What public vLLM logs print as "Model loading took … GiB" for a GPU."""
    assert weight_bytes(load_model(model), tp=tp, weights=weights) / GIB == pytest.approx(gib, rel=2.5e-3)


def test_what_is_split_and_what_is_copied() -> None:
    dense, moe = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
    angles = dense.max_model_len * dense.head_dim * 2
    assert weight_bytes(dense, tp=1, weights="bf16") == 2 * dense.num_parameters + angles
    assert weight_bytes(dense, tp=4, weights="bf16") == 2 * dense.num_parameters // 4 + angles
    copy = 2 * dense.layers * dense.hidden_size * dense.head_dim * 2  # K and V of one head, bf16
    assert weight_bytes(dense, tp=16, weights="bf16") == (2 * dense.num_parameters + 8 * copy) // 16 + angles
    router = moe.layers * moe.hidden_size * 128
    fp8 = weight_bytes(moe, tp=1, weights="fp8")
    tables = 2 * moe.vocab_size * moe.hidden_size
    assert fp8 == moe.num_parameters + tables + router + moe.max_model_len * moe.head_dim * 2
    wide = dense.model_copy(update={"vocab_size": 128_257, "num_parameters": dense.num_parameters + 8192})
    assert padded_vocab_size(wide) == 128_320
    grown = weight_bytes(wide, tp=1, weights="bf16") - weight_bytes(dense, tp=1, weights="bf16")
    assert grown == 64 * 2 * dense.hidden_size * 2
    table = dense.vocab_size * dense.hidden_size
    update = {"tied_embeddings": True, "num_parameters": dense.num_parameters - table}
    tied = weight_bytes(dense.model_copy(update=update), tp=1, weights="fp8")
    assert tied == weight_bytes(dense, tp=1, weights="fp8") - 2 * table  # one table, in bf16
    odd = dense.model_copy(update={"num_parameters": dense.num_parameters + 1})
    more = [weight_bytes(one, tp=2, weights="fp8") for one in (dense, odd)]
    assert more[1] == more[0] + 1  # no half bytes


def test_activations_take_the_larger_of_the_mlp_and_the_sampler() -> None:
    dense, moe = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")

    def peak(model: str, tokens: int, seqs: int, tp: int = 1) -> int:
        return activation_bytes(load_model(model), tp=tp, max_num_batched_tokens=tokens, max_num_seqs=seqs)

    hidden = 2 * 8192 * 4096 * 2
    assert peak("llama-3.1-8b", 8192, 256) == hidden + 3 * dense.intermediate_size * 8192 * 2
    assert peak("llama-3.1-8b", 8192, 256, tp=2) == hidden + 3 * dense.intermediate_size * 8192
    assert peak("llama-3.1-8b", 8192, 1024, tp=8) == hidden + 1024 * 128_256 * 6  # whole logits on each
    assert peak("llama-3.1-8b", 64, 1024) == 2 * 64 * 4096 * 2 + 64 * 128_256 * 6
    experts = 8 * (2048 + 768)  # a token's outputs, and its activations
    hidden = 2 * 8192 * moe.hidden_size * 2
    assert peak("qwen3-30b-a3b", 8192, 8) == hidden + 8192 * experts * 2
    wide = moe.model_copy(update={"moe_intermediate_size": 1536})  # whose product is the larger
    for tp, experts in ((1, 8 * (2 * 1536 + 1536)), (2, 8 * (2048 + 768))):
        held = activation_bytes(wide, tp=tp, max_num_batched_tokens=8192, max_num_seqs=8)
        assert held == hidden + 8192 * experts * 2


def test_against_start_up_logs() -> None:
    """Blocks that vLLM had, on four kinds of GPU, dense and with experts, alone and in pairs."""
    found = rows()
    assert len({row.configuration.split(",")[1].split()[0] for row in found}) >= 4
    for row in found:
        assert abs(row.difference) < (6.5 if "rtx-4090" in row.configuration else 3.5), row
    differences = sorted(abs(row.difference) for row in found)
    assert differences[len(found) // 2] < 1.0
    assert sum(differences) / len(found) < 1.5


def test_the_parts_add_up() -> None:
    size = size_of()
    rest = size.requested - size.weights - size.activations - size.other - size.graphs - size.kv_cache
    assert 0 <= rest < size.bytes_per_block == 16 * 131_072
    assert size.num_gpu_blocks // 4 == size_of(block_size=64).num_gpu_blocks
    share = load_gpu("h100-sxm").memory_bytes * 0.92
    assert share != int(share) and size.requested == int(share) + 1  # rounded up
    assert [size_of(tp=tp).other for tp in (1, 2, 4)] == [OTHER_BYTES[0], OTHER_BYTES[1], OTHER_BYTES[1]]
    assert OTHER_BYTES[0] < OTHER_BYTES[1]


def test_the_measured_rtx_4090() -> None:
    (row,) = (row for row in rows() if "rtx-4090" in row.configuration)
    assert (row.measured, row.block_size) == (2588, 16)
    assert row.difference == pytest.approx(100 * (row.computed - 2588) / 2588)


def test_what_does_not_fit_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="weights of llama-3.1-70b need 131.4 GiB .* raise tp"):
        size_of("llama-3.1-70b")
    with pytest.raises(ValueError, match="max_model_len 131072 needs 8193: lower max_model_len"):
        size_of(gpu="rtx-4090", utilization=0.9, max_model_len=131_072)
    with pytest.raises(ValueError, match="has room for 0 blocks"):
        size_of(gpu="rtx-4090", utilization=0.68)
    with pytest.raises(ValueError, match="tp 3 does not divide the 32 heads"):
        size_of(tp=3)
    with pytest.raises(ValueError, match="gpu_memory_utilization 92"):
        size_of(utilization=92)


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        ("llama-3.1-8b", 0, "tp 0 does not divide the 32 heads"),
        ("llama-13b", 16, "tp 16 does not divide the 40 heads"),
        ("llama-13b", 5, "tp 5 does not divide the 13824 MLP columns"),
        ("qwen3-30b-a3b", 8, None),  # two GPUs share each KV head
    ],
)
def test_which_tp_splits_a_model(model: str, tp: int, message: str | None) -> None:
    if message is None:
        assert size_of(model, tp=tp).num_gpu_blocks > 0
    else:
        with pytest.raises(InputError, match=message):
            size_of(model, tp=tp, max_model_len=1024)


def test_heads_and_vocabulary_must_be_divisible_too() -> None:
    sizes = {"num_attention_heads": 24, "intermediate_size": 12288}
    odd = load_model("llama-3.1-8b").model_copy(update=sizes)
    for change, tp, message in (
        ({}, 12, "tp 12 is no multiple of the 8 KV heads"),
        ({"num_kv_heads": 9}, 2, "tp 2 does not divide the 9 KV heads"),
        ({"vocab_size": 127_950}, 24, "tp 24 does not divide the 128000 padded vocabulary rows"),
    ):
        with pytest.raises(InputError, match=message):
            num_gpu_blocks(
                odd.model_copy(update=change),
                load_gpu("h100-sxm"),
                tp=tp,
                block_size=16,
                gpu_memory_utilization=0.9,
                weights="bf16",
                kv_dtype="bf16",
                max_num_batched_tokens=8192,
                max_num_seqs=256,
                max_model_len=8192,
            )


def test_the_columns_of_experts_must_be_divisible() -> None:
    thin = load_model("qwen3-30b-a3b").model_copy(update={"moe_intermediate_size": 766})
    with pytest.raises(InputError, match="tp 4 does not divide the 766 MLP columns of qwen3-30b-a3b"):
        num_gpu_blocks(
            thin, load_gpu("h100-sxm"), tp=4, block_size=16, gpu_memory_utilization=0.9, weights="bf16",
            kv_dtype="bf16", max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=8192,
        )  # fmt: skip


def test_the_pool_must_hold_one_request_and_the_null_block() -> None:
    blocks = size_of().num_gpu_blocks
    assert size_of(max_model_len=(blocks - 1) * 16).num_gpu_blocks == blocks
    with pytest.raises(ValueError, match=f"needs {blocks + 1}"):
        size_of(max_model_len=(blocks - 1) * 16 + 1)
