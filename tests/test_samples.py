"""Requests for n answers in the engine: what they share, what their records say, and who waits for them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from batches import make
from simulation import APART, Run, engine, prompts, run

from sim.arena import Arena
from sim.cache_kinds import ApcKind
from sim.clients import in_pieces
from sim.columns import R
from sim.errors import InputError
from sim.recorder import Recorder
from sim.replicas import Cluster
from sim.request import make_batch
from sim.sample_records import SampleRecords
from sim.samples import request_of, sample_of, samples
from sim.timeline import left_out, trace
from workloads.merge import join

BLOCK = 16


class Groups(ApcKind):
    """A cache whose engine takes all sequences of a request as one."""

    groups: ClassVar[bool] = True


def alone(prompt: int, n: int, **changes: Any) -> tuple[Run, int]:
    """One request of n answers of one token, and the most blocks that it holds."""
    result = run(prompts([[(0, prompt)]], n=n), engine(**changes))
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
    result = run(prompts([[(0, 32)]], output_len=41, n=3), engine())
    assert result.totals.max_blocks_used == 1 + 3 * (-(-(32 + 40) // BLOCK) - 1)
    batch = prompts([[(0, 32)], [(0, 32)]], output_len=41, n=3)  # the second asks the same long after
    found, _, number = samples(batch)
    last = found.segment_id[found.segment_start[1:] - 1]
    assert len(set(last.tolist())) == 6 and (last < 0).all() and number.tolist() == [0, 1, 2, 0, 1, 2]


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
    assert result.totals.num_admissions == 5
    assert result.totals.max_num_running == 2, "max_num_seqs is of samples"
    assert records["finish_time"].max() == result.totals.last_time


def hand_made() -> dict[str, Any]:
    """The samples of requests 3 (three) and 4 (one), as an engine tells of them."""
    ids = np.array([3 + (2 << 40), 4, 3, 3 + (1 << 40)])
    whole = {"n": [3, 1, 3, 3], "num_preemptions": [1, 5, 2, 0], "num_evictions": [1, 0, 0, 3],
             "prefix_cache_queries": [50, 9, 50, 50], "prefix_cache_hits": [48, 0, 16, 32],
             "prefix_cache_evicted": [0, 4, 8, 1],
             "num_cached_tokens": [48, 0, 16, 32], "fate_cold": [2, 9, 34, 18],
             "output_len": [8, 6, 8, 8]}  # fmt: skip
    times = {"scheduled_time": [1.0, 3.0, 1.5, 1.0], "first_token_time": [4.0, 4.0, 6.0, 5.0],
             "finish_time": [7.0, 8.0, 9.0, 10.0]}  # fmt: skip
    columns = {name: np.array(values) for name, values in {**whole, **times}.items()}
    return {"request_id": ids, **columns}


def test_a_joined_record_by_hand() -> None:
    joined = SampleRecords().joined(hand_made())
    assert {name: column.tolist() for name, column in joined.items()} == {
        "request_id": [4, 3], "n": [1, 3], "num_preemptions": [5, 3], "num_evictions": [0, 4],
        "prefix_cache_queries": [9, 150], "prefix_cache_hits": [0, 96], "prefix_cache_evicted": [4, 9],
        "num_cached_tokens": [0, 32], "fate_cold": [9, 18],  # samples 1 and 2 at once: that of 1
        "output_len": [6, 8],
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
        [0.0, 1.0, 2.0], [10, 20, 5], [4, 6, 3], [0, 2, 4, 6], [7, -1, 8, -2, 3, -3],
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
        [(8, 20), (-2, 6)], [(8, 20), (answers[2], 6)], [(3, 2), (-3, 6)],
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

    groups = Arena(engine(), Groups())
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
    cut = run(batch, config, cluster=Cluster(3, router), horizon=lambda clock: clock.now)
    for name, column in result.records.items():
        assert np.array_equal(column, cut.records[name], equal_nan=True), name
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
    together = prompts([[(0, 40)], [(1, 40)]], output_len=8, gap=0.0, n=[5, 2])
    assert run(together, engine()).totals.max_concurrent_requests == 2
    apart = prompts([[(0, 40)]], output_len=8, n=5), together._replace(arrival_time=np.full(2, APART))
    assert run(iter(apart), engine()).totals.max_concurrent_requests == 2, "ended samples are gone"


def test_samples_arrive_with_their_request() -> None:
    config = engine(priority_policy=True, max_num_seqs=1)
    batch = prompts([[(i, 20)] for i in range(4)], output_len=4, gap=0.0, n=[1, 1, 3, 1])
    result = run(batch, config, concurrency=2)
    assert result.records["arrival_time"][2] == result.records["finish_time"][0]
    assert result.records["scheduled_time"][2] == result.records["finish_time"][1]
    assert result.records["scheduled_time"][3] == result.records["finish_time"][2], "it came after all three"


def test_a_central_queue_waits_for_a_seat() -> None:
    batch = prompts([[(i, 40)] for i in range(6)], output_len=4, gap=0.0, n=3)
    result = run(batch, engine(max_num_seqs=3), cluster=Cluster(2, "central_queue"))
    assert (result.records["submitted_time"] == 0.0).sum() == 2
    assert result.records["submitted_time"].tolist() == result.records["scheduled_time"].tolist()


def test_many_samples_are_loaded_in_pieces() -> None:
    batch = prompts([[(i, 20)] for i in range(9)], n=[1, 30_000, 30_000, 30_000, 1, 1, 80_000, 40_000, 5])
    pieces = list(in_pieces(iter([batch])))
    assert [piece.n.tolist() for piece in pieces] == [
        [1, 30_000, 30_000], [30_000, 1, 1], [80_000], [40_000, 5],
    ]  # fmt: skip
    assert join(pieces).segment_id.tolist() == batch.segment_id.tolist()
    (same,) = in_pieces(iter([batch._replace(n=np.ones(9, np.int64))]))
    assert len(same.n) == 9


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
    config = engine(num_gpu_blocks=16, max_num_seqs=6, async_scheduling=asynchronous, token_fates=True)
    one = run(batch, config)
    cut = run(batch, config, horizon=lambda clock: clock.now)
    assert one.totals.num_preemptions > 0
    for name, column in one.records.items():
        assert np.array_equal(column, cut.records[name], equal_nan=True), name
    assert one.totals.max_concurrent_requests == cut.totals.max_concurrent_requests
    fates = [one.records[name] for name in one.records if name.startswith("fate_")]
    assert (sum(fates) + one.records["num_cached_tokens"] == one.records["prompt_len"]).all()


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


def test_beams_are_refused_where_the_engine_has_none() -> None:
    with pytest.raises(InputError, match="request 1 has beam_width 2: beam search needs cache: paged"):
        run(prompts([[(0, 20)], [(1, 20)]], beam_width=[1, 2]), engine())
