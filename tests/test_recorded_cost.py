"""`cost: recorded`: recorded servers again, step by step, and what happens where a run parts from them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from test_workloads_recording import LINES, written

from sim import Scenario, run
from sim.api import Run
from sim.recorded_steps import RESET, recorded_steps
from sim.recording import Requests, read_header, read_requests, read_steps
from sim.report import to_json

HERE = Path(__file__).parent
CPU_RUNS = [
    HERE / "measured" / f"{name}.json.gz" for name in ("shared_ample", "multi_turn", "overload_preempt")
]
RECORDER_RUNS = sorted((HERE / "recordings").glob("*.jsonl.gz"))
ASYNC, ASYNC_MIXED, TURNS = (
    HERE / "recordings" / f"{name}.jsonl.gz" for name in ("async", "async_mixed", "turns")
)
STAMP = 1.5e-4  # seconds: the engine stamps a token some .03 ms before its step ends


class Replay(NamedTuple):
    """A simulated recording. Columns of requests are in the order of the recording."""

    recorded: Requests
    simulated: Run
    row: npt.NDArray[np.int64]  # of each request, in `simulated.requests`

    def column(self, name: str) -> npt.NDArray[Any]:
        return self.simulated.requests[name].to_numpy()[self.row]


def replay(path: Path, pace: str = "open", **rest: Any) -> Replay:
    scenario = Scenario(workload={"kind": "recording", "path": str(path), "pace": pace}, **rest)
    simulated = run(scenario)
    number = scenario.workload.order()[simulated.requests["request_id"].to_numpy()]  # type: ignore[union-attr]
    return Replay(read_requests(path), simulated, np.argsort(number))


def far(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """The largest difference; a time that never came is NaN on both sides."""
    assert np.array_equal(np.isnan(a), np.isnan(b))
    return float(np.nanmax(np.abs(a - b)))


@pytest.mark.parametrize("pace", ["open", "closed"])
@pytest.mark.parametrize("path", [*CPU_RUNS, *RECORDER_RUNS], ids=lambda path: path.name.partition(".")[0])
def test_a_recorded_server_again(path: Path, pace: str) -> None:
    """Mean TTFT from the engine's queue to its first token: asked for are .2 %, multi_turn 1 %."""
    recorded, simulated, _ = again = replay(path, pace)
    steps = read_steps(path)
    assert simulated.summary["steps_as_recorded"] == simulated.summary["num_steps"]
    assert simulated.summary["num_steps"] == (steps.num_tokens > 0).sum()
    assert not [text for text in simulated.summary["warnings"] if "cost: recorded" in text]

    hits = np.maximum(recorded.num_cached_tokens, 0)  # -1: never admitted
    assert again.column("num_cached_tokens").tolist() == hits.tolist()
    assert again.column("num_preemptions").tolist() == recorded.num_preemptions.tolist()
    assert again.column("output_len").tolist() == recorded.output_len.tolist()
    assert far(again.column("scheduled_time"), recorded.scheduled_time) < 2e-5
    assert far(again.column("first_token_time"), recorded.first_token_time) < STAMP
    ended = ~recorded.aborted
    assert far(again.column("finish_time")[ended], recorded.finish_time[ended]) < STAMP
    measured = np.nanmean(recorded.first_token_time - recorded.queued_time)
    assert simulated.summary["mean_ttft_ms"] / 1e3 == pytest.approx(measured, rel=0.0005)


def test_the_recordings_show_what_they_should() -> None:
    assert len(RECORDER_RUNS) >= 8
    servers = [read_header(path).effective for path in RECORDER_RUNS]
    assert {server.async_scheduling for server in servers} == {True, False}
    assert {server.policy for server in servers} == {"fcfs", "priority"}
    requests = [read_requests(path) for path in RECORDER_RUNS]
    assert read_requests(TURNS).after.max() >= 0 and read_requests(ASYNC).num_preemptions.sum() == 9
    assert sum(one.aborted.sum() for one in requests) == 10
    assert sum(one.stopped.sum() for one in requests) > 10
    mixed = read_requests(ASYNC_MIXED)
    assert mixed.aborted.sum() == 3 and len(set(mixed.salt)) > 1


def test_sums_over_time_are_those_of_the_recorded_durations() -> None:
    steps = read_steps(CPU_RUNS[2])
    ran = steps.num_tokens > 0
    duration = (steps.update_end - steps.schedule_start)[ran]
    summary = replay(CPU_RUNS[2]).simulated.summary
    assert summary["busy_time"] == pytest.approx(duration.sum(), rel=1e-9)
    used = 109 - steps.free[ran]
    assert summary["mean_kv_cache_usage_perc"] == pytest.approx(
        (used * duration).sum() / duration.sum() / 109, rel=1e-9
    )


def test_from_the_first_other_step_on_a_fit_tells_the_time() -> None:
    recorded, simulated, _ = again = replay(CPU_RUNS[2], engine={"num_gpu_blocks": 220})
    (told,) = [text for text in simulated.summary["warnings"] if text.startswith("cost: recorded")]
    assert told == (
        "cost: recorded: step 146 of the recording schedules no tokens of request 14, and the simulation 135 "
        "tokens; from there on a fit of its steps times them"
    )
    assert simulated.summary["steps_as_recorded"] == 146
    until = read_steps(CPU_RUNS[2]).update_end[145]
    before = recorded.first_token_time < until
    assert 10 < before.sum() < 20
    assert far(again.column("first_token_time")[before], recorded.first_token_time[before]) < STAMP
    assert not np.isclose(again.column("first_token_time")[~before], recorded.first_token_time[~before]).any()
    assert simulated.summary["num_preemptions"] == 0


def test_what_changes_no_step_parts_from_nothing() -> None:
    """A pool that never fills, a block larger; and times that are .01 % longer, 6 ms at the end."""
    found = replay(CPU_RUNS[0], engine={"num_gpu_blocks": 4001}).simulated
    assert found.summary["steps_as_recorded"] == found.summary["num_steps"] == 2942
    workload = {"kind": "recording", "path": str(CPU_RUNS[0]), "time_scale": 1.0001}
    later = run(Scenario(workload=workload))
    assert later.summary["steps_as_recorded"] == 2942
    first = found.requests["first_token_time"] - found.requests["arrival_time"]
    assert later.summary["mean_ttft_ms"] == pytest.approx(1e3 * first.mean(), rel=0.001)


def test_a_fit_that_tells_all_the_time_is_near_the_recording() -> None:
    """Within 3 %: a first step of 255 tokens in place of 256 is not the recorded one."""
    recorded, simulated, _ = replay(CPU_RUNS[0], engine={"max_num_batched_tokens": 255})
    assert simulated.summary["steps_as_recorded"] == 0
    measured = (recorded.first_token_time - recorded.queued_time).mean()
    assert simulated.summary["mean_ttft_ms"] / 1e3 == pytest.approx(measured, rel=0.03)
    assert simulated.summary["prefix_cache_hits"] == recorded.num_cached_tokens.sum()


def test_a_recording_that_ends_before_its_requests_do(tmp_path: Path) -> None:
    recording = json.loads(gzip.decompress(CPU_RUNS[2].read_bytes()))
    recording["steps"] = recording["steps"][:400]
    path = tmp_path / "short.json"
    path.write_text(json.dumps(recording))
    found = run(Scenario(workload={"kind": "recording", "path": str(path)}))
    told = " ".join(found.summary["warnings"])
    assert found.summary["steps_as_recorded"] == 400
    assert "requests had not ended: each ends here with the tokens that it had got" in told
    assert "the recording ends after 400 steps that schedule something, and the simulation" not in told


def test_a_cluster_is_timed_by_the_fit() -> None:
    found = replay(TURNS, cluster={"replicas": 2}).simulated
    assert "steps_as_recorded" not in found.summary
    (told,) = [text for text in found.summary["warnings"] if text.startswith("cost: recorded")]
    assert "the recording is of one engine: with 2 replicas" in told


@pytest.mark.parametrize("path", [TURNS, ASYNC], ids=["made async", "made sync"])
def test_steps_that_overlap_otherwise_are_timed_by_the_fit(path: Path) -> None:
    """No step of a server that ends one before it schedules the next says when it would not have."""
    recorded = read_header(path).effective.async_scheduling
    summary = replay(path, engine={"async_scheduling": not recorded}).simulated.summary
    (told,) = [text for text in summary["warnings"] if text.startswith("cost: recorded")]
    assert told == (
        "cost: recorded: async_scheduling is not as recorded: all step times are those of a fit of its steps"
    )
    assert "steps_as_recorded" not in summary
    assert summary["mean_ttft_ms"] != replay(path).simulated.summary["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"gpu": "h100-sxm"}, "h100-sxm, tiny-llama, tp 1"),
        ({"model": "llama-3.1-8b"}, "cpu, llama-3.1-8b, tp 1"),
        ({"engine": {"tensor_parallel_size": 4}}, "cpu, tiny-llama, tp 4"),
    ],
)
def test_another_machine_than_the_recorded_one_is_warned_of(changed: dict[str, Any], asked: str) -> None:
    summary = run(Scenario(workload={"kind": "recording", "path": str(TURNS)}, **changed)).summary
    assert f"step time is that of cpu, tiny-llama, tp 1, as recorded, not of {asked}" in summary["warnings"]


def test_a_step_has_a_pause_a_duration_and_what_it_scheduled(tmp_path: Path) -> None:
    lines = [
        *LINES[:7],  # request 0 at 100, step 0 from 110 to 510, request 1 at 520, step 1 from 530 to 710
        {"o": 0, "t": 710, "n": 22},
        {"s": [[1, 1, 20]], "i": 2, "t": [740, 745], "fr": 35, "q": [1, 0]},
        {"u": 2, "t": [900, 910], "fin": [1], "fr2": 37},
        {"o": 1, "t": 910, "n": 22},
        {"s": [], "i": 3, "t": [920, 925], "fr": 37, "q": [0, 0]},  # tells the worker
        {"u": 3, "t": [930, 935], "fr2": 37},
        {"add": 2, "t": 2000, "id": "c", "arr": 1990, "np": 15, "max": 9},
        {"s": [[2, 15, 0]], "i": 4, "t": [2007, 2010], "new": [[2, 0]], "fr": 37, "q": [1, 0]},
        {"u": 4, "t": [2500, 2510], "fr2": 37},
        {"s": [[2, 1, 15]], "i": 5, "t": [2530, 2540], "fr": 37, "q": [1, 0]},  # never updated
    ]  # fmt: skip
    steps = recorded_steps(written(tmp_path / "r.jsonl", lines))
    assert steps.number.tolist() == [0, 1, 2, 4]
    us = 1e6
    assert (steps.pause * us).round(3).tolist() == [10, 20, 30, 7]
    assert (steps.duration * us).round(3).tolist() == [400, 180, 170, 503]
    assert steps.updates_before.tolist() == [0, 1, 2, 3]
    assert [steps.decisions(step) for step in range(4)] == [{0: 20}, {0: 1, 1: 20}, {1: 1}, {2: 15}]


def test_requests_are_aborted_as_they_were() -> None:
    recorded, simulated, _ = again = replay(ASYNC_MIXED)
    early = recorded.aborted & np.isnan(recorded.first_token_time)
    assert simulated.summary["failed"] == early.sum() == 2
    assert again.column("refused")[early].tolist() == [2, 2]
    (told,) = [text for text in simulated.summary["warnings"] if "before their first token" in text]
    assert told == "2 requests were aborted before their first token, and count as failed"


def test_what_is_done_to_an_engine_comes_between_two_calls(tmp_path: Path) -> None:
    lines = [
        *LINES[:4],  # request 0 at 100, step 0 from 110 to 510
        {"reset": False, "t": 515},
        {"add": 1, "t": 520, "id": "b", "arr": 300, "np": 15, "max": 9},
        {"abort": [1], "t": 522},
        {"o": 1, "t": 522, "n": 15},
        {"s": [[0, 1, 20]], "i": 1, "t": [530, 540], "fr": 35, "q": [1, 0]},
        {"abort": [0], "t": 560},
        {"o": 0, "t": 560, "n": 21},
        {"u": 1, "t": [700, 710], "fr2": 37},
        {"add": 2, "t": 800, "id": "c", "arr": 300, "np": 15, "max": 9},
        {"abort": [2], "t": 801},
        {"o": 2, "t": 801, "n": 15},
        {"add": 3, "t": 900, "id": "d", "arr": 300, "np": 15, "max": 9},
        {"s": [[3, 15, 0]], "i": 2, "t": [930, 940], "new": [[3, 0]], "fr": 35, "q": [1, 0]},
        {"u": 2, "t": [990, 1000], "fr2": 35},
    ]
    for step in range(3, 11):
        start = 1000 + 100 * (step - 3)
        times = {"s": [[3, 1, 12 + step]], "i": step, "t": [start + 7, start + 9], "fr": 35, "q": [1, 0]}
        lines += [times, {"u": step, "t": [start + 90, start + 100], "fin": [3] * (step == 10), "fr2": 37}]
    lines.append({"o": 3, "t": 1800, "n": 24})
    steps = recorded_steps(written(tmp_path / "r.jsonl", lines))
    assert steps.between == {2: [RESET, 1], 3: [0], 4: [2]}
    assert (steps.pause * 1e6).round(3).tolist() == [10, 20, 30] + [7] * 8

    again = run(Scenario(workload={"kind": "recording", "path": str(tmp_path / "r.jsonl")}))
    assert again.summary["steps_as_recorded"] == again.summary["num_steps"] == 11
    requests = again.requests.sort_values("request_id")
    assert requests["refused"].tolist() == [0, 2, 2, 0] and requests["output_len"].tolist() == [1, 0, 0, 9]
    assert (requests["scheduled_time"] * 1e6).round(1).tolist()[::3] == [110, 930]


def test_of_two_steps_in_flight_the_second_follows_the_first(tmp_path: Path) -> None:
    steps = recorded_steps(ASYNC)
    before = np.arange(len(steps.number)) - steps.updates_before
    assert set(before.tolist()) == {0, 1}  # in flight when a step is scheduled
    assert (before == 1).mean() > 0.9


CODE = """
import sys
from sim import Scenario
from sim.report import to_json
from sim.simulation import run
result = run(Scenario.model_validate_json(sys.argv[1]))
result.records.discard()
print(to_json(result.summary))
"""


def test_compiled_and_plain_give_the_same_bytes() -> None:
    path = str(ASYNC)
    scenario = Scenario(workload={"kind": "recording", "path": path}, engine={"num_gpu_blocks": 70})
    plain = subprocess.run(
        [sys.executable, "-c", CODE, scenario.model_dump_json()],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    result = run(scenario)
    assert 0 < result.summary["steps_as_recorded"] < result.summary["num_steps"]
    assert plain == to_json(result.summary) + "\n"
