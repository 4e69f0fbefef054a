"""The one-pass curve: known figures to the token, direct simulation, theory, the timed engine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_pool import Names, tokens_of
from simulation import Segments, engine, prompts
from simulation import run as serve
from test_workloads_trace import CONVERSATION, mooncake, shipped, write

from sim.curves.curve import Curve
from sim.curves.load import Load, one_pass
from sim.curves.study import Asked, Study, study
from sim.curves.timed import capacities, timed_point
from sim.errors import InputError
from sim.request import Batch
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.trace import prefix_tree
from sim.validate.cache_theory import references
from workloads import AnyWorkload, MultiTurn, Trace
from workloads.merge import cut
from workloads.popularity import draw_ranks, zipf_bounds

EVER = 1 << 40  # blocks: an infinite pool


class Given:
    """A workload of given batches."""

    has_sessions = False

    def __init__(self, *parts: Batch) -> None:
        self.parts = parts

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        return iter(self.parts)


def load_of(*parts: Batch, **fields: Any) -> Load:
    return Load("given", Given(*parts), **fields)  # type: ignore[arg-type]


def one_study(load: Load, block_size: int, **asked: Any) -> Study:
    (found,) = study(load, Asked([block_size], **asked))
    return found


def hits(found: Study, *blocks: int) -> list[int]:
    return found.curve.hit_tokens(np.array(blocks)).tolist()


@pytest.fixture(scope="module")
def conversation() -> str:
    return shipped(CONVERSATION)


# What trace tools and an independent LRU count (known answers)


def test_conversation_trace_by_vllms_rule(conversation: str) -> None:
    found = one_study(Load("trace", Trace(path=conversation)), 512)
    blocks = [1_000, 10_000, 30_000, 50_000, 100_000, EVER]
    assert hits(found, *blocks) == [
        6_650_880, 31_746_560, 48_812_544, 52_594_688, 53_722_112, 54_063_104,
    ]  # fmt: skip
    rates = [round(found.curve.hit_rate(hit), 4) for hit in hits(found, *blocks)]
    assert rates == [0.0459, 0.2193, 0.3371, 0.3632, 0.3710, 0.3734]
    knee = found.curve.knee
    assert knee is not None
    assert 100 * hits(found, knee - 1)[0] < 99 * 54_063_104 <= 100 * hits(found, knee)[0]


def test_conversation_trace_by_whole_ids(conversation: str) -> None:
    found = one_study(Load("trace", Trace(path=conversation), whole_ids=True), 512)
    rates = [found.curve.hit_rate(hit) for hit in hits(found, 1_000, 10_000, 30_000, 50_000, 100_000, EVER)]
    assert [round(rate, 4) for rate in rates] == [0.0454, 0.2157, 0.3322, 0.3615, 0.3708, 0.3736]


def test_last_requests_as_another_tool_counts_them(conversation: str) -> None:
    at = [22, 88, 352, 1_409, 5_637, 22_550, 90_200]
    found = one_study(Load("trace", Trace(path=conversation), whole_ids=True), 512, last=6_016, at=at)
    total = found.curve.prompt_tokens
    assert total == 67_915_607
    assert hits(found, *at, EVER) == [
        3_080_192, 3_080_581, 3_083_336, 3_320_864, 8_928_755, 21_501_492, 26_550_644, 27_038_068,
    ]  # fmt: skip
    assert [one.hit_tokens for one in found.capacities] == hits(found, *at)
    scale = [
        tuple(
            round(tokens / total, 4)
            for tokens in (one.hit_tokens, one.fifo_hit_tokens, one.belady_hit_tokens)
        )
        for one in found.capacities[3:]
    ]
    assert scale == [
        (0.0489, 0.0481, 0.2299),
        (0.1315, 0.1222, 0.3728),
        (0.3166, 0.2778, 0.3981),
        (0.3909, 0.3735, 0.3981),
    ]


@pytest.mark.slow
def test_all_capacities_of_the_conversation_trace_take_milliseconds(conversation: str) -> None:
    parts = list(Trace(path=conversation).batches(np.random.SeedSequence(0), 512))
    load = load_of(*parts)
    seconds = []
    for _ in range(6):  # the first compiles
        start = time.process_time()
        found = one_study(load, 512)
        seconds.append(time.process_time() - start)
        assert found.curve.ceiling == 54_063_104
    assert min(seconds) < 0.050


MEASURED = """
import resource, sys, time
from sim.curves.load import Load
from sim.curves.study import Asked, study
from workloads import Trace

start = time.process_time()
(found,) = study(Load("trace", Trace(path=sys.argv[1])), Asked([64]))
curve = found.curve
seconds = time.process_time() - start
print(curve.ceiling / curve.prompt_tokens, curve.distinct_blocks, seconds)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_coding_agents_in_seconds_and_gigabytes() -> None:
    path = shipped("claude_code_sessions_blk64.npz")
    code = [sys.executable, "-c", MEASURED, path]
    subprocess.run(code, check=True, capture_output=True)  # compiles
    rate, distinct, seconds, kibibytes = map(
        float, subprocess.run(code, check=True, capture_output=True, text=True).stdout.split()
    )
    assert round(rate, 4) == 0.9636
    assert distinct == 3_389_104
    assert seconds < 15
    assert kibibytes < 6e9 / 1024


def test_several_block_sizes_in_one_pass_are_each_alone(conversation: str) -> None:
    load = Load("trace", Trace(path=conversation, limit=2000))
    together = study(load, Asked([64, 512, 1024]))
    for found, size in zip(together, (64, 512, 1024), strict=True):
        alone = one_study(load, size)
        assert found.curve.block_size == size
        assert np.array_equal(found.curve.hits, alone.curve.hits)
        assert found.curve[2:] == alone.curve[2:]


# Direct simulation


class Use:
    """A request as a direct simulation sees it."""

    def __init__(self, names: list[int], prompt_len: int, block_size: int) -> None:
        self.names = names
        self.limit = (prompt_len - 1) // block_size

    def hits(self, cached: Any) -> int:
        found = 0
        while found < min(self.limit, len(self.names)) and self.names[found] in cached:
            found += 1
        return found


def uses_of(parts: Sequence[Batch], block_size: int, *, outputs: bool = False) -> list[Use]:
    """Every request's blocks by name, from its tokens."""
    naming, found = Names(), []
    for part in parts:
        pairs = list(zip(part.segment_id.tolist(), part.segment_len.tolist(), strict=True))
        for i, (begin, end) in enumerate(pairwise(part.segment_start.tolist())):
            computed = int(part.prompt_len[i] + (part.output_len[i] - 1 if outputs else 0))
            tokens = tokens_of(pairs[begin:end])[:computed]
            names = naming.of(tokens, block_size, int(part.namespace[i]))
            found.append(Use(names, int(part.prompt_len[i]), block_size))
    return found


def lru(uses: Sequence[Use], capacity: int) -> int:
    """Hit blocks; a request's blocks become the most recent, its first one last."""
    cached: OrderedDict[int, None] = OrderedDict()
    total = 0
    for use in uses:
        total += use.hits(cached)
        for name in reversed(use.names):
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return total


def fifo(uses: Sequence[Use], capacity: int) -> int:
    cached: set[int] = set()
    queue: deque[int] = deque()
    total = 0
    for use in uses:
        total += use.hits(cached)
        for name in use.names:
            if name not in cached:
                cached.add(name)
                queue.append(name)
                if len(queue) > capacity:
                    cached.remove(queue.popleft())
    return total


def belady(uses: Sequence[Use], capacity: int) -> int:
    cached: dict[int, int] = {}  # by name: its place in the chain that used it last
    total = 0
    for i, use in enumerate(uses):
        total += use.hits(cached)
        cached.update({name: place for place, name in enumerate(use.names)})

        def worth(name: int, now: int = i) -> tuple[int, int]:
            later = (at for at in range(now + 1, len(uses)) if name in uses[at].names)
            return next(later, len(uses)), cached[name]

        while len(cached) > capacity:
            del cached[max(cached, key=worth)]
    return total


@st.composite
def small_loads(draw: st.DrawFn) -> Batch:
    """Requests of a few shared openings, that end inside segments, and of contents of their own."""
    segment = st.tuples(st.integers(-1, 3), st.integers(1, 9))
    tokens = draw(st.lists(st.lists(segment, min_size=1, max_size=4), min_size=1, max_size=16))
    own = iter(range(-1000, 0))
    named = [[(next(own) if one < 0 else one, length) for one, length in row] for row in tokens]
    n = len(named)
    outputs = draw(st.lists(st.integers(1, 6), min_size=n, max_size=n))
    namespace = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    load = prompts(named, output_len=outputs, gap=1.0, namespace=namespace)
    if draw(st.booleans()):
        return load
    # The last answer's tokens are shared too: the segment of an answer is one that others may name.
    ids = load.segment_id.copy()
    ids[load.segment_start[1:] - 1] = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return load._replace(segment_id=ids)


@given(small_loads(), st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_equals_direct_simulation(batch: Batch, block_size: int, outputs: bool) -> None:
    uses = uses_of([batch], block_size, outputs=outputs)
    distinct = len({name for use in uses for name in use.names})
    at = list(range(1, 11))
    found = one_study(load_of(batch, outputs=outputs), block_size, at=at)
    assert found.curve.distinct_blocks == distinct
    for one in found.capacities:
        assert one.hit_tokens == hits(found, one.blocks)[0] == block_size * lru(uses, one.blocks)
        assert one.fifo_hit_tokens == block_size * fifo(uses, one.blocks)
        assert one.belady_hit_tokens == block_size * belady(uses, one.blocks)
    assert found.curve.ceiling == block_size * lru(uses, EVER)


@pytest.mark.parametrize("seed", range(40))
def test_equals_direct_simulation_at_every_capacity(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer loads, in pieces, with a tree that starts small."""
    monkeypatch.setattr("sim.curves.load.new_tree", lambda _: prefix_tree.new_tree(1))
    rng = np.random.default_rng(seed)
    rows: list[Segments] = [
        [(int(rng.integers(0, 3)), int(rng.integers(1, 12))) for _ in range(rng.integers(1, 4))]
        for _ in range(50)
    ]
    batch, block_size = prompts(rows, output_len=rng.integers(1, 9, 50).tolist(), gap=1.0), 1 + seed % 4
    batch.segment_id[batch.segment_start[1:] - 1] = rng.integers(0, 3, 50)  # answers are shared too
    outputs = seed % 3 > 0
    uses = uses_of([batch], block_size, outputs=outputs)
    pieces = [cut(batch, i, min(i + 7, 50)) for i in range(0, 50, 7)]
    found = one_study(load_of(*pieces, outputs=outputs), block_size)
    for blocks in range(1, found.curve.distinct_blocks + 1):
        assert hits(found, blocks) == [block_size * lru(uses, blocks)]


def test_the_tree_grows_with_content_not_with_requests() -> None:
    tree = prefix_tree.new_tree(8)
    for number, length in enumerate(60 * [9, 6, 3]):
        rows: list[Segments] = [[(0, length), (-1000 - number, 5)]]  # what is its own is never found again
        tree, _ = prefix_tree.add(tree, prompts(rows), np.array([length + 5]))
    assert tree.count[prefix_tree.ROWS] <= 1 + 1 + 3


def test_a_prompt_may_have_as_many_users_as_requests_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "FEWEST_RUNS", 1)
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1, 9]
    batch = prompts([[(0, length)] for length in lengths])
    _, runs = prefix_tree.add(prefix_tree.new_tree(1), batch, batch.prompt_len)
    last = runs.request == 9
    assert runs.user[last].tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert runs.begin[last].tolist() == list(range(9)) and runs.end[last].tolist() == list(range(1, 10))


@given(small_loads(), st.sampled_from([1, 3]), st.integers(1, 12))
def test_long_requests_refused_as_if_they_had_not_come(batch: Batch, block_size: int, blocks: int) -> None:
    uses = uses_of([batch], block_size)
    fits = [-(-int(prompt) // block_size) <= blocks for prompt in batch.prompt_len]
    (one,) = one_study(load_of(batch), block_size, at=[blocks], refuse_long=True).capacities
    left = [use for use, fit in zip(uses, fits, strict=True) if fit]
    assert one.hit_tokens == block_size * lru(left, blocks)
    assert one.fifo_hit_tokens == block_size * fifo(left, blocks)
    assert one.num_refused == len(uses) - len(left)
    assert one.prompt_tokens == batch.prompt_len[fits].sum()


def test_conversation_trace_directly_at_ten_capacities(conversation: str) -> None:
    trace = Trace(path=conversation)
    rows = [
        (part.segment_id[begin : end - 1].tolist(), int(prompt))
        for part in trace.batches(np.random.SeedSequence(0), 512)
        for (begin, end), prompt in zip(pairwise(part.segment_start.tolist()), part.prompt_len, strict=True)
    ]
    uses = [Use(ids[: prompt // 512], prompt, 512) for ids, prompt in rows]
    found = one_study(Load("trace", trace), 512)
    at = [1, 50, 247, 700, 2_000, 4_500, 12_345, 33_333, 77_777, 200_000]
    assert hits(found, *at) == [512 * lru(uses, blocks) for blocks in at]


@given(small_loads())
def test_cut_into_pieces_it_is_the_same(batch: Batch) -> None:
    whole = one_pass(load_of(batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_tree, "FEWEST_RUNS", 1)
        n = len(batch.prompt_len)
        parts = [cut(batch, i, min(i + 3, n)) for i in range(0, n, 3)]
        pieces = one_pass(load_of(*parts))
    for one, other in zip(whole.runs, pieces.runs, strict=True):
        assert np.array_equal(one, other)


# Laws and theory


@pytest.mark.parametrize(("num_prompts", "num_blocks"), [(4, 10), (3, 7), (1, 5)])
def test_knee_of_a_cycle(num_prompts: int, num_blocks: int) -> None:
    """The law of the engine, whose running request's partial block takes a place that the curve has not."""
    cycle: list[Segments] = [[(i, 16 * num_blocks + 1)] for i in range(num_prompts)]
    found = one_study(load_of(prompts(12 * cycle)), 16, last=2 * num_prompts)
    for usable in range(num_blocks + 1, num_prompts * num_blocks + 5):
        steady = max(0, min(num_blocks - (num_prompts * num_blocks + 1 - usable), num_blocks))
        assert hits(found, usable - 1) == [2 * num_prompts * 16 * steady]
    # 99 % of what hits is all of it where so few blocks are to be had.
    assert found.curve.knee == num_prompts * num_blocks


@pytest.mark.parametrize(
    ("num", "alpha", "capacity", "expected"),
    [
        (1000, 0.8, 100, 0.377790),
        (1000, 1.0, 100, 0.576525),
        (10_000, 0.8, 1000, 0.436660),
        (10_000, 1.0, 1000, 0.675602),
        (10_000, 1.2, 1000, 0.861435),
    ],
)
def test_lru_under_independent_references(num: int, alpha: float, capacity: int, expected: float) -> None:
    ranks = draw_ranks(np.random.default_rng(1), zipf_bounds(num, alpha), 200_000)
    found = one_study(load_of(*references(ranks, 1, 0)), 2, last=160_000)
    assert hits(found, capacity)[0] / (2 * 160_000) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("capacity", "expected"), [(2000, 0.5405), (6000, 0.738)])
def test_lru_of_chains(capacity: int, expected: float) -> None:
    ranks = draw_ranks(np.random.default_rng(2), zipf_bounds(500, 1.0), 100_000)
    found = one_study(load_of(*references(ranks, 32, 4)), 2, last=80_000)
    assert hits(found, capacity)[0] / (2 * 32 * 80_000) == pytest.approx(expected, abs=0.005)


def test_a_salt_isolates() -> None:
    same: list[Segments] = [[(0, 33)]] * 4
    assert hits(one_study(load_of(prompts(same)), 16), EVER) == [96]
    assert hits(one_study(load_of(prompts(same, namespace=[0, 1, 2, 1])), 16), EVER) == [32]


def test_working_sets_are_means_over_time() -> None:
    # Twenty blocks at 0, the first ten again at 90, thirty others at 300.
    load = prompts([[(0, 320)], [(0, 160)], [(1, 480)]])._replace(arrival_time=np.array([0.0, 90.0, 300.0]))
    found = one_study(load_of(load), 16).curve
    assert found.working_set == {60: 30 * 60 // 300, 600: (10 * 90 + 10 * 300 + 10 * 210) // 300}
    assert found.distinct_blocks == 50
    at_once = load._replace(arrival_time=np.zeros(3))
    assert one_study(load_of(at_once), 16).curve.working_set == {}


# Sessions


def test_turns_arrive_as_if_answers_took_no_time() -> None:
    chat = MultiTurn.model_validate(
        {"kind": "multi_turn", "num_sessions": 20, "session_rate": 1.0, "num_turns": 3, "user_len": 50,
         "output_len": 40, "system_prompt_len": 64, "think_time": 4.0}
    )  # fmt: skip
    passed = one_pass(Load("chat", chat))
    assert len(passed.prompt) == 60 and (np.diff(passed.arrival) >= 0).all()
    turns = [
        session.start + after
        for session in chat.sessions(np.random.SeedSequence(0))
        for after in np.cumsum(session.delay)
    ]
    assert passed.arrival.tolist() == pytest.approx(sorted(turns))
    answers, none = (one_study(Load("chat", chat, outputs=outputs), 16) for outputs in (True, False))
    assert answers.curve.ceiling > none.curve.ceiling  # a turn's prompt has the answers before


def test_a_user_begins_a_session_when_the_one_before_has_ended() -> None:
    chat = MultiTurn.model_validate(
        {"kind": "multi_turn", "num_sessions": 4, "concurrency": 2, "num_turns": 3, "user_len": 50,
         "output_len": 40, "think_time": 5.0}
    )  # fmt: skip
    turns = [np.cumsum(session.delay) for session in chat.sessions(np.random.SeedSequence(0))]
    ends = sorted(float(turn[-1]) for turn in turns[:2])
    starts = [0.0, 0.0, *ends]
    expected = sorted(float(start + at) for start, turn in zip(starts, turns, strict=True) for at in turn)
    assert one_pass(Load("chat", chat)).arrival.tolist() == pytest.approx(expected)


# The engine


def scenario(**fields: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": "any",
            "cost": {"base_us": 5000, "token_us": 50},
            "engine": {"block_size": 16, "num_gpu_blocks": 5000, "max_model_len": 2000},
            "workload": {"kind": "shared_prefix", "num_groups": 5, "prefix_len": 200, "suffix_len": 40,
                         "output_len": 20, "request_rate": 4.0, "num_requests": 200},
            **fields,
        }
    )  # fmt: skip


CHAT = {
    "kind": "multi_turn", "num_sessions": 40, "session_rate": 1.0, "num_turns": 4, "system_prompt_len": 100,
    "user_len": 50, "output_len": 70, "think_time": 6.0,
}  # fmt: skip


def curve_of(given: Scenario) -> Curve:
    config = resolve(given).config
    load = Load("s", given.workload, given.seed, outputs=True, max_model_len=config.max_model_len)
    return one_study(load, config.block_size).curve


@pytest.mark.parametrize("changes", [{}, {"workload": CHAT}], ids=["shared_prefix", "multi_turn"])
def test_ample_timed_run_is_the_ceiling(changes: Any) -> None:
    given = scenario(**changes)
    found = curve_of(given)
    point = timed_point(given, found, 4999)
    assert point.hit_tokens == point.curve_hit_tokens == found.ceiling > 0
    assert point.prompt_tokens == found.prompt_tokens
    assert point.gap == 0 and point.num_preemptions == 0


def test_refused_requests_are_none_of_the_curves() -> None:
    lengths = {"distribution": "uniform", "low": 100, "high": 400}
    workload = {"kind": "shared_prefix", "num_groups": 3, "prefix_len": 100, "suffix_len": lengths,
                "output_len": 20, "request_rate": 0.5, "num_requests": 60}  # fmt: skip
    engine_of = {"block_size": 16, "num_gpu_blocks": 5000, "max_model_len": 300}
    given = scenario(workload=workload, engine=engine_of)
    found = curve_of(given)
    point = timed_point(given, found, 4999)
    assert 0 < found.num_refused == point.failed < 60
    assert point.prompt_tokens == found.prompt_tokens and point.hit_tokens == found.ceiling


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused() -> None:
    load = prompts([[(0, length)] for length in (299, 300, 301, 299)], output_len=100)
    served = serve(load, engine(max_model_len=300))
    found = one_study(load_of(load, outputs=True, max_model_len=300), 16).curve
    assert served.records["refused"].sum() == found.num_refused == 2
    assert served.totals.prefix_cache_hits == found.ceiling == 288
    assert found.longest == 19  # max_model_len cuts the answer


def test_a_warm_up_counts_for_neither() -> None:
    given = scenario(measure_from=20.0)
    load = Load("s", given.workload, outputs=True)
    found = one_study(load, 16, measure_from=20.0).curve
    point = timed_point(given, found, 4999)
    assert 0 < found.num_requests < 200
    assert (point.hit_tokens, point.prompt_tokens) == (found.ceiling, found.prompt_tokens)


def test_timed_capacities_cover_what_is_of_interest() -> None:
    found = curve_of(scenario())
    blocks = capacities(found, 8)
    assert len(blocks) == 8 and blocks == sorted(blocks)
    assert blocks[0] >= found.longest
    assert found.hit_tokens(np.array(blocks[-1:]))[0] == found.ceiling
    ratios = [after / before for before, after in pairwise(blocks)]
    assert max(ratios) / min(ratios) < 1.1


def test_serial_engine_lies_between_the_capacities() -> None:
    """Without duplicates the running request's partial block costs one place at most."""
    rng = np.random.default_rng(0)
    rows: list[Segments] = [[(int(group), 16 * 6 + 5)] for group in rng.integers(0, 12, 200)]
    load = prompts(rows)
    found = one_study(load_of(load), 16)
    for usable in (8, 20, 40, 60, 72, 80):
        timed = sum(serve(load, engine(num_gpu_blocks=usable + 1)).hits)
        assert hits(found, usable - 1)[0] <= timed <= hits(found, usable)[0]


# What cannot be counted


def test_whole_ids_need_ids(tmp_path: Path) -> None:
    trace = Trace(path=write(tmp_path, mooncake(), mooncake()))
    with pytest.raises(InputError, match="--count whole-ids: .* ids of 512 tokens"):
        study(Load("t", trace, whole_ids=True), Asked([256]))
    assert study(Load("t", trace, whole_ids=True), Asked())[0].curve.ceiling == 600
    workload: AnyWorkload = scenario().workload
    with pytest.raises(InputError, match="--count whole-ids: s has no ids of blocks"):
        study(Load("s", workload, whole_ids=True), Asked())


def test_nothing_that_counts(tmp_path: Path) -> None:
    trace = Trace(path=write(tmp_path, mooncake(), mooncake()))
    with pytest.raises(InputError, match="--last 3: t has 2 requests"):
        study(Load("t", trace), Asked([512], last=3))
    with pytest.raises(InputError, match="no request is left to count"):
        study(Load("t", trace, max_model_len=600), Asked([512]))
