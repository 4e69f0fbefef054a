"""The timeline: what a lane says of a request, the format of the file, its bounds, bad input."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from simulation import Run, engine, linear, prompts, run
from typer.testing import CliRunner

from sim import recorder as recording
from sim import timeline
from sim.cli import app
from sim.columns import K, R, S, W
from sim.core import RUNNING, EngineConfig
from sim.cost import linear_cost
from sim.recorder import Lane, Recorder
from sim.state import State
from sim.timeline import left_out, trace, write_timeline

SECOND = linear_cost(1.0, 0.0, max_num_batched_tokens=8192)  # every step takes one second
SCENARIO = """\
seed: 3
cost: {base_us: 5000, token_us: 50}
engine: {block_size: 16, num_gpu_blocks: 60, max_num_batched_tokens: 128, max_model_len: 800}
workload:
  {kind: shared_prefix, num_groups: 3, prefix_len: 96, suffix_len: 40, output_len: 30, request_rate: 12,
   num_requests: 60}
"""


def recorded(config: EngineConfig, batch: Any, cost: Any = None, **window: float) -> tuple[Run, Recorder]:
    """A run with its recording; it must be the run without one, to the last bit."""
    recorder = Recorder(**window)
    seen = run(batch, config, cost, horizon=recorder.horizon, observe=recorder.observe)
    alone = run(batch, config, cost)
    for name in ("num_steps", "busy_time", "last_time", "num_evictions", "usage_time", "itl_sum"):
        assert getattr(seen.totals, name) == getattr(alone.totals, name), name
    for name, column in alone.records.items():
        assert (column == seen.records[name]).all(), name
    return seen, recorder


def slices(lane: Lane) -> list[tuple[Any, ...]]:
    return [tuple(piece)[: 4 if piece.num_tokens else 3] for piece in lane.slices]


def test_chunks_queue_and_decode_by_hand() -> None:
    """A: 20 tokens in chunks of 8, 3 answers. B arrives half a second later and waits for A's seat."""
    config = engine(max_num_batched_tokens=8, max_num_seqs=1)
    _, recorder = recorded(config, prompts([[(1, 20)], [(2, 8)]], output_len=[3, 1], gap=0.5), SECOND)
    first, second = recorder.lanes
    assert slices(first) == [
        ("prefill", 0.0, 1.0, 8), ("prefill", 1.0, 2.0, 8), ("prefill", 2.0, 3.0, 4), ("decode", 3.0, 5.0),
    ]  # fmt: skip
    assert slices(second) == [("queue", 0.5, 5.0), ("prefill", 5.0, 6.0, 8)]
    assert [tuple(step) for step in recorder.steps] == [
        (0.0, 1.0, 8, 0, 1), (1.0, 2.0, 8, 0, 1), (2.0, 3.0, 4, 0, 1),
        (3.0, 4.0, 1, 1, 0), (4.0, 5.0, 1, 1, 0), (5.0, 6.0, 8, 0, 1),
    ]  # fmt: skip
    # blocks of 16: one for the first chunk, two from the second on; B waits from the step after 0.5 s
    assert [tuple(level) for level in recorder.levels] == [
        (0.0, 1, 0, 1), (1.0, 1, 1, 1), (2.0, 1, 1, 2), (5.0, 1, 0, 1), (6.0, 0, 0, 0),
    ]  # fmt: skip


def test_preemption_by_hand() -> None:
    """4 blocks of 4: both take 2 and need a third at once; the later one goes and waits for the first."""
    config = engine(block_size=4, num_gpu_blocks=5, enable_prefix_caching=False, reserve_full_isl=False)
    result, recorder = recorded(config, prompts([[(1, 7)], [(2, 7)]], output_len=4, gap=0.0), SECOND)
    assert result.totals.num_preemptions == 1
    # the prefill samples token 8, the second step computes it and fills the block, the third needs another
    assert slices(recorder.lanes[0]) == [("prefill", 0.0, 1.0, 7), ("decode", 1.0, 4.0)]
    assert slices(recorder.lanes[1]) == [
        ("prefill", 0.0, 1.0, 7), ("decode", 1.0, 2.0), ("preempted", 2.0, 4.0), ("prefill", 4.0, 5.0, 9),
        ("decode", 5.0, 6.0),
    ]  # fmt: skip


def test_who_runs_in_a_step_although_preempted_was_preempted_before_it() -> None:
    """An engine put together by hand: a step from 0 to 1 s; at 3 s, a preemption and a step of it to 4 s."""
    core = State(engine()).core
    core.requests[[R.request_id, R.status], 0] = 0, RUNNING
    core.count[[K.steps_in_flight, K.step_size]] = 1
    recorder = Recorder()
    for now, end, tokens, preemptions in ((0.0, 1.0, 5, 0), (3.0, 4.0, 6, 1)):
        core.clock[[W.now, W.step_end]] = now, end
        core.steps[[S.tokens, S.samples], 0, 0] = tokens, 1
        core.requests[R.num_preemptions, 0] = preemptions
        core.count[K.num_steps] += 1
        recorder.observe(core)
    (lane,) = recorder.lanes
    assert slices(lane) == [("prefill", 0.0, 1.0, 5), ("decode", 1.0, 3.0), ("prefill", 3.0, 4.0, 6)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_lanes_agree_with_records_and_steps_with_totals(async_scheduling: bool) -> None:
    config = engine(
        num_gpu_blocks=40, max_num_batched_tokens=96, async_scheduling=async_scheduling, max_num_seqs=12
    )
    many = [[(i % 3, 64), (100 + i, 30 + 7 * (i % 5))] for i in range(50)]
    result, recorder = recorded(config, prompts(many, output_len=[20 + i % 9 for i in range(50)], gap=0.004))
    records, totals = result.records, result.totals
    assert totals.num_preemptions > 0 and totals.prefix_cache_hits > 0
    assert len(recorder.steps) == totals.num_steps
    assert sum(step.num_tokens for step in recorder.steps) == totals.num_scheduled_tokens
    assert sum(step.end - step.begin for step in recorder.steps) == pytest.approx(totals.busy_time)
    assert all(one.end <= two.begin for one, two in itertools.pairwise(recorder.steps))
    assert max(level.num_blocks for level in recorder.levels) == totals.max_blocks_used
    assert max(level.num_running for level in recorder.levels) == totals.max_num_running
    assert sorted(lane.request_id for lane in recorder.lanes) == list(range(50))
    for lane in recorder.lanes:
        record = {name: column[lane.request_id] for name, column in records.items()}
        assert all(one.end <= two.begin for one, two in itertools.pairwise(lane.slices)), lane
        assert lane.num_preemptions == record["num_preemptions"]
        assert lane.slices[-1].end == record["finish_time"]
        (queued,) = [piece for piece in lane.slices if piece.name == "queue"] or [None]
        assert (queued is None) == (record["ready_time"] == record["scheduled_time"])
        if queued is not None:
            assert queued[1:3] == (record["ready_time"], record["scheduled_time"])
        chunks = [piece for piece in lane.slices if piece.name == "prefill"]
        if lane.num_preemptions == 0:
            computed = sum(chunk.num_tokens for chunk in chunks)
            assert computed == record["prompt_len"] - record["num_cached_tokens"]
            assert chunks[-1].end == record["first_token_time"]


def test_requests_and_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine(max_num_seqs=2)
    batch = prompts([[(i, 20)] for i in range(9)], output_len=4, gap=0.0)
    _, everything = recorded(config, batch, SECOND)
    assert left_out(everything, 9) is None
    monkeypatch.setattr(recording, "MAX_REQUESTS", 3)
    result, some = recorded(config, batch, SECOND)
    assert [slices(lane) for lane in some.lanes] == [slices(lane) for lane in everything.lanes[:3]]
    # two at a time, 4 steps each: the third has ended after 8, and with it the recording
    assert [step.end for step in some.steps] == [float(i) for i in range(1, 9)]
    assert some.num_steps == result.totals.num_steps == 20
    text = left_out(some, 9)
    assert text is not None and "3 of 9 requests and 8 of 20 steps, from 0 to 8 s" in text
    monkeypatch.setattr(recording, "MAX_STEPS", 2)
    _, cut = recorded(config, batch, SECOND)
    assert len(cut.steps) == 2
    assert slices(cut.lanes[0]) == [("prefill", 0.0, 1.0, 20), ("decode", 1.0, 2.0)]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_window(async_scheduling: bool) -> None:
    """One request at a time, 4 s each, all arrived at the start: two first admissions in 5..13 s."""
    config = engine(max_num_seqs=1, async_scheduling=async_scheduling)
    batch = prompts([[(i, 20)] for i in range(9)], output_len=4, gap=0.0)
    _, recorder = recorded(config, batch, SECOND, start=5.0, end=13.0)
    assert [lane.request_id for lane in recorder.lanes] == [2, 3]
    assert min(step.begin for step in recorder.steps) >= 5.0
    assert [(step.begin, step.end) for step in recorder.steps][:2] == (
        [(6.0, 7.0), (7.0, 8.0)] if async_scheduling else [(5.0, 6.0), (6.0, 7.0)]
    )
    assert slices(recorder.lanes[0])[1:] == [("prefill", 8.0, 9.0, 20), ("decode", 9.0, 12.0)]


def prefixsim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def test_file_is_a_valid_trace_and_the_same_twice(scenario: Path, tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    for path in (plain, packed):
        result = prefixsim("run", scenario, "--timeline", path, "--format", "json")
        assert result.exit_code == 0, result.output
        assert f"written: {path}" in result.stderr and "--timeline-window" not in result.stderr
        summary = json.loads(result.stdout)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes()[4:8] == bytes(4), "no time of writing: equal runs, equal bytes"
    assert summary == json.loads(prefixsim("run", scenario, "--format", "json").stdout)
    check_format(json.loads(plain.read_text()), num_lanes=60, num_steps=summary["num_steps"])


def check_format(data: dict[str, Any], num_lanes: int, num_steps: int) -> None:
    """The Trace Event Format's rules for the phases X, C and M."""
    assert data["displayTimeUnit"] == "ms"
    events = data["traceEvents"]
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = {}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert {"name", "ph", "pid", "ts", "args"} <= event.keys()
        assert event["ph"] in ("X", "C", "M") and event["ts"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] > 0
            lanes.setdefault((event["pid"], event["tid"]), []).append(event)
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "requests running", "requests waiting", "KV blocks in use",
    }  # fmt: skip
    assert named == set(lanes) and len(lanes) == num_lanes + 1
    assert max(map(len, lanes.values())) == len(lanes[timeline.ENGINE, 1]) == num_steps
    for lane in lanes.values():
        for one, two in itertools.pairwise(lane):
            assert round(one["ts"] + one["dur"], 3) <= two["ts"]


def test_what_is_left_out_is_told(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    result = prefixsim("run", scenario, "--timeline", out, "--timeline-window", "1:2")
    assert "of 60 requests" in result.stderr and "from 1." in result.stderr
    events = json.loads(out.read_text())["traceEvents"]
    steps = [event["ts"] for event in events if event["ph"] == "X" and event["pid"] == timeline.ENGINE]
    assert 1e6 <= min(steps) < 1.1e6 and 1.9e6 < max(steps) < 2.1e6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeline", "t.txt"], "should end in .json or .gz"),
        (["--timeline", "none/t.json"], "there is no folder"),
        (["--timeline", "out/t.json", "--out", "out"], "lies in --out"),
        (["--timeline", "t.json", "--timeline-window", "5"], "should read START:END"),
        (["--timeline", "t.json", "--timeline-window", "7:5"], "should read START:END"),
        (["--timeline", "t.json", "--timeline-window", "a:5"], "should read START:END"),
        (["--timeline-window", "1:5"], "there is no timeline"),
        (["--timeline", "t.json", "--compare", "seed=1,2"], "are of one run"),
        (["--timeline-window", "1:5", "--compare", "seed=1,2"], "are of one run"),
    ],
)
def test_bad_input(
    scenario: Path, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = prefixsim("run", scenario, *options)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


def test_a_run_without_requests_in_the_window_gives_an_empty_trace(tmp_path: Path) -> None:
    config = engine()
    _, recorder = recorded(config, prompts([[(1, 20)]]), linear(config), start=100.0)
    assert not recorder.steps and not recorder.lanes
    write_timeline(recorder, tmp_path / "t.json")
    assert {event["ph"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]} == {"M"}
    assert list(trace(recorder))
