"""One small test for each rule that mirrors vLLM: the rule is the test's name, the proof its numbers.

Blocks are of 4 tokens unless said otherwise, and block 0 is the null block, so the first taken is 1.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from model_pool import tokens_of

from sim import blocks, chains, waiting
from sim._jit import entry
from sim.blocks import EVICTIONS, new_pool
from sim.caches.apc.blocked_head import REQUEST
from sim.chains import new_tree
from sim.columns import B, C, K, R
from sim.core import REFUSED, WAITING, Core, EngineConfig
from sim.request import make_batch
from sim.verify.compare import free_queue, pool_state
from sim.verify.manager import allocate, forget, reset_prefix_cache, take_seat
from sim.verify.scheduler import SchedulerReplay

take = entry(blocks.take)
touch = entry(blocks.touch)
register = entry(blocks.register)
free_blocks = entry(blocks.free_blocks)
free_order = entry(blocks.free_order)
name_chains = entry(chains.name_chains)
remove_at = entry(waiting.remove_at)
remove_request = entry(waiting.remove_request)


class Pool:
    """A pool of `usable` blocks and the chain ids 1, 2, ... of one long text."""

    def __init__(self, usable: int) -> None:
        self.pool = new_pool(usable + 1)
        self.tree = new_tree(64, 8, 16)
        text = np.array([[1], [32]], np.int64)
        name_chains(self.tree, text, 0, 1, 0, 32, 1, np.zeros(32, np.int64))

    def take(self, n: int = 1) -> list[int]:
        return [int(take(self.pool, self.tree, 0)) for _ in range(n)]

    def cache(self, *block_ids: int, chain: int | None = None) -> None:
        for block in block_ids:
            register(self.pool, self.tree, block, block if chain is None else chain)

    def touch(self, block: int) -> None:
        touch(self.pool, block, 0)

    def free(self, *table: int, all_last: bool = False) -> None:
        free_blocks(self.pool, np.array(table, np.int64), len(table), all_last)

    def queue(self) -> list[int]:
        order = np.zeros(self.pool.blocks.shape[1], np.int64)
        return order[: free_order(self.pool, order)].tolist()  # type: ignore[no-any-return]

    def cached(self) -> list[int]:
        return np.flatnonzero(self.pool.blocks[B.chain]).tolist()  # type: ignore[no-any-return]

    def find(self, chain: int) -> int:
        return int(self.tree.chains[C.block, chain])


class Run(SchedulerReplay):
    """A scheduler over `usable` blocks of 4 tokens; `step` schedules and applies the output."""

    def __init__(self, usable: int, **config: Any) -> None:
        defaults = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 1000}
        super().__init__(EngineConfig(num_gpu_blocks=usable + 1, **(defaults | config)), 1000)
        self.hits: dict[Any, int] = {}  # of the last step's admissions, tokens
        self.preempted: list[str] = []
        self.evicted: list[int] = []
        self.ended: list[str] = []

    def arrive(self, name: str, *segments: tuple[int, int], output: int = 1, **kwargs: Any) -> None:
        """A request of these segments (id, tokens), whose output is like no other."""
        own = 1000 + self.state.arena.next_id
        self.arrive_whole(name, *segments, (own, output), output=output, **kwargs)

    def arrive_whole(self, name: str, *segments: tuple[int, int], output: int, **kwargs: Any) -> None:
        """A request whose segments include its output."""
        tokens = tokens_of(list(segments))
        self.add(name, self.state.arena.next_id, tokens, len(tokens) - output, **kwargs)

    def begin(self) -> dict[str, int]:
        """Schedule a step; returns the tokens of each request in order."""
        decided = self.schedule()
        self.hits = {self.name(slot): decided.hit[slot] for slot in (*decided.new, *decided.resumed)}
        self.preempted, self.evicted = decided.preempted, decided.evicted
        return dict(decided.scheduled)

    def end(self) -> None:
        """Apply the oldest step's output."""
        self.ended = [name for name, _ in self.update()["fin"]]

    def step(self) -> dict[str, int]:
        scheduled = self.begin()
        self.end()
        return scheduled

    def finish(self, name: str, *segments: tuple[int, int], output: int = 1) -> dict[str, int]:
        """Let a request come and go; returns its hit."""
        self.arrive(name, *segments, output=output)
        self.step()
        hits = self.hits
        while self.count(K.num_running):
            self.step()
        return hits

    def seated(self, name: str) -> tuple[Core, int]:
        """Seat a waiting request; returns the core, which may be a new one, and its slot."""
        while not take_seat(self.state.core, self.slot_of[name]):
            self.state.grow_tree()
        return self.state.core, self.slot_of[name]

    def blocks_of(self, name: str) -> list[int]:
        return self.table(self.slot_of[name])

    def field(self, name: str, column: int) -> int:
        return int(self.state.core.requests[column, self.slot_of[name]])

    def queue(self) -> list[int]:
        return free_queue(self.state.core)

    def names_waiting(self) -> list[str]:
        return [self.name(slot) for slot in self.waiting()]


# the pool


def test_blocks_are_taken_from_the_head_and_lose_their_content() -> None:
    pool = Pool(4)
    assert pool.take(2) == [1, 2]
    pool.cache(1, 2)
    pool.free(1, 2)
    assert pool.queue() == [3, 4, 2, 1]
    assert pool.take(3) == [3, 4, 2]
    assert (pool.cached(), pool.find(2), pool.pool.count[EVICTIONS]) == ([1], 0, 1)


def test_a_touched_block_leaves_the_middle_of_the_queue_and_nothing_else_moves() -> None:
    pool = Pool(5)
    pool.take(3)
    pool.cache(1, 2, 3)
    pool.free(1, 2, 3)
    assert pool.queue() == [4, 5, 3, 2, 1]
    pool.touch(2)
    pool.touch(2)
    assert pool.queue() == [4, 5, 3, 1]
    pool.free(2)
    assert pool.queue() == [4, 5, 3, 1]
    pool.free(2)
    assert pool.queue() == [4, 5, 3, 1, 2]


def test_cached_blocks_are_freed_to_the_tail_and_others_to_the_head_deepest_first() -> None:
    pool = Pool(7)
    table = pool.take(5)
    pool.cache(1, 2, 3)
    pool.free(*table)
    assert pool.queue() == [5, 4, 6, 7, 3, 2, 1]


def test_the_older_rule_frees_all_to_the_tail() -> None:
    pool = Pool(7)
    table = pool.take(5)
    pool.cache(1, 2, 3)
    pool.free(*table, all_last=True)
    assert pool.queue() == [6, 7, 5, 4, 3, 2, 1]


def test_of_duplicates_the_earliest_surviving_is_found() -> None:
    pool = Pool(4)
    pool.take(4)
    pool.cache(3, 1, 2, chain=9)
    assert pool.find(9) == 3
    forget(pool.pool, pool.tree, 3)
    assert pool.find(9) == 1
    pool.cache(3, chain=9)
    forget(pool.pool, pool.tree, 1)
    assert pool.find(9) == 2
    forget(pool.pool, pool.tree, 2)
    assert pool.find(9) == 3
    forget(pool.pool, pool.tree, 3)
    assert pool.find(9) == 0


def test_a_block_forgotten_in_use_is_freed_to_the_head() -> None:
    pool = Pool(3)
    pool.take(2)
    pool.cache(1, 2)
    forget(pool.pool, pool.tree, 1)
    pool.free(1, 2)
    assert pool.queue() == [1, 3, 2]


def test_a_reset_is_refused_while_a_block_is_in_use_and_then_changes_nothing() -> None:
    pool = Pool(4)
    pool.take(3)
    pool.cache(1, 2, 3)
    pool.free(1, 2)
    before = pool.pool.blocks.copy(), pool.tree.chains.copy()
    assert not reset_prefix_cache(pool.pool, pool.tree)
    assert (pool.pool.blocks == before[0]).all()
    assert (pool.tree.chains == before[1]).all()
    pool.free(3)
    assert reset_prefix_cache(pool.pool, pool.tree)
    assert (pool.cached(), pool.queue()) == ([], [4, 2, 1, 3])


# lookup and allocation


def test_the_last_token_is_always_computed() -> None:
    run = Run(20)
    run.finish("a", (1, 8))
    run.arrive("b", (1, 8))
    run.arrive("c", (1, 9))
    assert run.step() == {"b": 4, "c": 1}  # at most (num_tokens - 1) // 4 blocks


def test_a_full_hit_computes_its_last_block_again_into_a_duplicate() -> None:
    run = Run(5)
    run.finish("a", (1, 8))
    run.arrive("b", (1, 8))
    run.begin()
    assert run.blocks_of("b") == [1, 3]
    assert pool_state(run.state.core)["nhash"] == 2
    assert run.state.core.pool.blocks[B.chain, 3] == run.state.core.pool.blocks[B.chain, 2]
    run.end()
    assert run.finish("c", (1, 9)) == {"c": 8}


def test_the_first_miss_ends_the_hit() -> None:
    run = Run(20)
    run.finish("a", (1, 16))
    forget(run.state.core.pool, run.state.core.tree, 2)
    assert run.finish("b", (1, 17)) == {"b": 4}
    forget(run.state.core.pool, run.state.core.tree, 1)  # known answer 7: a hole at block 0
    assert run.finish("c", (1, 17)) == {"c": 0}


def test_no_lookup_without_caching() -> None:
    run = Run(5, enable_prefix_caching=False)
    run.finish("a", (1, 9))
    assert run.queue() == [3, 2, 1, 4, 5]  # all to the head
    assert run.finish("b", (1, 9)) == {"b": 0}


def test_hit_blocks_are_touched_before_new_ones_are_taken() -> None:
    run = Run(3)
    run.finish("a", (1, 8))
    run.finish("x", (2, 4))
    assert run.queue() == [2, 1, 3]  # the head is part of the hit to come
    run.arrive("b", (1, 9))
    assert run.begin() == {"b": 1}
    assert (run.blocks_of("b"), run.evicted) == ([1, 2, 3], [3])


def test_a_hit_on_a_free_block_needs_that_block() -> None:
    run = Run(4)
    run.finish("a", (1, 8))
    run.arrive("r", (2, 7), output=9)
    run.arrive("b", (1, 9))
    assert run.step() == {"r": 7}  # b: one new block and two of its hit, but only these two are free
    assert run.count(K.num_lookups) == 3


def test_a_hit_on_a_block_in_use_needs_none() -> None:
    run = Run(4)
    run.arrive("r", (1, 9), output=3)
    run.arrive("b", (1, 11))
    assert run.step() == {"r": 9, "b": 3}
    assert run.queue() == [4]


def test_blocks_are_found_from_the_moment_they_are_allocated() -> None:
    run = Run(20)
    for name in "abc":
        run.arrive(name, (1, 14))
    assert run.step() == {"a": 14, "b": 2, "c": 2}


def test_equal_prompts_in_one_step() -> None:
    """Known answer 5."""
    run = Run(200, block_size=16, max_num_batched_tokens=1136)
    for i in range(8):
        run.arrive(f"r{i}", (1, 1024))
    assert list(run.step().values()) == [1024] + [16] * 7
    assert list(run.hits.values()) == [0] + [1008] * 7


def test_a_chunk_registers_only_the_blocks_it_fills() -> None:
    run = Run(20, max_num_batched_tokens=6)
    run.arrive("a", (1, 16))
    assert run.step() == {"a": 6}
    assert pool_state(run.state.core)["nhash"] == 1
    run.step()
    assert pool_state(run.state.core)["nhash"] == 3


def test_a_chunk_that_ends_before_the_prompt_does_yields_no_token() -> None:
    run = Run(20, max_num_batched_tokens=15)
    run.arrive("a", (1, 16))
    assert run.step() == {"a": 15}
    assert run.field("a", R.num_tokens) == 16
    assert run.step() == {"a": 1}
    assert run.ended == ["a"]


def test_the_whole_prompt_must_fit_before_its_first_chunk_runs() -> None:
    admitted = {}
    for gate in (True, False):
        run = Run(4, max_num_batched_tokens=8, reserve_full_isl=gate)
        run.arrive("r", (1, 4), output=9)
        run.step()
        run.arrive("a", (2, 16))
        admitted[gate] = run.step()
    assert admitted == {True: {"r": 1}, False: {"r": 1, "a": 7}}


@pytest.mark.parametrize("watermark", [0.2, 0.29])
def test_an_admission_leaves_the_watermark_free_only_while_others_run(watermark: float) -> None:
    """int(watermark * 10) = 2 blocks, the null block counted."""

    def run_beside(prompt_len: int) -> dict[str, int]:
        run = Run(9, watermark=watermark)
        run.arrive("r", (1, 1), output=9)
        run.step()
        run.arrive("a", (2, prompt_len))
        return run.step()

    assert run_beside(4 * 6) == {"r": 1, "a": 24}
    assert run_beside(4 * 6 + 1) == {"r": 1}
    alone = Run(9, watermark=watermark)
    alone.arrive("a", (1, 35), output=9)
    assert alone.step() == {"a": 35}  # 9 of 9 blocks
    grows = Run(9, watermark=watermark)
    grows.arrive("a", (1, 32), output=9)
    grows.step()
    assert grows.step() == {"a": 1}  # a running request may take the last block


def test_reserved_blocks_are_left_free() -> None:
    run = Run(3)
    run.arrive("a", (1, 8))
    core, slot = run.seated("a")
    assert not allocate(core, slot, 8, 0, 0, True, 2, False)
    assert run.queue() == [1, 2, 3]
    assert allocate(core, slot, 8, 0, 0, True, 1, False)


def test_lookahead_slots_take_blocks_but_are_never_cached() -> None:
    run = Run(5)
    run.arrive("a", (1, 8))
    core, slot = run.seated("a")
    assert allocate(core, slot, 5, 0, 4, True, 0, False)
    assert (run.table(slot), pool_state(core)["nhash"]) == ([1, 2, 3], 1)


def test_the_kv_of_the_last_sampled_token_is_never_cached() -> None:
    run = Run(20)
    run.arrive("a", (1, 4), output=4)
    output = run.field("a", R.request_id) + 1000
    while run.count(K.num_running) + run.count(K.num_waiting):
        run.step()
    assert pool_state(run.state.core)["nhash"] == 1  # not the 8 tokens' second block
    assert run.finish("b", (1, 4), (output, 4), (2, 1)) == {"b": 4}


def test_outputs_are_cached_as_they_are_computed() -> None:
    run = Run(20)
    run.arrive("a", (1, 4), output=5)
    output = run.field("a", R.request_id) + 1000
    while run.count(K.num_running) + run.count(K.num_waiting):
        run.step()
    assert run.finish("b", (1, 4), (output, 4), (2, 1)) == {"b": 8}


def test_salts_and_adapters_share_nothing() -> None:
    run = Run(20)
    run.finish("a", (1, 9))
    run.arrive("salted", (1, 9), salt="s")
    run.arrive("adapted", (1, 9), lora=1)
    run.arrive("plain", (1, 9))
    assert run.step() == {"salted": 9, "adapted": 9, "plain": 1}


# the scheduler


def test_running_requests_come_before_waiting_ones() -> None:
    run = Run(20, max_num_batched_tokens=8)
    run.arrive("a", (1, 20), output=2)
    assert run.step() == {"a": 8}
    run.arrive("b", (2, 4))
    assert run.step() == {"a": 8}
    assert list(run.step().items()) == [("a", 4), ("b", 4)]


def test_no_more_than_max_num_seqs_run() -> None:
    run = Run(20, max_num_seqs=2)
    for i, name in enumerate("abc"):
        run.arrive(name, (i, 4), output=2)
    assert run.step() == {"a": 4, "b": 4}
    assert run.step() == {"a": 1, "b": 1}
    assert run.step() == {"c": 4}


def test_a_step_that_preempts_admits_nobody() -> None:
    run = Run(4, priority_policy=True)
    run.arrive("a", (1, 8), output=9, priority=0)
    run.arrive("b", (2, 7), output=9, priority=5)
    run.step()
    run.arrive("c", (3, 2), output=9, priority=1)
    assert run.step() == {"a": 1}
    assert (run.preempted, len(run.queue())) == (["b"], 1)  # c would have fitted
    assert run.step() == {"a": 1, "c": 2}


def test_nobody_overtakes_a_blocked_head() -> None:
    run = Run(4)
    run.arrive("r", (1, 8), output=4)
    run.step()
    run.arrive("big", (2, 12))
    run.arrive("small", (3, 2))
    assert run.step() == {"r": 1}
    assert (len(run.queue()), run.names_waiting()) == (1, ["big", "small"])


def test_fcfs_preempts_the_last_and_puts_it_in_front() -> None:
    run = Run(3, max_num_seqs=3)
    for i, name in enumerate("abcd"):
        run.arrive(name, (i, 4), output=9)
    assert run.step() == {"a": 4, "b": 4, "c": 4}
    assert run.step() == {"a": 1}  # takes c's block; then b has none but its own to give
    assert run.preempted == ["c", "b"]
    assert run.names_waiting() == ["b", "c", "d"]


@pytest.mark.parametrize(
    ("x", "y", "victim"),
    [
        ((5, 0), (1, 0), "x"),
        ((1, 0), (5, 0), "y"),
        ((1, 0), (1, 1), "y"),
        ((1, 1), (1, 0), "x"),
        ((1, 0), (1, 0), "x"),  # the first of equals
    ],
)
def test_priority_preempts_the_least_urgent_then_the_latest(
    x: tuple[int, int], y: tuple[int, int], victim: str
) -> None:
    run = Run(3, priority_policy=True)
    run.arrive("x", (1, 4), output=9, priority=x[0], arrival_time=x[1])
    run.step()
    run.arrive("y", (2, 4), output=9, priority=y[0], arrival_time=y[1])
    assert run.step() == {"x": 1, "y": 4}
    assert run.step() == ({"y": 1} if victim == "x" else {"x": 1})
    assert run.preempted == [victim]


def test_a_victim_already_scheduled_gives_its_tokens_back() -> None:
    run = Run(4, priority_policy=True, max_num_batched_tokens=6, reserve_full_isl=False)
    run.arrive("x", (1, 4), output=9, priority=5)
    run.step()
    run.arrive("y", (2, 4), output=9, priority=1)
    run.arrive("z", (3, 8), output=9, priority=1)
    assert run.step() == {"x": 1, "y": 4, "z": 1}
    assert run.step() == {"y": 1, "z": 5}
    assert run.preempted == ["x"]


def test_priority_goes_on_behind_a_request_that_preempted_itself() -> None:
    run = Run(3, priority_policy=True)
    run.arrive("x", (1, 4), output=9, priority=5)
    run.step()
    run.arrive("y", (2, 1), output=9, priority=1)
    for _ in range(4):
        assert run.step() == {"x": 1, "y": 1}
    assert run.step() == {"y": 1}  # both need a block; x comes first, and is the least urgent
    assert run.preempted == ["x"]


def test_a_preempted_request_is_computed_again_with_hits_on_its_own_blocks() -> None:
    run = Run(3)
    run.arrive("a", (1, 4), output=4)
    run.arrive("b", (2, 3), output=9)
    run.step()
    run.step()
    assert run.step() == {"a": 1}  # b preempts itself, with a block of 3 prompt tokens and 1 output
    assert (run.preempted, run.queue()) == (["b"], [2])
    assert run.step() == {"a": 1}
    assert run.ended == ["a"]
    assert run.step() == {"b": 1}
    assert run.hits == {"b": 4}  # more than its prompt
    statistics = [run.count(index) for index in (K.queries, K.hits, K.preempted_queries, K.preempted_hits)]
    assert statistics == [7, 0, 5, 4]


def test_a_lone_request_has_no_prefill_threshold() -> None:
    run = Run(20, long_prefill_token_threshold=5)
    run.arrive("a", (1, 12))
    assert run.step() == {"a": 12}
    run.arrive("b", (2, 12))
    run.arrive("c", (3, 4))
    assert run.step() == {"b": 5, "c": 4}
    assert run.step() == {"b": 7}
    run.arrive("d", (4, 12))
    run.arrive("e", (5, 4), output=9)
    assert run.step() == {"d": 5, "e": 4}
    assert run.step() == {"d": 5, "e": 1}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_the_budget() -> None:
    run = Run(20, max_num_batched_tokens=8, enable_chunked_prefill=False)
    run.arrive("a", (1, 6), output=3)
    run.arrive("b", (2, 4))
    run.arrive("c", (3, 1))
    assert run.step() == {"a": 6}  # c does not overtake b
    assert run.step() == {"a": 1, "b": 4, "c": 1}


def test_the_prefill_threshold_comes_before_the_budget_without_chunked_prefill() -> None:
    run = Run(20, max_num_batched_tokens=12, long_prefill_token_threshold=5, enable_chunked_prefill=False)
    run.arrive("a", (1, 20))
    run.arrive("b", (2, 20))
    assert run.step() == {"a": 5, "b": 5}


def test_adapters_are_counted_once() -> None:
    run = Run(20, max_loras=2)
    for i, lora in enumerate([1, 1, 2, 3]):
        run.arrive(f"r{i}", (i, 4), lora=lora)
    assert run.step() == {"r0": 4, "r1": 4, "r2": 4}


def test_a_request_without_a_place_for_its_adapter_is_set_aside() -> None:
    run = Run(20, max_loras=1)
    for i, (name, lora) in enumerate([("a", 1), ("b", 2), ("c", 1), ("d", None), ("e", 2), ("f", 1)]):
        run.arrive(name, (i, 4), output=1 if name == "c" else 2, lora=lora)
    assert run.step() == {"a": 4, "c": 4, "d": 4, "f": 4}
    assert run.names_waiting() == ["b", "e"]
    run.step()
    assert run.step() == {"b": 4, "e": 4}


def test_a_preempted_request_comes_before_those_set_aside_earlier() -> None:
    run = Run(2, max_loras=1)
    run.arrive("a", (1, 4), output=4, lora=1)
    run.arrive("b", (2, 4), output=4, lora=2)
    run.arrive("c", (3, 4), output=4, lora=1)
    assert run.step() == {"a": 4, "c": 4}
    assert run.step() == {"a": 1}
    assert run.names_waiting() == ["c", "b"]


@pytest.mark.parametrize("priority_policy", [False, True])
def test_the_waiting_queue_keeps_its_order(priority_policy: bool) -> None:
    """By arrival, or by (priority, arrival time, rank); requests leave it from anywhere."""
    draw = random.Random(3)
    run = Run(1, priority_policy=priority_policy)
    expected: list[tuple[tuple[int, ...], int]] = []
    for number in range(400):
        if draw.random() < 0.6:
            priority, time = draw.randrange(3), draw.randrange(4)
            run.arrive(f"r{number}", (1, 1), priority=priority, arrival_time=time)
            slot = run.slot_of[f"r{number}"]
            rank = run.field(f"r{number}", R.rank)
            expected.append(((priority, time, rank) if priority_policy else (number,), slot))
        elif expected:
            expected.sort()
            if draw.random() < 0.5:
                assert remove_at(run.state.core, 0) == expected.pop(0)[1]
            else:
                remove_request(run.state.core, expected.pop(draw.randrange(len(expected)))[1])
    expected.sort()
    assert len(expected) > 50
    assert run.waiting() == [slot for _, slot in expected]
    assert [remove_at(run.state.core, 0) for _ in expected] == [slot for _, slot in expected]


@pytest.mark.parametrize(
    ("max_model_len", "prompt_len", "output_len", "refused"),
    [
        (100, 12, 1, False),
        (100, 8, 5, False),
        (100, 8, 6, True),
        (100, 13, 1, True),
        (12, 11, 1, False),
        (12, 12, 1, True),  # no room for a token
        (13, 8, 99, False),  # it ends at max_model_len
        (14, 8, 99, True),
    ],
)
def test_a_request_is_refused_only_if_it_can_never_fit(
    max_model_len: int, prompt_len: int, output_len: int, refused: bool
) -> None:
    """3 blocks hold 12 tokens; the last token's KV is never computed."""
    run = Run(3, max_model_len=max_model_len)
    batch = make_batch([0.0], [prompt_len], [output_len], [0, 1], [1], [prompt_len + output_len])
    status = run.state.core.requests[R.status, run.state.arena.load(batch)[0]]
    assert status == (REFUSED if refused else WAITING)
    if not refused:
        run.arrive("a", (1, prompt_len), output=output_len)
        while run.count(K.num_running) + run.count(K.num_waiting):
            run.step()
        assert (run.ended, run.count(K.num_preemptions)) == (["a"], 0)


def test_blocks_are_freed_request_by_request_in_scheduled_order() -> None:
    run = Run(6)
    run.arrive("a", (1, 8))
    run.arrive("b", (2, 6))
    run.step()
    assert run.ended == ["a", "b"]
    assert run.queue() == [4, 5, 6, 2, 1, 3]


def test_a_request_ends_at_max_model_len() -> None:
    run = Run(20, max_model_len=8)
    run.arrive("a", (1, 6), output=9)
    assert run.step() == {"a": 6}
    assert run.step() == {"a": 1}
    assert run.ended == ["a"]


def test_a_refused_reset_keeps_the_hits() -> None:
    run = Run(20)
    run.finish("a", (1, 8))
    run.arrive("r", (2, 8), output=5)
    run.step()
    assert run.reset() == 0
    run.arrive("b", (1, 9))
    assert run.step() == {"r": 1, "b": 1}
    while run.count(K.num_running):
        run.step()
    order = run.queue()
    assert (run.reset(), run.queue()) == (1, order)
    assert run.finish("c", (1, 9)) == {"c": 0}


# asynchronous scheduling: the next step is scheduled before the last one's tokens are known


def test_async_ends_by_max_tokens_without_a_wasted_token_but_not_by_a_stop_token() -> None:
    run = Run(20, async_scheduling=True)
    run.arrive("a", (1, 4), output=2)
    run.arrive("s", (2, 4), output=2, max_tokens=5)
    assert run.begin() == {"a": 4, "s": 4}
    assert run.begin() == {"a": 1, "s": 1}
    run.end()
    assert run.begin() == {"s": 1}
    assert run.update()["fin"] == [("a", "length"), ("s", "stop")]
    assert run.begin() == {}


def test_async_ends_by_max_model_len_without_a_wasted_token() -> None:
    run = Run(20, async_scheduling=True, max_model_len=8)
    run.arrive("a", (1, 6), output=9)
    assert [run.begin(), run.begin()] == [{"a": 6}, {"a": 1}]
    run.end()
    assert run.begin() == {}
    run.end()
    assert run.ended == ["a"]


def test_async_a_preempted_request_still_gets_the_token_in_flight() -> None:
    run = Run(3, async_scheduling=True)
    run.arrive("a", (1, 4), output=9)
    run.arrive("b", (2, 4), output=9)
    run.begin()
    assert run.begin() == {"a": 1}
    assert (run.preempted, run.field("b", R.num_tokens), run.field("b", R.stale)) == (["b"], 4, 4)
    assert run.field("b", R.placeholders) == 0
    run.end()
    assert (run.field("b", R.num_tokens), run.field("b", R.stale)) == (5, 0)
    assert run.field("b", R.num_computed) == 0


def test_async_a_preempted_request_may_end_while_it_waits() -> None:
    run = Run(2, async_scheduling=True)
    run.arrive("a", (1, 4), output=2)
    run.arrive("b", (2, 4), output=1)
    run.begin()
    assert run.begin() == {"a": 1}
    assert run.names_waiting() == ["b"]
    run.end()
    assert (run.ended, run.names_waiting()) == (["b"], [])


def test_async_caches_sampled_tokens_once_they_are_known() -> None:
    run = Run(20, async_scheduling=True)
    run.arrive("a", (1, 3), output=2)
    run.begin()
    assert run.begin() == {"a": 1}  # four tokens are scheduled, three known
    assert pool_state(run.state.core)["nhash"] == 0
    run.end()
    assert pool_state(run.state.core)["nhash"] == 0
    assert run.begin() == {}
    run.end()
    assert run.ended == ["a"]
    assert pool_state(run.state.core)["nhash"] == 1
    assert run.queue()[-1] == 1  # cached before it was freed


def test_async_a_request_whose_last_token_is_in_flight_keeps_its_adapters_place() -> None:
    run = Run(20, async_scheduling=True, max_loras=1)
    run.arrive("a", (1, 4), lora=1)
    run.arrive("b", (2, 4), lora=2)
    assert run.begin() == {"a": 4}
    assert run.begin() == {}  # a runs on, though nothing of it is scheduled
    run.end()
    assert run.begin() == {"b": 4}


# a shortcut that is no rule: a blocked head is not looked up again while it cannot fit


def test_a_blocked_head_is_admitted_when_its_hit_grows() -> None:
    run = Run(3)
    run.arrive_whole("r", (1, 12), output=7)
    run.arrive("b", (1, 9))
    assert [run.step() for _ in range(3)] == [{"r": 5}, {"r": 1}, {"r": 1}]
    assert run.count(K.num_lookups) == 2
    assert run.step() == {"r": 1, "b": 1}  # r completes a second block that b can share


def test_a_blocked_head_is_admitted_when_part_of_its_hit_was_evicted_and_cached_again() -> None:
    run = Run(5)
    run.finish("f", (1, 8))  # in blocks 1 and 2
    run.arrive_whole("r", (1, 14), output=9)
    run.arrive("e", (2, 4), output=9)
    run.arrive("q", (3, 1), output=3)
    run.arrive("b", (1, 9))  # needs two blocks, and only block 2 is free
    assert run.step() == {"r": 1, "e": 4, "q": 1}
    assert run.step() == {"r": 1, "e": 1, "q": 1}
    assert run.evicted == [2]
    assert run.step() == {"r": 1, "e": 1, "q": 1}  # q's block is free now
    assert run.step() == {"r": 1, "e": 1, "b": 1}  # r has cached what block 2 held


def test_a_blocked_head_is_admitted_when_a_duplicate_in_use_is_found_first() -> None:
    run = Run(4)
    run.finish("f", (1, 8))  # in blocks 1 and 2
    run.arrive("r", (1, 8), output=9)  # hits block 1; block 3 is a duplicate of block 2
    run.arrive("q", (3, 1), output=2)
    run.arrive("b", (1, 9))  # needs two blocks, and only block 2 is free
    assert run.step() == {"r": 4, "q": 1}
    assert run.step() == {"r": 1, "q": 1}
    assert run.evicted == [2]
    assert run.step() == {"r": 1, "b": 1}


def test_a_blocked_head_is_admitted_when_somebody_before_it_shares_its_hit() -> None:
    run = Run(5, priority_policy=True)
    run.finish("f", (1, 8))
    run.arrive("q", (3, 7), output=2)
    run.arrive("b", (1, 16), priority=1)
    assert run.step() == {"q": 7}
    run.arrive("c", (1, 9), output=9)
    assert run.step() == {"q": 1, "c": 1}
    assert run.step() == {"c": 1, "b": 8}  # its hit is in use now, so it needs two blocks, not four


def test_a_blocked_head_is_admitted_exactly_when_a_fresh_lookup_would() -> None:
    assert sum(lookups_saved(seed) for seed in range(60)) > 250


def lookups_saved(seed: int) -> int:
    """Two equal runs, of which one forgets before every step why its head was refused."""
    draw = random.Random(seed)
    chunked = draw.random() < 0.8
    block_size = draw.choice([1, 2, 4])
    config = {
        "block_size": block_size,
        "max_num_batched_tokens": draw.choice([5, 9, 16, 64] if chunked else [40]),
        "max_num_seqs": draw.choice([4, 8]),
        "watermark": draw.choice([0.0, 0.0, 0.1]),
        "priority_policy": draw.random() < 0.4,
        "async_scheduling": draw.random() < 0.4,
        "enable_prefix_caching": draw.random() < 0.9,
        "enable_chunked_prefill": chunked,
        "max_loras": draw.choice([0, 0, 1]),
        "max_model_len": draw.choice([40, 1000]),
    }
    usable = draw.randrange(10, 20) * 4 // block_size
    runs = [Run(usable, **config), Run(usable, **config)]
    in_flight = 0
    for number in range(150):
        if number < 100 and draw.random() < 0.8:
            segments = [
                (draw.randrange(3), draw.randrange(1, 16)),
                (draw.randrange(3), draw.randrange(1, 10)),
            ]
            output = draw.randrange(1, 12)
            options = {
                "max_tokens": output + draw.choice([0, 3]),
                "priority": draw.randrange(3),
                "lora": draw.choice([None, None, 1, 2]),
            }
            for run in runs:
                run.arrive_whole(f"r{number}", *segments, output=output, arrival_time=number, **options)
        if runs[0].slot_of and draw.random() < 0.03:
            name = draw.choice(sorted(runs[0].slot_of))
            for run in runs:
                run.abort(name)
        if draw.random() < 0.03:
            assert runs[0].reset() == runs[1].reset()
        runs[1].state.core.cache.blocked[REQUEST] = -1
        assert runs[0].begin() == runs[1].begin()
        in_flight += 1
        if in_flight > config["async_scheduling"]:
            for run in runs:
                run.end()
            in_flight -= 1
        assert pool_state(runs[0].state.core) == pool_state(runs[1].state.core)
        assert runs[0].names_waiting() == runs[1].names_waiting()
    assert runs[0].count(K.num_admissions) > 10
    return runs[1].count(K.num_lookups) - runs[0].count(K.num_lookups)
