"""Sessions: requests that wait for the ends of others, in an open and a closed loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from simulation import run

from sim.clock import Clock
from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.request import Session
from sim.resolve import resolve
from sim.scenario import Scenario
from workloads import Agent, MultiTurn, SessionWorkload, Tree, WorkloadError

CONFIG = EngineConfig(
    block_size=16, num_gpu_blocks=4096, max_num_batched_tokens=512, max_num_seqs=16, max_model_len=16_384
)
COST = linear_cost(2e-3, 1e-5, decode_context_s=1e-8, max_num_batched_tokens=512)
SEED = np.random.SeedSequence(3)

CHAT = MultiTurn(
    num_sessions=12, session_rate=2.0, num_turns={"distribution": "uniform", "low": 1, "high": 5},
    num_system_prompts=2, system_prompt_len=40, user_len={"distribution": "uniform", "low": 1, "high": 60},
    output_len={"distribution": "uniform", "low": 1, "high": 20}, think_time=0.5,
)  # fmt: skip
TREE = Tree(num_sessions=3, branch=3, depth=2, question_len=50, step_len=7, output_len=9)
AGENT = Agent(
    num_sessions=2, num_turns=7, system_prompt_len=64, task_len=30, tool_len=100, output_len=20,
    tool_time=0.1, fork_every=3, subagents=2, subagent_turns=2, compact_every=5, summary_len=33,
)  # fmt: skip


def sessions_of(workload: SessionWorkload) -> list[Session]:
    return list(workload.sessions(SEED))


def result(workload: SessionWorkload, config: EngineConfig = CONFIG, **options: Any) -> Any:
    return run(workload.sessions(SEED), config, COST, concurrency=workload.concurrency, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", [CHAT, TREE, AGENT])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_arrives_a_pause_after_those_it_waits_for(
    workload: SessionWorkload, asynchronous: bool
) -> None:
    records = result(workload, CONFIG._replace(async_scheduling=asynchronous)).records
    first = 0
    for session in sessions_of(workload):
        for i, after in enumerate(session.after):
            begin = max((records["finish_time"][first + j] for j in after), default=session.start)
            assert records["arrival_time"][first + i] == begin + session.delay[i]
        assert (records["session_id"][first : first + len(session.after)] >= 0).all()
        first += len(session.after)
    assert first == len(records["arrival_time"])


def by_steps(clock: Clock) -> float:
    return clock.now


@pytest.mark.parametrize("workload", [CHAT, TREE, AGENT, CHAT.model_copy(update={"session_rate": np.inf})])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_may_be_cut_anywhere(workload: SessionWorkload, asynchronous: bool) -> None:
    tight = CONFIG._replace(async_scheduling=asynchronous, num_gpu_blocks=300)
    whole, cut = result(workload, tight), result(workload, tight, horizon=by_steps)
    for name, column in whole.records.items():
        np.testing.assert_array_equal(cut.records[name], column, err_msg=name)
    assert cut.totals.num_steps == whole.totals.num_steps


def test_a_turns_prompt_is_the_whole_dialogue() -> None:
    for session in sessions_of(CHAT):
        batch = session.requests
        told = batch.prompt_len + batch.output_len
        assert (np.diff(batch.prompt_len) > 0).all()
        assert (batch.prompt_len[1:] > told[:-1]).all()
        rows = [slice(*batch.segment_start[i : i + 2]) for i in range(len(told))]
        assert {tuple(batch.segment_id[row]) for row in rows} == {tuple(batch.segment_id[rows[0]])}
        assert set(batch.segment_len[batch.segment_id < 2].tolist()) == {40}


def test_with_room_for_all_a_turn_hits_all_full_blocks_told_before() -> None:
    """Of the former prompt and answer all but the last token has KV, and the last block is computed."""
    records = result(CHAT).records
    first = 0
    for session in sessions_of(CHAT):
        batch = session.requests
        for turn in range(1, len(batch.prompt_len)):
            known = batch.prompt_len[turn - 1] + batch.output_len[turn - 1] - 1
            most = (batch.prompt_len[turn] - 1) // 16 * 16
            assert records["num_cached_tokens"][first + turn] == min(known // 16 * 16, most)
        first += len(batch.prompt_len)


def test_another_session_changes_no_other() -> None:
    few, many = (CHAT.model_copy(update={"num_sessions": n}) for n in (5, 50))
    for a, b in zip(sessions_of(few), sessions_of(many), strict=False):
        assert (a.start, a.after) == (b.start, b.after)
        for ours, theirs in zip(a.requests, b.requests, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_users_have_one_session_each() -> None:
    users = CHAT.model_copy(update={"session_rate": np.inf, "concurrency": 3})
    records = result(users).records
    begin, end = {}, {}
    for session in range(12):
        mine = records["session_id"] == session
        begin[session], end[session] = records["arrival_time"][mine].min(), records["finish_time"][mine].max()
    assert [begin[i] for i in range(3)] == [0.0] * 3
    for session in range(3, 12):
        assert begin[session] in end.values()
        assert sum(begin[i] <= begin[session] < end[i] for i in range(12)) <= 3


def test_a_tree_of_thoughts() -> None:
    session = sessions_of(TREE)[0]
    assert session.after == ((), (), (), *((parent,) for parent in (0, 0, 0, 1, 1, 1, 2, 2, 2)))
    assert session.requests.prompt_len.tolist() == [50 + 7] * 3 + [50 + 7 + 9 + 7] * 9
    starts, names = session.requests.segment_start, session.requests.segment_id
    paths = [tuple(names[starts[i] : starts[i + 1]]) for i in range(12)]
    assert len(set(paths)) == 12 and {path[0] for path in paths} == {paths[0][0]}
    assert all(paths[i][:2] == paths[(i - 3) // 3] for i in range(3, 12))
    other = sessions_of(TREE)[1].requests.segment_id
    assert not set(names) & set(other)


def test_an_agent_forks_waits_and_compacts() -> None:
    session = sessions_of(AGENT)[0]
    # turns 0 1 2, two helpers of two requests each, turns 3 4, turn 5 (compacted), helpers, turn 6
    assert session.after == (
        (), (0,), (1,), (2,), (3,), (2,), (5,), (4, 6), (7,), (8,), (9,), (10,), (9,), (12,), (11, 13),
    )  # fmt: skip
    prompts = session.requests.prompt_len.tolist()
    assert prompts[:3] == [94, 94 + 120, 94 + 240]
    assert prompts[3] == 94 + 240 + 20 + 30  # a helper: the context, its last answer, a task
    assert prompts[4] == prompts[3] + 20 + 100
    assert prompts[7] == 94 + 360  # the parent goes on where it was, with what the helpers found
    assert prompts[9] == 64 + 33 + 100  # only the system prompt is left of the context, and a summary
    starts, names = session.requests.segment_start, session.requests.segment_id
    parent, helper, compacted = (set(names[starts[i] : starts[i + 1]].tolist()) for i in (7, 3, 9))
    assert parent < helper and compacted & parent == {0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CHAT.model_validate({**CHAT.model_dump(), "concurrency": 2}), "drop it, or set"),
        (lambda: TREE.model_validate({**TREE.model_dump(), "depth": 9}), "over 4096 thoughts: lower one"),
        (lambda: AGENT.model_validate({**AGENT.model_dump(), "summary_len": None}), "give both or none"),
        (lambda: AGENT.model_validate({**AGENT.model_dump(), "fork_every": None}), "no effect without fork"),
    ],
)
def test_what_has_no_meaning_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_what_needs_fixed_times_says_so() -> None:
    batches: Iterator[Any] = iter(())
    with pytest.raises(WorkloadError, match="MultiTurn: when a request arrives depends on answers"):
        batches = CHAT.batches(SEED, 16)
    assert next(batches, None) is None


@pytest.mark.parametrize("kind", ["multi_turn", "agent", "tree"])
def test_the_shipped_scenarios_resolve(kind: str) -> None:
    from sim.scenario_file import load

    scenario: Scenario = load(f"scenarios/{kind}.yaml")
    assert scenario.workload.kind == kind
    assert resolve(scenario).step_time.name.startswith("h100-sxm/")
