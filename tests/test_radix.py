"""RadixAttention in the engine: what hits, who is let in and retracted, in which order, what is reported."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from conformance import at_every_step
from model_radix import ModelTree
from simulation import APART, Run, Segments, engine, prompts, run

from sim import blocks
from sim._jit import entry
from sim.arena import Arena
from sim.blocks import EVICTIONS, FREE
from sim.cache_kinds import RadixKind
from sim.caches import radix as cache
from sim.caches.radix import admission
from sim.caches.radix.admission import FULL, PROMISED, RATIO
from sim.caches.radix.tree import EVICTABLE
from sim.clients import arrivals
from sim.clock import Clock
from sim.columns import K, N, Q, R, W
from sim.core import EngineConfig
from sim.engine import Engine
from sim.request import Batch, make_batch

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
take = entry(blocks.take)
settle_ratio = entry(admission.settle_ratio)
note_retracted = entry(admission.note_retracted)
least_to_lose = entry(admission.least_to_lose)
order_waiting = entry(cache.order_waiting)
preempt = entry(cache.preempt)

RADIX = RadixKind()
LPM = RadixKind(schedule_policy="lpm")


def radix(batch: Batch, kind: RadixKind = RADIX, **changes: Any) -> Run:
    """A run under radix; the engine as in simulation.engine, but for `changes`."""
    return run(batch, engine(**changes), kind=kind)


def requests(rows: Sequence[tuple[Segments, int]], *, gap: float = APART, **columns: Any) -> Batch:
    """Requests of segments over prompt and output, with the prompt's tokens, `gap` seconds apart."""
    totals = [sum(length for _, length in row) for row, _ in rows]
    flat = [pair for row, _ in rows for pair in row]
    return make_batch(
        gap * np.arange(len(rows)),
        [prompt_len for _, prompt_len in rows],
        [total - prompt_len for total, (_, prompt_len) in zip(totals, rows, strict=True)],
        np.cumsum([0] + [len(row) for row, _ in rows]),
        [segment for segment, _ in flat],
        [length for _, length in flat],
        **columns,
    )


# what hits


@pytest.mark.parametrize(("page", "length", "hit"), [(1, 16, 15), (1, 33, 32), (16, 16, 0), (16, 33, 32)])
def test_a_replayed_prompt_hits_all_whole_pages_but_its_last_token(page: int, length: int, hit: int) -> None:
    assert radix(prompts([[(0, length)]] * 3), block_size=page).hits == [0, hit, hit]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(("budget", "hits"), [(8192, 8 * [0]), (1024, [0] + 7 * [1008])])
def test_identical_prompts_of_one_step_all_miss(budget: int, hits: list[int], async_scheduling: bool) -> None:
    if async_scheduling and budget == 1024:
        hits = [0, 0] + 6 * [1008]  # the second is scheduled while the first runs
    result = radix(
        prompts([[(0, 1024)]] * 8, gap=0.0), max_num_batched_tokens=budget, async_scheduling=async_scheduling
    )
    assert result.hits == hits
    assert result.totals.num_scheduled_tokens == 8 * 1024 - sum(hits)


@pytest.mark.parametrize(("page", "hit"), [(1, 149), (16, 144)])
def test_a_second_turn_reuses_the_answer_but_its_last_token(page: int, hit: int) -> None:
    batch = requests([([(0, 100), (1, 50)], 100), ([(0, 100), (1, 50), (2, 30), (3, 5)], 180)])
    assert radix(batch, block_size=page).hits == [0, hit]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_in_flight_at_a_stop_token_leaves_nothing_in_the_tree(async_scheduling: bool) -> None:
    """The engine may have gone on behind the last token, not knowing that it was the last."""
    rows: list[tuple[Segments, int]] = [([(0, 100), (1, 50)], 100), ([(0, 100), (1, 50), (2, 35)], 180)]
    batch = requests(rows, max_tokens=[60, 5])
    assert radix(batch, block_size=1, async_scheduling=async_scheduling).hits == [0, 149]


def test_an_answer_is_found_only_when_it_has_ended() -> None:
    rows: list[tuple[Segments, int]] = [([(0, 100), (1, 50)], 100), ([(0, 100), (1, 50), (2, 5)], 150)]
    together = requests(rows, gap=0.02)  # the first has its prompt in the tree and decodes
    assert radix(together, block_size=1).hits == [0, 100]


def test_namespaces_share_nothing() -> None:
    batch = prompts([[(0, 100)]] * 4, namespace=[0, 1, 0, 1])
    assert radix(batch, block_size=1).hits == [0, 0, 99, 99]


def test_without_prefix_caching_nothing_hits_and_all_comes_back() -> None:
    result = radix(prompts([[(0, 100)]] * 3, output_len=5), enable_prefix_caching=False)
    assert result.hits == [0, 0, 0]


def ideal_hits(rows: list[tuple[Segments, int]]) -> int:
    """Hit tokens of a serial run that forgets nothing, by a trie of single tokens."""
    trie: dict[Any, Any] = {}
    hits = 0
    for row, prompt_len in rows:
        tokens = [(segment, i) for segment, length in row for i in range(length)]
        node, depth = trie, 0
        while depth < prompt_len - 1 and tokens[depth] in node:
            node, depth = node[tokens[depth]], depth + 1
        hits += depth
        node = trie
        for token in tokens[:-1]:
            node = node.setdefault(token, {})
    return hits


@pytest.mark.parametrize("page", [1, 16])
def test_the_sharegpt_trace_hits_what_is_ideal(page: int) -> None:
    path = TRACES / "sharegpt_llama31_8b_segments.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs {path}")
    with gzip.open(path, "rt") as lines:
        data = [json.loads(line) for line in lines]
    rows = [([(s, n) for s, n in row["segments"]], int(row["input_length"])) for row in data]
    result = radix(requests(rows), block_size=page, num_gpu_blocks=600_000 // page)
    queries = sum(prompt_len for _, prompt_len in rows)
    assert (len(rows), queries) == (300, 257_239)
    if page == 1:
        assert result.totals.prefix_cache_hits == ideal_hits(rows) == 20_067
    assert round(result.hit_rate, 4) == {1: 0.0780, 16: 0.0759}[page]


def serial_hits(rows: list[tuple[Segments, int]], page: int, usable: int, budget: int) -> list[int]:
    """Hit tokens of a serial run in a pool of so many pages, by the tree of real tokens."""
    tree = ModelTree(page)
    hits = []
    for row, prompt_len in rows:
        tokens = tuple(segment * 1000 + i for segment, length in row for i in range(length))
        held, computed = tree.match(0, tokens[: prompt_len - 1])
        tree.lock(held, 1)
        hits.append(computed)
        protected = computed
        while computed < len(tokens) - 1:
            step = min(budget, prompt_len - computed) if computed < prompt_len else 1
            own = -(-computed // page) - protected // page
            wanted = -(-(computed + step) // page) - protected // page - own
            cached = (tree.size(locked=True) + tree.size(locked=False)) // page
            if usable - cached - own < wanted:
                tree.evict(wanted * page)
            computed += step
            if computed <= prompt_len:
                protected = computed // page * page
                tree.insert(0, tokens[:protected])
                tree.lock(held, -1)
                held, _ = tree.match(0, tokens[:protected])
                tree.lock(held, 1)
        tree.insert(0, tokens[: computed // page * page])
        tree.lock(held, -1)
    return hits


@pytest.mark.parametrize("budget", [8192, 50])
@pytest.mark.parametrize(("page", "usable"), [(1, 400), (1, 1000), (2, 300), (3, 150), (16, 40)])
def test_a_serial_run_in_a_tight_pool_hits_what_the_tree_of_real_tokens_does(
    page: int, usable: int, budget: int
) -> None:
    rng = np.random.default_rng([page, usable])
    rows: list[tuple[Segments, int]] = []
    for i in range(250):
        row = [(int(rng.integers(6)), int(rng.integers(1, 120)))]
        if rng.random() < 0.5:
            row.append((10 + int(rng.integers(3)), int(rng.integers(1, 60))))
        row.append((100 + i, int(rng.integers(1, 60))))
        row.append((1000 + i, int(rng.integers(1, 40))))
        rows.append((row, sum(length for _, length in row[:-1])))
        if rng.random() < 0.3:  # a second turn
            row = [*row, (2000 + i, 20), (3000 + i, 7)]
            rows.append((row, sum(length for _, length in row[:-1])))
    result = radix(requests(rows), block_size=page, num_gpu_blocks=usable + 1, max_num_batched_tokens=budget)
    expected = serial_hits(rows, page, usable, budget)
    assert result.hits == expected
    assert result.totals.num_evictions > 0 and sum(expected) > 0
    assert result.records["num_evictions"].sum() == result.totals.num_evictions


# who is let in


class Stepper:
    """An engine whose tables can be looked at when a batch has ended."""

    def __init__(self, config: EngineConfig, kind: RadixKind = RADIX) -> None:
        self.clock = Clock()
        self.rows: list[Any] = []
        arena = Arena(config, kind)
        self.engine = Engine(self.clock, arena, linear_of(config), self.rows.append, Clock.horizon)

    def run(self, batch: Batch) -> None:
        later = batch._replace(arrival_time=batch.arrival_time + self.clock.now + 1.0)
        self.clock.process(arrivals(self.clock, self.engine, iter([later])))
        self.clock.run()
        self.engine.deliver()

    @property
    def core(self) -> Any:
        return self.engine.state.core


def linear_of(config: EngineConfig) -> Any:
    from simulation import linear

    return linear(config)


def scheduled(result: Run) -> list[float]:
    """When each request was admitted, as the number of the 1 ms steps before it."""
    return [round(t, 6) for t in result.records["scheduled_time"]]


def in_steps(config: EngineConfig) -> Any:
    """A cost at which every step takes one second."""
    from sim.cost import linear_cost

    return linear_cost(1.0, 0.0, max_num_batched_tokens=config.max_num_batched_tokens)


def admissions(batch: Batch, kind: RadixKind = RADIX, **changes: Any) -> list[int]:
    """The step, from 0, at which each request was first admitted."""
    config = engine(**changes)
    result = run(batch, config, in_steps(config), kind=kind)
    return [round(t) for t in result.records["scheduled_time"]]


def test_a_lone_request_is_admitted_whatever_it_may_ask_for() -> None:
    batch = prompts([[(0, 50)]], output_len=10, max_tokens=[100_000])
    assert admissions(batch, block_size=1, num_gpu_blocks=101) == [0]


@pytest.mark.parametrize(("pool", "second"), [(61, 20), (62, 0)])
def test_the_estimate_counts_all_that_one_admitted_in_this_step_may_ask_for(pool: int, second: int) -> None:
    # 20 tokens of prompt and 20 asked for: 80 in all, of which 20 are taken; the rest must be above
    # what the first is promised (20) and the second wants (40)
    batch = prompts([[(0, 20)], [(1, 20)]], output_len=20, gap=0.0)
    assert admissions(batch, block_size=1, num_gpu_blocks=pool + 20) == [0, second]


@pytest.mark.parametrize(
    ("conservativeness", "usable", "second"), [(1.0, 75, 2), (1.0, 74, 20), (0.0, 63, 2), (0.0, 62, 20)]
)
def test_of_running_requests_the_ratio_counts(conservativeness: float, usable: int, second: int) -> None:
    # At step 2 the first has its 20 prompt tokens and 2 outputs, and takes the page of the second:
    # 22 pages. It may ask for 18 more, of which the ratio counts, decayed once by (.7 - .098) / 600.
    # The second wants 40, and there must be more: usable - 22 - 18 * .69899 > 40.
    batch = prompts([[(0, 20)], [(1, 20)]], output_len=20, gap=1.5)
    kind = RadixKind(schedule_conservativeness=conservativeness)
    assert admissions(batch, kind, block_size=1, num_gpu_blocks=usable + 1) == [0, second]


def at_work(core: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
    """Make requests of (prompt, outputs, tokens asked for, still prefilling) the running ones."""
    for slot, (prompt_len, outputs, asked, prefilling) in enumerate(rows):
        requests = core.requests
        requests[R.prompt_len, slot] = prompt_len
        requests[R.num_tokens, slot] = prompt_len + outputs
        requests[R.max_tokens, slot] = asked
        requests[R.seat, slot] = slot
        requests[R.num_computed, slot] = prompt_len + outputs - 1 - prefilling
        core.cache.prefill[slot] = prompt_len + outputs - 1
        core.queues[Q.running, slot] = slot
    core.count[K.num_running] = len(rows)


STEP = (0.7 - 0.7 * 0.14) / 600  # what a step of decodes takes from the ratio


def test_the_ratio_decays_with_decodes_alone_and_begins_anew_after_idling() -> None:
    stepper = Stepper(engine(block_size=1))
    stepper.run(prompts([[(0, 20)], [(1, 20)], [(2, 20)]], output_len=[101, 1, 1], gap=1e-9))
    core = stepper.core
    assert core.count[K.num_steps] == 101  # of which two prefilled, the second two prompts
    core.clock[W.now] = core.clock[W.last_update]
    settle_ratio(core)
    assert core.cache.ratio[RATIO] == pytest.approx(0.7 - 99 * STEP, abs=1e-12)
    core.clock[W.now] += 1e-6
    settle_ratio(core)
    assert core.cache.ratio[RATIO] == 0.7
    core.count[K.num_steps] += 10_000
    core.count[K.num_running] = 1
    settle_ratio(core)
    assert core.cache.ratio[RATIO] == 0.7 * 0.14


def test_what_is_promised_to_the_running_requests() -> None:
    core = Stepper(engine(block_size=1, num_gpu_blocks=9000)).core
    # decoding: what is left to ask for, no more than 4096; their share is .7 before the first decay
    at_work(core, [(100, 10, 50, False), (100, 1, 9000, False), (100, 60, 50, False)])
    core.count[K.num_waiting] = 1
    order_waiting(core)
    assert core.cache.ratio[PROMISED] == pytest.approx(0.7 * (40 + 4096 + 0))
    # one whose prompt this step computes: all that it may ask for, outputs of an earlier life included
    at_work(core, [(100, 10, 50, True), (8000, 1, 2000, True), (8900, 1, 2000, False)])
    order_waiting(core)
    # of 8999 tokens one is kept, and one more after the prompt: 997 are left of the 2000, 96 of the last
    assert core.cache.ratio[PROMISED] == pytest.approx(50 + 997 + 0.7 * 96)


def test_a_retraction_sets_the_ratio_by_those_that_decode_on() -> None:
    core = Stepper(engine(block_size=1)).core
    at_work(core, [(100, 10, 50, False), (100, 30, 200, False), (100, 5, 999, True)])
    core.cache.count[FULL] = 1
    assert note_retracted(core) == 2
    ratio = (10 + 30 + 2 * 20) / (50 + 200 + 1)
    assert core.cache.ratio[RATIO] == ratio
    assert core.cache.count[FULL] == 0
    core.count[K.num_steps] += 1  # the step that retracted leaves it as it is
    settle_ratio(core)
    assert core.cache.ratio[RATIO] == ratio
    core.count[K.num_steps] += 1
    settle_ratio(core)
    assert core.cache.ratio[RATIO] == pytest.approx(ratio - STEP, abs=1e-12)
    at_work(core, [(100, 90, 50, False)])
    note_retracted(core)
    assert core.cache.ratio[RATIO] == 1.0


@pytest.mark.parametrize(
    ("rows", "victim"),
    [
        ([(9, 3, 9, False), (9, 2, 9, False), (9, 4, 9, False)], 1),
        ([(9, 3, 9, False), (9, 0, 9, True), (9, 4, 9, False)], 0),  # a prefill is no decode
        ([(9, 0, 9, True), (9, 0, 9, True)], 1),
    ],
)
def test_whom_a_retraction_takes(rows: Sequence[tuple[int, int, int, bool]], victim: int) -> None:
    core = Stepper(engine(block_size=1)).core
    at_work(core, rows)
    assert least_to_lose(core) == victim


@pytest.mark.parametrize(("others", "evicted"), [(1, 0), (2, 60)])
def test_a_retraction_makes_room_for_twenty_steps_of_each_that_stays(others: int, evicted: int) -> None:
    # A prompt of 60 lies in the tree, nothing is free, and the retracted one leaves 34 pages: enough for
    # 20 steps of one, but not of two.
    stepper = Stepper(engine(block_size=1, num_gpu_blocks=400))
    stepper.run(prompts([[(0, 60)]]))
    core = stepper.core
    at_work(core, [(100, 50, 90, False)] * others)
    slot = others
    core.requests[R.seat, slot] = slot
    core.vacant_seats[core.count[K.vacant_seats] - 1] = slot
    core.count[K.vacant_seats] -= 1
    core.tree.nodes[N.refs, 0] += 1  # where its path ends
    core.requests[R.num_blocks, slot] = 34
    for i in range(core.pool.count[FREE] - core.cache.tree_count[EVICTABLE]):
        core.seat_blocks[slot, i] = take(core.pool, core.tree, 0)
    preempt(core, slot)
    assert core.pool.count[EVICTIONS] == evicted
    assert core.pool.count[FREE] == 34 + 60


def test_whoever_was_refused_waits_until_somebody_leaves() -> None:
    # the third would fit at once, but nobody overtakes; both wait for the first's end
    batch = prompts([[(0, 20)], [(1, 60)], [(2, 5)]], output_len=[20, 5, 5], gap=0.0)
    assert admissions(batch, block_size=1, num_gpu_blocks=90) == [0, 20, 20]


def test_behind_one_that_takes_all_nobody_is_looked_up() -> None:
    # 17 tokens take two of three pages, and 29 more may be asked for: nothing remains
    batch = prompts([[(0, 17)], [(1, 17)]], output_len=10, max_tokens=[500, 10], gap=0.0)
    assert radix(batch, num_gpu_blocks=4).totals.num_lookups == 2


# who is retracted


def test_the_one_with_the_fewest_outputs_is_retracted_and_queued_last() -> None:
    rows: list[tuple[Segments, int]] = [
        ([(0, 30), (-1, 40)], 30), ([(1, 30), (-2, 60)], 30), ([(2, 10), (-3, 10)], 10)
    ]  # fmt: skip
    batch = requests(rows, max_tokens=[60, 60, 10])._replace(arrival_time=np.array([0.0, 2.5, 30.0]))
    config = engine(block_size=1, num_gpu_blocks=131)
    result = run(batch, config, in_steps(config), kind=RadixKind(schedule_conservativeness=0.0))
    assert result.records["num_preemptions"].tolist() == [0, 1, 0]
    assert result.totals.preempted_hits == 30  # its prompt stayed in the tree, its outputs did not
    # the third waited when the second was retracted, and yet is the first to be let in
    assert result.records["scheduled_time"][2] < result.records["finish_time"][0] < 45


@pytest.mark.parametrize(
    ("lengths", "retracted"),
    [((30, 31, 29), [0, 1, 0]), ((30, 30, 30), [0, 0, 1]), ((31, 30, 31), [0, 0, 1])],
)
def test_of_equal_outputs_the_longest_prompt_then_the_last_is_retracted(
    lengths: Sequence[int], retracted: list[int]
) -> None:
    # 5000 tokens are asked for and 4096 counted, so all three get in; the pool is full before their end
    batch = prompts([[(i, length)] for i, length in enumerate(lengths)], output_len=5000, gap=0.0)
    result = radix(batch, block_size=1, num_gpu_blocks=13_001)
    assert result.records["num_preemptions"].tolist() == retracted


# in which order


def test_lpm_lets_the_longest_cached_prefix_in_first() -> None:
    warm = [[(0, 64)], [(1, 64)]]
    waiting = [[(9, 200)], [(0, 50), (5, 100)], [(2, 40)], [(1, 64), (6, 100)]]
    batch = prompts([*warm, *waiting], gap=0.0, output_len=1)
    times = np.array([0.0, 0.0, 10.0, 10.1, 10.2, 10.3])
    batch = batch._replace(arrival_time=times)
    for kind, expected in ((RADIX, [0, 1, 2, 3]), (LPM, [0, 2, 3, 1])):
        steps = admissions(batch, kind, block_size=1, max_num_batched_tokens=200, max_num_seqs=1)[2:]
        assert np.argsort(np.argsort(steps)).tolist() == expected


def test_lpm_lets_one_of_those_that_begin_alike_go_first() -> None:
    alike: list[Segments] = [[(0, 40), (1, 60)], [(0, 40), (2, 60)], [(0, 40), (3, 60)], [(7, 100)]]
    batch = prompts(alike, gap=0.0)
    assert radix(batch, LPM, block_size=1, max_num_batched_tokens=200).hits == [0, 40, 40, 0]
    assert radix(batch, block_size=1, max_num_batched_tokens=200).hits == [0, 0, 40, 0]
    short: list[Segments] = [[(0, 31), (1, 60)], [(0, 31), (2, 60)], [(7, 100)]]  # not alike enough
    assert radix(prompts(short, gap=0.0), LPM, block_size=1, max_num_batched_tokens=182).hits == [0, 0, 0]


def test_lpm_looks_for_those_alike_among_those_that_hit_at_most_32_tokens() -> None:
    for cached, second in ((32, 40), (33, 33)):
        rows: list[Segments] = [[(0, cached)], [(0, 40), (1, 60)], [(0, 40), (2, 60)], [(7, 100)]]
        batch = prompts(rows)._replace(arrival_time=np.array([0.0, 10.0, 10.0, 10.0]))
        assert radix(batch, LPM, block_size=1, max_num_batched_tokens=150).hits == [0, cached, second, 0]
    # the first hits more than 32, so it is none of those that the second is held against
    rows = [[(0, 40)], [(0, 40), (1, 60)], [(0, 32), (2, 60)], [(7, 100)]]
    batch = prompts(rows)._replace(arrival_time=np.array([0.0, 10.0, 10.0, 10.0]))
    steps = admissions(batch, LPM, block_size=1, max_num_batched_tokens=120)
    assert steps[1] == steps[2] < steps[3]


def test_lpm_finds_no_prompts_of_less_than_32_tokens_alike() -> None:
    rows: list[tuple[Segments, int]] = [([(0, 60)], 20), ([(0, 60)], 20), ([(1, 60)], 20)]
    assert radix(requests(rows, gap=0.0), LPM, block_size=1, max_num_batched_tokens=40).hits[:2] == [0, 0]


def test_above_128_waiting_requests_lpm_is_fcfs() -> None:
    for extra, first in ((0, 1), (1, 0)):
        rows: list[Segments] = (
            [[(0, 64)]] + [[(10 + i, 64)] for i in range(127 + extra)] + [[(0, 64), (1, 64)]]
        )
        batch = prompts(rows)
        times = np.array([0.0] + [10.0] * (len(rows) - 1))
        batch = batch._replace(arrival_time=times)
        steps = admissions(batch, LPM, block_size=1, max_num_seqs=1)
        assert (steps[-1] == min(steps[1:])) == bool(first)


# what is reported


def test_hit_and_evicted_are_what_an_infinite_pool_would_hit() -> None:
    rng = np.random.default_rng(0)
    rows: list[tuple[Segments, int]] = []
    for i in range(120):
        group, own = int(rng.integers(4)), int(rng.integers(3, 40))
        rows.append(([(group, int(rng.integers(10, 60))), (100 + i, own), (-1 - i, 5)], 0))
        row = rows[-1][0]
        rows[-1] = (row, row[0][1] + own)
    batch = requests(rows)
    tight = radix(batch, block_size=1, num_gpu_blocks=150, token_fates=True)
    ample = radix(batch, block_size=1, num_gpu_blocks=30_000, token_fates=True)
    assert tight.totals.num_evictions > 0 and ample.totals.num_evictions == 0
    kept = tight.records["num_cached_tokens"] + tight.records["fate_evicted"]
    assert kept.tolist() == ample.hits
    assert tight.hit_rate < ample.hit_rate


def test_an_answer_that_was_evicted_is_told() -> None:
    rows: list[tuple[Segments, int]] = [
        ([(0, 32), (1, 33)], 32), ([(2, 90), (-1, 5)], 90), ([(0, 32), (1, 33), (3, 5), (-2, 1)], 70)
    ]  # fmt: skip
    records = radix(requests(rows), block_size=1, num_gpu_blocks=101, token_fates=True).records
    assert [records[name][2] for name in ("num_cached_tokens", "fate_evicted", "fate_cold")] == [0, 64, 6]


def test_what_a_running_request_has_computed_is_known() -> None:
    batch = prompts([[(0, 20)], [(0, 20)]], output_len=50, gap=0.02)
    records = radix(batch, token_fates=True).records
    names = "num_cached_tokens", "fate_partial_block", "fate_last_token", "fate_cold"
    assert [records[name][1] for name in names] == [16, 3, 1, 0]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
@pytest.mark.parametrize(("page", "pool"), [(1, 700), (3, 300), (16, 60)])
def test_between_any_two_steps_every_page_is_accounted_for(
    page: int, pool: int, policy: Literal["fcfs", "lpm"]
) -> None:
    rng = np.random.default_rng(page)
    rows: list[tuple[Segments, int]] = []
    for i in range(150):
        shared, own, out = (int(n) for n in rng.integers((5, 1, 1), (150, 100, 60)))
        rows.append(([(int(rng.integers(5)), shared), (100 + i, own), (-1 - i, out)], shared + own))
    batch = requests(rows, gap=0.003)
    config = engine(block_size=page, num_gpu_blocks=pool, max_num_batched_tokens=200)
    kind = RadixKind(schedule_policy=policy, schedule_conservativeness=0.0)  # lets too many in
    looks = 0

    def look(core: Any) -> None:
        nonlocal looks
        looks += 1
        cache.audit(core)

    result = run(batch, config, kind=kind, observe=look, horizon=at_every_step)
    assert looks > 500 and result.totals.num_evictions > 0 and result.totals.num_preemptions > 0
