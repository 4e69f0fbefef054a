"""A calibration from a recording: known step times are found again, and the run is retold."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from simulation import in_order
from typer.testing import CliRunner

from sim.calibrate.command import default_name
from sim.calibrate.contention import contention
from sim.calibrate.from_recording import client_times, fit_recording, step_times, usual_mean
from sim.calibrate.step_fit import TERMS, fit_steps, robust_fit
from sim.calibration import WholeStepCalibration, load_calibration
from sim.cli import app
from sim.core import EngineConfig
from sim.cost import compile_cost
from sim.errors import InputError
from sim.recording import Header, Requests, Steps, read_header, read_requests, read_steps
from sim.request import Batch, make_batch
from sim.simulate import simulate

Floats = npt.NDArray[np.float64]

MEASURED = Path(__file__).parent / "measured"
NAMES = ("shared_ample", "multi_turn", "overload_preempt")
TRUE = {"base_us": 8000.0, "token_us": 180.0, "kv_us": 0.3, "seq_us": 250.0, "pair_us": 0.17}


def recording(name: str) -> Path:
    return MEASURED / f"{name}.json.gz"


@functools.cache
def fitted(name: str) -> WholeStepCalibration:
    return fit_recording(recording(name), date="2026-11-30").calibration


@functools.cache
def requests_of(name: str) -> Requests:
    return read_requests(recording(name))


@functools.cache
def steps_of(name: str) -> Steps:
    return read_steps(recording(name))


def made_up_steps(count: int = 2000, decodes_only: bool = False) -> Steps:
    """Steps of up to 16 sequences, one in four with a prefill."""
    rng = np.random.default_rng(3)
    columns = {name: np.zeros(count) for name in Steps._fields}
    columns["num_decodes"] = rng.integers(1, 16, count)
    columns["decode_kv"] = columns["num_decodes"] * rng.integers(50, 900, count)
    columns["num_prefills"] = np.zeros(count) if decodes_only else (rng.random(count) < 0.25) * 1.0
    new, computed = (
        columns["num_prefills"] * rng.integers(low, high, count) for low, high in ((2, 240), (0, 700))
    )
    columns["num_tokens"] = columns["num_decodes"] + new
    columns["num_seqs"] = columns["num_decodes"] + columns["num_prefills"]
    columns["sum_kv"] = columns["decode_kv"] + new + computed
    columns["pairs"] = columns["decode_kv"] + new * computed + new * (new + 1) / 2
    return Steps(**columns)  # type: ignore[arg-type]


def times_of(steps: Steps, coefficients: dict[str, float]) -> Floats:
    total = np.zeros(len(steps.num_tokens))
    for name, coefficient in coefficients.items():
        total += coefficient * TERMS[name](steps)
    return total


def test_known_step_times_are_found_again() -> None:
    steps = made_up_steps()
    times = times_of(steps, TRUE) + np.random.default_rng(0).normal(0.0, 200.0, len(steps.num_tokens))
    stalled = times.copy()
    stalled[::50] += 60_000.0  # something else held them up
    for seen in (times, stalled):
        fit = fit_steps(steps, seen)
        assert set(fit.coefficients) == set(TRUE)
        for name, value in TRUE.items():
            assert fit.coefficients[name] == pytest.approx(value, rel=0.06), name
        assert fit.spread_us == pytest.approx(200.0, rel=0.1)
    assert fit_steps(steps, times).errors["all_steps_odd_even"].mape < 0.1


def test_all_steps_together_take_what_they_took() -> None:
    """One step in ten is slow, none stalls: a robust fit alone would be 1 % too fast."""
    steps = made_up_steps()
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 300.0, len(steps.num_tokens)) + 2000.0 * (rng.random(len(steps.num_tokens)) < 0.1)
    times = times_of(steps, TRUE) + noise
    fit = fit_steps(steps, times)
    assert times_of(steps, fit.coefficients).sum() == pytest.approx(times.sum(), rel=1e-6)


def test_no_coefficient_is_negative() -> None:
    steps = made_up_steps()
    times = times_of(steps, TRUE | {"seq_us": -200.0})
    terms = np.stack([np.asarray(TERMS[name](steps), np.float64) for name in TRUE], axis=1)
    found = dict(zip(TRUE, robust_fit(terms, times), strict=True))
    assert found["seq_us"] == 0.0 and min(found.values()) >= 0.0


@pytest.mark.parametrize(
    ("changes", "has", "has_not"),
    [
        ({}, {"kv_us", "seq_us", "pair_us"}, {"prefill_us", "decode_context_us"}),
        ({"prefill_us": 4000.0}, {"prefill_us"}, {"decode_context_us"}),
        ({"decode_context_us": 1.5}, {"decode_context_us"}, {"prefill_us"}),
        ({"seq_us": -200.0}, {"pair_us"}, {"seq_us"}),
    ],
)
def test_a_term_is_there_where_it_pays(
    changes: dict[str, float], has: set[str], has_not: set[str]
) -> None:
    steps = made_up_steps()
    noise = np.random.default_rng(0).normal(0.0, 200.0, len(steps.num_tokens))
    fit = fit_steps(steps, times_of(steps, TRUE | changes) + noise)
    assert has <= set(fit.coefficients) and not has_not & set(fit.coefficients)


def test_terms_that_nothing_tells_apart_still_fit() -> None:
    steps = made_up_steps(decodes_only=True)  # pairs are KV, tokens are sequences
    times = times_of(steps, TRUE)
    fit = fit_steps(steps, times)
    np.testing.assert_allclose(times_of(steps, fit.coefficients), times, rtol=1e-6)


def small_steps(**columns: list[float]) -> Steps:
    count = len(columns["schedule_start"])
    return Steps(**{name: np.array(columns.get(name, [0.0] * count)) for name in Steps._fields})


def test_a_step_lasts_from_its_schedule_to_its_update() -> None:
    steps = small_steps(
        schedule_start=[1.0, 1.5, 5.0, 5.4],
        update_end=[1.4, 1.9, 5.4, 5.9],
        num_tokens=[5, 1, 3, 0],
        running=[1, 1, 1, 0],
        num_admitted=[1, 0, 1, 0],
    )
    times = step_times(steps)
    np.testing.assert_allclose(times.duration, [4e5, 4e5, 4e5])  # the empty step is none
    np.testing.assert_allclose(times.between, [np.nan, 1e5, np.nan])  # before the third it was idle
    assert step_times(steps, until=5.0).steps.num_tokens.tolist() == [5, 1]


def test_async_steps_follow_each_other() -> None:
    """The next step is scheduled before the update, and its time begins there."""
    steps = small_steps(
        schedule_start=[1.0, 1.01, 1.5], update_end=[1.5, 2.1, 2.4], num_tokens=[5, 2, 2], running=[1, 1, 1],
        num_admitted=[1, 0, 0],
    )  # fmt: skip
    times = step_times(steps)
    np.testing.assert_allclose(times.duration, [5e5, 6e5, 3e5])
    np.testing.assert_allclose(times.between[1:], [0.0, 0.0])


def test_a_step_after_one_that_left_others_waiting_follows_it() -> None:
    steps = small_steps(
        schedule_start=[1.0, 1.5], update_end=[1.4, 1.9], num_tokens=[5, 1], running=[1, 1],
        num_admitted=[1, 1], waiting=[1, 0],
    )  # fmt: skip
    np.testing.assert_allclose(step_times(steps).between[1:], [1e5])


def test_a_stall_counts_as_the_longest_of_the_others() -> None:
    values = np.full(100, 700.0) + np.arange(100.0)
    stalled = values.copy()
    stalled[7] = 5e6
    assert usual_mean(values) == values.mean()
    assert usual_mean(stalled) < 1.02 * values.mean()
    assert usual_mean(np.array([])) == 0.0


def test_what_the_client_sees() -> None:
    requests = requests_of("shared_ample")
    front_end, assumed = client_times(requests)
    assert assumed == []
    to_queue = requests.queued_time - requests.submitted_time
    assert front_end.alpha_us == pytest.approx(1e6 * to_queue.mean(), rel=0.01)
    back = requests.client_first - requests.first_token_time
    assert front_end.reply_us == pytest.approx(1e6 * np.median(back), rel=0.1)

    unknown = np.full(len(requests.name), np.nan)
    server = requests._replace(submitted_time=unknown, client_first=unknown, queued_time=requests.added_time)
    front_end, assumed = client_times(server)
    assert front_end.reply_us == 0.0 and "client was not recorded" in assumed[0]
    waits = 1e6 * (requests.added_time - requests.arrival_time)
    assert waits.min() <= front_end.alpha_us < np.median(waits) / 5, "waiting for a step is no front end"


@pytest.mark.parametrize("recorded", ["with waits", "without"])
def test_contention_is_told(recorded: str) -> None:
    """multi_turn was recorded on a box that was not quiet; the other two were alone."""
    for name in NAMES:
        times = step_times(steps_of(name))
        steps = times.steps
        if recorded == "without":
            unknown = np.full(len(steps.num_tokens), np.nan)
            steps = steps._replace(worker_wait=unknown, engine_wait=unknown)
        told = contention(steps, times.duration, times.between, fitted(name))
        assert len(told) == (name == "multi_turn"), (name, told)
        assert all("not" in text and "quiet" in text and "\n" not in text for text in told)


def config_of(header: Header) -> EngineConfig:
    one = header.effective
    return EngineConfig(
        one.block_size, one.num_gpu_blocks, one.max_num_batched_tokens, one.max_num_seqs, one.max_model_len
    )


def batch_of(requests: Requests) -> Batch:
    """The recorded requests, arriving when they came into the engine's queue."""
    flat = [segment for row in requests.segments for segment in row]
    return make_batch(
        np.maximum.accumulate(requests.queued_time),
        requests.prompt_len,
        requests.output_len,
        np.cumsum([0] + [len(row) for row in requests.segments]),
        [segment for segment, _ in flat],
        [length for _, length in flat],
    )


def retold(name: str, calibration: WholeStepCalibration) -> tuple[Requests, dict[str, Any], Any]:
    """The recording, and the records and sums of its simulation."""
    config, requests = config_of(read_header(recording(name))), requests_of(name)
    cost = compile_cost(
        calibration,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_dtype="bf16",
    )
    chunks: list[dict[str, Any]] = []
    totals = simulate(iter([batch_of(requests)]), config, cost, on_records=chunks.append)
    return requests, in_order(chunks), totals


@pytest.mark.parametrize("name", NAMES)
def test_a_run_retold_by_its_own_fit(name: str) -> None:
    requests, records, totals = retold(name, fitted(name))
    measured = requests.client_first - requests.submitted_time
    simulated = records["first_token_time"] - records["arrival_time"]
    assert simulated.mean() == pytest.approx(measured.mean(), rel=0.03)
    e2el = requests.client_last - requests.submitted_time
    assert (records["finish_time"] - records["arrival_time"]).mean() == pytest.approx(e2el.mean(), rel=0.03)
    hits = requests.num_cached_tokens.sum() / requests.prompt_len.sum()
    assert totals.prefix_cache_hits / totals.prefix_cache_queries == pytest.approx(hits, abs=0.005)
    assert totals.num_preemptions == pytest.approx(requests.num_preemptions.sum(), rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_the_second_half_retold_by_a_fit_to_the_first(name: str) -> None:
    requests = requests_of(name)
    half = len(requests.name) // 2
    until = float(requests.queued_time[half:].min())
    to_the_first = fit_recording(recording(name), date="2026-11-30", until=until).calibration
    _, records, _ = retold(name, to_the_first)
    measured = (requests.client_first - requests.submitted_time)[half:]
    simulated = (records["first_token_time"] - records["arrival_time"])[half:]
    assert simulated.mean() == pytest.approx(measured.mean(), rel=0.06)


def calibrate(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_the_command_writes_a_calibration_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "fit.yaml"
    result = calibrate("--from-recording", recording("overload_preempt"), "--out", out)
    assert result.exit_code == 0, result.output
    for text in ("step_odd_even", "step_halves", "all_steps_halves"):
        assert text in result.stdout
    assert "a step takes, in us: 727" in result.stderr and "warning" not in result.stderr
    written = load_calibration(str(out))
    assert isinstance(written, WholeStepCalibration)
    known = fitted("overload_preempt")
    assert written.errors == known.errors and written.domain == known.domain
    for name in (*TERMS, "between_us"):
        assert getattr(written, name) == pytest.approx(getattr(known, name), rel=1e-6), name
    assert written.errors["step_odd_even"].mape < 5.0 and written.errors["all_steps_halves"].p95 < 4.0

    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "model: tiny\ngpu: cpu\nengine: {num_gpu_blocks: 50, block_size: 32, async_scheduling: false}\n"
        "workload: {kind: scan, num_requests: 1, prompt_len: 64, output_len: 2, request_rate: 1}\n"
        f"cost: {out}\n"
    )
    result = CliRunner().invoke(app, ["run", str(scenario), "--format", "json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    fit, pairs = written, 64 * 65 / 2
    steps = fit.base_us + 64 * (fit.token_us + fit.kv_us) + fit.seq_us + pairs * fit.pair_us + fit.between_us
    ttft = fit.front_end.alpha_us + steps + fit.front_end.reply_us
    assert summary["mean_ttft_ms"] == pytest.approx(ttft / 1e3, rel=1e-6)
    assert "step_odd_even" in summary["calibration_mape"]


def test_a_noisy_recording_is_warned_of(tmp_path: Path) -> None:
    result = calibrate("--from-recording", recording("multi_turn"), "--out", tmp_path / "fit.yaml")
    assert result.exit_code == 0
    assert "warning: the machine was not quiet: during 17 % of the steps' time the engine" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "2"], "--tp would do nothing with --from-recording"),
        (["--from", "aiconfigurator"], "--from would do nothing with --from-recording"),
        (["--gpu", "h900"], "h900"),
        (["--out", "fit.json"], "should end in .yaml"),
    ],
)
def test_what_does_not_go_together_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = calibrate("--from-recording", recording("shared_ample"), *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_names_of_gpu_and_model(tmp_path: Path) -> None:
    path = recording("shared_ample")
    given = fit_recording(path, gpu="h100-sxm", model="llama-3.1-8b", date="2026-11-30").calibration
    assert given.name == "h100-sxm/llama-3.1-8b_tp1_bf16"
    own = fitted("shared_ample")
    assert (own.gpu, own.model) == ("recorded server", "llama")
    assert default_name(own, path).name == "recorded-server_llama_tp1_bf16_shared_ample.yaml"


def test_a_recording_that_is_too_short(tmp_path: Path) -> None:
    path = MEASURED.parent / "recordings" / "token_ids.jsonl.gz"
    assert any("only 83 steps ran" in text for text in fit_recording(path, date="2026-11-30").warnings)
    with pytest.raises(InputError, match="steps ran tokens; a fit takes 10 at least"):
        fit_recording(recording("shared_ample"), date="2026-11-30", until=0.3)


@pytest.mark.parametrize("longest", [0, 2**52], ids=["no time", "an age"])
def test_steps_that_nothing_fits(tmp_path: Path, longest: int) -> None:
    """A clock that stands still or leaps is one line, not what the fit's library says of it."""
    lines = gzip.decompress((MEASURED.parent / "recordings" / "async.jsonl.gz").read_bytes()).splitlines()
    changed = [json.loads(line) for line in lines]
    spans = [line for line in changed if isinstance(line.get("t"), list)]
    for number, span in enumerate(spans):
        span["t"] = [0, 0] if number < len(spans) // 2 else [longest, longest]
    path, out = tmp_path / "clock.jsonl", tmp_path / "fit.yaml"
    path.write_text("".join(json.dumps(line) + "\n" for line in changed), encoding="utf-8")
    result = calibrate("--from-recording", path, "--out", out)
    assert result.exit_code == 2 and not out.exists()
    (line,) = result.stderr.splitlines()
    assert line.endswith(f"no step time fits steps that took 0 to {longest:.6g} us; record again")


def test_a_cut_off_recording_is_fitted_and_told_once(tmp_path: Path) -> None:
    whole = gzip.decompress((MEASURED.parent / "recordings" / "async.jsonl.gz").read_bytes())
    cut, out = tmp_path / "cut.jsonl", tmp_path / "fit.yaml"
    cut.write_bytes(whole[: len(whole) * 3 // 4])
    result = calibrate("--from-recording", cut, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stderr.count(str(cut)) == 1 and "RecordingWarning" not in result.stderr
    written = load_calibration(str(out))
    assert isinstance(written, WholeStepCalibration)
    assert written.between_us == 0.0, "asynchronous steps follow each other at once"
    assert written.front_end.reply_us == 0.0 and "client was not recorded" in written.assumed[0]
