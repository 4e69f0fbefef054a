"""Why each prompt token was computed: against the definitions on token lists, and known answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import APART, Run, Segments, engine, prompts, run
from test_known_answers import Session, either_scheduling, fresh

from sim import state
from sim._jit import entry
from sim.blocks import forget
from sim.columns import H, K, R, S, W
from sim.core import REFUSED, EngineConfig
from sim.engine import FATE_FIELDS
from sim.fates import FATES, MISSES, miss_fates
from sim.history import ROOT
from sim.report import lines
from sim.request import Batch, make_batch
from sim.scenario_file import load
from sim.simulation import run as run_scenario
from sim.state import State
from sim.verify.manager import reset_prefix_cache
from sim.verify.scheduler import NO_ROOM, abort_request, add_request, schedule, update_from_output
from workloads import Trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
Token = tuple[int, int]

decide = entry(miss_fates)


def by_definition(prompt_len: int, block_size: int, hit: int, computed: int, anywhere: int) -> dict[str, int]:
    """The definitions, a token at a time."""
    fates = dict.fromkeys(FATES, 0)
    cap = max(k for k in range(prompt_len) if k % block_size == 0)
    whole = max(k for k in range(computed + 1) if k % block_size == 0)
    for token in range(prompt_len):
        if token < hit:
            fate = "hit"
        elif token < min(whole, cap):
            fate = "evicted"
        elif token < computed:
            fate = "last_token" if whole > cap else "partial_block"
        elif token < anywhere:
            fate = "isolated"
        else:
            fate = "cold"
        if token == prompt_len - 1 and anywhere == prompt_len:
            fate = "last_token"
        fates[fate] += 1
    return fates


@given(st.data())
@settings(max_examples=500)
def test_the_arithmetic(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    prompt_len = data.draw(st.integers(1, 20))
    anywhere = data.draw(st.integers(0, prompt_len))
    computed = data.draw(st.integers(0, anywhere))
    findable = min(computed, prompt_len - 1) // block_size
    hit = block_size * data.draw(st.integers(0, findable))
    expected = by_definition(prompt_len, block_size, hit, computed, anywhere)
    assert sum(expected.values()) == prompt_len
    found = decide(prompt_len, block_size, hit, computed, anywhere)
    assert (hit, *found) == tuple(expected.values())


class Oracle:
    """Every token prefix ever computed, as tries: one for each namespace, and one for all (None)."""

    def __init__(self) -> None:
        self.tries: dict[int | None, dict[Token, Any]] = {None: {}}

    def add(self, namespace: int, tokens: Sequence[Token]) -> None:
        for key in (namespace, None):
            place = self.tries.setdefault(key, {})
            for token in tokens:
                place = place.setdefault(token, {})

    def longest(self, key: int | None, prompt: Sequence[Token]) -> int:
        place = self.tries.get(key, {})
        for length, token in enumerate(prompt):
            if token not in place:
                return length
            place = place[token]
        return len(prompt)


class Case(NamedTuple):
    """A small load, the step before which each request arrives, and that before which some are aborted."""

    config: EngineConfig
    rows: list[list[tuple[int, int]]]
    load: Batch
    arrive: list[int]
    abort: dict[int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Prompts out of few segments, answers that later prompts may go on from, pools that overflow."""
    n = draw(st.integers(1, 16))

    def each(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=n, max_size=n))

    segment = st.tuples(st.integers(0, 2), st.integers(1, 9))
    rows = draw(st.lists(st.lists(segment, min_size=1, max_size=4), min_size=n, max_size=n))
    for i, private in enumerate(each(st.integers(0, 9))):
        if private or len(rows[i]) == 1:
            rows[i].append((-1 - i, private + 1))
    totals = [sum(length for _, length in row) for row in rows]
    outputs = [min(o, total - 1) for o, total in zip(each(st.integers(1, 12)), totals, strict=True)]
    namespaces = each(st.integers(0, draw(st.integers(0, 2))))
    load = make_batch(
        np.arange(n) / 2,
        np.subtract(totals, outputs),
        outputs,
        np.cumsum([0] + [len(row) for row in rows]),
        [segment for row in rows for segment, _ in row],
        [length for row in rows for _, length in row],
        max_tokens=np.add(outputs, each(st.integers(0, 2))),
        priority=each(st.integers(0, 2)),
        namespace=namespaces,
        lora=namespaces,
    )
    config = EngineConfig(
        block_size=draw(st.integers(1, 4)),
        num_gpu_blocks=draw(st.integers(8, 40)),
        max_num_batched_tokens=draw(st.integers(3, 40)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_model_len=60,
        max_loras=draw(st.integers(0, 1)),
        priority_policy=draw(st.booleans()),
        reserve_full_isl=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        free_all_last=draw(st.booleans()),
        token_fates=True,
    )
    arrive = np.cumsum(each(st.integers(0, 4))).tolist()
    aborted = draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, 40), max_size=2))
    return Case(config, rows, load, arrive, aborted)


def tokens_of(row: Sequence[tuple[int, int]]) -> list[Token]:
    """A request's tokens: each is its segment and its place in it."""
    return [(segment, place) for segment, length in row for place in range(length)]


def played(case: Case) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Run a case step by step; yields each ended request's fates, by the engine and by the oracle."""
    engine = State(case.config, num_records=len(case.rows) + 1)
    slots = engine.arena.load(case.load).tolist()
    live = {i for i in range(len(slots)) if engine.core.requests[R.status, slots[i]] != REFUSED}
    coming = sorted(live, key=lambda i: case.arrive[i])
    oracle = Oracle()
    expected: dict[int, dict[str, int]] = {}
    in_flight: list[int] = []
    step = 0
    while coming or in_flight or engine.core.count[K.num_running] + engine.core.count[K.num_waiting] > 0:
        if step == 2000:
            return  # requests of one priority may preempt each other for ever, as in vLLM
        engine.core.clock[W.now] = step
        idle = not in_flight and engine.core.count[K.num_running] + engine.core.count[K.num_waiting] == 0
        while coming and (idle or case.arrive[coming[0]] <= step):
            add_request(engine.core, slots[coming.pop(0)])
            idle = False
        for i, when in case.abort.items():
            still_here = engine.core.requests[R.request_id, slots[i]] == i
            if when == step and i in live and i not in coming and still_here:
                abort_request(engine.core, slots[i])
        row = 1 - in_flight[0] if in_flight else 0
        while (size := int(schedule(engine.core, row))) == NO_ROOM:
            engine.grow()
        requests = engine.core.requests
        for slot in engine.core.steps[S.slot, row, :size].tolist():
            i = int(requests[R.request_id, slot])
            namespace, tokens = int(case.load.namespace[i]), tokens_of(case.rows[i])
            if i not in expected:
                prompt = tokens[: case.load.prompt_len[i]]
                hit, known, anywhere = (
                    int(requests[R.num_cached_tokens, slot]),
                    oracle.longest(namespace, prompt),
                    oracle.longest(None, prompt),
                )
                expected[i] = by_definition(len(prompt), case.config.block_size, hit, known, anywhere)
            oracle.add(namespace, tokens[: requests[R.num_computed, slot]])
        in_flight.append(row)
        if len(in_flight) == 2 or size == 0 or not case.config.async_scheduling:
            update_from_output(engine.core, in_flight.pop(0))
        step += 1
    ended = engine.core.record_ints[: engine.core.count[K.num_records]]
    assert len(ended) == len(live)
    for record in ended.tolist():
        if record[0] in expected:
            hit, misses = record[R.num_cached_tokens], record[R.RECORDED + 2 :]
            found = dict(zip(FATES, (hit, *misses), strict=True))
            assert sum(found.values()) == record[R.prompt_len]
            yield found, expected[record[0]]
        else:
            assert record[R.num_cached_tokens] == -1  # aborted before any admission


@given(cases())
@settings(max_examples=300)
def test_against_an_oracle_on_token_lists(case: Case) -> None:
    for found, expected in played(case):
        assert found == expected


@given(cases())
@settings(max_examples=50)
def test_a_history_that_grows_often(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "HISTORY_NODES", 2)
        for found, expected in played(case):
            assert found == expected


@pytest.mark.parametrize(
    ("num_gpu_blocks", "third", "fourth"),
    [
        (9, {"hit": 8, "evicted": 4, "partial_block": 2, "cold": 3}, {"hit": 16, "cold": 4}),
        (10, {"hit": 12, "evicted": 4, "cold": 1}, {"hit": 16, "partial_block": 1, "cold": 3}),
    ],
)
def test_progress_counts_through_a_preemption(
    num_gpu_blocks: int, third: dict[str, int], fourth: dict[str, int]
) -> None:
    # The urgent second request takes the first one's blocks, at 14 or 16 computed tokens. When it
    # ends, the third goes before the first; the fourth comes in the step that admits that again,
    # with 17 computed tokens in the larger pool.
    rows = [
        [(0, 10), (1, 16)],
        [(2, 12), (-1, 12)],
        [(0, 10), (1, 6), (3, 1), (-2, 1)],
        [(0, 10), (1, 9), (4, 1), (-3, 1)],
    ]
    load = make_batch(
        [0.0, 0.0, 1.0, 1.0],
        [10, 12, 17, 20],
        [16, 12, 1, 1],
        [0, 2, 4, 8, 12],
        [segment for row in rows for segment, _ in row],
        [length for row in rows for _, length in row],
        priority=[2, 0, 1, 3],
    )
    config = EngineConfig(4, num_gpu_blocks, 64, 4, 60, priority_policy=True, token_fates=True)
    ended = [found for found, _ in played(Case(config, rows, load, [0, 0, 8, 8], {}))]
    for expected in (third, fourth):
        assert dict.fromkeys(FATES, 0) | expected in ended


def fates(result: Run) -> list[dict[str, int]]:
    """Each request's fates that are not 0."""
    hits, *misses = (result.records[name].tolist() for name in ("num_cached_tokens", *FATE_FIELDS))
    rows = [dict(zip(FATES, row, strict=True)) for row in zip(hits, *misses, strict=True)]
    for row, length in zip(rows, result.records["prompt_len"].tolist(), strict=True):
        assert sum(row.values()) == length
    return [{name: tokens for name, tokens in row.items() if tokens} for row in rows]


def total(result: Run) -> dict[str, int]:
    """The fates of all prompt tokens that are not 0."""
    rows = fates(result)
    sums = {name: sum(row.get(name, 0) for row in rows) for name in FATES}
    return {name: tokens for name, tokens in sums.items() if tokens}


def explained(**changes: Any) -> EngineConfig:
    """The roomy engine, which says why."""
    return engine(token_fates=True, **changes)


# 1
@either_scheduling
@pytest.mark.parametrize(
    ("block_size", "length", "misses"),
    [
        (16, 16, {"last_token": 16}),
        (16, 17, {"last_token": 1}),
        (16, 33, {"last_token": 1}),
        (64, 65, {"last_token": 1}),
        (3584, 2015, {"last_token": 1, "partial_block": 2014}),
        (3584, 47074, {"last_token": 1, "partial_block": 481}),
        (544, 3274, {"last_token": 1, "partial_block": 9}),
    ],
)
def test_a_replayed_prompt(
    block_size: int, length: int, misses: dict[str, int], async_scheduling: bool
) -> None:
    config = explained(block_size=block_size, async_scheduling=async_scheduling)
    first, *later = fates(run(prompts([[(0, length)]] * 3), config))
    hit = (length - 1) // block_size * block_size
    assert first == {"cold": length}
    assert later == 2 * [({"hit": hit} if hit else {}) | misses]


# 4
@either_scheduling
@pytest.mark.parametrize("max_num_batched_tokens", [8192, 300])
@pytest.mark.parametrize("gap", [0.0, APART], ids=["at once", "serial"])
def test_prefix_repetition(gap: float, max_num_batched_tokens: int, async_scheduling: bool) -> None:
    tokens = [[(i % 5, 512), (100 + i, 128)] for i in range(100)]
    config = explained(max_num_batched_tokens=max_num_batched_tokens, async_scheduling=async_scheduling)
    assert total(run(prompts(tokens, gap=gap), config)) == {"hit": 48_640, "cold": 15_360}


def test_a_running_prompt_counts_as_far_as_it_is_scheduled() -> None:
    load = prompts([[(0, 100)], [(0, 90), (1, 30)]], gap=0.0)
    chunked, whole = (explained(max_num_batched_tokens=budget, max_num_seqs=2) for budget in (40, 8192))
    assert fates(run(load, whole))[1] == {"hit": 80, "partial_block": 10, "cold": 30}
    # the second prompt is admitted in the third step, beside the last 20 tokens of the first
    assert fates(run(load, chunked))[1] == {"hit": 80, "partial_block": 10, "cold": 30}
    load = prompts([[(0, 100)], [(0, 90), (1, 30)]], gap=0.0, priority=[1, 0])
    threshold = explained(long_prefill_token_threshold=20)  # 20 tokens of each in the first step
    assert fates(run(load, threshold))[1] == {"hit": 16, "partial_block": 4, "cold": 100}


# 6
@either_scheduling
@pytest.mark.parametrize(("between", "hit"), [(1, 64), (17, 48), (33, 32), (49, 16)])
def test_an_evicted_tail(between: int, hit: int, async_scheduling: bool) -> None:
    config = explained(num_gpu_blocks=6, async_scheduling=async_scheduling)
    again = fates(run(prompts([[(0, 80)], [(1, between)], [(0, 80)]]), config))[2]
    lost = {"evicted": 64 - hit} if hit < 64 else {}
    assert again == {"hit": hit, "last_token": 16} | lost


def session_fates(session: Session) -> list[dict[str, int]]:
    """The fates of the requests that a session ran last."""
    (chunk,) = session.chunks
    columns = [chunk[name].tolist() for name in ("num_cached_tokens", *FATE_FIELDS)]
    rows = [dict(zip(FATES, row, strict=True)) for row in zip(*columns, strict=True)]
    return [{name: tokens for name, tokens in row.items() if tokens} for row in rows]


# 7
def test_behind_a_hole_all_is_evicted() -> None:
    session = Session(explained())
    prompt = prompts([[(0, 100)]])
    session.run(prompt)
    core = session.engine.state.core
    entry(forget)(core.pool, core.tree, 1)  # the prompt's first block: ids are taken in order
    session.run(prompt)
    assert session_fates(session) == [{"evicted": 96, "last_token": 1, "partial_block": 3}]
    session.run(prompt)
    assert session_fates(session) == [{"hit": 96, "last_token": 1, "partial_block": 3}]


# 8
@pytest.mark.parametrize("gap", [0.0, APART], ids=["at once", "serial"])
@pytest.mark.parametrize(
    ("namespaces", "expected"),
    [
        (np.arange(1, 257), {"isolated": 255 * 1024, "cold": 1024 + 256 * 64}),
        (np.arange(256), {"isolated": 255 * 1024, "cold": 1024 + 256 * 64}),
        (np.zeros(256), {"hit": 261_120, "cold": 1024 + 256 * 64}),
        (np.full(256, 7), {"hit": 261_120, "cold": 1024 + 256 * 64}),
    ],
    ids=["a salt each", "a salt each but one", "no salt", "one salt"],
)
def test_isolated_by_a_salt(namespaces: np.ndarray, expected: dict[str, int], gap: float) -> None:
    tokens = [[(0, 1024), (1 + i, 64)] for i in range(256)]
    assert total(run(prompts(tokens, gap=gap, namespace=namespaces), explained())) == expected


def test_the_final_token_of_an_isolated_prompt() -> None:
    load = prompts([[(0, 100)]] * 2, namespace=[0, 1])
    assert fates(run(load, explained()))[1] == {"isolated": 99, "last_token": 1}


# 11
@pytest.mark.parametrize("reset", [False, True])
def test_warm_rerun(reset: bool) -> None:
    session = Session(explained())
    load = prompts(fresh(0, 100 * [1024]), gap=0.0)
    session.run(load)
    assert session_fates(session) == 100 * [{"cold": 1024}]
    core = session.engine.state.core
    if reset:
        assert reset_prefix_cache(core.pool, core.tree)
    session.run(load)
    assert session_fates(session) == 100 * [{"evicted" if reset else "hit": 1008, "last_token": 16}]


# 12
@pytest.mark.parametrize("num_gpu_blocks", [30_000, 300])
@pytest.mark.parametrize(
    ("per_group", "shared", "own", "rate"), [(16, 2048, 128, 0.882353), (4, 2048, 0, 3 / 4 * 2032 / 2048)]
)
def test_ceiling_of_shared_groups(
    per_group: int, shared: int, own: int, rate: float, num_gpu_blocks: int
) -> None:
    tokens = [[(i % 8, shared), *([(100 + i, own)] if own else [])] for i in range(8 * per_group)]
    result = run(prompts(tokens), explained(num_gpu_blocks=num_gpu_blocks))
    sums = total(result)
    ceiling = (sums["hit"] if num_gpu_blocks > 300 else sums["evicted"]) / result.totals.prefix_cache_queries
    assert ceiling == pytest.approx(rate, abs=5e-7)


# 18
@pytest.mark.parametrize("length", [96, 100])
def test_an_edited_token(length: int) -> None:
    edits: list[Segments] = [[*([(0, j)] if j else []), (1 + j, length - j)] for j in range(length)]
    for j, row in enumerate(fates(run(prompts([[(0, length)], *edits]), explained()))[1:]):
        hit = min(j // 16, (length - 1) // 16) * 16
        expected = {"hit": hit, "partial_block": j - hit, "cold": length - j}
        assert row == {name: tokens for name, tokens in expected.items() if tokens}


def test_answers_count_but_for_their_last_token() -> None:
    # 100 prompt and 50 sampled tokens: the last sampled one's KV is never computed
    load = prompts([[(0, 100)], [(0, 100), (1, 50), (2, 50)]], output_len=[50, 1])
    first = load._replace(segment_id=load.segment_id.copy())
    first.segment_id[1] = 1  # the first request's answer, which the second prompt goes on from
    assert fates(run(first, explained()))[1] == {"hit": 144, "partial_block": 5, "cold": 51}


@pytest.mark.parametrize(("num_gpu_blocks", "hit_tokens"), [(10_001, 31_744_512), (300_001, 54_063_104)])
def test_the_ceiling_of_the_conversation_trace(num_gpu_blocks: int, hit_tokens: int) -> None:
    path = TRACES / "mooncake_conversation_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs the Mooncake conversation trace as {path}")
    load = Trace(path=str(path), arrival="constant", request_rate=1 / APART, output_len=1)
    config = explained(block_size=512, num_gpu_blocks=num_gpu_blocks)
    result = run(load.batches(np.random.SeedSequence(0), 512), config)
    sums = total(result)
    assert sums["hit"] == hit_tokens
    assert sums["hit"] + sums.get("evicted", 0) == 54_063_104
    assert 54_063_104 / result.totals.prefix_cache_queries == pytest.approx(0.3734, abs=5e-5)


def lookup_cost(load: Batch) -> tuple[int, float, int]:
    """After a run: nodes of the history, nodes looked at to find one of them in the mean, and at most."""
    session = Session(explained(block_size=64, num_gpu_blocks=300))
    session.run(load)
    core = session.engine.state.core
    used = int(core.count[K.history_nodes])
    seen = np.zeros(used, np.int64)
    for first in core.history.buckets.tolist():
        node, depth = first, 1
        while node != ROOT:
            seen[node] = depth
            node, depth = int(core.history.nodes[node, H.next_in_bucket]), depth + 1
    assert (seen[1:] > 0).all()
    return used, float(seen[1:].mean()), int(seen.max())


@pytest.mark.parametrize(
    "rows",
    [
        [[(0, 256), (1 + i, 64)] for i in range(10_000)],
        [[(0, 256), (1000 * i, 64)] for i in range(10_000)],
        [[(0, 1 + i), (1, 64)] for i in range(4000)],
    ],
    ids=["suffixes", "numbered in thousands", "places to branch off"],
)
def test_siblings_cost_nothing(rows: list[Segments]) -> None:
    used, mean, most = lookup_cost(prompts(rows, gap=0.5))
    assert used == 2 + len(rows)  # the root and the prefix
    assert mean < 1.5 and most < 12
    equal, *_ = lookup_cost(prompts([[(0, 256), (1, 64)]] * 10_000, gap=0.5))
    assert equal == 3


def test_tenants_cost_nothing() -> None:
    load = prompts([[(0, 256)]] * 5000, gap=0.5, namespace=np.arange(5000))
    used, mean, most = lookup_cost(load)
    assert used == 1 + 5000 and mean < 1.5 and most < 12


def test_what_nobody_can_name_is_not_kept() -> None:
    rows: list[Segments] = [[(0, 256), (-1000 - i, 64)] for i in range(1000)]
    used, _, _ = lookup_cost(prompts(rows, gap=0.5))
    assert used == 2  # the root and the prefix


def test_off_where_nobody_asks() -> None:
    result = run(prompts([[(0, 100)]] * 2), engine())
    assert not set(FATE_FIELDS) & set(result.records)
    core = Session(engine()).engine.state.core
    assert len(core.history.nodes) == 0 and core.record_ints.shape[1] == R.RECORDED + 2


def test_the_summary_of_a_run() -> None:
    small = ["workload.num_requests=300", "engine.num_gpu_blocks=400"]
    result = run_scenario(load(SCENARIOS / "shared_prefix.yaml", small))
    console = {text.split()[0]: text.split()[1] for _, text in lines(result) if text.startswith(FATES)}
    summary, columns = result.summary, {name: result.records.column(f"fate_{name}") for name in FATES}
    result.records.discard()
    assert summary["token_fates"] == {name: column.sum() for name, column in columns.items()}
    assert sum(columns.values()).tolist() == 300 * [2176]  # type: ignore[union-attr]
    assert console == {name: str(tokens) for name, tokens in summary["token_fates"].items()}
    assert summary["token_fates"]["hit"] == summary["prefix_cache_hits"] > 0
    assert summary["token_fates"]["evicted"] > 0
    hit_or_lost = summary["token_fates"]["hit"] + summary["token_fates"]["evicted"]
    assert summary["prefix_cache_ceiling"] == hit_or_lost / summary["prefix_cache_queries"]


def test_without_caching_there_is_nothing_to_explain() -> None:
    off = ["workload.num_requests=20", "engine.enable_prefix_caching=false"]
    result = run_scenario(load(SCENARIOS / "shared_prefix.yaml", off))
    result.records.discard()
    assert result.summary["token_fates"] is None and result.summary["prefix_cache_ceiling"] is None


def test_names() -> None:
    assert tuple(f"fate_{name}" for name in MISSES) == FATE_FIELDS
    assert [getattr(R, name) for name in FATE_FIELDS] == list(range(R.fate_evicted, R.fate_cold + 1))
