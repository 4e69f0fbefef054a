"""How many KV blocks a GPU holds: vLLM's start-up arithmetic, from a model's and a GPU's sizes.

    requested = ceil(total * gpu_memory_utilization)
    available = requested - weights - peak activations - other - CUDA graphs
    blocks    = available // bytes_per_block          (the least rank; one is the null block)

vLLM measures the three terms after the weights; here they are ASSUMED, from the formulas below.
sim/validate/pool_sizes.py holds the result against public start-up logs.
Source: vLLM 0.33 `Worker.determine_available_memory`, `get_kv_cache_configs`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.errors import InputError
from sim.hardware import DTYPE_BYTES, Dtype, GpuSpec, ModelSpec
from sim.kernels import check_split, padded_vocab_size

GIB = 1 << 30
BF16 = DTYPE_BYTES["bf16"]

# Assumed. Bytes for each (sequence, vocabulary entry) while vLLM profiles its sampler: the logits in
# bf16 and their float32 copy, which is what logs of vLLM 0.26 and 0.27 leave room for. Older releases
# held more: see sim/validate/pool_sizes.py.
SAMPLER_BYTES = 6
# Assumed. CUDA libraries' memory outside PyTorch, on one GPU and, with NCCL's buffers, on one of
# several: what public logs of vLLM 0.11 on H100s print with tp 1 and 2.
OTHER_BYTES = (13 * GIB // 100, 55 * GIB // 100)
# Assumed. Public logs of vLLM >= 0.21 show estimates from 0.17 to 0.83 GiB, and a few above 2.
GRAPH_BYTES = 2 * GIB // 5


class PoolSize(NamedTuple):
    """The parts of num_gpu_blocks, in bytes of one GPU; the last three are assumed."""

    num_gpu_blocks: int
    bytes_per_block: int
    requested: int
    weights: int
    activations: int
    other: int
    graphs: int

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache itself."""
        return self.num_gpu_blocks * self.bytes_per_block


def kv_bytes_per_token(model: ModelSpec, *, tp: int, kv_dtype: Dtype) -> int:
    """Bytes of keys and values that one token keeps on one GPU; with more GPUs than heads, copies."""
    return model.layers * _kv_heads(model, tp) * 2 * model.head_dim * DTYPE_BYTES[kv_dtype]


def weight_bytes(model: ModelSpec, *, tp: int, weights: Dtype) -> int:
    """Bytes of the model's weights on one GPU, its table of rotary angles among them.

    Embedding, LM head and the experts' router stay bf16 in fp8 checkpoints. Matrices and tables are
    split over tp, KV heads down to one a GPU; the router and the angles are copied.
    """
    one_kv_head = model.layers * 2 * model.hidden_size * model.head_dim
    copied_heads = tp * _kv_heads(model, tp) - model.num_kv_heads
    router = model.layers * model.hidden_size * (model.num_experts or 0)
    one_row = (1 if model.tied_embeddings else 2) * model.hidden_size
    matrices = model.num_parameters - router - one_row * model.vocab_size + one_kv_head * copied_heads
    split = matrices * DTYPE_BYTES[weights] + one_row * padded_vocab_size(model) * BF16
    return -(-split // tp) + (router + model.max_model_len * model.head_dim) * BF16


def activation_bytes(
    model: ModelSpec,
    *,
    tp: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    sampler_bytes: int = SAMPLER_BYTES,
) -> int:
    """Assumed peak of activations: hidden states and residual, and the larger of one MLP and the sampler.

    A dense MLP holds, for each token in bf16, the gate/up product (2 * intermediate / tp) and its
    activation (intermediate / tp). Experts hold the same for each of a token's experts, and their
    outputs (hidden) in the place of the product. Every GPU samples from the logits of the whole
    vocabulary.
    """
    if model.num_experts and model.num_experts_per_tok and model.moe_intermediate_size:
        inner = model.moe_intermediate_size // tp
        mlp = model.num_experts_per_tok * (max(2 * inner, model.hidden_size) + inner)
    else:
        mlp = 3 * model.intermediate_size // tp
    sequences = min(max_num_seqs, max_num_batched_tokens)
    hidden = 2 * max_num_batched_tokens * model.hidden_size * BF16
    sampler = sequences * padded_vocab_size(model) * sampler_bytes
    return hidden + max(max_num_batched_tokens * mlp * BF16, sampler)


def num_gpu_blocks(
    model: ModelSpec,
    gpu: GpuSpec,
    *,
    tp: int,
    block_size: int,
    gpu_memory_utilization: float,
    weights: Dtype,
    kv_dtype: Dtype,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    cuda_graph_estimate: bool = True,
    sampler_bytes: int = SAMPLER_BYTES,
) -> PoolSize:
    """The KV blocks of one engine, the null block among them, with the parts they come from.

    cuda_graph_estimate: off in vLLM before 0.21 (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS) and in
    eager mode. sampler_bytes: other in vLLM before 0.26.
    Raises InputError, naming the remedy, for a tp that does not split the model, a utilisation
    outside (0, 1], weights that do not fit, or a pool below one request of max_model_len.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization {gpu_memory_utilization}: must be above 0, at most 1")
    check_split(model, tp)
    per_block = kv_bytes_per_token(model, tp=tp, kv_dtype=kv_dtype) * block_size
    size = PoolSize(
        num_gpu_blocks=0,
        bytes_per_block=per_block,
        requested=math.ceil(gpu.memory_bytes * gpu_memory_utilization),
        weights=weight_bytes(model, tp=tp, weights=weights),
        activations=activation_bytes(
            model,
            tp=tp,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            sampler_bytes=sampler_bytes,
        ),
        other=OTHER_BYTES[tp > 1],
        graphs=GRAPH_BYTES if cuda_graph_estimate else 0,
    )
    if size.weights >= size.requested:
        raise InputError(
            f"the {weights} weights of {model.name} need {size.weights / GIB:.1f} GiB a GPU at tp {tp}, "
            f"{gpu.name} gives {size.requested / GIB:.1f} GiB at gpu_memory_utilization "
            f"{gpu_memory_utilization}: raise tp, use a smaller weight type or a larger GPU"
        )
    available = size.requested - size.weights - size.activations - size.other - size.graphs
    blocks = max(available // per_block, 0)
    needed = -(-max_model_len // block_size) + 1  # one more: the null block
    if blocks < needed:
        raise InputError(
            f"{gpu.name} has room for {blocks} blocks of {block_size} tokens beside {model.name}, "
            f"one request of max_model_len {max_model_len} needs {needed}: lower max_model_len or "
            "max_num_seqs, raise gpu_memory_utilization or tp, or give num_gpu_blocks as a number"
        )
    return size._replace(num_gpu_blocks=blocks)


def max_concurrency(num_blocks: int, *, block_size: int, max_model_len: int) -> float:
    """Requests of max_model_len tokens that the pool holds at once, as vLLM's start-up log says it."""
    return num_blocks / -(-max_model_len // block_size)


def _kv_heads(model: ModelSpec, tp: int) -> int:
    """KV heads on one GPU."""
    return max(1, model.num_kv_heads // tp)
