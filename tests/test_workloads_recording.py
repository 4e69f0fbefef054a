"""The workload kind `recording`: requests, contents and pace of a recorded server, and its settings."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from batches import SEED, make, rows, same, whole
from pydantic import ValidationError
from typer.testing import CliRunner

from sim import Scenario
from sim.cli import app
from sim.errors import InputError
from sim.planning.pace import pace_of, paced
from sim.recording import read_requests
from sim.scenario_file import load, to_yaml
from workloads import Recording, WorkloadError, WorkloadWarning
from workloads.same_content import description, shared

MEASURED = Path(__file__).parent / "measured"
AMPLE, TURNS, OVERLOAD = (
    str(MEASURED / f"{name}.json.gz") for name in ("shared_ample", "multi_turn", "overload_preempt")
)
TINY = str(MEASURED.parent / "recordings" / "async.jsonl.gz")


def prefixsim(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def edited(path: str, to: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A copy of a recording of version 1 with changes."""
    recording = json.loads(gzip.decompress(Path(path).read_bytes()))
    change(recording)
    to.write_text(json.dumps(recording))
    return str(to)


@pytest.mark.parametrize("path", [AMPLE, TURNS, OVERLOAD])
def test_the_requests_are_those_recorded(path: str) -> None:
    recorded = read_requests(path)
    batch = whole(Recording(path=path))
    assert batch.prompt_len.tolist() == recorded.prompt_len.tolist()
    assert batch.output_len.tolist() == recorded.output_len.tolist()
    assert batch.max_tokens.tolist() == recorded.max_tokens.tolist()
    assert not batch.namespace.any() and not batch.priority.any() and not batch.lora.any()


def test_a_request_arrives_when_it_came_into_the_queue() -> None:
    for path in (AMPLE, TURNS, OVERLOAD):
        late = whole(Recording(path=path)).arrival_time - read_requests(path).queued_time
        moved = np.flatnonzero(np.abs(late) > 1e-9)
        # one request was in the queue .17 ms before a step was scheduled, which did not see it
        assert len(moved) == (1 if path == TURNS else 0)
        assert late[moved] == pytest.approx([1.745e-4] * len(moved), abs=1e-9)


def test_a_prompt_goes_on_with_the_answer_of_the_turn_before() -> None:
    recorded = read_requests(TURNS)
    contents = rows(whole(Recording(path=TURNS)))
    for row in np.flatnonzero(recorded.after >= 0).tolist():
        before = int(recorded.after[row])
        told = contents[before]  # prompt and answer, all of it the next prompt's beginning
        assert contents[row][: len(told)] == told
        assert sum(tokens for _, tokens in told) == recorded.prompt_len[before] + recorded.output_len[before]


def test_a_closed_pace_has_the_conversations_as_sessions() -> None:
    recorded = read_requests(TURNS)
    workload = Recording(path=TURNS, pace="closed")
    sessions = list(workload.sessions(SEED, 32))
    assert workload.has_sessions and len(sessions) == 56
    order = workload.order()
    assert sorted(order.tolist()) == list(range(253))
    begins = [0, *accumulate(len(session.after) for session in sessions)]
    delays = []
    for session, begin in zip(sessions, begins, strict=False):
        requests = order[begin : begin + len(session.after)]
        assert session.requests.prompt_len.tolist() == recorded.prompt_len[requests].tolist()
        assert [len(after) for after in session.after] == [0] + [1] * (len(requests) - 1)
        told = [requests[after[0]] for after in session.after[1:]]
        assert told == recorded.after[requests[1:]].tolist()
        delays.extend((session.delay[1:] - recorded.think_time[requests[1:]]).tolist())
        assert session.start == pytest.approx(recorded.queued_time[requests[0]], abs=2e-4)
    # beyond the think time: the ways from the engine to the client and back, 1 ms each, and its timer
    assert min(delays) > 0.0016 and np.mean(delays) == pytest.approx(0.00316, abs=1e-5)
    assert [session.start for session in sessions] == sorted(session.start for session in sessions)


def test_turns_have_no_times_of_their_own_in_a_closed_pace() -> None:
    with pytest.raises(WorkloadError, match="this needs pace: open"):
        next(Recording(path=TURNS, pace="closed").batches(SEED, 16))


def test_the_first_requests_at_another_speed() -> None:
    every, first = whole(Recording(path=TURNS)), whole(Recording(path=TURNS, limit=10, time_scale=0.5))
    assert first.arrival_time.tolist() == (0.5 * every.arrival_time[:10]).tolist()
    assert rows(first) == rows(every)[:10]
    closed = Recording(path=TURNS, pace="closed", limit=10, time_scale=0.5)
    assert sorted(closed.order().tolist()) == list(range(10))
    assert next(closed.sessions(SEED, 16)).start == first.arrival_time[0]


def test_salts_and_priorities(tmp_path: Path) -> None:
    def change(recording: dict[str, Any]) -> None:
        for number, request in enumerate(recording["reqs"]):
            request |= {"salt": f"s{number % 2}", "prio": number % 3} if number % 4 else {}

    batch = whole(Recording(path=edited(OVERLOAD, tmp_path / "r.json", change)))
    by_id = [int(name.removeprefix("r")) for name in read_requests(OVERLOAD).name]
    assert batch.priority.tolist() == [number % 3 if number % 4 else 0 for number in by_id]
    salts = {
        (namespace, number % 2 if number % 4 else None)
        for namespace, number in zip(batch.namespace.tolist(), by_id, strict=True)
    }
    assert len(salts) == 3 and (0, None) in salts


LINES = [
    {"schema": "prefixsim_recording/2", "model": "org/tiny-llama", "device": "a GPU",
     "effective": {"block_size": 16, "num_gpu_blocks": 40, "max_num_seqs": 3, "max_num_batched_tokens": 64,
                   "max_model_len": 512, "policy": "priority", "chunked": True, "enable_prefix_caching": True,
                   "async_scheduling": False, "reserve_full_isl": False, "watermark": 0.01, "max_loras": 2,
                   "kv_cache_dtype": "fp8_e4m3", "hash_algo": "xxhash"},
     "content": {"form": "hashed", "tokens": 16}, "free0": None},
    {"add": 0, "t": 100, "id": "a", "arr": 90, "np": 20, "max": 9, "c": "00000000000000aa", "lora": "x"},
    {"s": [[0, 20, 0]], "i": 0, "t": [110, 120], "new": [[0, 0]], "fr": 37, "q": [1, 0]},
    {"u": 0, "t": [500, 510], "fr2": 37},
    {"add": 1, "t": 520, "id": "b", "arr": 300, "np": 20, "max": 9, "c": "00000000000000aa", "salt": "y"},
    {"s": [[0, 1, 20], [1, 20, 0]], "i": 1, "t": [530, 540], "new": [[1, 0]], "fr": 35, "q": [2, 0]},
    {"u": 1, "t": [700, 710], "fin": [0], "stop": [0], "fr2": 37},
    {"o": 0, "t": 710, "n": 22},
    {"abort": [1], "t": 715},
    {"o": 1, "t": 715, "n": 21},
]  # fmt: skip


def written(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_version_2_with_adapters_stop_tokens_aborts_and_no_end(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", LINES)
    with pytest.warns(WorkloadWarning) as told:
        batch = whole(Recording(path=path))
    assert batch.arrival_time == pytest.approx([100e-6, 520e-6], abs=1e-6)
    assert batch.output_len.tolist() == [2, 2] and batch.max_tokens.tolist() == [9, 9]
    assert batch.lora.tolist() == [1, 0] and len(set(batch.namespace.tolist()) | {0}) == 3
    (one, own), (other, also_own) = rows(batch)
    assert one == other == (0xAA, 16) and own[0] < 0 and also_own[0] < 0 and own[0] != also_own[0]
    texts = sorted(str(one.message).removeprefix(path) for one in told)
    assert len(texts) == 2 and texts[0] == (
        ": 1 requests were aborted: in steps that are not recorded, each ends by itself a token later"
    )
    assert texts[1].startswith(": cut off")


def test_a_run_has_the_settings_of_the_recorded_server(tmp_path: Path) -> None:
    path = written(tmp_path / "server.jsonl", LINES)
    scenario = Scenario(workload={"kind": "recording", "path": path})
    engine = scenario.engine
    assert (scenario.name, scenario.model, scenario.gpu) == ("server", "tiny-llama", "a GPU")
    assert scenario.cost == "recorded"
    assert (engine.block_size, engine.num_gpu_blocks, engine.max_num_seqs) == (16, 40, 3)
    assert (engine.max_num_batched_tokens, engine.max_model_len, engine.max_loras) == (64, 512, 2)
    assert (engine.scheduling_policy, engine.watermark) == ("priority", 0.01)
    assert not engine.async_scheduling and not engine.scheduler_reserve_full_isl
    assert (engine.kv_cache_dtype, engine.prefix_caching_hash_algo) == ("fp8", "xxhash")


def test_a_given_value_wins(tmp_path: Path) -> None:
    given = {
        "name": "mine", "gpu": "h100-sxm", "cost": "h100-sxm/llama-3.1-8b_tp1_bf16",
        "engine": {"num_gpu_blocks": 96, "async_scheduling": True},
    }  # fmt: skip
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(given | {"workload": {"kind": "recording", "path": TURNS}}))
    scenario = load(path, ["engine.max_num_seqs=7"])
    assert (scenario.name, scenario.gpu, scenario.cost) == ("mine", "h100-sxm", given["cost"])
    engine = scenario.engine
    assert (engine.num_gpu_blocks, engine.async_scheduling, engine.max_num_seqs) == (96, True, 7)
    assert (engine.block_size, engine.max_num_batched_tokens) == (32, 256)
    (tmp_path / "again.yaml").write_text(to_yaml(scenario))
    assert load(tmp_path / "again.yaml") == scenario


def test_one_command_without_a_scenario_simulates_a_recorded_server(tmp_path: Path) -> None:
    result = prefixsim(
        "run", "--set", "workload.kind=recording", "--set", f"workload.path={TINY}",
        "--set", "engine.num_gpu_blocks=220",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    text = re.sub(r"\s+", " ", result.stdout)
    assert "Recorded server" in text and "as recorded: block_size 32, tensor_parallel_size 1" in text
    assert "changed: num_gpu_blocks 220, recorded 60" in text


def test_a_run_needs_a_scenario_or_a_workload() -> None:
    result = prefixsim("run", "--set", "engine.block_size=16")
    assert result.exit_code == 2
    assert result.stderr == (
        "prefixsim: run: give a scenario in YAML, or name a workload with --set workload.kind=…\n"
    )
    assert prefixsim("run", "--set", "workload.kind=fourteen_tokens").exit_code == 0


def test_bad_recordings_are_told_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": "something/9"}')
    for path, text in [
        (str(tmp_path / "none.json"), "no file"),
        (str(other), "a recording of format 'something/9'"),
        (str(MEASURED.parent / "conftest.py"), 'it has no "schema"'),
    ]:
        result = prefixsim("run", "--set", "workload.kind=recording", "--set", f"workload.path={path}")
        assert result.exit_code == 2 and text in result.stderr and result.stderr.count("\n") == 1
    with pytest.raises(WorkloadError, match="cannot read the recording"):
        whole(Recording(path=str(tmp_path / "none.json")))
    with pytest.raises(ValidationError, match="pace"):
        Recording(path=TURNS, pace="slow")


def test_recorded_steps_are_a_recordings() -> None:
    with pytest.raises(ValueError, match="the workload is fourteen_tokens: set workload.kind to recording"):
        Scenario(workload={"kind": "fourteen_tokens"}, cost="recorded")
    with pytest.raises(InputError, match="multi_turn.yaml: cost: recorded is .*--from-recording$"):
        load(MEASURED.parents[1] / "scenarios" / "multi_turn.yaml", ["cost=recorded"])


def test_trace_and_mrc_take_a_recordings_file(tmp_path: Path) -> None:
    described = json.loads(prefixsim("trace", "describe", TURNS, "--format", "json").stdout)
    assert (described["format"], described["requests"]) == ("recording", 253)
    assert described["total_input_tokens"] == 192_617 and described["total_output_tokens"] == 10_214
    ceiling = described["ideal_hit_rate"]["32"]
    assert ceiling == pytest.approx(0.8370, abs=1e-4)
    curve = json.loads(prefixsim("mrc", TURNS, "--block-size", "32", "--outputs", "--format", "json").stdout)
    assert curve["ceiling"] == pytest.approx(ceiling, abs=1e-4)
    out = tmp_path / "t.jsonl"
    assert prefixsim("trace", "convert", TURNS, str(out), "--to", "segments").exit_code == 0
    assert same(
        whole(make({"kind": "trace", "path": str(out)})),
        whole(Recording(path=TURNS)),
        but=("arrival_time", "segment_id"),
    )


def test_open_and_closed_ask_the_same() -> None:
    opened, closed = (Recording(path=TURNS, pace=pace) for pace in ("open", "closed"))  # type: ignore[arg-type]
    assert shared(description(opened, 0), description(closed, 0)).again
    fewer = Recording(path=TURNS, limit=10)
    found = shared(description(opened, 0), description(fewer, 0))
    assert not found.again and found.ids
    assert not shared(description(opened, 0), description(Recording(path=AMPLE), 0)).ids


def test_its_pace_is_a_speed() -> None:
    scenario = Scenario(workload={"kind": "recording", "path": TURNS, "time_scale": 0.5}, measure_from=8.0)
    pace = pace_of(scenario)
    assert (pace.name, pace.now) == ("speed", 1.0)
    assert paced(scenario, pace, 2.0) == ["workload.time_scale=0.25", "measure_from=4.0"]


def test_a_recording_among_tenants() -> None:
    tenants = {
        "a": {"workload": {"kind": "recording", "path": TURNS, "pace": "closed"}},
        "b": {"workload": {"kind": "recording", "path": OVERLOAD}},
    }
    sessions = list(make({"kind": "mix", "tenants": tenants}).sessions(SEED, 32))
    assert len(sessions) == 56 + 150
    starts = [session.start for session in sessions]
    assert starts == sorted(starts)
