"""The validation page: its bars as tests, and the rules by which it judges."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from sim._jit import entry, jit_disabled
from sim.calibrate import fit as fits
from sim.calibrate.bars import Bar
from sim.calibrate.build import KAPPA_OF
from sim.calibrate.measured_run import Ticks
from sim.calibration import FitError, load_calibration
from sim.cli import app
from sim.cost import compile_cost, gpu_time, linear_cost
from sim.errors import InputError
from sim.hardware import load_gpu, load_model, shipped
from sim.memory import num_gpu_blocks
from sim.validate import (
    closed_form,
    components,
    context,
    page,
    pool_sizes,
    rtx4090,
    silicon,
    silicon_page,
    single_request,
    step_speed,
)
from sim.validate.engine_runs import RUN_TITLE, pool_section, rtx4090_section
from sim.validate.section import Check, Section, at_most, skipped, table

pytest.importorskip("scipy", reason="needs the extra [calibrate]")

DATA = Path(__file__).resolve().parents[2] / "shared"
SILICON_MISSES = {
    "silicon mean TTFT, TP held out, b200-sxm": "prefill was probably launched without CUDA graphs",
    "silicon, saturated rows: TTFT": "on H100 the pool was probably of bf16 KV, half as many tokens",
}
COMPONENT_MISSES = {
    "gemm, a100-sxm": "p95 of one fit: the tables of A100 are coarse",
    "gemm, b200-sxm": "p95 of two fits: tile steps of fp8 products",
    "gemm, h100-sxm": "the few small products beside Qwen3-30B-A3B's experts",
    "gemm, h200-sxm": "p95 of three fits, two of them beside Qwen3-30B-A3B's experts",
    "decode_attention, a100-sxm": "one KV head a GPU: launch alone up to long contexts",
    "decode_attention, b200-sxm": "times jump where the KV outgrows the L2 cache",
    "prefill_attention, b200-sxm": "short prompts on a kernel that is all launch",
}


def judged(bars: Iterable[str], misses: dict[str, str]) -> list[Any]:
    """Every bar as a parameter; a known miss has to stay one until this file says otherwise."""
    params = []
    for what in bars:
        why = misses.get(what)
        marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
        params.append(pytest.param(what, marks=marks))
    return params


@cache
def component_checks() -> dict[str, Check]:
    return {check.what: check for check in components.checks(components.read_fits())}


# ---------------------------------------------------------------- fits of kernels


@pytest.mark.parametrize("what", judged(component_checks(), COMPONENT_MISSES))
def test_the_bar_of_a_component(what: str) -> None:
    check = component_checks()[what]
    assert check.met, check.reached


def test_every_known_miss_is_a_bar() -> None:
    assert COMPONENT_MISSES.keys() <= component_checks().keys()
    assert SILICON_MISSES.keys() <= set(silicon_page.BARS)


BAR = Bar(6, 15)


def fit(file: str, mape: float, p95: float, bar: Bar | None = BAR) -> components.Fit:
    return components.Fit("h100-sxm", file, "gemm", FitError(points=9, mape=mape, p95=p95), bar)


def test_one_file_beyond_its_bar_misses_the_bar_of_all() -> None:
    good, bad = fit("a", 5.0, 14.0), fit("b", 5.0, 16.0)
    assert [check.met for check in components.checks([good])] == [True]
    assert [check.met for check in components.checks([good, bad])] == [False]
    assert "1 of 2 miss" in components.checks([good, bad])[0].reached
    assert components.checks([fit("a", 99.0, 99.0, None)]) == []


def test_no_miss_is_hidden() -> None:
    fits = components.read_fits()
    assert {one.file for one in fits} == {
        name for name in shipped("calibrations") if load_calibration(name).errors
    }
    text = "\n".join(components.section().lines)
    for one in fits:
        beyond = one.bar is not None and one.error.mape > one.bar.mape
        row = f"| {one.file} | {one.component} | {one.error.mape} |"
        assert not beyond or row in text


# ---------------------------------------------------------------- closed form and speed


def test_decode_steps_in_closed_form() -> None:
    (check,) = closed_form.section().checks
    assert check.met, check.reached


def test_the_loop_notices_a_closed_form_without_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = linear_cost(1e-3, 1e-6, decode_context_s=1e-7, max_num_batched_tokens=64)
    assert closed_form.closed_form(cost, 8, 800, 10) == pytest.approx(
        10 * (1e-3 + 8e-6) + 1e-7 * sum(800 + 8 * k for k in range(10)), rel=1e-12
    )
    assert closed_form.difference(cost, 8, 800, 10) < 1e-12
    still = cost._replace(d2=0.0)
    grown = closed_form.closed_form
    monkeypatch.setattr(
        closed_form, "closed_form", lambda cost, n, kv, k: grown(cost, n, kv, k) - grown(still, n, kv, k)
    )
    assert closed_form.difference(cost, 8, 800, 10) > 1e-3


@pytest.mark.skipif(jit_disabled(), reason="a bar of compiled code")
def test_evaluating_a_step_takes_less_than_a_microsecond() -> None:
    (check,) = step_speed.section().checks
    assert check.met


@pytest.mark.parametrize(("nanoseconds", "met"), [(999.0, True), (1001.0, False)])
def test_the_bar_of_a_step_is_in_microseconds(
    nanoseconds: float, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_speed, "jit_disabled", lambda: False)
    monkeypatch.setattr(step_speed, "step_time_ns", lambda name: nanoseconds)
    (check,) = step_speed.section().checks
    assert check.met is met and check.reached.startswith("under" if met else "1 us or more")


# ---------------------------------------------------------------- prefill over context


@cache
def vidur() -> pd.DataFrame:
    if not (DATA / context.FILE).is_file():
        pytest.skip(f"needs Vidur's table: no {DATA / context.FILE}")
    return context.read_points(DATA / context.FILE)


def test_the_bar_of_prefill_over_context() -> None:
    vidur()
    (check,) = context.section(DATA).checks
    assert check.met, check.reached


def test_without_context_rows_the_bar_is_far_away() -> None:
    points = vidur()
    unseen = points[(points.c > 0) & ~context._seen(points)]
    (_, best), _, (_, a100), *others = context.fits(points)
    for known in (best, a100):
        assert np.abs(context.context_errors(known, unseen)).mean() <= context.BAR
    for _, other in others:
        assert np.abs(context.context_errors(other, unseen)).mean() > 2 * context.BAR


def test_the_kappa_of_the_a100_is_that_of_the_few_context_points() -> None:
    """Through the points without context and the four with it, and no cost of context length alone."""
    points = vidur()
    few = points[(points.c == 0) | context._seen(points)]
    terms, times = fits._prefill_terms(few)[:, :4], few.latency_us.to_numpy(np.float64)
    _, _, a2, cross = fits._fit_linear(terms, times, fits.PREFILL_BAND)
    assert a2 / cross == pytest.approx(KAPPA_OF["a100-sxm"], abs=0.01)


def test_four_context_points_are_in_the_fit_and_none_of_them_in_the_test() -> None:
    points = vidur()
    seen = points[context._seen(points)]
    assert sorted(zip(seen.q, seen.c, strict=True)) == [(256, 1024), (256, 2048), (1024, 1024), (1024, 2048)]
    worse = points.assign(latency_us=points.latency_us.where((points.c == 0) | context._seen(points), 1e9))
    assert context.fit_with_context(worse) == context.fit_with_context(points)


def test_a_point_timed_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "attention.csv.gz"
    head = "is_prefill,batch_size,prefill_chunk_size,kv_cache_size,time_stats.attn_prefill.median"
    rows = ["True,1,64,0,0.010", "True,1,64,0,0.030", "True,1,64,32,0.050", "False,8,0,32,"]
    path.write_bytes(gzip.compress("\n".join([head, *rows, ""]).encode()))
    points = context.read_points(path)
    assert points.latency_us.to_list() == pytest.approx([20.0, 50.0])
    path.write_text("not a table")
    with pytest.raises(InputError, match=r"attention.csv.gz: not Vidur's table"):
        context.read_points(path)


# ---------------------------------------------------------------- end to end on real machines


@cache
def silicon_rows() -> pd.DataFrame:
    try:
        silicon.package_folder()
    except InputError as error:
        pytest.skip(str(error))
    return silicon.read_rows()


@cache
def all_simulated() -> dict[str, Check]:
    found = silicon.simulated(silicon_rows(), "fp8")
    return {check.what: check for check in silicon_page.checks(found, found)}


def test_the_measured_rows() -> None:
    rows = silicon_rows()
    assert len(rows) == 165 and not rows.duplicated(["gpu", "tp", "isl", "osl", "concurrency"]).any()
    assert rows.gpu.value_counts().to_dict() == {"b200-sxm": 60, "h200-sxm": 60, "h100-sxm": 45}
    assert len(silicon_page.unsaturated(rows)) == 158 and len(silicon_page.saturated(rows)) == 7
    known = {("h100-sxm", 2, 1024, 1024, 4): (121.3, 17.41), ("h200-sxm", 8, 1024, 8192, 64): (180.4, 13.58)}
    found = rows.set_index(["gpu", "tp", "isl", "osl", "concurrency"])
    for row, (ttft, tpot) in known.items():
        assert found.loc[row].to_list() == [pytest.approx(ttft, abs=0.05), pytest.approx(tpot, abs=0.005)]


def test_a_row_runs_as_the_benchmark_did() -> None:
    scenario = silicon.scenario("h200-sxm", 2, 8192, 1024, 16, "fp8")
    engine, load = scenario.engine, scenario.workload.model_dump()
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (16, 8192, 16)
    assert (engine.quantization, engine.kv_cache_dtype, engine.tensor_parallel_size) == ("fp8", "fp8", 2)
    assert engine.async_scheduling and not engine.enable_prefix_caching
    assert (load["concurrency"], load["num_requests"], load["think_time"]) == (16, 160, 0.0)
    assert load["suffix_len"] == {"distribution": "uniform", "low": 6553, "high": 8192}
    assert load["output_len"] == {"distribution": "uniform", "low": 819, "high": 1024}
    blocks = silicon.scenario("h200-sxm", 2, 8192, 1024, 16, "bf16").engine.num_gpu_blocks
    assert isinstance(engine.num_gpu_blocks, int) and isinstance(blocks, int)
    assert blocks == engine.num_gpu_blocks // 2


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_a_row_has_the_pool_of_its_release(kv_dtype: Any) -> None:
    """At tp 8 the sampler of 64 sequences holds more than the MLP does."""
    size = num_gpu_blocks(
        load_model("llama-3.1-70b"), load_gpu("h100-sxm"), tp=8, block_size=16, gpu_memory_utilization=0.9,
        weights="fp8", kv_dtype=kv_dtype, max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=10_240,
        cuda_graph_estimate=False, sampler_bytes=38,
    )  # fmt: skip
    engine = silicon.scenario("h100-sxm", 8, 1024, 1024, 64, kv_dtype).engine
    assert engine.num_gpu_blocks == size.num_gpu_blocks


def test_eight_rows_of_few_users_within_the_bar() -> None:
    rows = silicon_rows()
    few = rows[(rows.concurrency == 4) & (rows.osl == 1024) & rows.tp.isin([2, 8])]
    few = few[(few.gpu != "b200-sxm") | (few.isl == 1024)].iloc[:8]
    found = silicon.simulated(few, "fp8")
    assert len(found) == 8 and few.columns.to_list() == rows.columns.to_list()
    assert np.abs(silicon_page.tpot_errors(found)).mean() <= silicon_page.TPOT_BAR


@pytest.mark.slow
@pytest.mark.parametrize("what", judged(silicon_page.BARS, SILICON_MISSES))
def test_the_bar_of_all_rows(what: str) -> None:
    silicon_rows()
    check = all_simulated()[what]
    assert check.met, check.reached


def synthetic(offset: float, scale: float) -> pd.DataFrame:
    simulated = np.array([50.0, 100.0, 200.0, 400.0, 70.0, 300.0])
    columns = {"gpu": "h100-sxm", "tp": [1, 1, 4, 4, 2, 8], "ttft_ms": offset + scale * simulated}
    return pd.DataFrame({**columns, "sim_ttft_ms": simulated, "tpot_ms": 10.0, "sim_tpot_ms": 11.0})


def test_offset_and_scale_are_found_and_tested_on_other_sizes() -> None:
    found = synthetic(30.0, 1.2)
    assert silicon_page.fit_ttft(found) == pytest.approx((30.0, 1.2))
    assert silicon_page.held_out_ttft_errors(found) == pytest.approx([0.0, 0.0], abs=1e-9)
    held_out = found.tp.isin(silicon_page.TESTED_TP)
    slower = found.assign(ttft_ms=found.ttft_ms.where(~held_out, 2 * found.ttft_ms))
    assert silicon_page.held_out_ttft_errors(slower) == pytest.approx([-50.0, -50.0])  # fitted without them
    assert silicon_page.tpot_errors(found) == pytest.approx(10.0)


def test_a_saturated_row_may_be_off_by_a_factor_either_way() -> None:
    found = pd.concat([synthetic(30.0, 1.2).assign(gpu=gpu) for gpu in silicon_page.GPUS], ignore_index=True)
    for simulated, met in ((2001.0, True), (1999.0, False), (7999.0, True), (8001.0, False)):
        full = pd.DataFrame([{**found.iloc[0].to_dict(), "ttft_ms": 4000.0, "sim_ttft_ms": simulated}])
        both = pd.concat([found, full], ignore_index=True)
        checks = silicon_page.checks(both, both)
        assert checks[-1].met is met, simulated
        assert all(check.met for check in checks[4:-1])  # a saturated row is in no other bar
    assert tuple(check.what for check in checks)[1:] == silicon_page.BARS[1:]


def test_errors_are_pooled_over_all_rows_and_do_not_cancel() -> None:
    """Each GPU with a line of its own; the H100's held-out rows count twice, and are off by half."""
    parts = []
    for gpu, offset in zip(silicon_page.GPUS, (10.0, 30.0, 50.0), strict=True):
        one = synthetic(offset, 1.2).assign(gpu=gpu, sim_tpot_ms=[9.0, 11.0] * 3)
        if gpu == "h100-sxm":
            held_out = one[one.tp.isin(silicon_page.TESTED_TP)]
            one = pd.concat([one, held_out])
            slower = one.tp.isin(silicon_page.TESTED_TP)
            one["ttft_ms"] = one.ttft_ms.where(~slower, 2 * one.ttft_ms)
        parts.append(one)
    found = pd.concat(parts, ignore_index=True)
    full = found.iloc[[0]].assign(ttft_ms=4000.0, sim_ttft_ms=4000.0, sim_tpot_ms=1e6)  # saturated
    both = pd.concat([found, full], ignore_index=True)
    reached = {check.what: check.reached for check in silicon_page.checks(both, both)}
    assert reached["silicon TPOT, 20 rows"] == "10.00 %"
    assert [reached[f"silicon TPOT, {gpu}"] for gpu in silicon_page.GPUS] == ["10.00 %"] * 3
    assert reached["silicon mean TTFT, TP held out"] == "25.00 %"  # 4 of 8 rows, not one GPU of three
    each = [reached[f"silicon mean TTFT, TP held out, {gpu}"] for gpu in silicon_page.GPUS]
    assert each == ["0.00 %", "50.00 %", "0.00 %"]


# ---------------------------------------------------------------- measured paces


@pytest.mark.parametrize(("gpu", "within"), [("h100-sxm", 0.03), ("b200-sxm", 0.11)])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_the_pace_of_one_request(gpu: str, kv_dtype: Any, within: float) -> None:
    ours, measured = single_request.pace(gpu, kv_dtype), single_request.MEASURED[gpu, kv_dtype]
    for tokens in single_request.CONTEXTS:
        assert ours.at(tokens) == pytest.approx(measured.at(tokens), rel=within)


def test_the_pace_is_that_of_decode_steps() -> None:
    ours = single_request.pace("h100-sxm", "bf16")
    calibration = load_calibration("h100-sxm/llama-3.1-8b_tp1_bf16")
    cost = compile_cost(calibration, max_num_batched_tokens=64, block_size=16, kv_dtype="bf16")
    step = entry(gpu_time)(cost, 1, 1, 1, 12_345, 0, 0, 0, 0, 0)
    assert ours.at(12_345) == pytest.approx(1e3 * step, rel=1e-9)


def test_eight_users_of_long_prompts() -> None:
    engine = single_request.eight_users().engine
    assert (engine.block_size, engine.kv_cache_dtype, engine.enable_prefix_caching) == (16, "auto", True)
    text = "\n".join(single_request.section().lines)
    assert all(name in text for name in single_request.EIGHT_USERS)


# ---------------------------------------------------------------- whole engines


def test_sections_without_their_data_are_skipped_and_count_as_not_checked(tmp_path: Path) -> None:
    for section in (context.section(tmp_path), rtx4090_section(tmp_path)):
        assert section.lines[0].startswith("skipped: no ")
        assert section.checks and all(check.verdict == "not checked" for check in section.checks)


def test_silicon_without_its_package_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise InputError("not installed")

    monkeypatch.setattr(silicon_page, "package_folder", absent)
    section = silicon_page.section()
    assert section.lines == ["skipped: not installed"]
    assert [check.met for check in section.checks] == [None] * len(silicon_page.BARS)


def test_the_run_on_an_rtx_4090_has_its_bars() -> None:
    section = rtx4090_section(DATA)
    if section.checks[0].met is None:
        pytest.skip("needs the measured run of an RTX 4090")
    assert section.title == RUN_TITLE
    assert [check.what.removeprefix("RTX 4090, ") for check in section.checks] == [
        "mean TTFT", "p50 TTFT", "p95 TTFT", "mean TPOT", "p50 TPOT", "p95 TPOT", "makespan",
        "KV use (%), mean difference",
    ]  # fmt: skip
    assert all(check.met for check in section.checks)
    assert set(section.figures) == {"rtx4090_ttft.png", "rtx4090_curves.png"}


def test_curves_that_cross_are_apart() -> None:
    one, two = np.array([1.0, 3.0]), np.array([3.0, 1.0])
    ticks = Ticks(np.array([0.0, 1.0]), one, one, one / 10)
    series = {"num_requests_running": two, "num_requests_waiting": one, "kv_cache_usage_perc": two / 10}
    retold: Any = rtx4090.Retold(None, ticks, {}, series)  # type: ignore[arg-type]
    assert [(curve.measured, curve.simulated) for curve in rtx4090.curves(retold)] == [
        pytest.approx(means) for means in ((2.0, 2.0), (2.0, 2.0), (20.0, 20.0))
    ]
    assert [curve.difference for curve in rtx4090.curves(retold)] == pytest.approx([2.0, 0.0, 20.0])


def test_every_recorded_pool_is_shown() -> None:
    lines = pool_section().lines
    assert len(lines) == 4 + len(pool_sizes.rows())


# ---------------------------------------------------------------- the page


def dot(path: Path) -> None:
    path.write_bytes(b"PNG")


def broken(path: Path) -> None:
    raise OSError(28, "No space left on device")


GOOD, BAD, UNKNOWN = at_most("good", 1.0, 1.0), at_most("bad", 1.01, 1.0), Check("unknown", "", "", None)


def test_a_bar_is_met_at_its_very_figure() -> None:
    assert (GOOD.verdict, BAD.verdict, UNKNOWN.verdict) == ("met", "MISSED", "not checked")
    assert (BAD.reached, BAD.bar) == ("1.01 %", "<= 1 %")


def test_the_page_lists_every_bar() -> None:
    sections = [Section("One", [GOOD, BAD], ["text"], {"a.png": dot}), skipped("Two", ["unknown"], "no data")]
    text = page.to_text(sections, "there")
    assert "3 bars: 1 met, 1 missed, 1 not checked." in text and f"`{page.COMMAND}`" in text
    for row in ("| good | 1.00 % | <= 1 % | met |", "| bad | 1.01 % | <= 1 % | MISSED |"):
        assert row in text
    assert "| unknown |  |  | not checked |" in text
    assert "## Two\n\nskipped: no data\n" in text and "![One](there/a.png)" in text
    assert str(Path.cwd()) not in text and str(Path.home()) not in text


def test_a_table_in_markdown() -> None:
    assert table(["a", "b"], [(1, "x")]) == ["| a | b |", "| --- | --- |", "| 1 | x |"]


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.md"
    page.write([Section("One", [GOOD], ["first"], {"a.png": dot})], out)
    assert "first" in out.read_text() and (out.with_suffix("") / "a.png").read_bytes() == b"PNG"
    with pytest.raises(InputError, match=r"cannot write the page: No space left"):
        page.write([Section("One", [GOOD], ["second"], {"a.png": dot, "b.png": broken})], out)
    assert "first" in out.read_text()
    assert sorted(path.name for path in out.parent.iterdir()) == ["page", "page.md"]
    assert [path.name for path in out.with_suffix("").iterdir()] == ["a.png"]


def test_where_no_page_can_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "folder.md").mkdir()
    for name in ("page", "taken.md", "folder.md"):
        with pytest.raises(InputError, match="--out"):
            page.check_place(tmp_path / name)
    page.check_place(tmp_path / "page.md")


@pytest.mark.parametrize(
    ("checks", "status"), [([GOOD], 0), ([GOOD, UNKNOWN], 0), ([GOOD, BAD], 1), ([BAD, UNKNOWN], 1)]
)
def test_a_missed_bar_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: list[Check], status: int
) -> None:
    monkeypatch.setattr(page, "all_sections", lambda data: [Section("One", checks, [])])
    out = tmp_path / "page.md"
    result = CliRunner().invoke(app, ["calibrate", "--validate", "--out", str(out), "--data", str(tmp_path)])
    assert result.exit_code == status
    assert "met" in result.stdout and out.is_file() and not out.with_suffix("").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--validate", "--gpu", "h100-sxm"], "--validate: goes with --data and --out only"),
        (["--validate", "--data", "nowhere"], "--data nowhere: no such folder"),
        (["--validate", "--out", "page.txt"], "--out page.txt: should be the name of a Markdown file"),
        (["--data", "."], "--data goes with --validate only"),
        (["--gpu", "h100-sxm"], "give --gpu and --model"),
    ],
)
def test_bad_options_are_told_in_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2 and said in result.stderr
    assert len(result.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_page_of_one_checkout_has_one_text(tmp_path: Path) -> None:
    for name in ("a", "b"):
        page.validate(DATA if DATA.is_dir() else tmp_path, tmp_path / name / "page.md")
    first, second = (sorted((tmp_path / name).rglob("*.*")) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert len(first) >= 1
