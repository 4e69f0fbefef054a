"""Fits of NVIDIA's measured tables: reading them, held-out errors, bars, the table mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from sim._jit import entry
from sim.calibrate.bars import Bar, bar_of, meets
from sim.calibrate.curve import layer_curve
from sim.calibrate.fit import fit_decode, fit_prefill, fit_saturating
from sim.calibrate.held_out import fit_error, held_out_errors, interpolation_errors
from sim.calibration import FitError, KernelCalibration, find_calibration, load_calibration
from sim.cost import compile_cost, gpu_time, saturating
from sim.errors import InputError
from sim.grid import make_grid, on_grid
from sim.hardware import load_gpu, load_model, shipped
from sim.kernels import Gemm, kernels_of

aiconfigurator = pytest.importorskip("sim.calibrate.aiconfigurator")
pytest.importorskip("scipy", reason="needs the extra [calibrate]")
Floats = npt.NDArray[np.float64]

time_on_grid = entry(on_grid)


@pytest.fixture(scope="module")
def tables() -> Path:
    try:
        folder: Path = aiconfigurator.package_folder()
    except InputError as error:
        pytest.skip(str(error))
    return folder


def test_kernels_of_llama_8b_at_tp_2() -> None:
    kernels = kernels_of(load_model("llama-3.1-8b"), 2)
    assert kernels.gemms == (
        Gemm("qkv", (16 + 2 * 4) * 128, 4096),
        Gemm("o", 4096, 16 * 128),
        Gemm("gate_up", 14336, 4096),
        Gemm("down", 4096, 7168),
    )
    assert kernels.lm_head == Gemm("lm_head", 64128, 4096)
    assert (kernels.num_heads, kernels.num_kv_heads, kernels.head_dim) == (16, 4, 128)
    # bf16: two norms 8 x 4096; rotary 2 x 20 x 128; KV 4 x 4 x 128; activation 3 x 7168
    assert kernels.elementwise_bytes == 2 * (32768 + 5120 + 2048 + 21504)


def test_kv_heads_are_copied_to_more_ranks_and_experts_replace_the_mlp() -> None:
    assert kernels_of(load_model("llama-3.1-70b"), 16).num_kv_heads == 1
    experts = kernels_of(load_model("qwen3-30b-a3b"), 1)
    assert [gemm.name for gemm in experts.gemms] == ["qkv", "o"]
    assert experts.router == Gemm("router", 128, 2048)
    # norms 8 x 2048, rotary 2 x 36 x 128, KV 4 x 4 x 128; the activation is inside the experts
    assert experts.elementwise_bytes == 2 * (16384 + 9216 + 2048)
    with pytest.raises(InputError, match="tp 3 does not divide the 32 heads"):
        kernels_of(load_model("llama-3.1-8b"), 3)


def grid_of_products() -> pd.DataFrame:
    rows = [(m, n, k, 1e-4 * m * n**0.5 * k) for m in (8, 16) for n in (64, 256) for k in (64, 256)]
    return pd.DataFrame(rows, columns=["m", "n", "k", "latency_us"])


def test_a_product_is_read_off_the_grid_by_powers_of_its_sizes() -> None:
    curve = layer_curve(grid_of_products(), [Gemm("one", 128, 128), Gemm("two", 64, 256)])
    assert curve.to_dict() == pytest.approx(
        {m: 1e-4 * m * (128**0.5 * 128 + 64**0.5 * 256) for m in (8, 16)}, rel=1e-12
    )


def test_a_wide_product_is_cut_and_a_narrow_one_refused() -> None:
    curve = layer_curve(grid_of_products(), [Gemm("lm_head", 1000, 64)])
    assert curve[8] == pytest.approx(4 * 1e-4 * 8 * 250**0.5 * 64, rel=1e-12)
    with pytest.raises(InputError, match="n of small = 32 is outside the measured 64"):
        layer_curve(grid_of_products(), [Gemm("small", 32, 64)])


def test_time_never_falls_as_rows_grow() -> None:
    spiked = grid_of_products()
    spiked.loc[spiked.m == 8, "latency_us"] *= 5.0
    curve = layer_curve(spiked, [Gemm("one", 64, 64)])
    assert curve[8] == curve[16]


def test_held_out_errors_are_of_points_not_in_the_fit() -> None:
    points = pd.DataFrame({"x": range(40), "latency_us": np.linspace(1.0, 5.0, 40)})
    seen: list[set[int]] = []

    def fit(some: pd.DataFrame) -> set[int]:
        seen.append(set(some.x))
        return seen[-1]

    def predict(fitted: set[int], some: pd.DataFrame) -> Floats:
        assert not fitted & set(some.x)
        return 1.1 * some.latency_us.to_numpy(np.float64)

    errors = held_out_errors(points, fit, predict)
    assert errors == pytest.approx(np.full(40, 0.1))
    assert [len(one) for one in seen] == [30] * 4
    assert fit_error(errors) == FitError(points=40, mape=10.0, p95=10.0)


def test_interpolation_errors_leave_each_inner_point_out() -> None:
    assert interpolation_errors(np.array([1.0, 2.0, 4.0]), np.array([1.0, 4.0, 4.0])) == pytest.approx([-0.5])


def test_fits_find_what_made_the_points() -> None:
    rows = np.array([8, 16, 64, 256, 1024, 4096, 8192], np.float64)
    made = (100.0**3 + (0.4 * rows) ** 3) ** (1 / 3)
    found = fit_saturating(rows, made)
    assert (found.a, found.b, found.p) == pytest.approx((100.0, 0.4, 3.0), rel=1e-4)
    assert saturating(found, rows.astype(np.int64)) == pytest.approx(made, rel=1e-6)
    points = pd.DataFrame(
        [(n, kv, 9.0 + 0.1 * n + 0.002 * n * kv) for n in (1, 8, 64) for kv in (64, 512, 4096)],
        columns=["batch", "kv", "latency_us"],
    )
    decode = fit_decode(points)
    assert (decode.d0, decode.d1, decode.d2) == pytest.approx((9.0, 0.1, 0.002), rel=1e-6)


def test_without_context_points_kappa_is_what_is_given() -> None:
    points = pd.DataFrame(
        [(1, q, 0, 10.0 + 0.01 * q + 1e-5 * q * q / 2) for q in (64, 256, 1024, 4096)],
        columns=["batch", "q", "c", "latency_us"],
    )
    fitted = fit_prefill(points, 1.3)
    assert (fitted.kappa, fitted.a3) == (1.3, 0.0)
    assert (fitted.a0, fitted.a1, fitted.a2) == pytest.approx((10.0, 0.01, 1e-5), rel=1e-6)


def test_bars() -> None:
    assert bar_of("decode_attention_fp8", "a100-sxm") == Bar(13, 45)
    assert bar_of("step_against_tables_bf16", "l40s") == Bar(4, 10)
    assert bar_of("prefill_over_context_bf16", "h100-sxm") == Bar(9)
    assert bar_of("gemm", "l40s") is None
    assert meets(FitError(points=1, mape=6.0, p95=15.0), Bar(6, 15))
    assert not meets(FitError(points=1, mape=6.01, p95=1.0), Bar(6, 15))
    assert not meets(FitError(points=1, mape=1.0, p95=15.01), Bar(6, 15))


def test_a_grid_is_bilinear_inside_and_linear_beyond() -> None:
    times = {(x, y): 2.0 + 3.0 * x + 5.0 * y + 0.5 * x * y for x in (1, 2, 8) for y in (1, 4, 16)}
    del times[8, 16]  # did not fit on the device: the line through the two before it
    grid = make_grid(times, 10.0)
    for x, y in ((1.0, 1.0), (1.5, 2.0), (5.0, 3.0), (2.0, 20.0), (8.0, 16.0), (20.0, 2.0)):
        assert time_on_grid(grid, x, y) == pytest.approx(10 * (2 + 3 * x + 5 * y + 0.5 * x * y), rel=1e-12)


def test_a_grid_fills_rows_then_columns_and_never_falls_on() -> None:
    falling = make_grid({(1, 1): 10.0, (1, 2): 8.0, (2, 1): 10.0, (2, 2): 20.0, (2, 4): 40.0}, 1.0)
    assert time_on_grid(falling, 1.0, 4.0) == 8.0  # not 4: a longer sequence takes no less
    column = make_grid({(1, 1): 1.0, (1, 2): 3.0, (2, 1): 2.0, (2, 2): 5.0, (4, 1): 4.0}, 1.0)
    assert time_on_grid(column, 4.0, 2.0) == 9.0  # its row has nothing before it but one place
    steep = make_grid({(1, 1): 1.0, (1, 2): 1.0, (2, 1): 5.0, (2, 2): 5.0}, 1.0)
    assert time_on_grid(steep, 0.5, 1.0) == 0.0


def test_of_equal_products_the_least_time_counts() -> None:
    once = grid_of_products()
    again = once.assign(latency_us=1.5 * once.latency_us)
    for both in ([once, again], [again, once]):
        curve = layer_curve(pd.concat(both), [Gemm("one", 64, 256)])
        assert curve.to_dict() == layer_curve(once, [Gemm("one", 64, 256)]).to_dict()


def test_versions_are_compared_as_numbers(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.24.0", "0.10.2"):
        folder = tmp_path / "gemm" / "vllm" / version
        folder.mkdir(parents=True)
        (folder / "gemm_perf.parquet").touch()
    assert aiconfigurator._newest(tmp_path, "gemm", "gemm").parent.name == "0.24.0"


def stub(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> None:
    """A table of these columns in the place of the package's."""
    frame = pd.DataFrame({"kernel_source": "one", **rows})
    frame.attrs["path"] = "made up"
    monkeypatch.setattr(aiconfigurator, "_read", lambda *_: frame)


def test_experts_are_all_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of each, that is: with expert parallelism a rank has whole ones, and other times."""
    layer = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128, "moe_tp_size": 2}
    stub(
        monkeypatch,
        {
            **layer, "moe_dtype": "bfloat16", "distribution": aiconfigurator.EXPERT_CHOICE,
            "moe_ep_size": [1, 1, 4, 4], "num_tokens": [64, 8, 8, 64], "latency_us": [9.0, 5.0, 1.0, 2.0],
        },
    )  # fmt: skip
    found = aiconfigurator._experts(Path(), load_model("qwen3-30b-a3b"), 2, "bf16", [])
    assert found.to_numpy().tolist() == [[8, 5.0], [64, 9.0]]


def test_all_reduces_come_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"message_size": [512, 128, 256, 64], "latency_us": [4.0, 2.0, 3.0, 1.0]}
    stub(monkeypatch, {**sizes, "num_gpus": [2, 2, 2, 4], "backend": "vllm_graph"})
    found = aiconfigurator._allreduce(Path(), 2, [])
    assert found.to_numpy().tolist() == [[128, 2.0], [256, 3.0], [512, 4.0]]


def test_the_tables_as_they_are(tables: Path) -> None:
    """A decode's KV length is isl + step, times are ms there, one kernel, no windows, finite."""
    model = load_model("llama-3.1-8b")
    read: Any = aiconfigurator.read_timings
    timings = read("h100-sxm", model, kernels_of(model, 1), tp=1, weights="bf16", kv_dtypes=["bf16"])
    raw = pd.read_parquet(
        tables / "systems/data/h100_sxm/attention/vllm/0.24.0/generation_attention_perf.parquet"
    )
    one = raw.query(
        "num_heads == 32 and num_key_value_heads == 8 and head_dim == 128 and window_size == 0"
        " and kv_cache_dtype == 'bfloat16' and batch_size == 64 and step == 1023"
    )
    mine = timings.decode["bf16"].query("batch == 64 and kv == 1024")
    assert mine.latency_us.tolist() == pytest.approx((1e3 * one.latency).tolist())
    assert not timings.decode["bf16"].duplicated(["batch", "kv"]).any()
    assert not timings.prefill["bf16"].duplicated(["batch", "q", "c"]).any()
    assert (timings.gemm.m % 8 == 0).all() and np.isfinite(timings.gemm.latency_us).all()
    assert {table.framework for table in timings.tables} == {"vllm 0.24.0"}


def test_all_reduce_counts_elements_and_is_that_of_graphs(tables: Path) -> None:
    """2^29 bf16 elements over 4 GPUs in 4.5 ms: 237 GB/s of data, 355 GB/s on the bus, as NVLink gives."""
    model = load_model("llama-3.1-70b")
    read: Any = aiconfigurator.read_timings
    timings = read("h100-sxm", model, kernels_of(model, 4), tp=4, weights="fp8", kv_dtypes=["fp8"])
    times = timings.allreduce.set_index("elements").latency_us
    assert times[128] == pytest.approx(4.589, abs=1e-3)  # eager: 22.1
    bus = 2 * 3 / 4 * 2 * 2**29 / (times[2**29] * 1e-6)
    assert 300e9 < bus < 450e9


@pytest.mark.parametrize(
    ("gpu", "model", "tp", "weights", "said"),
    [
        ("rtx-4090", "llama-3.1-8b", 1, "bf16", "has no tables of rtx-4090; it has a100-pcie"),
        ("a100-sxm", "llama-3.1-8b", 1, "fp8", "has no rows of fp8 matrix products on a100-sxm"),
        ("h100-sxm", "qwen3-30b-a3b", 4, "fp8", "has no rows of fp8 experts of qwen3-30b-a3b at tp 4"),
    ],
)
def test_what_the_package_lacks_is_said(
    tables: Path, gpu: str, model: str, tp: int, weights: Any, said: str
) -> None:
    spec = load_model(model)
    with pytest.raises(InputError, match=said):
        aiconfigurator.read_timings(
            gpu, spec, kernels_of(spec, tp), tp=tp, weights=weights, kv_dtypes=["bf16"]
        )


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'prefixsim\[calibrate\]'"):
        aiconfigurator.package_folder()


SAMPLE = [
    "a100-sxm/llama-3.1-8b_tp1_bf16", "h100-sxm/llama-3.1-8b_tp1_bf16", "h200-sxm/qwen3-30b-a3b_tp2_bf16",
    "b200-sxm/llama-3.1-70b_tp4_fp8", "a100-sxm/llama-13b_tp1_bf16",
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_shipped_files_come_from_the_tables(tables: Path, name: str) -> None:
    """Fitted again, they are what is shipped, but for the last digits of the optimiser."""
    from sim.calibrate.sources import from_aiconfigurator

    file = load_calibration(name)
    assert isinstance(file, KernelCalibration)
    again = from_aiconfigurator(
        load_gpu(file.gpu), load_model(file.model), tp=file.tp, weights=file.weights, kv_dtypes=[],
        date=file.provenance.date,
    )  # fmt: skip
    assert again.provenance == file.provenance
    assert again.domain == file.domain
    assert again.assumed == file.assumed
    assert again.gemm.a == pytest.approx(file.gemm.a, rel=1e-3)
    assert again.attention[file.kv_dtypes[0]].decode.d2 == pytest.approx(
        file.attention[file.kv_dtypes[0]].decode.d2, rel=1e-3
    )
    assert set(again.errors) == set(file.errors)
    for component, error in again.errors.items():
        assert error.mape == pytest.approx(file.errors[component].mape, abs=0.05), component


def test_every_shipped_fit_states_its_errors_domain_and_sources() -> None:
    for name in shipped("calibrations"):
        calibration = load_calibration(name)
        assert calibration.domain is not None and calibration.errors and calibration.assumed, name
        if isinstance(calibration, KernelCalibration):
            assert calibration.provenance.tables, name
            assert all(len(table.sha256) == 64 and table.kernel for table in calibration.provenance.tables)


def test_table_mode_is_the_table_at_its_points(tables: Path) -> None:
    """A decode of 64 sequences over 1024 tokens costs what was measured, not what was fitted."""
    from sim.calibrate.sources import table_mode

    model = load_model("llama-3.1-8b")
    calibration, cost = table_mode(
        load_gpu("h100-sxm"), model, tp=1, weights="bf16", kv_dtype="bf16",
        max_num_batched_tokens=8192, block_size=16, hash_algo="sha256",
    )  # fmt: skip
    compact = compile_cost(calibration, max_num_batched_tokens=8192, block_size=16, kv_dtype="bf16")
    step = (64, 64, 64, 64 * 1024, 0, 0, 0, 0, 0)
    time = entry(gpu_time)
    gemm = cost.decode_us[64] + cost.output_us[64]
    attention = 1e6 * time(cost, *step) - gemm
    assert attention == pytest.approx(32 * 119.4, rel=0.005)
    fitted = find_calibration("h100-sxm", "llama-3.1-8b", tp=1, weights="bf16")
    assert isinstance(fitted, KernelCalibration)
    assert abs(attention / (32 * 119.4) - 1) < abs(
        (1e6 * time(compact, *step) - compact.decode_us[64] - compact.output_us[64]) / (32 * 119.4) - 1
    )


def test_the_lm_head_has_the_padded_vocabulary_and_ranks_split_what_vllm_splits() -> None:
    odd = load_model("llama-3.1-8b").model_copy(update={"vocab_size": 50_257})
    assert kernels_of(odd, 1).lm_head.n == 50_304
    assert kernels_of(odd, 2).lm_head.n == 25_152
    with pytest.raises(InputError, match="tp 5 does not divide the 13824 MLP columns of llama-13b"):
        kernels_of(load_model("llama-13b"), 5)
    with pytest.raises(InputError, match="tp 0 does not divide"):
        kernels_of(odd, 0)


def test_a_mixture_of_experts_is_measured_as_far_as_its_experts() -> None:
    """Matrix products were timed to 32,768 rows, experts to 16,384 tokens."""
    fit = load_calibration("h100-sxm/qwen3-30b-a3b_tp1_bf16")
    assert isinstance(fit, KernelCalibration) and fit.domain is not None and fit.experts is not None
    assert fit.domain.max_tokens == max(fit.experts.points) == 16_384
    assert any("experts" in text for text in fit.assumed)
    assert any("fp8" in text for text in load_calibration("h100-sxm/llama-3.1-8b_tp1_fp8").assumed)
