"""Requests for n answers: what they share, what their records say, and who waits for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import make
from simulation import APART, Run, engine, linear, prompts, run
from typer.testing import CliRunner

from sim.arena import Arena
from sim.cli import app
from sim.columns import K, R
from sim.core import EngineConfig
from sim.errors import InputError
from sim.recorder import Recorder
from sim.replicas import Cluster
from sim.request import Batch, make_batch
from sim.sample_records import SampleRecords
from sim.samples import request_of, sample_of, samples
from sim.scenario_file import load
from sim.simulation import Result
from sim.simulation import run as run_scenario
from sim.timeline import left_out, trace

BLOCK = 16


class Watch:
    """Sees a run of `simulate` step by step: the most blocks in use, the most running."""

    def __init__(self) -> None:
        self.blocks = self.running = 0

    def __call__(self, core: Any) -> None:
        from sim.blocks import FREE

        used = core.pool.blocks.shape[1] - 1 - core.pool.count[FREE]
        self.blocks = max(self.blocks, int(used))
        self.running = max(self.running, int(core.count[K.num_running]))


def alone(prompt: int, n: int, **changes: Any) -> tuple[Run, int]:
    """One request of n answers of one token, and the most blocks that it holds."""
    watch = Watch()
    result = run(
        prompts([[(0, prompt)]], n=n), engine(**changes), observe=watch, horizon=lambda clock: clock.now
    )
    return result, result.totals.max_blocks_used


@pytest.mark.parametrize("prompt", [5, 16, 17, 100, 128, 129])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_samples_share_the_full_blocks_of_their_prompt(prompt: int, n: int) -> None:
    result, blocks = alone(prompt, n)
    hit = (prompt - 1) // BLOCK * BLOCK  # the last token of a prompt is always computed
    assert result.totals.prefix_cache_queries == n * prompt
    assert result.totals.prefix_cache_hits == (n - 1) * hit
    assert result.hits == [0], "the record has the hit of the sample admitted first"
    shared = hit // BLOCK
    assert blocks == shared + n * (-(-prompt // BLOCK) - shared), "at the end of prefill"
    if prompt % BLOCK:
        assert shared == prompt // BLOCK
    assert result.totals.num_scheduled_tokens == prompt + (n - 1) * (prompt - hit)


def test_without_a_cache_samples_share_nothing() -> None:
    result, blocks = alone(100, 4, enable_prefix_caching=False)
    assert result.totals.prefix_cache_hits == 0 and blocks == 4 * 7


def test_answers_are_apart() -> None:
    # 100 answers of 40 tokens would be one chain of blocks were their content the same
    config = engine(num_gpu_blocks=1000)
    result = run(prompts([[(0, 32)]], output_len=41, n=3), config)
    assert result.totals.max_blocks_used == 1 + 3 * (-(-(32 + 40) // BLOCK) - 1)
    again = prompts([[(0, 32), (7, 40), (1, 20)]])  # nobody asks with an answer that has no name
    assert run(again, config).hits == [0]


def test_the_first_answer_is_the_workloads() -> None:
    first = make_batch([0.0], 32, 40, [0, 1], [5], [72], n=3)
    then = make_batch([APART], 80, 1, [0, 2], [5, 6], [72, 9])  # the prompt, its answer, and more
    for batches, hit in (([first, then], 64), ([first._replace(n=np.ones(1, np.int64)), then], 64)):
        assert run(iter(batches), engine()).hits == [0, hit]


def test_one_record_for_all_samples() -> None:
    config = engine(num_gpu_blocks=12, max_num_seqs=2, max_num_batched_tokens=40)
    result = run(prompts([[(0, 40)], [(1, 20)]], output_len=[30, 3], gap=0.0, n=[4, 1]), config)
    records = result.records
    assert records["request_id"].tolist() == [0, 1] and records["n"].tolist() == [4, 1]
    assert records["output_len"].tolist() == [30, 3]
    assert records["prefix_cache_queries"].tolist() == [4 * 40, 20]
    assert result.totals.num_admissions == 5 and result.totals.max_num_running == 2, "max_num_seqs is of samples"
    assert records["finish_time"].max() == result.totals.last_time


def hand_made() -> dict[str, Any]:
    """The samples of requests 3 (three) and 4 (one), as an engine tells of them."""
    ids = np.array([3 + (2 << 40), 4, 3, 3 + (1 << 40)])
    whole = {"n": [3, 1, 3, 3], "num_preemptions": [1, 5, 2, 0], "num_evictions": [1, 0, 0, 3],
             "prefix_cache_queries": [50, 9, 50, 50], "prefix_cache_hits": [48, 0, 16, 32],
             "num_cached_tokens": [48, 0, 16, 32], "fate_cold": [2, 9, 34, 18]}  # fmt: skip
    times = {"scheduled_time": [2.0, 3.0, 1.0, 1.0], "first_token_time": [4.0, 4.0, 6.0, 5.0],
             "finish_time": [7.0, 8.0, 9.0, 10.0]}  # fmt: skip
    columns = {name: np.array(values) for name, values in {**whole, **times}.items()}
    return {"request_id": ids, **columns}


def test_a_joined_record_by_hand() -> None:
    joined = SampleRecords().joined(hand_made())
    assert {name: column.tolist() for name, column in joined.items()} == {
        "request_id": [4, 3], "n": [1, 3], "num_preemptions": [5, 3], "num_evictions": [0, 4],
        "prefix_cache_queries": [9, 150], "prefix_cache_hits": [0, 96],
        "num_cached_tokens": [0, 16], "fate_cold": [9, 34],  # samples 0 and 1 at once: that of 0
        "scheduled_time": [3.0, 1.0], "first_token_time": [4.0, 4.0], "finish_time": [8.0, 10.0],
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3])
def test_records_are_joined_however_they_are_cut(size: int) -> None:
    chunk = hand_made()
    joiner = SampleRecords()
    parts = [
        joiner.joined({name: column[i : i + size] for name, column in chunk.items()})
        for i in range(0, 4, size)
    ]
    whole = SampleRecords().joined(chunk)
    for name, column in whole.items():
        assert np.concatenate([part[name] for part in parts]).tolist() == column.tolist()


def test_records_without_samples_pass_as_they_are() -> None:
    chunk = {name: column[1:2] for name, column in hand_made().items()}
    assert SampleRecords().joined(chunk) is chunk


def test_samples_in_columns() -> None:
    batch = make_batch(
        [0.0, 1.0, 2.0], [10, 20, 5], [4, 6, 3], [0, 2, 4, 6], [7, -1, 8, 9, 3, 4],
        [6, 8, 20, 6, 2, 6], n=[3, 2, 1], priority=[1, 2, 3],
    )  # fmt: skip
    found, row, number = samples(batch, first=100)
    assert row.tolist() == [0, 0, 0, 1, 1, 2] and number.tolist() == [0, 1, 2, 0, 1, 0]
    assert found.priority.tolist() == [1, 1, 1, 2, 2, 3]
    pairs = list(zip(found.segment_id.tolist(), found.segment_len.tolist(), strict=True))
    rows = [pairs[a:b] for a, b in zip(found.segment_start, found.segment_start[1:], strict=False)]
    own = rows[0][1][0]
    assert own >= 0, "a prompt that samples share has names"
    answers = [rows[1][2][0], rows[2][2][0], rows[4][1][0]]
    assert len(set(answers)) == 3 and max(answers) < -(2**58)
    assert rows == [
        [(7, 6), (own, 8)], [(7, 6), (own, 4), (answers[0], 4)], [(7, 6), (own, 4), (answers[1], 4)],
        [(8, 20), (9, 6)], [(8, 20), (answers[2], 6)], [(3, 2), (4, 6)],
    ]  # fmt: skip


def test_loading_expands_unless_the_engine_takes_groups() -> None:
    batch = prompts([[(0, 20)], [(1, 20)], [(2, 20)]], n=[1, 3, 2])
    arena = Arena(engine())
    slots = arena.load(batch)
    assert arena.requests[R.request_id, slots].tolist() == [0, 1, 2]
    families = [arena.samples_of(slot) for slot in slots.tolist()]
    assert [len(family) for family in families] == [1, 3, 2]
    ids = arena.requests[R.request_id, families[1]]
    assert request_of(ids).tolist() == [1, 1, 1] and sample_of(ids).tolist() == [0, 1, 2]
    ranks = arena.requests[R.rank, [slot for family in families for slot in family]]
    assert ranks.tolist() == list(range(6))
    assert arena.requests[R.request_id, arena.load(batch)].tolist() == [3, 4, 5]

    groups = Arena(engine(), groups=True)
    beams = batch._replace(n=np.ones(3, np.int64), beam_width=np.array([1, 6, 2]))
    for one in (batch, beams):
        slots = groups.load(one)
        assert [groups.samples_of(slot) for slot in slots.tolist()] == [[slot] for slot in slots.tolist()]
        assert groups.requests[R.n, slots].tolist() == one.n.tolist()
        assert groups.requests[R.beam_width, slots].tolist() == one.beam_width.tolist()


def test_a_request_that_can_never_run_is_refused_once() -> None:
    config = engine(num_gpu_blocks=6, max_model_len=64)
    batch = prompts([[(0, 20)], [(0, 70)], [(0, 20)]], n=3)
    result = run(batch, config)
    assert result.records["refused"].tolist() == [0, 1, 0]
    assert result.records["n"].tolist() == [3, 3, 3]
    arena = Arena(config)
    before = arena.num_vacant
    slots = arena.load(batch)
    assert arena.num_vacant == before - 7 and arena.samples_of(int(slots[1])) == [slots[1]]


def test_a_user_waits_for_the_last_sample() -> None:
    config = engine(max_num_seqs=1)  # one sample after the other
    batch = prompts([[(0, 20)], [(1, 20)], [(2, 20)]], output_len=5, gap=0.0, n=4)
    result = run(batch, config, concurrency=1)
    arrival, finish = result.records["arrival_time"], result.records["finish_time"]
    assert arrival[1:].tolist() == finish[:-1].tolist()
    assert result.totals.max_concurrent_requests == 1 and result.totals.num_admissions == 12
    together = run(batch, engine(), concurrency=1)
    assert together.e2el[0] < result.e2el[0]


def test_a_session_goes_on_after_the_last_sample_with_the_first() -> None:
    chat = {"kind": "multi_turn", "num_sessions": 3, "num_turns": 3, "user_len": 40, "output_len": 24}
    plain = run(make(chat).sessions(np.random.SeedSequence(1)), engine())
    several = run(make({**chat, "n": 4}).sessions(np.random.SeedSequence(1)), engine(max_num_seqs=2))
    assert several.hits == plain.hits and sum(plain.hits) > 0
    for name in ("prompt_len", "output_len"):
        assert several.records[name].tolist() == plain.records[name].tolist()
    arrival, finish = several.records["arrival_time"], several.records["finish_time"]
    session = several.records["session_id"]
    for one in range(3):
        turns = np.flatnonzero(session == one)
        assert arrival[turns[1:]].tolist() == finish[turns[:-1]].tolist()


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "central_queue", "kv_aware"])
def test_all_samples_of_a_request_go_to_one_replica(router: str) -> None:
    batch = prompts([[(i % 3, 40)] for i in range(40)], output_len=8, gap=0.004, n=3)
    config = engine(max_num_seqs=4, num_gpu_blocks=200)
    result = run(batch, config, cluster=Cluster(3, router))
    totals = result.totals
    per_replica = np.bincount(result.records["replica"], minlength=3)
    assert [one.num_admissions for one in totals.replicas] == (3 * per_replica).tolist()
    if router == "round_robin":
        assert per_replica.tolist() == [14, 13, 13], "the router sees requests"
    served = result.records
    alive = [
        int(((served["arrival_time"] <= t) & (served["finish_time"] > t)).sum())
        for t in served["arrival_time"].tolist()
    ]
    assert totals.max_concurrent_requests == max(alive)


def test_concurrency_is_of_requests() -> None:
    batch = prompts([[(0, 40)], [(1, 40)]], output_len=8, gap=0.0, n=[5, 2])
    assert run(batch, engine()).totals.max_concurrent_requests == 2


def test_urgency_is_the_requests_and_of_equals_the_first_sample_is_first() -> None:
    config = engine(priority_policy=True, max_num_seqs=1)
    batch = prompts([[(0, 20)], [(1, 20)]], output_len=2, gap=0.0, n=2, priority=[1, 0])
    result = run(batch, config)
    assert result.records["finish_time"][1] <= result.records["scheduled_time"][0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_however_the_run_is_cut(asynchronous: bool) -> None:
    batch = prompts(
        [[(i % 4, 33 + i)] for i in range(30)], output_len=[3 + i % 9 for i in range(30)], gap=0.003,
        n=[1 + i % 4 for i in range(30)],
    )  # fmt: skip
    config = engine(num_gpu_blocks=30, max_num_seqs=6, async_scheduling=asynchronous, token_fates=True)
    one = run(batch, config)
    cut = run(batch, config, horizon=lambda clock: clock.now)
    assert one.totals.num_preemptions > 0
    for name, column in one.records.items():
        assert np.array_equal(column, cut.records[name], equal_nan=True), name
    assert one.totals.max_concurrent_requests == cut.totals.max_concurrent_requests
    fates = [one.records[name] for name in one.records if name.startswith("fate_")]
    assert (sum(fates) + one.records["num_cached_tokens"] == one.records["prompt_len"]).all()


SPECS: list[dict[str, Any]] = [
    {"kind": "shared_prefix", "num_requests": 9, "prefix_len": 40, "suffix_len": 9, "output_len": 3},
    {"kind": "scan", "num_requests": 9, "prompt_len": 40, "output_len": 3},
    {"kind": "fourteen_tokens"},
    {"kind": "documents", "num_requests": 9, "num_documents": 2, "document_len": 40, "question_len": 9,
     "output_len": 3},
    {"kind": "few_shot", "num_requests": 9, "num_examples": 2, "examples_per_request": 1, "example_len": 40,
     "question_len": 9, "output_len": 3},
    {"kind": "multi_turn", "num_sessions": 2, "num_turns": 2, "user_len": 9, "output_len": 3},
    {"kind": "agent", "num_sessions": 2, "num_turns": 2, "task_len": 9, "tool_len": 9, "output_len": 3},
    {"kind": "tree", "num_sessions": 2, "branch": 2, "depth": 2, "question_len": 9, "step_len": 9,
     "output_len": 3},
]  # fmt: skip


def all_requests(workload: Any) -> list[Batch]:
    seed = np.random.SeedSequence(0)
    if workload.has_sessions:
        return [session.requests for session in workload.sessions(seed)]
    return list(workload.batches(seed, BLOCK))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_every_workload_has_n_and_beam_width(spec: dict[str, Any]) -> None:
    for n, beam_width in ((1, 1), (3, 1), (1, 6)):
        for batch in all_requests(make({**spec, "n": n, "beam_width": beam_width})):
            assert set(batch.n.tolist()) == {n} and set(batch.beam_width.tolist()) == {beam_width}
    plain = all_requests(make(spec))
    several = all_requests(make({**spec, "n": 3}))
    for one, other in zip(plain, several, strict=True):
        for name in Batch._fields:
            assert name == "n" or np.array_equal(getattr(one, name), getattr(other, name)), name


def test_no_workload_is_left_out() -> None:
    from typing import get_args

    from workloads import AnyWorkload

    union, _ = get_args(AnyWorkload)
    kinds = {one.model_fields["kind"].default for one in get_args(union)}
    assert kinds == {spec["kind"] for spec in SPECS} | {"mix", "trace"}


ENGINE = "gpu: none\nmodel: none\ncost: {form: whole_step, base_us: 2000, token_us: 20}\nengine: {block_size: 16, num_gpu_blocks: 400, max_model_len: 400}\n"
LOAD = "workload: {kind: shared_prefix, num_requests: 40, num_groups: 2, prefix_len: 64, suffix_len: 20, output_len: 6, request_rate: 50}\n"


def result_of(folder: Path, *overrides: str, text: str = ENGINE + LOAD) -> Result:
    path = folder / "s.yaml"
    path.write_text(text)
    return run_scenario(load(path, overrides))


def test_figures_are_of_requests_and_output_tokens_of_all_samples(tmp_path: Path) -> None:
    one = result_of(tmp_path)
    result = result_of(tmp_path, "workload.n=3")
    summary = result.summary
    assert "num_sequences" not in one.summary
    assert summary["num_sequences"] == 120 and summary["completed"] == 40
    assert summary["total_output_tokens"] == 40 * 3 * 6 == 3 * one.summary["total_output_tokens"]
    assert summary["total_input_tokens"] == one.summary["total_input_tokens"] == 40 * 84
    assert summary["prefix_cache_queries"] == 3 * 40 * 84
    assert sum(summary["token_fates"].values()) == 40 * 84
    assert set(result.records.column("num_sequences").tolist()) == {3}
    assert summary["by_prefix_group"][0]["prefix_cache_queries"] > 84 * 40
    hits = sum(row["prefix_cache_hits"] for row in summary["by_prefix_group"])
    assert hits == summary["prefix_cache_hits"], "the sums of a breakdown are the engine's"


def test_a_warm_up_leaves_out_all_samples_of_its_requests(tmp_path: Path) -> None:
    summary = result_of(tmp_path, "workload.n=3", "measure_from=0.4").summary
    measured = 40 - summary["num_requests_left_out"]
    assert 0 < measured < 40
    assert summary["prefix_cache_queries"] == 3 * measured * 84


def test_a_mix_has_them_by_tenant(tmp_path: Path) -> None:
    parts = {"a": {**SPECS[0], "n": 2}, "b": SPECS[1], "c": {**SPECS[5], "n": 4}}
    tenants = {name: {"workload": {**spec}} for name, spec in parts.items()}
    text = ENGINE + "workload: " + json.dumps({"kind": "mix", "tenants": tenants}) + "\n"
    records = result_of(tmp_path, text=text).records
    tenant, width = records.column("tenant"), records.column("num_sequences")
    assert [set(width[tenant == number].tolist()) for number in range(3)] == [{2}, {1}, {4}]


def test_a_second_run_finds_the_prompts_again_whatever_n_is(tmp_path: Path) -> None:
    primed = "prime" + LOAD.removeprefix("workload") + "measure" + LOAD.removeprefix("workload")
    warm = result_of(tmp_path, "measure.n=2", text=ENGINE + primed).summary
    assert warm["warm_start"]["in_common"] == "the same prompts again"
    assert warm["token_fates"]["cold"] == 0


def trace_row(**fields: Any) -> dict[str, Any]:
    return {"arrival_time": 0, "input_length": 40, "output_length": 5, "segments": [[1, 40], [2, 5]]} | fields


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.yaml").write_text(ENGINE + f"workload: {{kind: trace, path: {path}}}\n")
    return path


def prefixsim(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_trace_says_them_row_by_row(tmp_path: Path) -> None:
    path = written(tmp_path, trace_row(), trace_row(n=3), trace_row(n=None, beam_width=1))
    result = run_scenario(load(tmp_path / "t.yaml"))
    assert sorted(result.records.column("num_sequences").tolist()) == [1, 1, 3]
    told = prefixsim("trace", "describe", path, "--format", "json")
    described = json.loads(told.stdout)
    assert described["requests"] == 3 and described["sequences"] == 5
    assert described["total_output_tokens"] == 25
    assert any("several answers" in note for note in described["notes"])
    for target in ("segments", "mooncake"):
        out = tmp_path / f"{target}.jsonl"
        assert prefixsim("trace", "convert", path, out, "--to", target).exit_code == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row.get("n"), row.get("beam_width")) for row in rows] == [(None, None), (3, None), (None, 1)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 0}, "n is 0: it must be a whole number from 1 to 16384"),
        ({"n": -1}, "n is -1: it must be"),
        ({"beam_width": 0}, "beam_width is 0: it must be"),
        ({"n": "2"}, 'n is "2": it must be a whole number'),
        ({"n": 2, "beam_width": 2}, "n is 2 and beam_width 2: a request samples or searches"),
        ({"beam_width": 4}, "request 1 has beam_width 4: beam search needs cache: paged"),
    ],
)
def test_bad_rows_are_told(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    written(tmp_path, trace_row(), trace_row(**fields))
    result = prefixsim("run", tmp_path / "t.yaml")
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prefixsim: compiling")]
    assert len(lines) == 1 and said in lines[0], result.stderr
    if "beam_width 4" not in said:
        assert "line 2" in lines[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["workload.n=0"], "workload.n"),
        (["workload.n=-1"], "workload.n"),
        (["workload.n='2'"], "workload.n"),
        (["workload.n=1.5"], "workload.n"),
        (["workload.n=20000"], "workload.n"),
        (["workload.beam_width=0"], "workload.beam_width"),
        (["workload.n=2", "workload.beam_width=2"], "n is 2 and beam_width 2: a request samples or searches"),
        (["workload.beam_width=2"], "request 0 has beam_width 2: beam search needs cache: paged"),
    ],
)
def test_bad_values_are_told(tmp_path: Path, overrides: list[str], said: str) -> None:
    (tmp_path / "s.yaml").write_text(ENGINE + LOAD)
    result = prefixsim("run", tmp_path / "s.yaml", *(part for one in overrides for part in ("--set", one)))
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prefixsim: compiling")]
    assert len(lines) == 1 and said in lines[0], result.stderr


def test_beams_are_refused_where_the_engine_has_none() -> None:
    with pytest.raises(InputError, match="request 1 has beam_width 2: beam search needs cache: paged"):
        run(prompts([[(0, 20)], [(1, 20)]], beam_width=[1, 2]), engine())


def test_a_curve_counts_each_sample_as_the_engine_does(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(ENGINE + LOAD)
    rates = []
    for n in (1, 3):
        result = prefixsim("mrc", tmp_path / "s.yaml", "--set", f"workload.n={n}", "--block-size", 16,
                           "--format", "json")  # fmt: skip
        assert result.exit_code == 0, result.stderr
        rates.append(json.loads(result.stdout))
    one, several = (found["curves"][0] for found in rates)
    assert several["prompt_tokens"] == 3 * one["prompt_tokens"]
    # with room for all: two samples of each request find its full blocks
    assert several["ceiling_hit_tokens"] == one["ceiling_hit_tokens"] + 2 * 40 * 80


def test_a_timeline_has_a_lane_for_each_sample() -> None:
    recorder = Recorder()
    run(
        prompts([[(0, 20)], [(1, 20)]], output_len=4, n=[3, 1], gap=0.0), engine(),
        horizon=recorder.horizon, observe=recorder.observe,
    )  # fmt: skip
    names = [event["args"]["name"] for event in trace(recorder) if event["name"] == "thread_name"]
    assert names[1:] == [*(f"request 0, sample {i}" for i in (1, 2, 3)), "request 1"]
    assert left_out(recorder, 2) is None
    recorder.lanes.pop(1)
    assert left_out(recorder, 2) is not None


def test_explain_draws_each_sample(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "engine: {block_size: 4, num_gpu_blocks: 30}\nworkload: {kind: fourteen_tokens, num_requests: 1, n: 3}\n"
    )
    result = prefixsim("explain", tmp_path / "s.yaml")
    assert result.exit_code == 0, result.stderr
    assert "In all: 24 of 42 prompt tokens hit" in result.stdout
    told = prefixsim("explain", tmp_path / "s.yaml", "--set", "workload.concurrency=1")
    assert told.exit_code == 2 and "no closed loop" in told.stderr
