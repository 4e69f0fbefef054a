"""From timings made up here to a calibration: which points count where, and what gets written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim._jit import entry
from sim.calibrate import shipped
from sim.calibrate.build import build
from sim.calibrate.elementwise import with_elementwise
from sim.calibrate.table_mode import table_cost
from sim.calibrate.timings import DECODE, EXPERTS, GEMM, PREFILL, STEP, Timings
from sim.calibrate.write import write
from sim.calibration import Elementwise, FitError, KernelCalibration, Saturating, load_calibration
from sim.cost import compile_cost, gpu_time
from sim.errors import InputError
from sim.hardware import load_gpu, load_model
from sim.kernels import kernels_of

pytest.importorskip("scipy", reason="needs the extra [calibrate]")

GPU, MODEL = load_gpu("h100-sxm"), load_model("llama-3.1-8b")
KERNELS = kernels_of(MODEL, 1)
SHIPPED = "h100-sxm/llama-3.1-8b_tp1_bf16"


def frame(columns: list[str], rows: Any) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=columns)


def prefill_rows(contexts: tuple[int, ...], slower: float = 1.0) -> pd.DataFrame:
    """Eight lengths over each context; all take longer than a launch does."""
    lengths = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
    return frame(
        PREFILL,
        (
            (1, q, c, (150 + 0.02 * q + 1e-5 * (q * q / 2 + q * c)) * (slower if c else 1.0))
            for c in contexts
            for q in lengths
        ),
    )


def timings(prefill: pd.DataFrame, experts: pd.DataFrame | None = None) -> Timings:
    products = frame(
        GEMM,
        (
            (m, gemm.n, gemm.k, 1e-6 * gemm.n * gemm.k * (1 + m / 256))
            for gemm in (*KERNELS.gemms, KERNELS.lm_head)
            for m in (8, 16, 64, 256, 1024, 4096, 8192)
        ),
    )
    decode = frame(
        DECODE, ((n, kv, 9 + 0.1 * n + 0.002 * n * kv) for n in (1, 8, 64) for kv in (64, 512, 4096))
    )
    return Timings(
        gemm=products, gemm_bf16=products, decode={"bf16": decode}, prefill={"bf16": prefill},
        allreduce=None, experts=experts, steps=None, decode_factors={}, prefill_factors={},
        hash_us_per_block=None, tables=[], source="made up", licence="none", notes=[], assumed=[],
    )  # fmt: skip


def built(some: Timings) -> KernelCalibration:
    return build(GPU, MODEL, KERNELS, some, tp=1, weights="bf16", date="")


def test_prefills_with_and_without_context_are_judged_apart() -> None:
    errors = built(timings(prefill_rows((0, 2048, 4096)))).errors
    assert errors["prefill_attention_bf16"].points == 8
    assert errors["prefill_over_context_bf16"].points == 16
    noisy = prefill_rows((0, 2048))
    noisy.loc[(noisy.c > 0) & (noisy.q % 1024 == 0), "latency_us"] *= 2.0
    errors = built(timings(noisy)).errors
    assert errors["prefill_over_context_bf16"].mape > 2 * errors["prefill_attention_bf16"].mape
    assert "prefill_over_context_bf16" not in built(timings(prefill_rows((0,)))).errors


def test_more_tokens_take_no_less_time_in_the_experts() -> None:
    experts = built(timings(prefill_rows((0,)), frame(EXPERTS, [(1, 5.0), (2, 4.0), (4, 6.0)]))).experts
    assert experts is not None and experts.points == {1: 4.0, 2: 4.0, 4: 6.0}


def test_the_table_mode_reads_prefills_without_context() -> None:
    without, mixed = timings(prefill_rows((0,))), timings(prefill_rows((0, 2048), slower=3.0))
    for one in (without, mixed):  # the grid needs two numbers of sequences
        single = one.prefill["bf16"]
        double = single.assign(batch=2, latency_us=1.9 * single.latency_us)
        one.prefill["bf16"] = pd.concat([single, double], ignore_index=True)
    calibration = built(without)
    grids = [
        table_cost(
            calibration, one, KERNELS, max_num_batched_tokens=64, block_size=16, kv_dtype="bf16"
        ).prefill_grid.tolist()
        for one in (without, mixed)
    ]
    assert grids[0] == grids[1]


def test_what_steps_leave_over_weighs_by_their_time_and_is_not_negative() -> None:
    """A step that takes less than its kernels leaves nothing, not less."""
    fit = load_calibration(SHIPPED)
    assert isinstance(fit, KernelCalibration)
    fit = fit.model_copy(update={"lm_head": Saturating(a=1.0, b=20.0, p=1.0)})  # every row of it counts
    bare = fit.model_copy(update={"elementwise": Elementwise(e0=0.0, e1=0.0), "layers": 4})
    cost = compile_cost(bare, max_num_batched_tokens=4096, block_size=16, kv_dtype="bf16")
    shapes = [(2, 100, 50, 20, 9000), (3, 1000, 0, 40, 30_000)]
    known = []
    for batch, q, c, decodes, kv in shapes:
        sums = (batch, batch * q, batch * q * q, batch * q * c, batch * c)
        step = (batch * q + decodes, batch + decodes, decodes, kv, *sums)
        known.append(1e6 * entry(gpu_time)(cost, *step))
    rest = 80.0
    first, second = known[0] + rest, known[1] - 400.0
    steps = frame(STEP, [(*shapes[0], 4, first), (*shapes[1], 4, second)])
    found = with_elementwise(fit, steps)
    expected = rest / 4 / first**2 / (first**-2 + second**-2)  # least squares of relative errors, e1 = 0
    assert found.elementwise.e1 == 0.0
    assert found.elementwise.e0 == pytest.approx(expected, rel=1e-9)
    errors = [abs(known[0] + 4 * expected - first) / first, abs(known[1] + 4 * expected - second) / second]
    assert found.errors["step_fitted"].mape == pytest.approx(50 * sum(errors), abs=0.006)


def with_step_errors(**errors: tuple[float, float]) -> KernelCalibration:
    fit = load_calibration(SHIPPED)
    assert isinstance(fit, KernelCalibration)
    stated = {name: FitError(points=1, mape=mape, p95=p95) for name, (mape, p95) in errors.items()}
    return fit.model_copy(update={"errors": stated})


@pytest.mark.parametrize(
    ("bf16", "fp8", "good"),
    [
        ((4.0, 10.0), (4.0, 10.0), True),
        ((4.01, 1.0), (1.0, 1.0), False),
        ((1.0, 10.01), (1.0, 1.0), False),
        ((1.0, 1.0), (4.01, 1.0), False),  # every KV type counts
    ],
)
def test_only_a_fit_within_the_bar_of_steps_is_shipped(
    bf16: tuple[float, float], fp8: tuple[float, float], good: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    steps = {"step_against_tables_bf16": bf16, "step_against_tables_fp8": fp8}
    fitted = with_step_errors(gemm=(99.0, 99.0), **steps)  # kernels have bars of their own
    assert shipped.is_good_enough(fitted) is good
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "targets", lambda: [shipped.Target("h100-sxm", "llama-3.1-8b", 1, "bf16")])
    monkeypatch.setattr(shipped, "fit", lambda target, date: fitted)
    monkeypatch.setattr(sys, "argv", ["shipped", "2026-01-01"])
    shipped.main()
    written = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert written == ([f"{SHIPPED}.yaml"] if good else [])
    assert ("left out" in capsys.readouterr().out) is not good


def test_a_calibration_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    write(load_calibration(SHIPPED), path)
    before = path.read_bytes()

    def broken(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(InputError, match="mine.yaml: cannot be written: No space left"):
        write(load_calibration("a100-sxm/llama-3.1-8b_tp1_bf16"), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
