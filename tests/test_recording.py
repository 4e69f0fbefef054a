"""Recordings of a server: both formats say the same, are read as streams, and refuse what they should."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded
from typer.testing import CliRunner

from sim.cli import app
from sim.core import EngineConfig
from sim.errors import InputError
from sim.recording import (
    Add,
    Header,
    RecordingWarning,
    Requests,
    Steps,
    calls,
    read_header,
    read_requests,
    read_steps,
)
from sim.recording.header import Content, Effective
from sim.recording.lines import KINDS
from sim.recording.source import expanded
from sim.verify import scheduler as scheduler_module
from sim.verify.contents import crc
from sim.verify.engine_run import replay_recording
from sim.verify.scheduler import replay_scheduler

HERE = Path(__file__).parent
MEASURED = {path.name.partition(".")[0]: path for path in sorted((HERE / "measured").glob("*.json.gz"))}
REAL = sorted((HERE / "recordings").glob("*.jsonl.gz"))
Line = dict[str, Any]


def verify(*files: Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, files)])


def golden_cases(file: str) -> list[Any]:
    data: Any = json.loads(gzip.decompress((HERE / "golden" / f"{file}.json.gz").read_bytes()))
    return data["cases"]  # type: ignore[no-any-return]


def golden_case(name: str) -> Any:
    files = ("golden_scheduler_targeted", "golden_scheduler_resets", "golden_scheduler")
    return next(case for file in files for case in golden_cases(file) if case["name"] == name)


def written(case: Any, monkeypatch: pytest.MonkeyPatch, form: str = "hashed") -> list[dict[str, Any]]:
    """The lines of a recording of what vLLM decided in a golden case."""
    monkeypatch.setattr(scheduler_module, "SchedulerReplay", recorded.RecordingReplay)
    monkeypatch.setattr(recorded.RecordingReplay, "form", form)
    replay_scheduler(case)  # raises where vLLM decided otherwise
    return recorded.RecordingReplay.last.finished()


SMALL = "rand15"  # 9 requests in blocks of 1, one adapter at a time, preemptions, aborts, resets, stop tokens
FEW = (
    "budget2", "mml0", "mml1", "nochunk1", "wmidle3", "abortasync0", "abortasync3", "salt_lora1", "reset1",
    "reset2", "rand22", "rand26", "rand46", SMALL,
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> list[Line]:
    """The lines of a short recording with nearly all that lines may say."""
    with pytest.MonkeyPatch.context() as patch:
        return written(golden_case(SMALL), patch)


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


def small_header(**effective: Any) -> Line:
    """A first line; blocks of 8, chunks of 4."""
    line: Line = json.loads(json.dumps(recorded.header_of(EngineConfig(8, 50, 64, 8, 400))))
    line["effective"] |= effective
    line["content"]["tokens"] = 4
    return line


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


def two_steps() -> list[Line]:
    """A request of 12 tokens that generates 2, in blocks of 8; then a reset."""
    ids = recorded.chunk_ids(range(14), 4)
    free = [2, *range(3, 50), 1]  # its last block has no hash, so it goes to the head
    return [
        {"add": 0, "t": 5, "id": "a", "arr": 1, "np": 12, "max": 2, "c": "".join(ids[:3])},
        {
            "s": [[0, 12, 0]],
            "i": 0,
            "t": [10, 11],
            "new": [[0, 0]],
            "nb": 2,
            "bcrc": crc([1, 2]),
            "fr": 47,
            "q": [1, 0],
        },
        {"u": 0, "t": [20, 21], "fr2": 47, "pcs": [1, 12, 0, 0, 0, 0]},
        {"s": [[0, 1, 12]], "i": 1, "t": [30, 31], "fr": 47, "q": [1, 0]},
        {"u": 1, "t": [40, 41], "fin": [0], "fr2": 49},
        {"o": 0, "t": 41, "n": 14},
        {"reset": True, "t": 45},
        {"end": True, "t": 50, "end_free": crc(free), "steps": 2},
    ]


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


# what cannot be used


def refused(path: Path, *words: str) -> str:
    """Whatever reads it refuses a file, in one line."""
    result = verify(path)
    assert result.exit_code == 2, result.output
    (line,) = [text for text in result.stderr.splitlines() if "compiling" not in text]
    assert line.startswith(f"prefixsim: {path}: ") and len(line) < 500, line
    for word in words:
        assert word in line, line
    return line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "prefixsim_recording/3"}, ["'prefixsim_recording/3'", "reads prefixsim_recording/2 and"]),
        ({"kv_groups": ["FullAttentionSpec(a)", "SlidingWindowSpec(b)"]}, ["2 KV cache groups"]),
        ({"kv_groups": ["SlidingWindowSpec(sliding_window=128)"]}, ["SlidingWindowSpec", "not modelled"]),
        ({"num_spec_tokens": 3}, ["speculative decoding"]),
        ({"kv_connector": "NixlConnector"}, ["NixlConnector"]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size 2"]),
        ({"prefill_schedule_interval": 4}, ["prefill_schedule_interval 4"]),
        ({"long_prefill_token_threshold_adaptive": True}, ["adaptive"]),
        ({"hash_block_size": 4}, ["hashes blocks of 4", "allocates 8"]),
        ({"block_size": None}, ["header: effective.block_size: ", "not None"]),
        ({"block_size": 0}, ["effective.block_size"]),
        ({"num_gpu_blocks": 2**60}, ["effective.num_gpu_blocks"]),
        ({"policy": "lifo"}, ["effective.policy", "fcfs"]),
        ({"max_num_seqs": True}, ["effective.max_num_seqs"]),
        ({"free0": [1, 2, 3]}, ["free0", "each block"]),
        ({"content": {"form": "words"}}, ["content.form"]),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_used(change: Line, words: list[str], tmp_path: Path) -> None:
    header = small_header()
    for field, value in change.items():
        (header if field in ("schema", "free0", "content") else header["effective"])[field] = value
    path = recorded.write(tmp_path / "r.jsonl", [header, *two_steps()])
    refused(path, *words)
    for read in (read_header, read_requests, read_steps, lambda path: list(calls(path))):
        with pytest.raises(InputError):
            read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[:2] + a[4:], "line 3: step 1 where 0 is due"),
        (lambda a: a[:3] + a[4:], "line 4: 2 steps in flight, at most 1 can be"),
        (lambda a: a[:4] + a[5:], "line 5: the update of step 1, which is not due"),
        (lambda a: a[:6] + a[7:], "line 7: the end of request 0 is not there"),
        (lambda a: [*a[:2], a[6], *a[2:]], "line 3: the end of request 0, which is not due"),
        (lambda a: a[:1] + a[2:], "line 2: request 0, which does not live then"),
        (lambda a: [*a[:1], a[1] | {"add": 4}], "line 2: adds request 4 where 0 is due"),
        (lambda a: [*a[:2], a[2] | {"new": [[3, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:2], a[2] | {"res": [[3, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:2], a[2] | {"pre": [[3, 0, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:3], a[3] | {"stop": [3]}], "line 4: request 3, which does not live then"),
        (lambda a: [*a[:4], {"reset": True, "t": 25, "pre": [[3, 0, 0]]}], "line 5: request 3, which"),
        (lambda a: [*a[:2], a[2] | {"t": [11, 10]}], "line 3: t: [11, 10]: time goes back"),
        (lambda a: [*a[:3], a[3] | {"t": [10, 21]}], "line 4: t: [10, 21]: time goes back"),
        (lambda a: [*a[:2], a[2] | {"s": [[0, 2**29, 0]]}], "line 3: s.0.1: should be"),
        (lambda a: [*a[:1], {"end": True, "t": 90, "steps": 2}], "line 2: ends after 2 steps, 0 are there"),
        (lambda a: [*a[:2], {"t": 3}, *a[2:]], "line 3: begins with none of the fields add, s, u"),
        (lambda a: [*a[:2], [1], *a[2:]], "line 3: should be an object, not [1]"),
        (lambda a: [*a[:2], a[1]], "line 3: adds request 0 where 1 is due"),
        (lambda a: [a[0], a[1] | {"c": "x" * 48}], "line 2: request 0: c should be text of 16 hexadecimal"),
        (lambda a: [a[0], a[1] | {"c": 16 * "0"}], "line 2: request 0: c has 1 chunks of a prompt of 12"),
        (lambda a: [a[0], a[1] | {"np": 401, "c": ""}], "line 2: request 0: 401 prompt tokens"),
        (lambda a: [*a[:6], a[6] | {"n": 9}], "line 2: request 0: 12 prompt tokens, 9 in all"),
        (lambda a: [a[0], a[1] | {"uses": ["grammar"]}], "request 0 (a) uses grammar, which is not"),
        (lambda a: [*a[:4], {"pause": "PAUSED_ALL", "t": 25}], "PAUSED_ALL), which is not"),
        (lambda a: [*a[:2], a[2] | {"throttle": True}], "prefills back, which is not modelled"),
        (lambda a: [*a[:4], {"reset": True, "t": 25, "pre": [[0, 12, 1]]}], "preempted what ran, which is"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used(change: Any, words: str, tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl", change([small_header(), *two_steps()]))
    refused(path, words)


@pytest.mark.parametrize(
    "content", [b"not json\n", b'{"add": 1\n', b"\xff\xfe\n", b"[" * 50_000 + b"\n", b"\n"]
)
def test_a_line_of_garbage(content: bytes, tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl", [small_header(), *two_steps()])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], content, *lines[3:]]))
    refused(path, "line 4: ")
    path.write_bytes(content + b"".join(lines[1:]))
    refused(path)


def test_more_steps_in_flight_than_the_engine_has(tmp_path: Path) -> None:
    """Two under async scheduling: pipeline parallelism would have more."""
    step = {"s": [], "fr": 49, "q": [0, 0]}
    lines = [small_header(async_scheduling=True), *(step | {"i": i, "t": [i, i]} for i in range(3))]
    refused(recorded.write(tmp_path / "r.jsonl", lines), "line 4: 3 steps in flight, at most 2 can be")
    lines[3:] = [{"u": 1, "t": [9, 9], "fr2": 49}]
    refused(recorded.write(tmp_path / "r.jsonl", lines), "line 4: the update of step 1, which is not due")


def mutations(value: Any, generator: random.Random) -> Iterator[Any]:
    """A value with one part of it changed for one of another kind."""
    others: tuple[Any, ...] = (
        None, True, -1, 0, 1, 2**31, 2**53, 10**30, 1.5, 1e308, float("nan"), "", "x", 40 * "0", [], {}, [[]],
        [None], {"a": 1},
    )  # fmt: skip
    if isinstance(value, dict) and value:
        key = generator.choice(list(value))
        yield {k: v for k, v in value.items() if k != key}
        yield from (value | {key: one} for one in mutations(value[key], generator))
    elif isinstance(value, list) and value:
        place = generator.randrange(len(value))
        yield value[:place] + value[place + 1 :]
        yield [*value, *value]
        yield from ([*value[:place], one, *value[place + 1 :]] for one in mutations(value[place], generator))
    yield generator.choice(others)
    yield generator.choice(others)


def said_in_one_line(path: Path) -> int:
    """The exit status of verify, which must not fail, and the readers agree."""
    result = verify(path)
    assert result.exit_code in (0, 1, 2), (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert len([line for line in result.stderr.splitlines() if "compiling" not in line]) <= 1 + (
        "cut off" in result.stderr
    ), result.stderr
    for read in (read_header, read_requests, read_steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordingWarning)
            try:
                read(path)
            except InputError as error:
                assert "\n" not in str(error)
                assert result.exit_code != 0  # 1: a difference came first
    return result.exit_code


def test_mutated_fields(small: list[Line], tmp_path: Path, seeds: range = range(150)) -> None:
    """Any field may be of any kind: what comes of it is one line."""
    statuses = []
    for seed in seeds:
        generator = random.Random(seed)
        lines = list(recorded.delta_coded(iter(small))) if seed % 2 else list(small)
        number = generator.choice([0, generator.randrange(len(lines)), generator.randrange(len(lines))])
        changed = generator.choice(list(mutations(lines[number], generator)))
        path = recorded.write(tmp_path / "r.jsonl", [*lines[:number], changed, *lines[number + 1 :]])
        statuses.append(said_in_one_line(path))
    assert {0, 1, 2} == {*statuses}, "some are harmless, some are differences, some cannot be used"


@pytest.mark.slow
def test_many_mutated_fields(small: list[Line], tmp_path: Path) -> None:
    test_mutated_fields(small, tmp_path, range(150, 6000))


def test_mutated_fields_of_version_1(tmp_path: Path, seeds: range = range(40)) -> None:
    run = json.loads(gzip.decompress(MEASURED["overload_preempt"].read_bytes()))
    names = {request["id"] for request in run["reqs"][:20]}
    run["steps"] = [step for step in run["steps"][:60] if not {name for name, *_ in step["s"]} - names]
    run["reqs"] = run["reqs"][:40]
    del run["end_free"]
    for seed in seeds:
        generator = random.Random(seed)
        key = generator.choice(["effective", "reqs", "steps", "steps", "free0"])
        changed = generator.choice(list(mutations(run[key], generator)))
        path = tmp_path / "r.json"
        path.write_text(json.dumps(run | {key: changed}))
        said_in_one_line(path)


# what was cut off


def positions(size: int, count: int) -> list[int]:
    return sorted({round(1 + (size - 2) * i / count) for i in range(count + 1)})


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_recording_cut_anywhere(suffix: str, small: list[Line], tmp_path: Path) -> None:
    whole = recorded.write(tmp_path / f"whole{suffix}", list(recorded.delta_coded(iter(small))))
    data = whole.read_bytes()
    num_steps = len(read_steps(whole).running)
    path, read = tmp_path / f"cut{suffix}", []
    for at in positions(len(data), 60):
        path.write_bytes(data[:at])
        result = verify(path)
        assert result.exit_code in (0, 2), result.output
        if result.exit_code == 2:
            refused(path)
            continue
        told = [line for line in result.stderr.splitlines() if "compiling" not in line]
        if at > len(data) - 10 and not told:
            continue  # the last line's end or gzip's trailer: nothing is missing
        (warning,) = told
        assert f"{path}: cut off" in warning
        steps = int(re.findall(r"(\d+) steps in all", warning)[0])
        assert result.stdout.startswith(f"{path}: ")
        with pytest.warns(RecordingWarning, match="cut off"):
            assert len(read_steps(path).running) == steps
        with pytest.warns(RecordingWarning, match="cut off"):
            read_requests(path)
        read.append(steps)
    assert read == sorted(read) and read[-1] >= num_steps - 3
    assert len({*read}) > (20 if suffix == ".jsonl" else 1)


def test_a_killed_recorder_leaves_what_was_flushed(small: list[Line], tmp_path: Path) -> None:
    """A stream flushed as the recorder flushes it, cut within what came after the flush."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    text = [(json.dumps(line) + "\n").encode() for line in small]
    data, flushed = b"", []
    for start in range(0, len(text), 20):
        data += deflate.compress(b"".join(text[start : start + 20])) + deflate.flush(zlib.Z_SYNC_FLUSH)
        flushed.append((len(data), sum(line.startswith(b'{"u"') for line in text[: start + 20])))
    path = tmp_path / "cut.jsonl.gz"
    for (size, steps), (following, _) in itertools.pairwise(flushed):
        for at in (size, (size + following) // 2):
            path.write_bytes(data[:at])
            with pytest.warns(RecordingWarning, match="cut off"):
                assert len(read_steps(path).running) >= steps


def test_a_recorder_that_gave_up(small: list[Line], tmp_path: Path) -> None:
    failed = {"failed": "OSError: no space left on device", "t": 9}
    path = recorded.write(tmp_path / "r.jsonl", [*small[:40], failed])
    result = verify(path)
    assert result.exit_code == 0
    assert "cut off (the recorder gave up: OSError: no space left on device)" in result.stderr


def test_version_1_cut_anywhere(tmp_path: Path) -> None:
    data = MEASURED["overload_preempt"].read_bytes()
    text = gzip.decompress(data)
    path, read = tmp_path / "cut", []
    for cut in [
        *(data[:at] for at in positions(len(data), 4)),
        *(text[:at] for at in positions(len(text), 6)),
    ]:
        path.write_bytes(cut)
        result = verify(path)
        if result.exit_code == 2:
            refused(path)
            continue
        assert result.exit_code == 0, result.output
        assert f"{path}: cut off" in result.stderr or len(cut) == len(data) - 1  # of gzip's trailer
        read.append(int(re.findall(r"(\d+) steps, 0 differences", result.stdout)[0]))
    assert max(read) > 2000 and len({*read}) >= 4


def test_a_damaged_stream(small: list[Line], tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl.gz", small)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(50) + data[len(data) // 2 + 50 :])
    refused(path)
    path.write_bytes(b"\x1f\x8bnothing")
    refused(path, "damaged")
    assert verify(tmp_path).exit_code == 2
