"""Samples under radix: their prompt goes ahead of them, and they arrive when it has been computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from batches import make
from simulation import Run, engine, prompts, run

from sim.arena import Arena
from sim.cache_kinds import RadixKind
from sim.columns import R
from sim.recorder import Recorder
from sim.replicas import Cluster
from sim.sample_records import SampleRecords
from sim.samples import request_of, sample_of, samples
from sim.scenario_file import load
from sim.simulation import run as run_scenario
from sim.timeline import left_out, trace

RADIX = RadixKind()
BASE, TOKEN = 1e-3, 1e-5  # seconds of a step and of a token in it, see simulation.linear


class AllAtOnce(RadixKind):
    """The rule flipped: samples arrive with their request."""

    prompt_first: ClassVar[bool] = False


def same(one: Run, other: Run) -> bool:
    return all(np.array_equal(one.records[name], other.records[name], equal_nan=True) for name in one.records)


@pytest.mark.parametrize(("page", "hit"), [(1, 99), (16, 96), (100, 0), (128, 0)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_prompt_is_computed_once_and_then_found(page: int, hit: int, asynchronous: bool) -> None:
    """A prompt of 100 with 4 answers of 7: a step computes it, the next the rest of it for each of four."""
    config = engine(block_size=page, async_scheduling=asynchronous)
    result = run(prompts([[(0, 100)]], output_len=7, n=4), config, kind=RADIX)
    assert result.totals.num_admissions == 5
    assert result.totals.prefix_cache_queries == 5 * 100
    assert result.totals.prefix_cache_hits == 4 * hit
    assert result.totals.num_scheduled_tokens == 100 + 4 * (100 - hit + 6)
    assert result.totals.itl_count == 4 * 6
    records = {name: column.tolist() for name, column in result.records.items()}
    assert records["num_cached_tokens"] == [0] and records["output_len"] == [7]
    assert records["prefix_cache_queries"] == [500] and records["prefix_cache_hits"] == [4 * hit]
    assert records["scheduled_time"] == [0.0]
    ahead, first, then = (BASE + TOKEN * tokens for tokens in (100, 4 * (100 - hit), 4))
    assert result.ttft[0] == pytest.approx(ahead + first, rel=1e-12)
    assert result.e2el[0] == pytest.approx(ahead + first + 6 * then, rel=1e-12)


def test_a_request_for_one_answer_is_as_before() -> None:
    batch = prompts([[(i % 3, 40 + i)] for i in range(30)], output_len=9, gap=0.002)
    config = engine(num_gpu_blocks=40, max_num_seqs=6)
    assert same(run(batch, config, kind=RADIX), run(batch, config, kind=AllAtOnce()))
    several = batch._replace(n=np.full(30, 3))
    assert not same(run(several, config, kind=RADIX), run(several, config, kind=AllAtOnce()))


def test_without_prefix_caching_the_prompt_goes_ahead_all_the_same() -> None:
    config = engine(enable_prefix_caching=False)
    result = run(prompts([[(0, 100)]], n=4), config, kind=RADIX)
    assert result.totals.num_scheduled_tokens == 500 and result.totals.num_steps == 2


def test_those_who_came_meanwhile_are_before_the_samples() -> None:
    batch = prompts([[(0, 100)], [(1, 100)]], output_len=4, gap=1e-4, n=[2, 1])
    result = run(batch, engine(max_num_seqs=1), kind=RADIX)
    records = result.records
    assert records["scheduled_time"][1] == BASE + TOKEN * 100, "when the prompt has been computed"
    assert records["first_token_time"][0] > records["finish_time"][1]


def test_the_prompt_ahead_asks_for_no_tokens() -> None:
    """Admission leaves no room for its output, as max_new_tokens 0 says; its samples have to wait."""
    batch = prompts([[(0, 200)], [(1, 50)]], output_len=[60, 80], gap=0.003, n=[1, 2])
    result = run(batch, engine(block_size=1, num_gpu_blocks=1 + 320), kind=RADIX)
    records = result.records
    assert result.totals.num_preemptions == 0
    assert records["scheduled_time"][1] < 0.01
    assert records["first_token_time"][1] > records["finish_time"][0]


def test_rows_and_ids() -> None:
    batch = prompts([[(7, 6), (-5, 4)], [(8, 20)]], output_len=[5, 3], n=[2, 1], max_tokens=[9, 3])
    found, row, number = samples(batch, first=10, prompt_first=True)
    assert row.tolist() == [0, 0, 0, 1] and number.tolist() == [2, 0, 1, 0]
    assert found.output_len.tolist() == [1, 5, 5, 3] and found.max_tokens.tolist() == [0, 9, 9, 3]
    assert found.n.tolist() == [2, 2, 2, 1]
    pairs = list(zip(found.segment_id.tolist(), found.segment_len.tolist(), strict=True))
    ahead, first, second, _ = (
        pairs[a:b] for a, b in zip(found.segment_start, found.segment_start[1:], strict=False)
    )
    assert ahead[:2] == first[:2] == second[:2]
    assert [ahead[2][1], first[2][1], second[2][1]] == [1, 5, 5]
    assert len({ahead[2][0], first[2][0], second[2][0]}) == 3
    arena = Arena(engine(), RADIX)
    slots = arena.load(batch)
    one, other = (arena.samples_of(slot) for slot in slots.tolist())
    assert sample_of(arena.requests[R.request_id, one]).tolist() == [2, 0, 1]
    assert request_of(arena.requests[R.request_id, [*one, *other]]).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_joined_record_by_hand(size: int) -> None:
    """Request 3 with two samples and its prompt ahead, request 4 alone between them."""
    ids = np.array([3 + (2 << 40), 4, 3 + (1 << 40), 3])
    whole = {"n": [2, 1, 2, 2], "num_preemptions": [1, 5, 2, 0], "num_evictions": [1, 0, 0, 3],
             "prefix_cache_queries": [50, 9, 50, 50], "prefix_cache_hits": [10, 0, 49, 49],
             "num_cached_tokens": [10, 0, 49, 49], "output_len": [1, 6, 8, 8]}  # fmt: skip
    times = {"arrival_time": [0.5, 0.6, 4.0, 4.0], "scheduled_time": [1.0, 3.0, 4.5, 4.0],
             "first_token_time": [4.0, 4.0, 6.0, 6.5], "finish_time": [4.0, 8.0, 9.0, 10.0]}  # fmt: skip
    chunk = {"request_id": ids} | {name: np.array(values) for name, values in {**whole, **times}.items()}
    joiner = SampleRecords()
    parts = [
        joiner.joined({name: column[i : i + size] for name, column in chunk.items()})
        for i in range(0, 4, size)
    ]
    assert {name: np.concatenate([part[name] for part in parts]).tolist() for name in chunk} == {
        "request_id": [4, 3], "n": [1, 2], "num_preemptions": [5, 3], "num_evictions": [0, 4],
        "prefix_cache_queries": [9, 150], "prefix_cache_hits": [0, 108], "num_cached_tokens": [0, 10],
        "output_len": [6, 8], "arrival_time": [0.6, 0.5], "scheduled_time": [3.0, 1.0],
        "first_token_time": [4.0, 6.0], "finish_time": [8.0, 10.0],
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_however_the_run_is_cut(policy: Any, asynchronous: bool) -> None:
    batch = prompts(
        [[(i % 4, 33 + i % 7)] for i in range(30)], output_len=[3 + 5 * i % 40 for i in range(30)], gap=0.003,
        n=[1 + i % 4 for i in range(30)],
    )  # fmt: skip
    kind = RadixKind(schedule_policy=policy, schedule_conservativeness=0.0)
    config = engine(
        block_size=4, num_gpu_blocks=40, max_num_seqs=6, async_scheduling=asynchronous, token_fates=True,
        max_num_batched_tokens=20,
    )  # fmt: skip
    one = run(batch, config, kind=kind)
    assert one.totals.num_preemptions > 0 and one.totals.num_evictions > 0
    for concurrency in (None, 3):
        one = run(batch, config, kind=kind, concurrency=concurrency)
        cut = run(batch, config, kind=kind, concurrency=concurrency, horizon=lambda clock: clock.now)
        assert same(one, cut)
        assert one.totals.max_concurrent_requests == cut.totals.max_concurrent_requests
        assert concurrency is None or one.totals.max_concurrent_requests <= concurrency
        fates = [one.records[name] for name in one.records if name.startswith("fate_")]
        assert (sum(fates) + one.records["num_cached_tokens"] == one.records["prompt_len"]).all()


def alive(records: Any) -> int:
    """The most requests in the system when one arrives."""
    arrival, finish = records["arrival_time"], records["finish_time"]
    return max(int(((arrival <= time) & (finish > time)).sum()) for time in arrival.tolist())


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "central_queue", "kv_aware"])
def test_replicas(router: str) -> None:
    batch = prompts([[(i % 3, 40)] for i in range(40)], output_len=8, gap=0.004, n=3)
    config = engine(max_num_seqs=4, num_gpu_blocks=200)
    result = run(batch, config, kind=RADIX, cluster=Cluster(3, router))
    cut = run(batch, config, kind=RADIX, cluster=Cluster(3, router), horizon=lambda clock: clock.now)
    assert same(result, cut)
    totals = result.totals
    per_replica = np.bincount(result.records["replica"], minlength=3)
    assert [one.num_admissions for one in totals.replicas] == (4 * per_replica).tolist()
    if router == "round_robin":
        assert per_replica.tolist() == [14, 13, 13], "the router sees requests"
    assert totals.max_concurrent_requests == alive(result.records)


def test_concurrency_is_of_requests() -> None:
    batch = prompts([[(i, 40)] for i in range(12)], output_len=8, gap=0.003, n=[1 + i % 5 for i in range(12)])
    result = run(batch, engine(max_num_seqs=4), kind=RADIX)
    assert result.totals.max_concurrent_requests == alive(result.records) > 2
    alone = run(batch, engine(max_num_seqs=4), kind=RADIX, cluster=Cluster(1, "round_robin"))
    assert same(result, alone)


def test_a_central_queue_keeps_seats_for_the_samples() -> None:
    batch = prompts([[(i, 40)] for i in range(6)], output_len=4, gap=0.0, n=3)
    result = run(batch, engine(max_num_seqs=3), kind=RADIX, cluster=Cluster(2, "central_queue"))
    assert (result.records["submitted_time"] == 0.0).sum() == 2
    assert result.records["submitted_time"].tolist() == result.records["scheduled_time"].tolist()


def test_a_user_waits_for_the_last_sample() -> None:
    batch = prompts([[(0, 20)], [(1, 20)], [(2, 20)]], output_len=5, gap=0.0, n=[4, 1, 4])
    result = run(batch, engine(max_num_seqs=1), kind=RADIX, concurrency=1)
    arrival, finish = result.records["arrival_time"], result.records["finish_time"]
    assert arrival[1:].tolist() == finish[:-1].tolist()
    assert result.totals.max_concurrent_requests == 1 and result.totals.num_admissions == 11


def test_a_session_goes_on_with_the_first_answer() -> None:
    chat = {"kind": "multi_turn", "num_sessions": 3, "num_turns": 3, "user_len": 40, "output_len": 24}
    config = engine(block_size=1)
    plain = run(make(chat).sessions(np.random.SeedSequence(1)), config, kind=RADIX)
    several = run(make({**chat, "n": 4}).sessions(np.random.SeedSequence(1)), config, kind=RADIX)
    assert several.hits == plain.hits and sum(plain.hits) > 0
    arrival, finish = several.records["arrival_time"], several.records["finish_time"]
    for one in range(3):
        turns = np.flatnonzero(several.records["session_id"] == one)
        assert arrival[turns[1:]].tolist() == finish[turns[:-1]].tolist()


@pytest.mark.parametrize("concurrency", [None, 1])
def test_a_prompt_whose_answers_can_never_fit_is_refused_once(concurrency: int | None) -> None:
    config = engine(num_gpu_blocks=6, max_model_len=400)
    batch = prompts([[(0, 20)], [(1, 40)], [(2, 20)]], output_len=[5, 60, 5], n=3)
    result = run(batch, config, kind=RADIX, concurrency=concurrency)
    assert result.records["refused"].tolist() == [0, 1, 0]
    assert result.totals.num_admissions == 8
    arena = Arena(config, RADIX)
    before = arena.num_vacant
    slots = arena.load(batch)
    assert arena.num_vacant == before - 9 and arena.samples_of(int(slots[1])) == [slots[1]]


def test_a_timeline_has_lanes_for_the_prompt_and_each_sample() -> None:
    recorder = Recorder()
    run(
        prompts([[(0, 20)], [(1, 20)]], output_len=4, n=[3, 1], gap=0.0), engine(), kind=RADIX,
        horizon=recorder.horizon, observe=recorder.observe,
    )  # fmt: skip
    names = [event["args"]["name"] for event in trace(recorder) if event["name"] == "thread_name"]
    assert names[1:] == [
        "request 0, its prompt ahead", "request 1", *(f"request 0, sample {i}" for i in (1, 2, 3)),
    ]  # fmt: skip
    assert left_out(recorder, 2) is None
    recorder.lanes.pop()
    assert left_out(recorder, 2) is not None


SCENARIO = """\
cost: {form: whole_step, base_us: 2000, token_us: 20}
engine: {block_size: 16, num_gpu_blocks: 400, max_model_len: 400}
workload: {kind: shared_prefix, num_requests: 40, num_groups: 2, prefix_len: 64, suffix_len: 20,
           output_len: 6, request_rate: 50, n: 3}
cache: radix
"""


@pytest.mark.parametrize("measure_from", [None, 0.4])
def test_figures(tmp_path: Path, measure_from: float | None) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    summary = run_scenario(load(path, [f"measure_from={json.dumps(measure_from)}"])).summary
    measured = 40 - summary.get("num_requests_left_out", 0)
    assert (measured < 40) == (measure_from is not None)
    assert summary["completed"] == measured and summary["num_sequences"] == 3 * measured
    assert summary["total_output_tokens"] == 3 * 6 * measured
    assert summary["prefix_cache_queries"] == 4 * 84 * measured
    assert sum(summary["token_fates"].values()) == 84 * measured
    assert summary["prefix_cache_hit_rate"] <= summary["prefix_cache_ceiling"]
    fates = summary["token_fates"]
    ceiling = (fates["hit"] + fates["evicted"] + 3 * 80 * measured) / (4 * 84 * measured)
    assert summary["prefix_cache_ceiling"] == pytest.approx(ceiling)
    hits = sum(row["prefix_cache_hits"] for row in summary["by_prefix_group"])
    assert hits == summary["prefix_cache_hits"]
