"""Step time: the shipped calibrations, the verbs, and measured points to hold them against."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim import cost as step_cost
from sim._jit import entry
from sim.calibration import (
    Allreduce,
    Cpu,
    Domain,
    KernelCalibration,
    WholeStepCalibration,
    find_calibration,
    load_calibration,
)
from sim.cost import StepCost, compile_cost, linear_cost
from sim.grid import make_grid
from sim.hardware import load_gpu, load_model, shipped

BUDGET = 8192
ROOT = Path(__file__).parent.parent

gpu_time = entry(step_cost.gpu_time)
cpu_time = entry(step_cost.cpu_time)


def cost_of(name: str, block_size: int = 16) -> StepCost:
    calibration = load_calibration(name)
    return compile_cost(
        calibration,
        max_num_batched_tokens=BUDGET,
        block_size=block_size,
        kv_dtype=calibration.kv_dtypes[0],
    )


def decode_step(cost: StepCost, num_seqs: int, kv: int) -> float:
    return gpu_time(cost, num_seqs, num_seqs, num_seqs, kv, 0, 0, 0, 0, 0)


def prefill_step(cost: StepCost, new: int, context: int) -> float:
    return gpu_time(cost, new, 1, 0, 0, 1, new, new * new, new * context, context)


def random_steps(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    steps = []
    for _ in range(count):
        num_decodes = int(rng.integers(0, 257))
        new = rng.integers(2, 2000, int(rng.integers(0, 4)))
        context = rng.integers(0, 100_000, len(new))
        decode_kv = int(rng.integers(num_decodes, 1_000_000)) if num_decodes else 0
        sums = [int(x) for x in (new.sum(), (new * new).sum(), (new * context).sum(), context.sum())]
        tokens = num_decodes + sums[0]
        outputs = int(rng.integers(0, num_decodes + len(new) + 1))
        steps.append((tokens, outputs, num_decodes, decode_kv, len(new), *sums))
    return steps


def bits_of_random_steps(plain: bool) -> list[str]:
    def function(verb: Any) -> Any:
        return getattr(verb, "py_func", verb) if plain else entry(verb)

    gpu, cpu = function(step_cost.gpu_time), function(step_cost.cpu_time)
    bits = []
    for name in shipped("calibrations"):
        cost = cost_of(name)._replace(cpu0_us=1234.5, cpu1_us=6.7)
        for step in random_steps(300):
            bits.append(float(gpu(cost, *step)).hex())
            bits.append(float(cpu(cost, step[2])).hex())
    return bits


def test_compiled_and_plain_agree_to_the_last_bit() -> None:
    compiled = bits_of_random_steps(plain=False)
    assert compiled == bits_of_random_steps(plain=True)
    script = "from tests.test_cost import bits_of_random_steps as f; print(*f(plain=False))"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert compiled == result.stdout.split()


@pytest.mark.parametrize("name", shipped("calibrations"))
def test_shipped_calibrations_are_named_by_content_and_know_their_hardware(name: str) -> None:
    calibration = load_calibration(name)
    assert calibration.name == name
    assert calibration.assumed
    assert calibration == find_calibration(
        calibration.gpu, calibration.model, tp=calibration.tp, weights=calibration.weights
    )
    load_gpu(calibration.gpu)
    model = load_model(calibration.model)
    if isinstance(calibration, KernelCalibration):
        assert (calibration.layers, calibration.hidden_size) == (model.layers, model.hidden_size)


@pytest.mark.parametrize("name", shipped("calibrations"))
def test_a_step_costs_nothing_without_tokens_and_more_with_more(name: str) -> None:
    cost = cost_of(name)
    assert gpu_time(cost, 0, 0, 0, 0, 0, 0, 0, 0, 0) == 0.0
    assert cpu_time(cost, 0) == 0.0
    for table in cost[:3]:
        assert table.shape == (BUDGET + 1,)
        assert table.dtype == np.float64
        assert table[0] == 0.0
        assert np.all(np.diff(table) >= 0)
    assert prefill_step(cost, 1000, 0) <= prefill_step(cost, 1000, 4000) < prefill_step(cost, 5000, 0)
    assert decode_step(cost, 64, 64_000) < decode_step(cost, 128, 128_000)


def test_the_form_term_by_term() -> None:
    fit = load_calibration("h100-sxm/llama-3.1-70b_tp4_fp8")
    assert isinstance(fit, KernelCalibration)
    cost = compile_cost(fit, max_num_batched_tokens=BUDGET, block_size=16, kv_dtype="fp8")

    def saturating(rows: int, a: float, b: float, p: float) -> float:
        return float((a**p + (b * rows) ** p) ** (1 / p))

    # 3 decodes over 3,000 cached tokens, prompts of 100 over 0 and 157 over 1,000: M = 260.
    gemm, head = fit.gemm, fit.lm_head
    decode, prefill = fit.attention["fp8"].decode, fit.attention["fp8"].prefill
    assert fit.allreduce is not None
    low, high = fit.allreduce.points[2097152], fit.allreduce.points[4194304]
    allreduce = low + (high - low) * (260 * 8192 - 2097152) / 2097152
    expected = 80 * (
        saturating(260, gemm.a, gemm.b, gemm.p)
        + fit.elementwise.e0
        + 260 * fit.elementwise.e1
        + 2 * allreduce
        + (decode.d0 + 3 * decode.d1 + 3000 * decode.d2)
        + (prefill.a0 + 257 * prefill.a1)
        + prefill.a2 * (100**2 / 2 + 157**2 / 2 + 157 * 1000 / prefill.kappa)
    ) + saturating(4, head.a, head.b, head.p)
    squares = 100**2 + 157**2
    time = gpu_time(cost, 260, 4, 3, 3000, 2, 257, squares, 157_000, 1000)
    assert time == pytest.approx(expected * 1e-6, rel=1e-12)


def test_a_pure_decode_step_takes_the_smallest_graph_that_holds_it() -> None:
    cost = cost_of("a100-sxm/llama-3.1-8b_tp1_bf16")
    graphs = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 249: 256, 256: 256, 257: 272, 497: 512, 512: 512}
    for num_seqs, rows in {**graphs, 513: 513, 1000: 1000}.items():
        assert cost.decode_us[num_seqs] == cost.token_us[rows], num_seqs
    assert cost.token_us[272] > cost.token_us[257]


def test_allreduce_is_flat_below_the_table_and_proportional_above() -> None:
    name = "h100-sxm/llama-3.1-70b_tp4_fp8"
    fit = load_calibration(name)
    assert isinstance(fit, KernelCalibration) and fit.allreduce is not None
    points = fit.allreduce.points
    budget = 2 * 65536  # twice the table's last size
    free = fit.model_copy(update={"allreduce": None})
    with_it, without = (
        compile_cost(c, max_num_batched_tokens=budget, block_size=16, kv_dtype="fp8") for c in (fit, free)
    )
    allreduce = (with_it.token_us - without.token_us) / (2 * 80)
    # 16,384 elements are 2 tokens of the hidden size 8192.
    between = (points[16384] + points[32768]) / 2
    last = points[536870912]
    for tokens, expected in {2: points[16384], 3: between, 65536: last, 131072: 2 * last}.items():
        assert allreduce[tokens] == pytest.approx(expected, rel=1e-9)
    small = fit.model_copy(update={"allreduce": Allreduce(points={16384: 4.9, 32768: 5.2})})
    flat = compile_cost(small, max_num_batched_tokens=1, block_size=16, kv_dtype="fp8").token_us[1]
    assert (flat - without.token_us[1]) / (2 * 80) == pytest.approx(4.9, rel=1e-9)


def test_hash_time_follows_the_block_size() -> None:
    name = "h100-sxm/llama-3.1-8b_tp1_bf16"
    slope = (2.45 - 1.75) / 48
    for block_size, expected in {16: 1.75, 64: 2.45, 32: 1.75 + 16 * slope, 512: 2.45 + 448 * slope}.items():
        assert cost_of(name, block_size).hash_us_per_block == pytest.approx(expected, rel=1e-12)
    assert cost_of("rtx-4090/llama-3.1-8b_tp1_bf16").hash_us_per_block == 0.0


def test_whole_step_form() -> None:
    fit = load_calibration("rtx-4090/llama-3.1-8b_tp1_bf16")
    assert isinstance(fit, WholeStepCalibration)
    cost = cost_of(fit.name)
    mixed = gpu_time(cost, 150, 51, 50, 20_000, 1, 100, 100**2, 0, 0)
    us = fit.base_us + fit.token_us * 150 + fit.decode_context_us * 20_000 + fit.seq_us * 51
    assert mixed == pytest.approx(1e-6 * us, rel=1e-12)
    assert cpu_time(cost, 51) == 0.0


def test_terms_that_only_recorded_steps_tell_apart() -> None:
    fit = load_calibration("rtx-4090/llama-3.1-8b_tp1_bf16")
    assert isinstance(fit, WholeStepCalibration)
    more = {"kv_us": 0.25, "pair_us": 0.125, "prefill_us": 900.0, "between_us": 650.0}
    told = fit.model_copy(update=more)
    bounds = {"max_num_batched_tokens": 8192, "block_size": 16}
    plain, cost = (compile_cost(one, **bounds, kv_dtype="bf16") for one in (fit, told))  # type: ignore[arg-type]
    # prefills of 100 tokens over 300 and of 40 over none, decodes over 50 and 70
    prefills, decodes = [(100, 300), (40, 0)], [50, 70]
    kv = sum(q + c for q, c in prefills) + sum(decodes)
    pairs = sum(c + i for q, c in prefills for i in range(1, q + 1)) + sum(decodes)
    sums = (2, 120, 2, 140, 100**2 + 40**2, 100 * 300, 300)
    further = gpu_time(cost, 142, 4, *sums) - gpu_time(plain, 142, 4, *sums)
    assert 1e6 * further == pytest.approx(0.25 * kv + 0.125 * pairs + 900.0, rel=1e-9)
    further = decode_step(cost, 2, 60) - decode_step(plain, 2, 60)
    assert 1e6 * further == pytest.approx((0.25 + 0.125) * 60, rel=1e-9), "no prefill, no time for it"
    assert cpu_time(cost, 4) == pytest.approx(650e-6) and cpu_time(plain, 4) == 0.0


def test_linear_cost() -> None:
    cost = linear_cost(0.25, 1e-4, decode_context_s=2e-6, seq_s=1e-3, max_num_batched_tokens=2048)
    assert prefill_step(cost, 2048, 512) == pytest.approx(0.25 + 0.2048 + 1e-3, rel=1e-12)
    assert decode_step(cost, 5, 1000) == pytest.approx(0.25 + 5e-4 + 2e-3 + 5e-3, rel=1e-12)
    free = linear_cost(0, 0, max_num_batched_tokens=16)
    assert decode_step(free, 1, 1) == 0.0


@pytest.mark.parametrize(
    ("gpu", "base_ms", "per_token_ms", "base_band", "slope_band"),
    [("h100-sxm", 6.44, 4.37e-5, 0.05, 0.02), ("b200-sxm", 3.93, 1.80e-5, 0.15, 0.05)],
)
def test_one_request_against_measured_inter_token_latency(
    gpu: str, base_ms: float, per_token_ms: float, base_band: float, slope_band: float
) -> None:
    """vLLM blog 2026-04-22, Llama-3.1-8B bf16; the model gives 6.37 + 4.36e-5 and 3.55 + 1.76e-5."""
    cost = cost_of(f"{gpu}/llama-3.1-8b_tp1_bf16")
    at_0, at_100k = decode_step(cost, 1, 0), decode_step(cost, 1, 100_000)
    assert at_0 * 1e3 == pytest.approx(base_ms, rel=base_band)
    assert (at_100k - at_0) * 1e3 / 100_000 == pytest.approx(per_token_ms, rel=slope_band)


def test_an_unknown_name_says_the_nearest_and_the_list() -> None:
    with pytest.raises(ValueError, match=r"did you mean h100-sxm/llama-3.1-8b_tp1_bf16\?"):
        find_calibration("h100", "llama-3.1-8b", tp=1, weights="bf16")
    with pytest.raises(ValueError, match=r"did you mean h100-sxm\? \(of a100-sxm, a100-sxm-40gb"):
        load_gpu("h100_sxm")
    with pytest.raises(ValueError, match=r"did you mean llama-3.1-70b\?"):
        load_model("llama3.1-70b")
    with pytest.raises(ValueError, match="there are: llama-13b, llama-3.1-70b"):
        load_model("gpt")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  kappa: 1.15", "  kappa: .nan", "attention.bf16.prefill.kappa: .*finite"),
        ("  kappa: 1.15", "  kappa: fast", "attention.bf16.prefill.kappa: .*number"),
        ("  kappa: 1.15", "  kappa: -1", "attention.bf16.prefill.kappa: .*greater than or equal to 0"),
        ("  kappa: 1.15", "", "attention.bf16.prefill.kappa: .*required"),
        ("tp: 1", "tp: 2", "allreduce: should be there with tp above 1"),
        ("layers: 32", "layers: 32.5", "layers: .*integer"),
        ("form: kernels", "form: kernel", "form: .*did you mean kernels"),
        ("lm_head:", "lm_head: {", "mine.yaml:[0-9]+: not valid YAML"),
        ("assumed:", "lm_heads: 1\nassumed:", "unknown field; did you mean lm_head"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (ROOT / "sim/calibrations/h100-sxm/llama-3.1-8b_tp1_bf16.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as caught:
        load_calibration(str(path))
    assert "mine.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_or_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_calibration(str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ValueError, match="empty.yaml"):
        load_calibration(str(tmp_path / "empty.yaml"))


def test_tables_are_finite_whatever_the_fit() -> None:
    fit = load_calibration("h200-sxm/llama-3.1-8b_tp1_bf16")
    assert isinstance(fit, KernelCalibration)
    sharp = fit.model_copy(update={"gemm": fit.gemm.model_copy(update={"p": 500.0})})
    cost = compile_cost(sharp, max_num_batched_tokens=BUDGET, block_size=16, kv_dtype=sharp.kv_dtypes[0])
    assert all(math.isfinite(value) for value in cost.token_us)


# ---------------------------------------------------------------- each term by itself


def h100(**changes: Any) -> KernelCalibration:
    fit = load_calibration("h100-sxm/llama-3.1-8b_tp1_bf16")
    assert isinstance(fit, KernelCalibration)
    return fit.model_copy(update=changes)


def h100_attention(decode: dict[str, Any], prefill: dict[str, Any]) -> KernelCalibration:
    """The H100's fit with other coefficients of attention over bf16 KV."""
    one = h100().attention["bf16"]
    parts = {
        "decode": one.decode.model_copy(update=decode),
        "prefill": one.prefill.model_copy(update=prefill),
    }
    return h100(attention={"bf16": one.model_copy(update=parts)})


def compiled(fit: KernelCalibration, block_size: int = 16) -> StepCost:
    return compile_cost(fit, max_num_batched_tokens=512, block_size=block_size, kv_dtype="bf16")


def test_a_pure_decode_step_takes_the_time_of_its_graph() -> None:
    cost = compiled(h100())
    assert cost.decode_us[9] > cost.token_us[9]
    us = cost.decode_us[9] + cost.output_us[9] + cost.d0 + 9 * cost.d1
    assert decode_step(cost, 9, 0) == us * 1e-6
    # beside a prefill of one token there is no graph: 10 rows as they are
    us = cost.token_us[10] + cost.output_us[10] + cost.d0 + 9 * cost.d1 + cost.a0 + cost.a1 + cost.a2 / 2
    assert gpu_time(cost, 10, 10, 9, 0, 1, 1, 1, 0, 0) == pytest.approx(us * 1e-6, rel=1e-14)


def test_cached_context_costs_by_the_token_too() -> None:
    without, with_it = (compiled(h100_attention({}, {"a3": a3})) for a3 in (0.0, 0.01))
    assert with_it.a3 == pytest.approx(32 * 0.01, rel=1e-12)
    slower = prefill_step(with_it, 100, 3000) - prefill_step(without, 100, 3000)
    assert slower == pytest.approx(32 * 0.01 * 3000 * 1e-6, rel=1e-9)


@pytest.mark.parametrize(("block_size", "at"), [(8, 0.0), (16, 0.0), (32, 1 / 3), (64, 1.0), (128, 1.0)])
def test_attention_at_other_block_sizes(block_size: int, at: float) -> None:
    """Decode and prefill by factors of their own, read off between their block sizes."""
    decode, prefill = {"block_size_factor": {16: 1.0, 64: 0.8}}, {"block_size_factor": {16: 1.0, 64: 0.5}}
    base = compiled(h100_attention({}, {"a3": 0.01}), block_size)
    cost = compiled(h100_attention(decode, {"a3": 0.01, **prefill}), block_size)
    for name in ("d0", "d1", "d2", "a0", "a1", "a2", "a2_context", "a3"):
        factor = 1 - (0.2 if name.startswith("d") else 0.5) * at
        assert getattr(cost, name) == pytest.approx(factor * getattr(base, name), rel=1e-12), name


def test_the_cpu_takes_time_by_step_and_sequence() -> None:
    cost = compiled(h100(cpu=Cpu(o0=100.0, o1=7.0)))
    assert cpu_time(cost, 3) == pytest.approx(121e-6, rel=1e-12)


def test_the_domain_goes_with_the_cost() -> None:
    bounds = dict(zip(Domain.model_fields, range(101, 108), strict=True))
    cost = compiled(h100(domain=Domain(**bounds)))
    everywhere = compiled(h100(domain=None))
    for name, bound in bounds.items():
        assert getattr(cost, name) == bound, name
        assert getattr(everywhere, name) == (0.0 if name == "min_kv_len" else 1e300), name


def test_every_layer_has_its_experts() -> None:
    fit = load_calibration("h100-sxm/qwen3-30b-a3b_tp1_bf16")
    assert isinstance(fit, KernelCalibration) and fit.experts is not None
    points = fit.experts.points
    with_them, without = (compiled(one) for one in (fit, fit.model_copy(update={"experts": None})))
    for tokens in (64, 128, 256):
        experts = with_them.token_us[tokens] - without.token_us[tokens]
        assert experts == pytest.approx(48 * points[tokens], rel=1e-9)


def test_table_mode_adds_what_its_tables_lack() -> None:
    """Tables have prefills without context; what context costs is added as in the compact form."""
    plain = compiled(h100_attention({}, {"a3": 0.01}))
    grid = make_grid({(x, y): float(x * y) for x in (1, 2) for y in (100, 200)}, 1.0)
    cost = plain._replace(prefill_grid=grid)
    alone = prefill_step(cost, 150, 0)
    assert alone == pytest.approx(1e-6 * (plain.token_us[150] + plain.output_us[1] + 150.0), rel=1e-12)
    over = 1e-6 * (plain.a2_context * 150 * 3000 + plain.a3 * 3000)
    assert prefill_step(cost, 150, 3000) - alone == pytest.approx(over, rel=1e-9)
