"""A decoder of the model's shapes with random weights, and one step of it.

Its operations are torch's own, not fused as in an engine: norms, rotary embedding and activation
take longer here, so that a step measured here is a ceiling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sim.hardware import DTYPE_BYTES, Dtype, ModelSpec
from sim.kernels import kernels_of
from sim.measure.attention import Attend, Kernel, Sequences
from sim.measure.device import Device, Tensor, random
from sim.measure.gemm import linear
from sim.measure.grid import Point

CPU_LAYERS = 2
WEIGHT_SHARE = 0.5  # of a GPU's memory, for the layers; KV and activations need the rest
ROTARY_BASE = 500_000.0


class Layer(NamedTuple):
    """Weights of one layer, products as (n, k)."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder(NamedTuple):
    """Random weights of a dense decoder."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    lm_head: Tensor


class Group(NamedTuple):
    """Sequences of a step that are alike: its prefills, or its decodes."""

    sequences: Sequences
    attend: Attend
    caches: list[tuple[Tensor, Tensor]]  # a layer's keys and values, (batch, c + q, kv heads, dim)

    @property
    def num_tokens(self) -> int:
        """New tokens of the group."""
        return self.sequences.batch * self.sequences.q


def layers_that_fit(model: ModelSpec, weights: Dtype, device: Device) -> int:
    """How many of the model's layers a step on this device can have."""
    if device.kind == "cpu":
        return min(model.layers, CPU_LAYERS)
    a_layer = sum(gemm.n * gemm.k for gemm in kernels_of(model, 1).gemms) * DTYPE_BYTES[weights]
    return max(1, min(model.layers, int(WEIGHT_SHARE * device.memory_bytes / a_layer)))


def random_decoder(model: ModelSpec, weights: Dtype, num_layers: int, device: Device) -> Decoder:
    """A decoder of `num_layers` layers; embedding and LM head stay bf16 in fp8 checkpoints."""
    kernels = kernels_of(model, 1)
    norm = torch.ones(model.hidden_size, dtype=torch.bfloat16, device=device.kind)

    def layer() -> Layer:
        qkv, o, gate_up, down = (
            random(device, gemm.n, gemm.k, dtype=weights, scale=gemm.k**-0.5) for gemm in kernels.gemms
        )
        return Layer(norm, qkv, o, norm, gate_up, down)

    n, k = kernels.lm_head.n, kernels.lm_head.k
    head = random(device, n, k, scale=k**-0.5)
    embedding = head if model.tied_embeddings else random(device, n, k)
    return Decoder(embedding, [layer() for _ in range(num_layers)], norm, head)


def step(device: Device, point: Point, decoder: Decoder, kernel: Kernel) -> Callable[[], Tensor]:
    """A call of one step of the point's shape on random tokens: the tokens it would sample, greedily."""
    groups = [_group(device, sequences, kernel, len(decoder.layers)) for sequences in _sequences(point)]
    tokens = torch.randint(len(decoder.embedding), (point.num_tokens,), device=device.kind)
    rotary = _rotary(groups, device)
    last = _last_tokens(groups, device)

    def call() -> Tensor:
        with torch.inference_mode():
            return forward(decoder, tokens, groups, rotary, last).argmax(-1)

    return call


def forward(
    decoder: Decoder, tokens: Tensor, groups: list[Group], rotary: tuple[Tensor, Tensor], last: Tensor
) -> Tensor:
    """Logits of the tokens at rows `last`. Writes the new tokens' keys and values into the caches.

    tokens (num_tokens,) are the groups', one after the other; rotary is cosine and sine of each.
    """
    hidden = F.embedding(tokens, decoder.embedding)
    size = hidden.shape[-1:]
    for i, layer in enumerate(decoder.layers):
        normed = F.rms_norm(hidden, size, layer.input_norm)
        hidden = hidden + linear(_attention(linear(normed, layer.qkv), groups, i, rotary), layer.o)
        normed = F.rms_norm(hidden, size, layer.post_norm)
        gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
        hidden = hidden + linear(F.silu(gate) * up, layer.down)
    return linear(F.rms_norm(hidden[last], size, decoder.norm), decoder.lm_head)


def _attention(qkv: Tensor, groups: list[Group], layer: int, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """(num_tokens, heads * dim) from the rows of QKV, each group over its own caches."""
    shape = groups[0].sequences
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    query, key, value = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    query, key = _rotate(query, *rotary), _rotate(key, *rotary)
    outputs = []
    start = 0
    for group in groups:
        rows = slice(start, start := start + group.num_tokens)
        keys, values = group.caches[layer]
        alike = (group.sequences.batch, group.sequences.q)
        keys[:, group.sequences.c :] = key[rows].unflatten(0, alike)
        values[:, group.sequences.c :] = value[rows].unflatten(0, alike)
        outputs.append(group.attend(query[rows].unflatten(0, alike), keys, values).flatten(0, 1))
    return torch.cat(outputs).flatten(1)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _rotary(groups: list[Group], device: Device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's position, (num_tokens, 1, dim / 2)."""
    half = groups[0].sequences.head_dim // 2
    frequencies = ROTARY_BASE ** -(torch.arange(half, device=device.kind) / half)
    angles = _positions(groups, device).float()[:, None, None] * frequencies
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _positions(groups: list[Group], device: Device) -> Tensor:
    alike = [group.sequences for group in groups]
    return torch.cat([torch.arange(one.c, one.kv, device=device.kind).repeat(one.batch) for one in alike])


def _last_tokens(groups: list[Group], device: Device) -> Tensor:
    """The row of each sequence's last token: the one that is sampled from."""
    lengths = [group.sequences.q for group in groups for _ in range(group.sequences.batch)]
    return torch.tensor(lengths, device=device.kind).cumsum(0) - 1


def _sequences(point: Point) -> list[Sequences]:
    """The prefills and the decodes of a step, those there are."""
    assert point.num_heads and point.num_kv_heads and point.head_dim
    heads = (point.num_heads, point.num_kv_heads, point.head_dim)
    found = []
    if point.batch:
        found.append(Sequences(point.batch, point.q or 0, point.c or 0, *heads))
    if point.num_decodes:
        found.append(Sequences(point.num_decodes, 1, (point.decode_kv or 0) // point.num_decodes - 1, *heads))
    return found


def _group(device: Device, sequences: Sequences, kernel: Kernel, num_layers: int) -> Group:
    shape = (sequences.batch, sequences.kv, sequences.num_kv_heads, sequences.head_dim)
    caches = [(random(device, *shape), random(device, *shape)) for _ in range(num_layers)]
    return Group(sequences, kernel.plan(sequences, None), caches)

