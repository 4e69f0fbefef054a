"""The kernels that `prefixsim measure` times compute what an engine's compute."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sim.hardware import ModelSpec
from sim.measure.grid import CPU, GEMM_KERNELS, Point

torch = pytest.importorskip("torch")

from sim.measure import attention, device, gemm, step  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 16
MODEL = ModelSpec(
    name="tiny", layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=256, tied_embeddings=False, num_parameters=109_184,
    max_model_len=384,
)  # fmt: skip
LENGTHS = [(1, 1, 0), (3, 1, 40), (1, 24, 0), (2, 7, 33), (2, 16, 16)]  # batch, q, c


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def cpu() -> device.Device:
    return device.open_device("cpu")


def naive(query: Any, key: Any, value: Any) -> Any:
    """Attention in float32, one sequence, head and token after the other; tokens before heads."""
    out = torch.zeros(query.shape)
    batch, q, heads, dim = query.shape
    c, group = key.shape[1] - q, heads // key.shape[2]
    for b in range(batch):
        for h in range(heads):
            for i in range(q):
                seen = c + i + 1
                keys, values = (one[b, :seen, h // group].float() for one in (key, value))
                out[b, i, h] = (keys @ query[b, i, h].float() / math.sqrt(dim)).softmax(0) @ values
    return out


def tensors(batch: int, q: int, c: int, block_size: int | None) -> tuple[Any, Any, Any, Any, Any]:
    """Random query, keys and values, and the same keys and values as pages under a shuffled table."""
    query = torch.randn(batch, q, HEADS, DIM).bfloat16()
    key, value = (torch.randn(batch, q + c, KV_HEADS, DIM).bfloat16() for _ in range(2))
    if block_size is None:
        return query, (key, value), (key, value), None, None
    pages = -(-(q + c) // block_size)
    table = torch.randperm(batch * pages).view(batch, pages).int()
    pools = []
    for one in (key, value):
        padded = torch.full((batch, pages * block_size, KV_HEADS, DIM), 100.0).bfloat16()
        padded[:, : q + c] = one
        pool = torch.empty(batch * pages, block_size, KV_HEADS, DIM).bfloat16()
        pool[table.flatten().long()] = padded.view(-1, block_size, KV_HEADS, DIM)
        pools.append(pool)
    return query, (key, value), tuple(pools), table, pages


@pytest.mark.parametrize("block_size", [None, 16, 32])
@pytest.mark.parametrize(("batch", "q", "c"), LENGTHS)
def test_attention_is_attention(
    cpu: device.Device, batch: int, q: int, c: int, block_size: int | None
) -> None:
    kernel = next(one for one in attention.kernels(cpu, "bf16") if block_size in one.block_sizes)
    query, contiguous, stored, table, _ = tensors(batch, q, c, block_size)
    sequences = attention.Sequences(batch, q, c, HEADS, KV_HEADS, DIM, block_size)
    out = kernel.plan(sequences, table)(query, *stored)
    torch.testing.assert_close(out.float(), naive(query, *contiguous), atol=0.02, rtol=0.02)


def test_the_last_tokens_are_the_new_ones(cpu: device.Device) -> None:
    query, (key, value), *_ = tensors(1, 3, 5, None)
    attend = attention.unpaged(cpu).plan(attention.Sequences(1, 3, 5, HEADS, KV_HEADS, DIM), None)
    before = attend(query, key, value)
    for position in range(8):
        changed = value.clone()
        changed[:, position] += 10
        moved = (attend(query, key, changed) != before).flatten(2).any(-1)[0].tolist()
        assert moved == [position <= 5 + i for i in range(3)]


@pytest.mark.parametrize("op", ["prefill_attention", "decode_attention"])
@pytest.mark.parametrize("block_size", [None, 16])
def test_a_point_is_timed_at_its_own_shape(
    cpu: device.Device, monkeypatch: pytest.MonkeyPatch, op: str, block_size: int | None
) -> None:
    seen: list[Any] = []

    def plan(sequences: attention.Sequences, table: Any) -> Any:
        return lambda *given: seen.append((sequences, table, *given))

    sizes = {"q": 5, "c": 30} if op == "prefill_attention" else {"kv": 35}
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": block_size}
    point = Point(op, "bf16", "bf16", batch=3, **sizes, **shape)
    attention.attention(cpu, point, attention.Kernel("k", (block_size,), plan))()
    sequences, table, query, key, value = seen[0]
    q = sizes.get("q", 1)
    assert sequences == attention.Sequences(3, q, 35 - q, 4, 2, 16, block_size)
    assert query.shape == (3, q, 4, 16)
    assert key.shape == value.shape == ((3, 35, 2, 16) if block_size is None else (9, 16, 2, 16))
    assert not torch.equal(key, value)
    if block_size is not None:
        assert table.shape == (3, 3) and sorted(table.flatten().tolist()) == list(range(9))


# Kernels of libraries that are seldom there, in their documented meaning


def gather(pool: Any, pages: Any, length: int) -> Any:
    return pool[pages.long()].flatten(0, 1)[:length].unsqueeze(0)


class Wrapper:
    """FlashInfer's two wrappers for paged KV, in their documented meaning."""

    causal = True  # a decode sees all there is

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool = False) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8
        self.use_tensor_cores = use_tensor_cores

    def run(self, query: Any, pools: tuple[Any, Any]) -> Any:
        outputs = []
        for i, length in enumerate(self.last_pages.tolist()):
            pages = self.indices[self.page_ends[i] : self.page_ends[i + 1]]
            rows = query[self.query_ends[i] : self.query_ends[i + 1]].unsqueeze(0)
            kv = (len(pages) - 1) * self.page_size + length
            outputs.append(naive(rows, *(gather(pool, pages, kv) for pool in pools))[0])
        return torch.cat(outputs)


class Prefill(Wrapper):
    def plan(self, query_ends: Any, page_ends: Any, indices: Any, last_pages: Any, *heads: int, causal: bool,
             q_data_type: Any, kv_data_type: Any) -> None:  # fmt: skip
        assert heads[:3] == (HEADS, KV_HEADS, DIM) and causal
        assert q_data_type == kv_data_type == torch.bfloat16
        self.query_ends, self.page_ends = query_ends, page_ends
        self.indices, self.last_pages = indices, last_pages
        self.page_size = heads[3]


class Decode(Wrapper):
    def plan(self, page_ends: Any, indices: Any, last_pages: Any, *heads: int, q_data_type: Any,
             kv_data_type: Any) -> None:  # fmt: skip
        assert heads[:3] == (HEADS, KV_HEADS, DIM) and q_data_type == kv_data_type == torch.bfloat16
        self.query_ends = torch.arange(len(last_pages) + 1)
        self.page_ends, self.indices, self.last_pages = page_ends, indices, last_pages
        self.page_size = heads[3]


def with_kvcache(query: Any, key: Any, value: Any, *, cache_seqlens: Any, causal: bool, **table: Any) -> Any:
    """flash_attn_with_kvcache over a paged cache, in its documented meaning."""
    assert causal
    (pages,) = table.values()
    outputs = [
        naive(query[i : i + 1], *(gather(pool, pages[i], length) for pool in (key, value)))
        for i, length in enumerate(cache_seqlens.tolist())
    ]
    return torch.cat(outputs)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    for name, argument in (("flash_attn", "block_table"), ("flash_attn_interface", "page_table")):
        module = ModuleType(name)

        def attend(*given: Any, _argument: str = argument, **named: Any) -> Any:
            assert _argument in named
            return with_kvcache(*given, **named)

        module.flash_attn_with_kvcache = attend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn_2", "flash_attn_3"])
@pytest.mark.parametrize(("batch", "q", "c"), LENGTHS)
def test_paged_libraries_are_told_the_right_batch(
    libraries: None, name: str, batch: int, q: int, c: int
) -> None:
    query, contiguous, pools, table, _ = tensors(batch, q, c, 16)
    plan = getattr(attention, name)
    out = plan(attention.Sequences(batch, q, c, HEADS, KV_HEADS, DIM, 16), table)(query, *pools)
    assert out.shape == query.shape
    torch.testing.assert_close(out.float(), naive(query, *contiguous), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("installed", "kv_dtype", "names"),
    [
        (set(), "bf16", ["sdpa_flash"]),
        ({"flash_attn"}, "bf16", ["sdpa_flash", "flash_attn_2"]),
        ({"flash_attn", "flash_attn_interface"}, "bf16", ["sdpa_flash", "flash_attn_3"]),
        ({"flash_attn", "flashinfer"}, "bf16", ["sdpa_flash", "flashinfer"]),
        ({"flash_attn", "flashinfer"}, "fp8", ["flashinfer"]),
    ],
)
def test_the_first_paged_kernel_installed_is_timed(
    cpu: device.Device, monkeypatch: pytest.MonkeyPatch, installed: set[str], kv_dtype: str, names: list[str]
) -> None:
    monkeypatch.setattr(attention, "_installed", installed.__contains__)
    gpu = cpu._replace(kind="cuda")
    assert [kernel.name for kernel in attention.kernels(gpu, kv_dtype)] == names


def test_fp8_kv_needs_a_kernel_that_reads_it(cpu: device.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_installed", {"flash_attn"}.__contains__)
    with pytest.raises(attention.InputError, match="use --kv bf16"):
        attention.kernels(cpu._replace(kind="cuda"), "fp8")


# Products and whole steps


def test_a_product_is_a_product(cpu: device.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    real = gemm.product
    monkeypatch.setattr(gemm, "product", lambda *both: given.append(both) or real(*both))
    out = gemm.gemm(cpu, Point("gemm", "bf16", m=5, n=48, k=32, kernel=GEMM_KERNELS["bf16"]))()
    tokens, weights = given[0]
    assert (tokens.shape, weights.shape) == ((5, 32), (48, 32))
    torch.testing.assert_close(out.float(), tokens.float() @ weights.float().T, atol=0.2, rtol=0.02)


def test_an_fp8_product_is_asked_of_scaled_mm(
    cpu: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled_mm(a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous() and b.t().is_contiguous()  # row by column, as the GPU wants it
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    out = gemm.gemm(cpu, Point("gemm", "fp8", m=5, n=48, k=32, kernel=GEMM_KERNELS["fp8"]))()
    assert out.shape == (5, 48) and out.dtype == torch.bfloat16
    tokens, weights = torch.randn(3, 32).bfloat16(), torch.randn(16, 32).to(torch.float8_e4m3fn)
    expected = tokens.to(torch.float8_e4m3fn).float() @ weights.float().T
    torch.testing.assert_close(gemm.linear(tokens, weights).float(), expected, atol=0.1, rtol=0.02)


def reference(decoder: step.Decoder, groups: list[step.Group], tokens: Any) -> Any:
    """Logits of each sequence's last token in float32, sequence by sequence, from the caches before."""
    logits, row = [], 0
    for group in groups:
        q, c = group.sequences.q, group.sequences.c
        for b in range(group.sequences.batch):
            hidden = decoder.embedding[tokens[row : row + q]].float()
            for layer, (keys, values) in zip(decoder.layers, group.caches, strict=True):
                normed = norm(hidden)
                heads = (normed @ layer.qkv.float().T).view(q, -1, DIM)
                positions = torch.arange(c, c + q)
                query = rotate(heads[:, :HEADS], positions)
                new_keys = rotate(heads[:, HEADS : HEADS + KV_HEADS], positions)
                key = torch.cat((keys[b, :c].float(), new_keys))
                value = torch.cat((values[b, :c].float(), heads[:, HEADS + KV_HEADS :]))
                attended = naive(query[None], key[None], value[None])[0].flatten(1)
                hidden = hidden + attended @ layer.o.float().T
                gate, up = (norm(hidden) @ layer.gate_up.float().T).split(MODEL.intermediate_size, dim=1)
                hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ layer.down.float().T
            logits.append(norm(hidden[-1:]) @ decoder.lm_head.float().T)
            row += q
    return torch.cat(logits)


def norm(hidden: Any) -> Any:
    return hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()


def rotate(heads: Any, positions: Any) -> Any:
    """Each pair (i, i + dim/2) of a head turned by position / base**(2i/dim), as a complex product."""
    half = DIM // 2
    angles = positions[:, None, None] * step.ROTARY_BASE ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


STEPS = {
    "decode": {"batch": 0, "q": 0, "c": 0, "num_decodes": 3},
    "prefill": {"batch": 2, "q": 6, "c": 0, "num_decodes": 0},
    "over context": {"batch": 2, "q": 6, "c": 9, "num_decodes": 0},
    "mixed": {"batch": 1, "q": 6, "c": 9, "num_decodes": 3},
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_is_the_decoder_s(cpu: device.Device, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    batch, q, c, num_decodes = STEPS[kind].values()
    point = Point(
        "step", "bf16", "bf16", batch=batch, q=q, c=c, num_tokens=batch * q + num_decodes,
        num_decodes=num_decodes, decode_kv=20 * num_decodes, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, num_layers=2,
    )  # fmt: skip
    decoder = step.random_decoder(MODEL, "bf16", 2, cpu)
    given: list[Any] = []
    real = step.forward
    monkeypatch.setattr(step, "forward", lambda *all_: given.append((all_, real(*all_))) or given[-1][1])
    sampled = step.step(cpu, point, decoder, attention.unpaged(cpu))()
    (_, tokens, groups, _, _), logits = given[0]
    assert len(tokens) == point.num_tokens
    assert sum(group.num_tokens for group in groups) == point.num_tokens
    prefills, decodes = (batch, q, q + c), (num_decodes, 1, 20)
    shapes = [(one.sequences.batch, one.sequences.q, one.sequences.kv) for one in groups]
    assert shapes == [one for one in (prefills, decodes) if one[0]]
    expected = reference(decoder, groups, tokens)
    torch.testing.assert_close(logits.float(), expected, atol=0.08, rtol=0.05)
    assert torch.equal(sampled, logits.argmax(-1))


def test_as_many_layers_as_fit(cpu: device.Device) -> None:
    a_layer = 2 * (128 * 64 + 64 * 64 + 320 * 64 + 64 * 160)  # bytes
    gpu = cpu._replace(kind="cuda", memory_bytes=14 * a_layer)
    many = MODEL.model_copy(update={"layers": 80})
    assert step.layers_that_fit(many, "bf16", gpu) == 7  # half of the memory
    assert step.layers_that_fit(many, "fp8", gpu) == 14
    assert step.layers_that_fit(MODEL, "bf16", gpu) == 2
    assert step.layers_that_fit(many, "bf16", gpu._replace(memory_bytes=1)) == 1
    assert step.layers_that_fit(many, "bf16", cpu) == step.CPU_LAYERS


# Timing


def test_random_data_has_the_scale_asked_for_and_no_equal_rows(cpu: device.Device) -> None:
    matrix = device.random(cpu, 600, 4096, scale=0.5)  # more than the values drawn
    assert matrix.shape == (600, 4096) and matrix.dtype == torch.bfloat16
    assert float(matrix.float().std()) == pytest.approx(0.5, rel=0.01)
    assert len(torch.unique(matrix, dim=0)) == 600
    assert device.random(cpu, 4, 4, dtype="fp8").dtype == torch.float8_e4m3fn


def test_a_call_is_timed_warm_and_many_times(cpu: device.Device) -> None:
    calls: list[int] = []
    fast = device.time_call(cpu, lambda: calls.append(0))
    assert fast.repeats == device.REPEATS["cpu"][1]
    assert len(calls) == device.WARM_UP + 1 + fast.repeats
    slow = device.time_call(cpu, lambda: device.time.sleep(0.02))
    assert slow.repeats == device.REPEATS["cpu"][0]
    assert 20_000 <= slow.p10_us <= slow.latency_us <= slow.p90_us


def test_on_a_cpu_the_cache_is_emptied_before_each_timed_call(cpu: device.Device) -> None:
    order: list[str] = []
    scratch = SimpleNamespace(zero_=lambda: order.append("write"))
    repeats = device.time_call(cpu._replace(scratch=scratch), lambda: order.append("call")).repeats
    assert order == ["call"] * (device.WARM_UP + 1) + ["write", "call"] * repeats


def test_on_a_gpu_the_cache_is_emptied_before_each_timed_call(
    cpu: device.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what is launched, on a stand-in for a stream: events tell the place in it."""
    stream: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            stream.append("event")
            self.at = len(stream)

        def elapsed_time(self, end: Event) -> float:
            return float(end.at - self.at)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: stream.append("synchronize"))
    scratch = SimpleNamespace(zero_=lambda: stream.append("write"))
    gpu = cpu._replace(kind="cuda", scratch=scratch, write_seconds=1.0)
    result = device.time_call(gpu, lambda: stream.append("call"))
    repeats = device.REPEATS["cuda"][1]
    timed = ["write", "write", "event", "call", "event"] * repeats
    assert stream[-1] == "synchronize" and stream[-1 - len(timed) : -1] == timed
    assert result == (2000.0, 2000.0, 2000.0, repeats)


def test_writes_cover_a_slow_launch(cpu: device.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    scratch = SimpleNamespace(zero_=lambda: writes.append(0))
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    gpu = cpu._replace(kind="cuda", scratch=scratch, write_seconds=1e-3)
    device._cuda_times(gpu, lambda: None, 1, launched=4.5e-3)
    assert len(writes) == 10  # twice the launch, and one
    writes.clear()
    device._cuda_times(gpu, lambda: None, 1, launched=10.0)
    assert len(writes) == device.MOST_WRITES


def test_the_cpu_grid_is_small() -> None:
    assert max(CPU.tokens) <= 64 and max(q + c for _, q, c in CPU.prefills) <= 512
