"""Recordings of a server: both formats say the same, are read as streams, and verify names what differs."""

from __future__ import annotations

import gzip
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded
from recorded import Line
from recordings_made import (
    HERE,
    MEASURED,
    SMALL,
    golden_case,
    golden_cases,
    refused,
    small_header,
    small_recording,
    two_steps,
    verify,
    written,
)
from typer.testing import CliRunner

from sim.cli import app
from sim.recording import (
    Add,
    Header,
    RecordingWarning,
    Requests,
    Steps,
    calls,
    read_requests,
    read_steps,
)
from sim.recording.header import Content, Effective
from sim.recording.lines import KINDS
from sim.recording.source import expanded
from sim.verify.engine_run import replay_recording

REAL = sorted((HERE / "recordings").glob("*.jsonl.gz"))
FEW = (
    "budget2", "mml0", "mml1", "nochunk1", "wmidle3", "abortasync0", "abortasync3", "salt_lora1", "reset1",
    "reset2", "rand22", "rand26", "rand46", SMALL,
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> list[Line]:
    return small_recording()


# what both formats say


@pytest.mark.parametrize("name", FEW)
def test_a_recording_of_what_vllm_decided_replays(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = written(golden_case(name), monkeypatch)
    path = recorded.write(tmp_path / "r.jsonl.gz", recorded.delta_coded(iter(lines)))
    assert replay_recording(path) == sum("s" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hashed", "token_ids"])
@pytest.mark.parametrize("file", ["golden_scheduler_targeted", "golden_scheduler_resets", "golden_scheduler"])
def test_recordings_of_all_that_vllm_decided_replay(
    file: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in golden_cases(file):
        lines = written(case, monkeypatch, form)
        path = recorded.write(tmp_path / "r.jsonl", recorded.delta_coded(iter(lines)))
        assert replay_recording(path) == sum("s" in line for line in lines), case["name"]


@pytest.mark.parametrize("form", ["hashed", "token_ids"])
def test_version_2_says_what_version_1_says(form: str, tmp_path: Path) -> None:
    old = MEASURED["multi_turn"]
    new = recorded.write(tmp_path / "r.jsonl.gz", recorded.delta_coded(recorded.of_version_1(old, form)))
    assert replay_recording(new) == 4486
    first, second = read_steps(old), read_steps(new)
    for name in first._fields[:-3]:  # what version 2 does not know of the processes
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
    assert np.isnan(second.worker_cpu).all()
    had, have = read_requests(old), read_requests(new)
    for name in (
        "name", "prompt_len", "output_len", "max_tokens", "num_cached_tokens", "num_preemptions", "priority",
        "after", "stopped", "aborted", "salt", "lora",
    ):  # fmt: skip
        assert np.array_equal(getattr(had, name), getattr(have, name)), name
    # the engine's stamps are drawn a little before its calls begin and end
    np.testing.assert_allclose(had.first_token_time, have.first_token_time, atol=2e-4)
    np.testing.assert_allclose(had.finish_time, have.finish_time, atol=2e-4)
    np.testing.assert_allclose(had.scheduled_time, have.scheduled_time, atol=2e-4)
    # the predecessor's end at the engine, its last token at the client, the request at the engine: 2 ms
    followed = had.after >= 0
    assert followed.sum() == 197
    np.testing.assert_allclose(had.think_time[followed], have.think_time[followed], atol=0.02)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_what_the_recorder_wrote_replays(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        assert replay_recording(path) == len(read_steps(path).running) > 0
    requests = read_requests(path)
    assert sorted(requests.finish_time) == list(np.sort(requests.finish_time)), "all ended"


def test_the_figures_of_the_measured_runs() -> None:
    """Those of tests/measured/README.md."""
    for name, num_requests, hit_rate, preemptions, mean_ms in (
        ("shared_ample", 320, 0.707, 0, 140),
        ("multi_turn", 253, 0.835, 0, 66),
        ("overload_preempt", 150, 0.418, 104, 8417),
    ):
        found, steps = read_requests(MEASURED[name]), read_steps(MEASURED[name])
        assert len(found.name) == num_requests
        assert found.num_cached_tokens.sum() / found.prompt_len.sum() == pytest.approx(hit_rate, abs=5e-4)
        assert steps.prefix_cache_hits.sum() == found.num_cached_tokens.sum()
        assert steps.prefix_cache_queries.sum() == found.prompt_len.sum()
        assert found.num_preemptions.sum() == steps.num_preempted.sum() == preemptions
        assert 1e3 * (found.client_first - found.submitted_time).mean() == pytest.approx(mean_ms, abs=0.5)
        assert np.array_equal(found.output_len, found.max_tokens) and not found.stopped.any()
        assert steps.num_outputs.sum() == found.output_len.sum()
        assert steps.num_admitted.sum() == num_requests + preemptions


def test_the_sums_of_a_step() -> None:
    steps = read_steps(MEASURED["overload_preempt"])
    # step 2: [r0, 1 token over 296], [r1, 255 over 0]
    assert [int(getattr(steps, name)[2]) for name in (
        "num_tokens", "num_seqs", "num_outputs", "num_decodes", "decode_kv", "num_prefills", "prefill_tokens",
        "prefill_squares", "prefill_cross", "prefill_context", "sum_kv", "pairs",
    )] == [256, 2, 1, 1, 297, 1, 255, 255**2, 0, 0, 297 + 255, 297 + 255 * 128]  # fmt: skip
    assert [int(getattr(steps, name)[2]) for name in ("running", "waiting", "free", "free_after")] == [
        2,
        0,
        91,
        91,
    ]


def test_a_stop_an_abort_and_a_salt_are_columns(small: list[Line], tmp_path: Path) -> None:
    found = read_requests(recorded.write(tmp_path / "r.jsonl", small))
    stopped = {row for line in small for row in line.get("stop", [])}
    aborted = {row for line in small for row in line.get("abort", [])}
    assert stopped and aborted
    assert set(np.flatnonzero(found.stopped)) == stopped
    assert set(np.flatnonzero(found.aborted)) == aborted
    assert (found.output_len[found.stopped] < found.max_tokens[found.stopped]).all()
    assert not np.isnan(found.finish_time).any()
    lengths = [sum(length for _, length in segments) for segments in found.segments]
    assert np.array_equal(lengths, found.prompt_len + found.output_len)


def test_a_token_in_flight_when_its_request_ends_is_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under async scheduling a stop token comes while another token is being computed."""
    lines = written(golden_case("abortasync0"), monkeypatch)
    found = read_requests(recorded.write(tmp_path / "r.jsonl", lines))
    ends = {line["o"]: line["n"] for line in lines if "o" in line}
    assert found.stopped.any() and len(ends) == len(found.name)
    assert (found.prompt_len + found.output_len).tolist() == [ends[row] for row in range(len(ends))]


def test_salts_adapters_and_priorities_are_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(golden_case("salt_lora1"), monkeypatch)
    found = read_requests(recorded.write(tmp_path / "r.jsonl", lines))
    adds = [line for line in lines if "add" in line]
    assert found.salt == [line.get("salt") for line in adds] and {*found.salt} > {None}
    assert found.lora == [line.get("lora") for line in adds] and {*found.lora} > {None}
    assert found.priority.tolist() == [line.get("prio", 0) for line in adds] and len({*found.priority}) > 1


def test_a_list_that_refers_to_the_step_before() -> None:
    before = [(row, 1, 10 * row) for row in range(6)]
    assert expanded([6], before) == [(row, 1, 10 * row + 1) for row in range(6)]
    assert expanded([1, -2, 3, [9, 4, 0]], before) == [
        (0, 1, 1),
        (3, 1, 31),
        (4, 1, 41),
        (5, 1, 51),
        [9, 4, 0],
    ]
    assert expanded([[9, 4, 0], -5, 1], [(0, 5, 7)] * 6) == [[9, 4, 0], (0, 1, 12)]
    assert expanded([], before) == []
    assert expanded([7], before) == [7], "left for the check"


def test_who_follows_whom(tmp_path: Path) -> None:
    """A turn follows the request whose prompt and answer it repeats; one that shares a prefix does not."""
    size, system = 4, list(range(8))
    question, answer = [20, 21, 22, 23], [30, 31, 32, 33, 34]
    prompts = [
        [*system, *question],  # 0: answered
        [*system, 40, 41, 42, 43],  # 1: the same prefix only
        [*system, *question, *answer, 50],  # 2: goes on with 0
        [*system, *question, *answer, 50],  # 3: arrives before 0 ends
        [*system, *question, 30, 31, 32, 99, 98],  # 4: another answer
    ]
    arrivals = [0, 10, 5000, 900, 6000]
    header = small_header()
    lines = [header]
    for row, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True)):
        ids = "".join(recorded.chunk_ids(prompt, size))
        lines.append(
            {"add": row, "t": arrival, "id": f"r{row}", "arr": arrival, "np": len(prompt), "max": 5, "c": ids}
        )
        if row == 1:
            lines += [{"abort": [0], "t": 1000}]
            whole = recorded.chunk_ids([*prompts[0], *answer], size)
            lines += [{"o": 0, "t": 1000, "n": 17, "c": "".join(whole[3:])}]
    found = read_requests(recorded.write(tmp_path / "r.jsonl", [*lines, {"end": True, "t": 7000}]))
    assert found.after.tolist() == [-1, -1, 0, -1, -1]
    assert found.think_time[2] == pytest.approx(0.004)


def test_requests_are_read_ahead_only_as_far_as_they_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of the future are the ends of requests that live now, not all that follow."""
    held = []
    outcomes = sys.modules["sim.recording.calls"]._Outcomes
    added = outcomes.added

    def watched(self: Any, number: int, line: Any) -> Any:
        result = added(self, number, line)
        held.append(len(self.known))
        return result

    monkeypatch.setattr(outcomes, "added", watched)
    assert sum(isinstance(call, Add) for call in calls(MEASURED["shared_ample"])) == len(held) == 320
    assert max(held) < 40


def test_every_field_is_explained() -> None:
    text = (HERE.parent / "docs" / "recordings.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(\w+)`", text))
    models = [*KINDS.values(), Header, Effective, Content]
    fields = {field.alias or name for model in models for name, field in model.model_fields.items()}
    only_in_version_1 = {"name", "loadavg", "after", "think", "sched", "ftok", "ltok", "w", "num_free"}
    assert fields - known - only_in_version_1 == set()
    assert {*Requests._fields, *Steps._fields} - known == set()


# what verify finds


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        (
            "s",
            lambda s: [[s[0][0], s[0][1] + 1, s[0][2]], *s[1:]],
            "s[0]: recorded (0, 13, 0), replayed (0, 12, 0)",
        ),
        ("new", lambda new: [[new[0][0], new[0][1] + 8]], "new[0]: recorded (0, 8), replayed (0, 0)"),
        ("res", lambda res: [[0, 4]], "res[0]: recorded (0, 4), replayed nothing"),
        ("nb", lambda nb: nb + 1, "nb: recorded 3, replayed 2"),
        ("bcrc", lambda crc: crc ^ 1, "bcrc: recorded "),
        ("nev", lambda nev: 1, "nev: recorded 1, replayed 0"),
        ("ecrc", lambda crc: 7, "ecrc: recorded 7, replayed 0"),
        ("fr", lambda fr: fr - 1, "fr: recorded "),
        ("q", lambda q: [q[0], q[1] + 1], "q: recorded (1, 1), replayed (1, 0)"),
        ("pre", lambda pre: [[0, 3, 1]], "pre[0]: recorded (0, 3, 1), replayed nothing"),
    ],
)
def test_a_changed_decision_is_named(field: str, change: Any, words: str, tmp_path: Path) -> None:
    lines = [small_header(), *two_steps()]
    assert verify(recorded.write(tmp_path / "r.jsonl", lines)).exit_code == 0
    lines[2][field] = change(lines[2].get(field, 0))
    path = recorded.write(tmp_path / "r.jsonl", lines)
    result = verify(path)
    assert result.exit_code == 1
    first, last = result.stdout.splitlines()
    assert first.startswith(f"{path}: step 0, {words}"), first
    assert last == "1 cases, 1 mismatches"


@pytest.mark.parametrize(
    ("line", "field", "value", "words"),
    [
        (
            3,
            "pcs",
            [1, 12, 8, 0, 0, 0],
            "step 0, pcs: recorded (1, 12, 8, 0, 0, 0), replayed (1, 12, 0, 0, 0, 0)",
        ),
        (3, "fr2", 46, "step 0, fr2: recorded 46, replayed 47"),
        (7, "reset", False, "step 2, before it, reset: recorded False, replayed True"),
        (8, "end_free", 1, "step 2, before it, end_free: recorded 1, replayed "),
    ],
)
def test_a_changed_outcome_is_named(line: int, field: str, value: Any, words: str, tmp_path: Path) -> None:
    lines = [small_header(), *two_steps()]
    lines[line][field] = value
    result = verify(recorded.write(tmp_path / "r.jsonl", lines))
    assert result.exit_code == 1
    assert words in result.stdout, result.stdout


def test_a_server_without_statistics(tmp_path: Path) -> None:
    lines = [small_header(log_stats=False), *two_steps()]
    del lines[3]["pcs"]
    assert verify(recorded.write(tmp_path / "r.jsonl", lines)).exit_code == 0
    lines[0] = small_header()
    assert "step 0, pcs: " in verify(recorded.write(tmp_path / "r.jsonl", lines)).stdout


@pytest.mark.parametrize(
    ("version", "policy", "noted"),
    [("0.32.0", "priority", True), ("0.33.0", "priority", False), ("0.32.0", "fcfs", False)],
)
def test_a_rule_that_was_another_in_an_older_vllm(
    version: str, policy: str, noted: bool, tmp_path: Path
) -> None:
    lines = [small_header(policy=policy) | {"versions": {"vllm": version, "torch": None}}, *two_steps()]
    lines[2]["fr"] = 46
    result = verify(recorded.write(tmp_path / "r.jsonl", lines))
    assert ("vLLM 0.32 ends a step at a request that preempts itself" in result.stdout) == noted


def test_vllms_asynchronous_scheduler_in_a_synchronous_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CPU: which rules hold is said by the class of the scheduler, not by the engine's loop."""
    lines = written(golden_case("rand22"), monkeypatch)
    lines[0]["effective"] |= {"async_scheduling": False, "scheduler_base": "AsyncScheduler"}
    assert replay_recording(recorded.write(tmp_path / "r.jsonl", lines)) > 100
    lines[0]["effective"] |= {"scheduler_base": "Scheduler"}
    refused(recorded.write(tmp_path / "r.jsonl", lines), "2 steps in flight, at most 1 can be")


def test_version_1_is_as_strict(tmp_path: Path) -> None:
    run = json.loads(gzip.decompress(MEASURED["overload_preempt"].read_bytes()))
    whole = json.dumps(run)
    path = tmp_path / "r.json"
    for field, change in (
        ("fr", lambda step: step | {"fr": step["fr"] + 1}),
        ("bcrc", lambda step: step | {"bcrc": step["bcrc"] ^ 1}),
        ("ecrc", lambda step: step | {"ecrc": step["ecrc"] ^ 1}),
        ("fin[0]", lambda step: step | {"fin": []}),
        ("res[0]", lambda step: step | {"res": [[step["res"][0][0], step["res"][0][1] + 32]]}),
        (
            "pre[0]",
            lambda step: step | {"pre": [[step["pre"][0][0], step["pre"][0][1] - 1, step["pre"][0][2]]]},
        ),
    ):
        run = json.loads(whole)
        steps = run["steps"]
        index = next(i for i, step in enumerate(steps) if i > 900 and field.partition("[")[0] in step)
        steps[index] = change(steps[index])
        path.write_text(json.dumps(run))
        result = verify(path)
        assert result.exit_code == 1 and f"{path}: step {index}, {field}: recorded " in result.stdout, (
            result.output
        )
    run = json.loads(whole)
    path.write_text(json.dumps(run | {"end_free": run["end_free"] + 1}))
    result = verify(path)
    assert result.exit_code == 1 and "before it, num_free: recorded 110, replayed 109" in result.stdout


def test_a_recording_as_json(tmp_path: Path) -> None:
    good = recorded.write(tmp_path / "good.jsonl", [small_header(), *two_steps()])
    lines = [small_header(), *two_steps()]
    lines[2]["fr"] = 46
    bad = recorded.write(tmp_path / "bad.jsonl", lines)
    result = CliRunner().invoke(app, ["verify", str(good), str(bad), "--format", "json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "cases": 2,
        "mismatches": 1,
        "results": [
            {"path": str(good), "name": str(good), "steps": 2, "first_difference": None},
            {
                "path": str(bad), "name": str(bad), "steps": 0,
                "first_difference": {"step": 0, "field": "fr", "recorded": 46, "replayed": 47},
            },
        ],
    }  # fmt: skip
