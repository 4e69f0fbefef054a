"""How many KV blocks a GPU holds: vLLM's start-up arithmetic, from a model's and a GPU's sizes.

    requested = ceil(total * gpu_memory_utilization)
    available = requested - weights - peak activations - other - CUDA graphs
    blocks    = available // bytes_per_block          (the least rank; one is the null block)

vLLM measures the three terms after the weights; here they are ASSUMED, from the formulas below.
Source: vLLM 0.33 `Worker.determine_available_memory`, `get_kv_cache_configs`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.errors import InputError
from sim.hardware import DTYPE_BYTES, Dtype, GpuSpec, ModelSpec

GIB = 1 << 30

# Assumed. Bytes for each (sequence, vocabulary entry) while vLLM profiles its sampler with top-p:
# logits 2, their float32 copy 4, sorted values 4, sort indices 8, sort workspace 12.
SAMPLER_BYTES = 30
# Assumed. CUDA libraries' memory outside PyTorch: public start-up logs show 0.1 to 0.33 GiB.
OTHER_BYTES = GIB // 5
# Assumed. Public start-up logs of vLLM >= 0.21 show estimates from 0.17 to 0.58 GiB.
GRAPH_BYTES = 2 * GIB // 5
# None of the three is fitted; a measured RTX 4090 run (2,588 blocks), whose count they miss by
# under 1 %, was known when they were written down.


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
    """Bytes of keys and values that one token keeps on one GPU."""
    heads = max(1, model.num_kv_heads // tp)
    return model.layers * heads * 2 * model.head_dim * DTYPE_BYTES[kv_dtype]


def weight_bytes(model: ModelSpec, *, tp: int, weights: Dtype) -> int:
    """Bytes of the model's weights on one GPU; embedding and LM head stay bf16 in fp8 checkpoints."""
    tables = (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    total = (model.num_parameters - tables) * DTYPE_BYTES[weights] + tables * DTYPE_BYTES["bf16"]
    return -(-total // tp)


def activation_bytes(model: ModelSpec, *, tp: int, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """Assumed peak of activations: the larger of one layer's tensors and the sampler's.

    A layer holds, for each token in bf16, hidden states and residual, the gate/up product
    (2 * intermediate / tp) and its activation (intermediate / tp).
    """
    layer = max_num_batched_tokens * (2 * model.hidden_size + 3 * model.intermediate_size // tp) * 2
    sampler = min(max_num_seqs, max_num_batched_tokens) * model.vocab_size * SAMPLER_BYTES
    return max(layer, sampler)


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
) -> PoolSize:
    """The KV blocks of one engine, the null block among them, with the parts they come from.

    cuda_graph_estimate: off in vLLM before 0.21 (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS).
    Raises InputError, naming the remedy, for a tp that does not divide the heads, a utilisation
    outside (0, 1], weights that do not fit, or a pool below one request of max_model_len.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization {gpu_memory_utilization}: must be above 0, at most 1")
    if tp < 1 or model.num_attention_heads % tp:
        raise InputError(f"tp {tp} does not divide the {model.num_attention_heads} heads of {model.name}")
    per_block = kv_bytes_per_token(model, tp=tp, kv_dtype=kv_dtype) * block_size
    size = PoolSize(
        num_gpu_blocks=0,
        bytes_per_block=per_block,
        requested=math.ceil(gpu.memory_bytes * gpu_memory_utilization),
        weights=weight_bytes(model, tp=tp, weights=weights),
        activations=activation_bytes(
            model, tp=tp, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
        ),
        other=OTHER_BYTES,
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
