"""A run beside a recording: where decisions part and why, and what both sides are said to have done."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from simulation import engine, in_order, linear, prompts
from typer.testing import CliRunner

from sim.against.decisions import Decisions
from sim.against.sides import measured_curves, measured_side, read_recorded, simulated_curves
from sim.blocks import FREE
from sim.cli import app
from sim.clock import Clock
from sim.columns import K, W
from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.recording import RecordingWarning, read_requests, read_steps
from sim.request import Batch
from sim.simulate import simulate
from sim.timeseries import time_series

LATE = "the recording scheduled r1, which the simulation got 0.5 ms later; its step began 10 ms earlier"
EARLY = "the simulation scheduled r1, which the recording got 0.5 ms later; its step began 3 ms later"
WAITED = "the recording scheduled r1, which waited in the simulation; its step began when that one did"
SPLIT = "r0 got 64 tokens over 0 computed ones in the recording, 32 over 0 in the simulation"

Floats = npt.NDArray[np.float64]

MEASURED = Path(__file__).parent / "measured"
RECORDINGS = Path(__file__).parent / "recordings"
CONFIG = engine(
    block_size=32, num_gpu_blocks=60, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=900
)


class Taken:
    """Takes a run of a synchronous engine down as a recording of version 1."""

    def __init__(self, batch: Batch, config: EngineConfig) -> None:
        self.batch = batch
        self.config = config
        self.decisions = Decisions.__new__(Decisions)
        self.decisions.order = np.arange(len(batch.n))
        self.steps: list[dict[str, Any]] = []
        self.num_steps = 0
        self.seen: set[int] = set()

    def horizon(self, clock: Clock) -> float:
        return clock.now

    def observe(self, core: Core) -> None:
        new = int(core.count[K.num_steps]) - self.num_steps
        self.num_steps += new
        if not new:
            return
        (pieces,) = self.decisions._begun(core, 1)
        begin, end = float(core.clock[W.now]), float(core.clock[W.step_end + core.count[K.oldest_step]])
        first = [row for row, *_ in pieces if row not in self.seen]
        self.seen.update(first)
        self.steps.append(
            {
                "t": [round(1e6 * begin), round(1e6 * begin), round(1e6 * end), round(1e6 * end)],
                "s": [[f"r{row}", new, computed] for row, new, computed in pieces],
                "new": [[f"r{row}", computed] for row, _, computed in pieces if row in first],
                "arr": [],
                "fr": int(core.pool.count[FREE]),
                "fr2": int(core.pool.count[FREE]),
                "q": [int(core.count[K.num_running]), int(core.count[K.num_waiting])],
            }
        )

    def document(self, records: dict[str, Any]) -> dict[str, Any]:
        """The recording, once the run has ended."""
        starts = np.array([step["t"][0] for step in self.steps])
        ends = np.array([step["t"][3] for step in self.steps])
        requests = []
        for row in range(len(self.batch.n)):
            stamps = {
                name: round(1e6 * float(records[f"{name}_time"][row]))
                for name in ("arrival", "ready", "scheduled", "first_token", "finish")
            }
            added = self.steps[int(np.searchsorted(starts, stamps["ready"]))]
            added["arr"].append(f"r{row}")
            last = self.steps[int(np.searchsorted(ends, stamps["finish"]))]
            last.setdefault("fin", []).append(f"r{row}")
            if len(last["fin"]) == last["q"][0]:
                last["fr2"] = self.config.num_gpu_blocks - 1
            outputs, prompt = int(records["output_len"][row]), int(records["prompt_len"][row])
            requests.append(
                {
                    "id": f"r{row}", "segs": [[row, prompt]], "np": prompt, "out": outputs, "ngen": outputs,
                    "o_ids": [7] * outputs, "cached": int(records["num_cached_tokens"][row]),
                    "npre": int(records["num_preemptions"][row]),
                    "T": {
                        "sub": stamps["arrival"], "arr": stamps["arrival"], "inq": stamps["ready"],
                        "add": added["t"][0], "sched": stamps["scheduled"], "ftok": stamps["first_token"],
                        "ltok": stamps["finish"], "cfirst": stamps["first_token"], "clast": stamps["finish"],
                    },
                }
            )  # fmt: skip
        config = self.config
        return {
            "schema": "vllm_cpu_truth/1",
            "effective": {
                "block_size": config.block_size, "num_gpu_blocks": config.num_gpu_blocks,
                "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_model_len": config.max_model_len, "policy": "fcfs", "chunked": True, "watermark": 0.0,
                "enable_prefix_caching": True, "async_scheduling": False, "reserve_full_isl": True,
            },
            "free0": list(range(1, config.num_gpu_blocks)),
            "reqs": requests,
            "steps": self.steps,
        }  # fmt: skip


def load(outputs: tuple[int, ...] = (20, 20, 6)) -> Batch:
    """r0 alone; r1 comes 30.5 ms after it, r2 at 60 ms; each has a prompt of two steps at a budget of 64."""
    batch = prompts([[(1, 100)], [(2, 90)], [(3, 80)]], output_len=outputs)
    return batch._replace(arrival_time=np.array([0.0, 0.0305, 0.06]))


def taken(path: Path, cost: StepCost, config: EngineConfig = CONFIG, batch: Batch | None = None) -> None:
    """The recording of a run with this step time."""
    batch = load() if batch is None else batch
    watcher, chunks = Taken(batch, config), []  # type: ignore[var-annotated]
    simulate(
        iter([batch]), config, cost, on_records=chunks.append, horizon=watcher.horizon,
        observe=watcher.observe,
    )  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(watcher.document(in_order(chunks))).encode()))


def compared(
    path: Path, cost: StepCost, config: EngineConfig = CONFIG, batch: Batch | None = None
) -> Decisions:
    """The decisions of a run with this step time, beside the recording."""
    requests = read_requests(path)
    decisions = Decisions(path, requests, np.arange(len(requests.name)))
    simulate(
        iter([load() if batch is None else batch]), config, cost, on_records=lambda _: None,
        horizon=decisions.horizon, observe=decisions.observe,
    )  # fmt: skip
    decisions.finish()
    return decisions


def steps_of(milliseconds: float) -> StepCost:
    return linear(CONFIG, milliseconds / 1e3, 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of steps of 10 ms each: r1 waits from 30.5 to 40 ms."""
    file = tmp_path / "recording.json.gz"
    taken(file, steps_of(10.0))
    return file


def test_the_same_run_parts_nowhere(path: Path) -> None:
    decisions = compared(path, steps_of(10.0))
    assert decisions.parting is None
    assert decisions.num_same == len(read_steps(path).num_tokens) > 20


@pytest.mark.parametrize(
    ("milliseconds", "step", "why"),
    [
        # steps begin at 0, 7.5, ..., 30, where r1 is not yet there; the recording's number 4 at 40
        (7.5, 4, LATE),
        # steps begin at 0, 11, 22, 33, where r1 is there; the recording's number 3 at 30
        (11.0, 3, EARLY),
    ],
)  # fmt: skip
def test_who_came_too_late(path: Path, milliseconds: float, step: int, why: str) -> None:
    for later in (0.0, 3.0):  # seconds: the run's clock is its own
        batch = load()
        batch = batch._replace(arrival_time=batch.arrival_time + later)
        decisions = compared(path, steps_of(milliseconds), batch=batch)
        assert decisions.parting is not None and decisions.num_same == step
        assert decisions.parting.step == step and decisions.parting.why == why


@pytest.mark.parametrize(
    ("changes", "step", "why"),
    [
        ({"max_num_seqs": 1}, 4, WAITED),
        ({"max_num_batched_tokens": 32}, 0, SPLIT),
        ({"num_gpu_blocks": 6}, 4, "the recording scheduled r1, which waited in the simulation"),
    ],
)  # fmt: skip
def test_who_was_treated_otherwise(path: Path, changes: dict[str, Any], step: int, why: str) -> None:
    decisions = compared(path, steps_of(10.0), CONFIG._replace(**changes))
    assert decisions.parting is not None and decisions.parting.step == step
    assert decisions.parting.why.startswith(why)


def test_the_order_of_requests_is_a_decision(path: Path) -> None:
    document = json.loads(gzip.decompress(path.read_bytes()))
    index = next(i for i, step in enumerate(document["steps"]) if len(step["s"]) > 1)
    document["steps"][index]["s"].reverse()
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    parting = compared(path, steps_of(10.0)).parting
    assert parting is not None
    assert (parting.step, parting.why) == (index, "the same requests in another order")


def test_whom_one_side_has_preempted(tmp_path: Path) -> None:
    """Eight blocks hold three prompts and no more: of two sides, one has to let somebody go."""
    roomy, small = tmp_path / "roomy.json.gz", CONFIG._replace(num_gpu_blocks=11, max_model_len=200)
    taken(roomy, steps_of(10.0), CONFIG._replace(max_model_len=200))
    decisions = compared(roomy, steps_of(10.0), small)
    assert decisions.parting is not None
    assert decisions.parting.why.startswith("the recording scheduled r2, which the simulation had preempted")


def test_a_recording_that_is_longer_or_shorter(path: Path) -> None:
    count = len(read_steps(path).num_tokens)
    shorter, longer = (load(outputs=(20, last, 6)) for last in (19, 21))
    parting = compared(path, steps_of(10.0), batch=shorter).parting
    assert parting is not None and (parting.step, parting.why) == (count - 1, "the simulation has ended")
    parting = compared(path, steps_of(10.0), batch=longer).parting
    assert parting is not None and (parting.step, parting.why) == (count, "the simulation has a step more")


def test_both_sides_of_the_same_run_are_alike(path: Path) -> None:
    recorded = read_recorded(path)
    chunks: list[dict[str, Any]] = []
    totals = simulate(iter([load()]), CONFIG, steps_of(10.0), on_records=chunks.append)
    records = in_order(chunks)
    side = measured_side(recorded.requests, "engine")
    for name, stamp in (("ttft_ms", "first_token_time"), ("e2el_ms", "finish_time")):
        expected = 1e3 * (records[stamp] - records["ready_time"])
        np.testing.assert_allclose(getattr(side, name), expected, atol=2e-3)
    assert side.num_cached_tokens.tolist() == records["num_cached_tokens"].tolist()

    end = float(records["finish_time"].max())
    measured = measured_curves(recorded, end)
    simulated = simulated_curves(time_series(totals.samples, CONFIG.num_gpu_blocks - 1), 0.0, end)
    assert measured.running.max() == 3 and measured.waiting.max() == 0
    for name in ("running", "waiting", "kv_cache_usage_perc"):
        one, other = getattr(measured, name), getattr(simulated, name)
        assert abs(one.mean() - other.mean()) <= 0.03 * one.mean(), name
        assert np.mean(one != other) < 0.1, "only where a step begins, by a sample at most"


def test_an_idle_engine_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "recording.json.gz"
    taken(path, steps_of(10.0), batch=load()._replace(arrival_time=np.array([0.0, 5.0, 10.0])))
    curves = measured_curves(read_recorded(path), 10.0)
    for second, running in ((0.1, 1), (3.0, 0), (5.1, 1), (8.0, 0)):
        at = np.searchsorted(curves.time, second)
        assert curves.running[at] == running and curves.waiting[at] == 0
        assert (curves.kv_cache_usage_perc[at] > 0) == (running > 0)


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def of_recording(name: str, **fields: str) -> list[str]:
    sets = {"workload.kind": "recording", "workload.path": str(MEASURED / f"{name}.json.gz")} | fields
    return [part for field, value in sets.items() for part in ("--set", f"{field}={value}")]


def test_a_recording_played_again_makes_the_same_decisions(tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    path = MEASURED / "shared_ample.json.gz"
    result = run(*of_recording("shared_ample"), "--against", path, "--out", out, "--report", page)
    assert result.exit_code == 0, result.output
    assert "decisions are the same in all 2942 steps" in result.stdout
    summary = json.loads((out / "summary.json").read_text())["against"]
    assert summary["same_requests"] and summary["clock"] == "engine" and summary["first_difference"] is None
    assert summary["requests_with_equal_hits"] == summary["measured"]["requests"] == 320
    measured, simulated = summary["measured"], summary["simulated"]
    assert measured["prefix_cache_hits"] == simulated["prefix_cache_hits"]
    for name in ("mean_ttft_ms", "p99_ttft_ms", "mean_e2el_ms"):
        assert simulated[name] == pytest.approx(measured[name], rel=0.002), name
    rows = list(csv.DictReader((out / "against.csv").open()))
    assert [int(row["request"]) for row in rows] == list(range(320))
    mean = np.mean([float(row["measured_ttft_ms"]) for row in rows])
    assert mean == pytest.approx(measured["mean_ttft_ms"], abs=1e-3)
    assert all(row["measured_num_cached_tokens"] == row["simulated_num_cached_tokens"] for row in rows)
    assert (out / "against.png").stat().st_size > 10_000
    text = page.read_text()
    assert "Beside the recording shared_ample.json.gz" in text and "in all 2942 steps." in text
    again = run(*of_recording("shared_ample"), "--against", path, "--out", out)
    assert again.exit_code == 0, "its own folder may be replaced"


def test_a_fit_to_the_recording_parts_and_comes_close(tmp_path: Path) -> None:
    path, fit = MEASURED / "overload_preempt.json.gz", tmp_path / "fit.yaml"
    calibrated = CliRunner().invoke(app, ["calibrate", "--from-recording", str(path), "--out", str(fit)])
    assert calibrated.exit_code == 0, calibrated.output
    result = run(*of_recording("overload_preempt", cost=str(fit)), "--against", path, "--format", "json")
    assert result.exit_code == 0, result.output
    assert "step time is that of" not in result.stderr, "it is of this server"
    summary = json.loads(result.stdout)["against"]
    measured, simulated = summary["measured"], summary["simulated"]
    assert summary["clock"] == "client" and measured["mean_ttft_ms"] == pytest.approx(8416.8, abs=0.1)
    for name in ("mean_ttft_ms", "mean_e2el_ms", "mean_kv_cache_usage_perc", "mean_num_requests_waiting"):
        assert simulated[name] == pytest.approx(measured[name], rel=0.03), name
    assert simulated["prefix_cache_hit_rate"] == pytest.approx(measured["prefix_cache_hit_rate"], abs=0.005)
    assert simulated["num_preemptions"] == pytest.approx(measured["num_preemptions"], rel=0.05)
    assert summary["ttft_correlation"] > 0.999
    parting = summary["first_difference"]
    assert parting["step"] == summary["steps_alike"] == 25, "no step before it is empty"
    why = r"the simulation scheduled r3, which the recording got \d+ ms later; its step began \d+ ms later"
    assert re.fullmatch(why, parting["why"])
    assert parting["recorded"] != parting["simulated"] and all(len(one) == 3 for one in parting["recorded"])


def test_another_load_compares_distributions_only(tmp_path: Path) -> None:
    out, path = tmp_path / "out", MEASURED / "shared_ample.json.gz"
    other = of_recording("multi_turn", **{"workload.limit": "20"})
    result = run(*other, "--against", path, "--out", out)
    assert result.exit_code == 0, result.output
    assert "the scenario's workload is not that recording" in result.stdout
    summary = json.loads((out / "summary.json").read_text())["against"]
    assert not summary["same_requests"] and "first_difference" not in summary
    assert (summary["measured"]["requests"], summary["simulated"]["requests"]) == (320, 20)
    rows = list(csv.DictReader((out / "against.csv").open()))
    assert [row["percentile"] for row in rows] == [str(percent) for percent in range(101)]


def test_the_same_file_by_another_name_is_the_same_recording(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl.gz"
    path.symlink_to(RECORDINGS / "turns.jsonl.gz")
    ours = of_recording("", **{"workload.path": str(RECORDINGS / "turns.jsonl.gz")})
    result = run(*ours, "--against", path)
    assert result.exit_code == 0, result.output
    assert "decisions are the same in all 225 steps" in result.stdout


def test_the_turns_of_a_closed_loop_are_matched(tmp_path: Path) -> None:
    """Sessions load their requests at once, so numbers are not in order of arrival."""
    path, out = MEASURED / "multi_turn.json.gz", tmp_path / "out"
    result = run(*of_recording("multi_turn", **{"workload.pace": "closed"}), "--against", path, "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())["against"]
    assert summary["requests_with_equal_hits"] == 253 and summary["ttft_correlation"] > 0.99
    requests = read_requests(path)
    rows = list(csv.DictReader((out / "against.csv").open()))
    assert [row["name"] for row in rows] == requests.name
    assert [int(row["prompt_len"]) for row in rows] == requests.prompt_len.tolist()


def test_with_a_timeline_both_look_on(tmp_path: Path) -> None:
    path, timeline = MEASURED / "shared_ample.json.gz", tmp_path / "timeline.json"
    limited = of_recording("shared_ample", **{"workload.limit": "12"})
    result = run(*limited, "--against", path, "--timeline", timeline, "--format", "json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["against"]["measured"]["requests"] == 12
    why = summary["against"]["first_difference"]["why"]
    assert why.startswith("the recording scheduled r12, which is not in the simulation's load")
    names = [event["name"] for event in json.loads(timeline.read_text())["traceEvents"]]
    assert sum("decode" in name or "prefill" in name for name in names) > summary["num_steps"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "engine.block_size=32,64"], "leave out --compare"),
        (["--set", "cluster.replicas=2"], "--against"),
    ],
)
def test_what_does_not_go_together_is_one_line(arguments: list[str], words: str) -> None:
    path = MEASURED / "shared_ample.json.gz"
    result = run(*of_recording("shared_ample", cost="{base_us: 1000}"), "--against", path, *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_no_recording_is_told_before_the_run(tmp_path: Path) -> None:
    scenario = str(Path(__file__).parent.parent / "scenarios" / "fourteen_tokens.yaml")
    for file in (tmp_path / "none.json", Path(scenario)):
        result = run(scenario, "--against", file, "--out", tmp_path / "out")
        assert result.exit_code == 2 and str(file) in result.stderr, result.output
        assert len(result.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_cut_off_recording_is_told_once(tmp_path: Path) -> None:
    lines = gzip.decompress((RECORDINGS / "turns.jsonl.gz").read_bytes()).splitlines(keepends=True)
    cut, out = tmp_path / "cut.jsonl", tmp_path / "out"
    cut.write_bytes(b"".join(lines[: len(lines) * 2 // 3]))
    sets = {"workload.kind": "recording", "workload.path": str(cut)}
    arguments = [part for field, value in sets.items() for part in ("--set", f"{field}={value}")]
    result = run(*arguments, "--against", cut, "--out", out)
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())["against"]
    (told,) = summary["warnings"]
    assert str(cut) in told and "steps" in told
    assert summary["steps_alike"] == np.count_nonzero(read_recorded_quietly(cut).num_tokens)
    assert "RecordingWarning" not in result.output


def read_recorded_quietly(path: Path) -> Any:
    with pytest.warns(RecordingWarning):
        return read_steps(path)


def test_a_recording_in_which_nothing_ran_is_one_line(tmp_path: Path) -> None:
    first = gzip.decompress((RECORDINGS / "turns.jsonl.gz").read_bytes()).splitlines(keepends=True)[0]
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(first)
    scenario = Path(__file__).parent.parent / "scenarios" / "fourteen_tokens.yaml"
    result = run(scenario, "--against", empty)
    assert result.exit_code == 2 and "no step ran there" in result.stderr
    assert len(result.stderr.splitlines()) == 1
