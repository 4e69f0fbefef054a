"""Right answers that follow from vLLM's rules, as numbers (the list's own numbering in the comments)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import APART, Run, Segments, engine, in_order, linear, prompts, run

from sim.arena import Arena
from sim.blocks import FREE
from sim.chains import NODES_USED, ChainTree
from sim.clients import arrivals
from sim.clock import Clock
from sim.columns import B, K, N
from sim.core import EngineConfig
from sim.engine import Engine, Records
from sim.request import Batch
from sim.verify.manager import forget, reset_prefix_cache
from workloads import FourteenTokens, SharedPrefix, Trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"

either_scheduling = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


def fresh(first: int, lengths: Sequence[int]) -> list[Segments]:
    """Prompts that have nothing in common, named from `first` on."""
    return [[(first + i, length)] for i, length in enumerate(lengths)]


class Session:
    """An engine that runs batches one after the other and can be touched between them."""

    def __init__(self, config: EngineConfig) -> None:
        self.clock = Clock()
        self.chunks: list[Records] = []
        self.engine = Engine(self.clock, Arena(config), linear(config), self.chunks.append, Clock.horizon)

    def run(self, batch: Batch) -> list[int]:
        """Hit tokens of each request of a batch that arrives from now on."""
        self.chunks.clear()
        later = batch._replace(arrival_time=batch.arrival_time + self.clock.now)
        self.clock.process(arrivals(self.clock, self.engine, iter([later])))
        self.clock.run()
        self.engine.deliver()
        return in_order(self.chunks)["num_cached_tokens"].tolist()  # type: ignore[no-any-return]


# 1
@either_scheduling
@pytest.mark.parametrize(
    ("block_size", "length", "hit"),
    [
        (16, 16, 0), (16, 17, 16), (16, 33, 32), (64, 64, 0), (64, 65, 64),
        (3584, 2015, 0), (3584, 8015, 7168), (3584, 32015, 28672), (3584, 47074, 46592),
        (544, 3274, 3264), (576, 3274, 2880),
    ],
)  # fmt: skip
def test_a_replayed_prompt_hits_all_full_blocks_but_never_its_last_token(
    block_size: int, length: int, hit: int, async_scheduling: bool
) -> None:
    config = engine(block_size=block_size, async_scheduling=async_scheduling)
    assert run(prompts([[(0, length)]] * 3), config).hits == [0, hit, hit]


# 2
def test_fourteen_tokens() -> None:
    load = FourteenTokens(request_rate=1.0, arrival="constant")
    config = engine(block_size=4, num_gpu_blocks=11)
    result = run(load.batches(np.random.SeedSequence(0), 4), config)
    assert result.hits == [0, 8]
    assert result.totals.num_scheduled_tokens == 14 + 6


# 4
@either_scheduling
@pytest.mark.parametrize("max_num_batched_tokens", [8192, 300])
@pytest.mark.parametrize("gap", [0.0, APART], ids=["at once", "serial"])
def test_prefix_repetition(gap: float, max_num_batched_tokens: int, async_scheduling: bool) -> None:
    tokens = [[(i % 5, 512), (100 + i, 128)] for i in range(100)]
    config = engine(max_num_batched_tokens=max_num_batched_tokens, async_scheduling=async_scheduling)
    totals = run(prompts(tokens, gap=gap), config).totals
    assert (totals.prefix_cache_hits, totals.prefix_cache_queries) == (48_640, 64_000)
    assert totals.num_scheduled_tokens == 64_000 - 48_640


# 5
@either_scheduling
@pytest.mark.parametrize(("budget", "num_steps"), [(1136, 1), (1135, 2)])
def test_identical_prompts_hit_within_one_step(budget: int, num_steps: int, async_scheduling: bool) -> None:
    config = engine(max_num_batched_tokens=budget, async_scheduling=async_scheduling)
    result = run(prompts([[(0, 1024)]] * 8, gap=0.0), config)
    assert result.hits == [0] + 7 * [1008]
    assert result.totals.num_scheduled_tokens == 1024 + 7 * 16
    assert result.totals.num_steps == num_steps


# 6
@either_scheduling
@pytest.mark.parametrize(("between", "hit"), [(1, 64), (17, 48), (33, 32), (49, 16)])
def test_the_tail_of_a_prompt_is_evicted_first(between: int, hit: int, async_scheduling: bool) -> None:
    config = engine(num_gpu_blocks=6, async_scheduling=async_scheduling)
    assert run(prompts([[(0, 80)], [(1, between)], [(0, 80)]]), config).hits == [0, 0, hit]


# 7
def test_behind_a_hole_nothing_hits() -> None:
    session = Session(engine())
    prompt = prompts([[(0, 100)]])
    assert session.run(prompt) == [0]
    core = session.engine.state.core
    assert core.pool.blocks[B.chain, 1:7].astype(bool).tolist() == 6 * [True]
    forget(core.pool, core.tree, 1)  # the prompt's first block: ids are taken in order
    assert session.run(prompt) == [0]
    assert session.run(prompt) == [96]  # the second run cached the first block again


# 8
@pytest.mark.parametrize(
    ("namespaces", "hits"),
    [(np.arange(1, 257), 0), (np.zeros(256), 261_120), (np.full(256, 7), 261_120)],
    ids=["a salt each", "no salt", "one salt"],
)
@pytest.mark.parametrize("gap", [0.0, APART], ids=["at once", "serial"])
def test_a_salt_isolates_a_tenant(namespaces: np.ndarray, hits: int, gap: float) -> None:
    tokens = [[(0, 1024), (1 + i, 64)] for i in range(256)]
    totals = run(prompts(tokens, gap=gap, namespace=namespaces), engine()).totals
    assert (totals.prefix_cache_hits, totals.prefix_cache_queries) == (hits, 278_528)


# 9
@pytest.mark.parametrize(("num_prompts", "num_blocks"), [(4, 10), (3, 7), (1, 5)])
def test_knee_of_a_cycle(num_prompts: int, num_blocks: int) -> None:
    steady = {}
    for usable in range(num_blocks + 1, num_prompts * num_blocks + 5):
        cycle = [[(i, 16 * num_blocks + 1)] for i in range(num_prompts)]
        hits = run(prompts(12 * cycle), engine(num_gpu_blocks=usable + 1)).hits
        steady[usable] = np.array(hits[-2 * num_prompts :]) / 16
    for usable, hit_blocks in steady.items():
        expected = np.clip(num_blocks - (num_prompts * num_blocks + 1 - usable), 0, num_blocks)
        assert (hit_blocks == expected).all(), usable
    if (num_prompts, num_blocks) == (4, 10):
        assert [steady[usable][0] for usable in (11, 31, 35, 38, 41, 44)] == [0, 0, 4, 7, 10, 10]


# 10
@either_scheduling
def test_hits_after_a_preemption_are_counted_apart(async_scheduling: bool) -> None:
    load = prompts(fresh(0, 8 * [64]), output_len=150, gap=0.0)
    totals = run(load, engine(num_gpu_blocks=41, async_scheduling=async_scheduling)).totals
    assert totals.num_preemptions > 0
    assert totals.prefix_cache_hits == 0
    assert totals.prefix_cache_queries == 8 * 64
    assert totals.preempted_hits > 0
    assert totals.preempted_queries > totals.preempted_hits


# 11
@pytest.mark.parametrize("reset", [False, True])
def test_warm_rerun(reset: bool) -> None:
    session = Session(engine())
    load = prompts(fresh(0, 100 * [1024]), gap=0.0)
    assert session.run(load) == 100 * [0]
    core = session.engine.state.core
    if reset:
        assert reset_prefix_cache(core.pool, core.tree)
    assert session.run(load) == 100 * [0 if reset else 1008]


# 12
@pytest.mark.parametrize(
    ("per_group", "shared", "own", "rate"),
    [(16, 2048, 128, 0.882353), (16, 2048, 1, 15 / 16 * 2048 / 2049), (4, 2048, 0, 3 / 4 * 2032 / 2048)],
)
def test_shared_groups(per_group: int, shared: int, own: int, rate: float) -> None:
    tokens = [
        [(i % 8, shared), *([(100 + i, own)] if own else [])] for i in range(8 * per_group)
    ]  # eight groups in turn
    assert run(prompts(tokens, gap=0.0), engine()).hit_rate == pytest.approx(rate, abs=5e-7)


# 14
@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_block_size_tax(block_size: int) -> None:
    shared = range(3 * block_size, 4 * block_size)  # each remainder once
    tokens = [
        [(i, length), (1000 + 2 * i + k, 2 * block_size)] for i, length in enumerate(shared) for k in (0, 1)
    ]
    hits = np.array(run(prompts(tokens), engine(block_size=block_size)).hits)
    assert (hits[::2] == 0).all()
    assert (np.array(shared) - hits[1::2]).mean() == (block_size - 1) / 2


# 16
@either_scheduling
def test_an_ample_pool_has_no_effect(async_scheduling: bool) -> None:
    load = SharedPrefix(
        num_requests=300, num_groups=8, prefix_len=512, suffix_len=100, output_len=50, request_rate=40.0
    )

    def with_pool(num_gpu_blocks: int) -> Run:
        config = engine(num_gpu_blocks=num_gpu_blocks, async_scheduling=async_scheduling)
        return run(load.batches(np.random.SeedSequence(7), 16), config)

    first = with_pool(3001)
    assert first.totals.num_evictions == first.totals.num_preemptions == 0
    assert first.hit_rate > 0.5 and first.totals.max_num_running > 1
    for num_gpu_blocks in (3002, 100_000):
        other = with_pool(num_gpu_blocks)
        for name, column in first.records.items():
            np.testing.assert_array_equal(other.records[name], column)
        for name, value in first.totals._asdict().items():
            if name != "samples":
                np.testing.assert_array_equal(getattr(other.totals, name), value, err_msg=name)
        for ours, theirs in zip(first.totals.samples, other.totals.samples, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg="samples")
    tight = with_pool(200)  # and the load does feel a pool that is not ample
    assert tight.totals.num_evictions > 0 and tight.hit_rate < first.hit_rate


# 17
@pytest.mark.parametrize(
    ("num_gpu_blocks", "hit_tokens"),
    [
        (1_001, 6_649_856),
        (10_001, 31_744_512),
        (30_001, 48_812_032),
        (50_001, 52_594_176),
        (100_001, 53_722_112),
        (300_001, 54_063_104),  # more than the trace has distinct blocks
    ],
)
def test_conversation_trace_without_overlap(num_gpu_blocks: int, hit_tokens: int) -> None:
    path = TRACES / "mooncake_conversation_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs the Mooncake conversation trace as {path}")
    load = Trace(path=str(path), arrival="constant", request_rate=1 / APART, output_len=1)
    config = engine(block_size=512, num_gpu_blocks=num_gpu_blocks)
    totals = run(load.batches(np.random.SeedSequence(0), 512), config).totals
    assert totals.max_num_running == totals.max_concurrent_requests == 1
    assert (totals.num_evictions == 0) == (num_gpu_blocks == 300_001)
    assert totals.prefix_cache_hits == hit_tokens


# 18
@pytest.mark.parametrize("length", [96, 100])
def test_an_edited_token_loses_its_block_and_all_behind(length: int) -> None:
    edits = [[*([(0, j)] if j else []), (1 + j, length - j)] for j in range(length)]
    hits = run(prompts([[(0, length)], *edits]), engine()).hits[1:]
    assert hits == [min(j // 16, (length - 1) // 16) * 16 for j in range(length)]


# 19
@either_scheduling
def test_long_answers_make_caching_matter_less(async_scheduling: bool) -> None:
    ratios = []
    for output_len in (1, 16, 256, 4096):
        load = prompts([[(0, 4097)]] * 2, output_len=output_len)
        on, off = (
            run(load, engine(enable_prefix_caching=caching, async_scheduling=async_scheduling)).e2el[1]
            for caching in (True, False)
        )
        ratios.append(on / off)
        decode = (output_len - 1) * 1.01e-3
        assert on == pytest.approx(1e-3 + 1e-5 + decode, rel=1e-6)
        assert off == pytest.approx(1e-3 + 4097e-5 + decode, rel=1e-6)
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.1 and ratios[-1] > 0.99


# Invariants, always: `run` checks them


@st.composite
def small_loads(draw: st.DrawFn) -> tuple[Batch, EngineConfig, int | None]:
    """Requests of a few shared openings, some too long, into an engine that may be too small for them."""
    segment = st.tuples(st.integers(0, 3), st.integers(1, 12))
    tokens = draw(st.lists(st.lists(segment, min_size=1, max_size=3), min_size=1, max_size=24))
    n = len(tokens)

    def each(values: st.SearchStrategy[int]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)))

    outputs = each(st.integers(1, 20))
    load = prompts(
        tokens,
        output_len=outputs.tolist(),
        gap=draw(st.sampled_from([0.0, 0.0012, 0.01])),
        max_tokens=outputs + each(st.integers(0, 2)),
        priority=each(st.integers(0, 2)),
        namespace=each(st.integers(0, 1)),
        lora=each(st.integers(0, 2)),
    )
    config = EngineConfig(
        block_size=draw(st.sampled_from([1, 2, 4])),
        num_gpu_blocks=draw(st.integers(6, 40)),
        max_num_batched_tokens=draw(st.integers(3, 40)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=draw(st.integers(20, 60)),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_loras=draw(st.integers(0, 1)),
        priority_policy=draw(st.booleans()),
        reserve_full_isl=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        free_all_last=draw(st.booleans()),
    )
    return load, config, draw(st.sampled_from([None, 1, 3]))


@given(small_loads())
def test_invariants_of_any_run(case: tuple[Batch, EngineConfig, int | None]) -> None:
    load, config, concurrency = case
    result = run(load, config, concurrency=concurrency)
    room = np.minimum(load.output_len, config.max_model_len - load.prompt_len)
    served = result.records["refused"] == 0
    assert (result.records["output_len"][served] == room[served]).all()


def live_nodes(tree: ChainTree) -> int:
    """Nodes of the chain tree that something keeps, the root among them."""
    return int((tree.nodes[N.refs, : tree.count[NODES_USED]] > 0).sum())


@either_scheduling
def test_an_idle_engine_holds_nothing(async_scheduling: bool) -> None:
    load = SharedPrefix(
        num_requests=300, num_groups=20, prefix_len=100, suffix_len=60, output_len=80, request_rate=400.0
    )
    session = Session(engine(num_gpu_blocks=150, max_num_seqs=32, async_scheduling=async_scheduling))
    (batch,) = load.batches(np.random.SeedSequence(3), 16)
    session.run(batch)
    core = session.engine.state.core
    assert session.engine.totals().num_preemptions > 0
    assert core.count[K.num_running] == core.count[K.num_waiting] == 0
    assert core.count[K.vacant_slots] + session.engine.arena.num_vacant == core.requests.shape[1]
    assert core.count[K.vacant_seats] == len(core.vacant_seats)
    assert core.pool.count[FREE] == 149 and not core.pool.blocks[B.ref_cnt].any()
    assert live_nodes(core.tree) > 1
    assert reset_prefix_cache(core.pool, core.tree)
    assert live_nodes(core.tree) == 1
