"""Step times from a data sheet: by hand, against the measured fits, and from a file to a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim import roofline as rules
from sim._jit import entry
from sim.calibration import KernelCalibration, load_calibration
from sim.cli import app
from sim.cost import compile_cost, gpu_time
from sim.errors import InputError
from sim.hardware import GpuSpec, ModelSpec, load_gpu, load_model, shipped
from sim.kernels import kernels_of
from sim.resolve import resolve
from sim.roofline import has_rates, roofline
from sim.scenario import Scenario

GPU = GpuSpec(
    name="round",
    memory_bytes=100 * 2**30,
    memory_source="test",
    memory_bandwidth=1e12,
    peak_flops={"bf16": 1e14, "fp8": 2e14},
    interconnect_bandwidth=1e11,
    rates_source="test",
)
LLAMA, MOE = load_model("llama-3.1-8b"), load_model("qwen3-30b-a3b")
LAYER = 2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336  # weights of one layer of LLAMA


def of(model: ModelSpec = LLAMA, gpu: GpuSpec = GPU, tp: int = 1, weights: Any = "bf16") -> KernelCalibration:
    return roofline(model, gpu, tp=tp, weights=weights)


def test_matrix_products_read_their_weights_or_multiply() -> None:
    one, launches = of().gemm, 4 * rules.KERNEL_US
    assert one.a == pytest.approx(LAYER * 2 / (1e12 * rules.WEIGHTS_EFFICIENCY["bf16"]) * 1e6 + launches)
    assert one.b == pytest.approx(2 * LAYER / (1e14 * rules.PRODUCT_EFFICIENCY["bf16"]) * 1e6)
    fp8 = of(weights="fp8").gemm
    assert fp8.a == pytest.approx(LAYER / (1e12 * rules.WEIGHTS_EFFICIENCY["fp8"]) * 1e6 + launches)
    assert fp8.b == pytest.approx(2 * LAYER / (2e14 * rules.PRODUCT_EFFICIENCY["fp8"]) * 1e6)
    assert of(tp=4).gemm.b == pytest.approx(one.b / 4)
    copied = 2 * 4096 * 128 * (32 + 16) + 3 * 4096 * 14336  # 16 GPUs hold one KV head each
    assert of(tp=16).gemm.b == pytest.approx(one.b * copied / LAYER / 16)
    head = of(weights="fp8").lm_head  # stays bf16
    assert head.b == pytest.approx(2 * 128_256 * 4096 / (1e14 * rules.PRODUCT_EFFICIENCY["bf16"]) * 1e6)


def test_attention_reads_kv_or_multiplies_pairs() -> None:
    one = of().attention
    assert one["bf16"].decode.d2 == pytest.approx(2 * 8 * 128 * 2 / (1e12 * rules.KV_EFFICIENCY) * 1e6)
    assert one["fp8"].decode.d2 == pytest.approx(one["bf16"].decode.d2 / 2)
    assert of(tp=16).attention["bf16"].decode.d2 == pytest.approx(one["bf16"].decode.d2 / 8)
    pair = 4 * 32 * 128 / (1e14 * rules.ATTENTION_EFFICIENCY) * 1e6
    assert one["bf16"].prefill.a2 == pytest.approx(pair)
    assert one["bf16"].prefill.kappa == 1.0  # a cached key costs as much as a new one


def test_experts_are_read_as_they_are_touched() -> None:
    fit = of(MOE)
    assert fit.experts is not None
    points = fit.experts.points
    one = 3 * 2048 * 768
    read = one * 2 / (1e12 * rules.WEIGHTS_EFFICIENCY["bf16"]) * 1e6  # one expert
    launch = rules.EXPERTS_US
    assert points[1] == pytest.approx(8 * read + launch, rel=0.01)  # a token's own eight
    assert points[2] == pytest.approx((16 - 0.5) * read + launch, rel=0.01)  # two tokens share half a one
    multiply = 2 * 8 * one / (1e14 * rules.EXPERTS_EFFICIENCY["bf16"]) * 1e6  # a token
    assert points[32768] == pytest.approx(32768 * multiply, rel=0.02)
    assert points[256] > 128 * read > points[8]
    assert list(points.values()) == sorted(points.values())
    dense = 2 * 2048 * 128 * (32 + 4) + 2048 * 128  # attention's matrices and the router
    assert fit.gemm.b == pytest.approx(2 * dense / (1e14 * rules.PRODUCT_EFFICIENCY["bf16"]) * 1e6)
    assert of().experts is None


def test_elementwise_kernels_move_their_bytes() -> None:
    for model, tp in ((LLAMA, 1), (LLAMA, 4), (MOE, 2)):
        moved = kernels_of(model, tp).elementwise_bytes / (1e12 * rules.ELEMENTWISE_EFFICIENCY) * 1e6
        one = of(model, tp=tp).elementwise
        assert (one.e0, one.e1) == (rules.ELEMENTWISE_US, pytest.approx(moved, rel=1e-12))


def test_allreduce_sends_its_ring() -> None:
    points = of(tp=4).allreduce
    assert points is not None and of().allreduce is None
    elements = max(points.points)
    sent = elements * 2 * 2 * 3 / 4 / (1e11 * rules.NVLINK_EFFICIENCY) * 1e6
    assert points.points[elements] == pytest.approx(rules.ALLREDUCE_US + sent)
    assert points.points[1] == rules.ALLREDUCE_US
    host = of(tp=4, gpu=GPU.model_copy(update={"shared_interconnect": True})).allreduce
    assert host is not None  # all four GPUs' parts through one path
    together = 4 * sent * rules.NVLINK_EFFICIENCY / rules.PCIE_EFFICIENCY
    assert host.points[elements] == pytest.approx(rules.ALLREDUCE_US + together)


def test_nothing_is_called_measured() -> None:
    fit = of()
    assert fit.provenance.note == "roofline from data sheet, nothing measured"
    assert fit.domain is None and fit.errors == {} and fit.provenance.tables == []
    assert len(fit.assumed) == 1 and "every time of a step" in fit.assumed[0]


def steps() -> Iterator[tuple[int, ...]]:
    """Decode steps, prefills and mixtures, as the arguments of gpu_time."""
    for n in (1, 4, 16, 64, 256):
        for kv in (256, 2048, 8192):
            yield n, n, n, n * kv, 0, 0, 0, 0, 0
    for q in (128, 512, 2048, 8192):
        for c in (0, 4096):
            yield q, 1, 0, 0, 1, q, q * q, q * c, c
    for n in (16, 128):
        for q in (512, 2048):
            yield q + n, n + 1, n, n * 2048, 1, q, q * q, 0, 0


def test_against_the_measured_fits() -> None:
    """What "expect errors of tens of percent" rests on; the same fits chose the efficiencies, together."""
    timed, means, worst = entry(gpu_time), {}, 0.0
    for name in shipped("calibrations"):
        fit = load_calibration(name)
        gpu = load_gpu(fit.gpu)
        if not isinstance(fit, KernelCalibration) or not has_rates(gpu):
            continue
        sheet = roofline(load_model(fit.model), gpu, tp=fit.tp, weights=fit.weights)
        kv_dtype = fit.kv_dtypes[0]
        measured, computed = (
            compile_cost(one, max_num_batched_tokens=8192, block_size=16, kv_dtype=kv_dtype)
            for one in (fit, sheet)
        )
        off = [abs(timed(computed, *step) / timed(measured, *step) - 1.0) for step in steps()]
        means[name] = sum(off) / len(off)
        worst = max(worst, *off)
    assert len(means) >= 8
    assert max(means.values()) == pytest.approx(0.22, abs=0.005), "or the docstring is wrong"
    assert sum(means.values()) / len(means) == pytest.approx(0.08, abs=0.005), "or the docstring is wrong"
    assert worst == pytest.approx(0.43, abs=0.005), "or the docstring is wrong"


WORKLOAD: dict[str, Any] = {
    "kind": "shared_prefix",
    "num_groups": 2,
    "prefix_len": 128,
    "suffix_len": 32,
    "output_len": 4,
    "request_rate": 5.0,
    "num_requests": 20,
}


def scenario(**fields: Any) -> Scenario:
    return Scenario.model_validate({"workload": WORKLOAD, **fields})


def test_a_roofline_stands_in_where_nothing_is_measured() -> None:
    step_time = resolve(scenario(gpu="h100-pcie", model="qwen3-8b", engine={"max_model_len": 8192})).step_time
    assert step_time.name == "roofline:h100-pcie/qwen3-8b_tp1_bf16"
    (warning,) = step_time.warnings
    assert warning == (
        "no measured calibration for h100-pcie, qwen3-8b, tp 1, bf16: step times are a roofline from "
        "the data sheet; expect errors of tens of percent"
    )


def test_measured_comes_first_unless_a_roofline_is_asked_for() -> None:
    measured = resolve(scenario(gpu="h100-sxm")).step_time
    assert (measured.name, measured.warnings) == ("h100-sxm/llama-3.1-8b_tp1_bf16", [])
    asked = resolve(scenario(gpu="h100-sxm", cost="roofline", engine={"num_gpu_blocks": 100})).step_time
    assert asked.name == "roofline:h100-sxm/llama-3.1-8b_tp1_bf16"
    assert asked.warnings[0].startswith("cost is roofline: step times are a roofline from the data sheet")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu": "rtx-pro-6000-server"}, "unknown calibration 'rtx-pro-6000-server/.*did you mean"),
        ({"gpu": "rtx-pro-6000-server", "cost": "roofline"}, "a roofline needs memory_bandwidth"),
        ({"gpu": "a100-sxm", "engine": {"quantization": "fp8"}}, "a100-sxm: no peak_flops for fp8 weights"),
        ({"gpu": "l41s"}, "unknown GPU 'l41s'; did you mean l40s"),
        ({"gpu": "l40s", "model": "qwen3-9b"}, "unknown model 'qwen3-9b'; did you mean qwen3-8b"),
    ],
)
def test_what_no_roofline_can_do(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(scenario(**fields))


def test_tensor_parallel_needs_an_interconnect() -> None:
    alone = GPU.model_copy(update={"interconnect_bandwidth": None})
    assert of(gpu=alone).allreduce is None
    with pytest.raises(InputError, match="round: tp 2 needs interconnect_bandwidth"):
        of(gpu=alone, tp=2)


def files(folder: Path) -> None:
    """A scenario in `folder` with a GPU and a model of its own beside it."""
    gpu = {"name": "mine", "memory_bytes": 48 * 2**30, "memory_source": "data sheet"}
    rates = {"memory_bandwidth": 1e12, "peak_flops": {"bf16": 3e14}, "rates_source": "data sheet"}
    (folder / "my-gpu.yaml").write_text(json.dumps({**gpu, **rates}))
    small = load_model("llama-3.1-8b").model_dump(exclude_none=True)
    (folder / "my-model.yaml").write_text(json.dumps({**small, "name": "ours"}))
    own = {"gpu": "./my-gpu.yaml", "model": "my-model.yaml", "engine": {"max_model_len": 4096}}
    (folder / "s.yaml").write_text(json.dumps({**own, "workload": WORKLOAD}))


def prefixsim(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["run", *arguments])


def test_a_users_gpu_and_model_from_files_to_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    files(folder)
    monkeypatch.chdir(tmp_path)  # the files are found beside the scenario
    result = prefixsim("mine/s.yaml", "--format", "json", "--out", "out")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["completed"] == 20
    assert "warning: no measured calibration for mine, ours, tp 1, bf16" in result.stderr
    again = prefixsim("out/scenario.yaml", "--format", "json", "--out", "again")
    assert again.stdout == result.stdout
    assert (tmp_path / "out/summary.json").read_bytes() == (tmp_path / "again/summary.json").read_bytes()
    monkeypatch.chdir(folder)  # and from where one stands
    assert json.loads(prefixsim("s.yaml", "--format", "json").stdout)["completed"] == 20


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("my-gpu.yaml", {"memory_bandwidth": 0}, "my-gpu.yaml:1: memory_bandwidth: .*greater than 0"),
        ("my-gpu.yaml", {"memory_bytes": "48 GB"}, "my-gpu.yaml:1: memory_bytes: .*integer"),
        ("my-model.yaml", {"num_experts": 8}, "my-model.yaml: num_experts.* belong together"),
    ],
)
def test_a_bad_file_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: dict[str, Any], message: str
) -> None:
    files(tmp_path)
    data = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**data, **change}))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = prefixsim("s.yaml", "--out", "out")
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "compiling" not in line]
    assert len(lines) == 1
    with pytest.raises(InputError, match=message):
        raise InputError(lines[0])
    assert sorted(tmp_path.iterdir()) == before
