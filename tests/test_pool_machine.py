"""Pool, chain tree and cache manager under random work, against a small independent model.

Programs are bytes, so hypothesis can shrink them; every operation is followed by a comparison of
everything: free order, reference counts, tables, contents and their blocks, evictions.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from model_pool import ModelManager, ModelRequest, Names, tokens_of

from sim import blocks, update
from sim._jit import entry
from sim.blocks import EVICTIONS, FREE
from sim.caches import apc
from sim.chains import CHAINS_USED, FREE_NODE, MAX_RUN, NODES_USED, ROOT, new_tree
from sim.columns import B, C, K, N, R
from sim.core import NO_SEAT, PREEMPTED, RUNNING, WAITING, EngineConfig
from sim.request import make_batch
from sim.state import State
from sim.verify.compare import drain_taken

forget = entry(blocks.forget)
reset_prefix_cache = entry(blocks.reset_prefix_cache)
take_seat = entry(apc.take_seat)
leave_seat = entry(apc.leave_seat)
get_computed_tokens = entry(apc.get_computed_tokens)
allocate = entry(apc.allocate)
cache_blocks = entry(apc.cache_blocks)
set_edge = entry(apc.set_edge)
free = entry(apc.free)
finish_request = entry(update.finish_request)

Choose = Callable[[int], int]  # a number below n


class Driver:
    """The core and the model side by side; `choose` decides what happens to them."""

    OPERATIONS = (
        ["arrive"] * 3 + ["lookup"] * 2 + ["admit"] * 6 + ["extend"] * 8 + ["learn"] * 3
        + ["finish"] * 2 + ["preempt"] * 2 + ["reset", "evict"]
    )  # fmt: skip

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.block_size = (1, 2, 3, 4, 5, 8)[choose(6)]
        num_blocks = (2, 4, 8, 14, 24, 40, 150)[choose(7)]
        self.longest = min(4 + choose(40) * (1 + choose(4)), 2 * num_blocks * self.block_size)
        if num_blocks == 150:
            self.longest = MAX_RUN * self.block_size + 1 + choose(80 * self.block_size)
        max_model_len = self.longest - choose(2)
        caching, all_last, eagle = choose(8) > 0, choose(4) == 0, choose(8) == 0
        watermark = (0.0, 0.0, 0.1, 0.35)[choose(4)]
        self.model = ModelManager(
            num_blocks,
            self.block_size,
            caching=caching,
            all_last=all_last,
            watermark=watermark,
            max_model_len=max_model_len,
            eagle=eagle,
        )
        self.state = State(
            EngineConfig(
                block_size=self.block_size,
                num_gpu_blocks=num_blocks,
                max_num_batched_tokens=1 << 20,
                max_num_seqs=8,
                max_model_len=max_model_len,
                watermark=watermark,
                enable_prefix_caching=caching,
                free_all_last=all_last,
                use_eagle=eagle,
            ),
            num_records=1,
            taken_log=4 * num_blocks,
            table_len=self.longest // self.block_size,
        )
        # next to no room, so that growing and compacting happen in the middle of the work; with one
        # bucket, every other node is a candidate
        self.state.core = self.state.core._replace(
            tree=new_tree(2, 2, (1, 16)[choose(2)])
        )
        self.state.arena.segments = np.zeros((2, 1), np.int64)
        self.state.share()
        self.names = Names()
        self.requests: dict[int, ModelRequest] = {}  # by slot
        self.segment_ids = 2 + choose(6)
        self.done: Counter[str] = Counter()
        self.evictions = 0
        self.idle = False  # whether the operation found nothing to do
        self.holes = False  # whether blocks were forgotten out of turn

    def operate(self) -> None:
        """Carry out one random operation on both, and compare them."""
        self.perform(self.OPERATIONS[self.choose(len(self.OPERATIONS))])

    def perform(self, operation: str) -> None:
        self.idle = False
        getattr(self, operation)()
        if not self.idle:
            self.done[operation] += 1
            self.compare()

    # choices

    def pick(self, wanted: Callable[[int], bool]) -> int | None:
        slots = [slot for slot in self.requests if wanted(slot)]
        self.idle = not slots
        return slots[self.choose(len(slots))] if slots else None

    def status(self, slot: int) -> int:
        return int(self.state.core.requests[R.status, slot])

    def running(self) -> int | None:
        return self.pick(lambda slot: self.status(slot) == RUNNING)

    def waiting(self) -> int | None:
        return self.pick(lambda slot: self.status(slot) != RUNNING)

    # operations

    def arrive(self) -> None:
        """A request of segments cut anywhere, repeated or not, in one of three namespaces."""
        if len(self.requests) == 8:
            self.idle = True
            return
        segments: list[tuple[int, int]] = []
        room = self.longest
        while room > 0 and len(segments) < 5:
            length = min(room, self.choose(1 + min(self.longest, 255)) * (1 + self.choose(2)))
            segments.append((self.choose(self.segment_ids), length))
            room -= length
            if sum(n for _, n in segments) >= 2 and self.choose(3) == 0:
                break
        tokens = tokens_of(segments)
        if len(tokens) < 2:
            self.idle = True
            return
        prompt_len = 1 + self.choose(len(tokens) - 1)
        namespace = (0, 0, 1, 2)[self.choose(4)]
        batch = make_batch(
            [0.0],
            [prompt_len],
            [len(tokens) - prompt_len],
            [0, len(segments)],
            [segment for segment, _ in segments],
            [length for _, length in segments],
            namespace=namespace,
        )
        slot = int(self.state.arena.load(batch)[0])
        self.state.core.requests[R.status, slot] = WAITING  # also where it can never fit
        named = tokens[: self.model.max_model_len]
        self.requests[slot] = ModelRequest(
            tokens, prompt_len, self.names.of(named, self.block_size, namespace)
        )

    def sit(self, slot: int) -> None:
        while self.state.core.requests[R.seat, slot] == NO_SEAT and not take_seat(self.state.core, slot):
            self.audit()  # the walk that found no room took nothing
            self.state.grow_tree()

    def find(self, slot: int) -> list[int]:
        """The hit blocks, equal in both."""
        self.sit(slot)
        core, request = self.state.core, self.requests[slot]
        chains = core.seat_chains[core.requests[R.seat, slot]]
        hit = int(get_computed_tokens(core, slot)) // self.block_size
        found: list[int] = core.tree.chains[C.block, chains[:hit]].tolist()
        assert found == self.model.lookup(request)
        assert hit * self.block_size <= request.num_tokens - 1
        return found

    def lookup(self) -> None:
        slot = self.waiting()
        if slot is not None:
            self.find(slot)

    def admit(self) -> None:
        slot = self.waiting()
        if slot is None:
            return
        hit = self.find(slot)
        core, request = self.state.core, self.requests[slot]
        most = min(request.num_tokens, self.model.max_model_len) - len(hit) * self.block_size
        if most <= 0:
            self.idle = True
            return
        num_new = most if self.choose(2) else 1 + self.choose(most)
        full_fit, others = bool(self.choose(2)), bool(self.choose(2))
        reserved = max(0, self.choose(8) - 4)
        lookahead = max(0, self.choose(6) - 3)
        ok = self.model.allocate(
            request,
            num_new,
            hit,
            lookahead=lookahead,
            full_fit=full_fit,
            reserved=reserved,
            watermark=others,
        )
        assert ok == allocate(core, slot, num_new, len(hit), lookahead, full_fit, reserved, others)
        if ok:
            request.computed = len(hit) * self.block_size + num_new
            core.requests[R.num_computed, slot] = request.computed
            core.requests[R.status, slot] = RUNNING
            core.count[K.seated_head] = -1
            self.done["admitted"] += 1
            self.done["hit"] += len(hit) > 0
        else:
            self.done["refused"] += 1

    def extend(self) -> None:
        """A chunk of the prompt, a decoded token, or (async) tokens not known yet."""
        slot = self.running()
        if slot is None:
            return
        core, request = self.state.core, self.requests[slot]
        if request.num_tokens == request.computed and request.num_tokens < request.total:
            request.num_tokens += self.choose(4) > 0  # else it is still unknown
            core.requests[R.num_tokens, slot] = request.num_tokens
        most = min(request.num_tokens + self.choose(3), request.total, self.model.max_model_len)
        most -= request.computed
        if most <= 0:
            self.idle = True
            return
        num_new = 1 + self.choose(most)
        lookahead = max(0, self.choose(8) - 5)
        edge = int(core.requests[R.edge, slot])
        before = list(request.table), request.cached
        ok = self.model.allocate(request, num_new, [], lookahead=lookahead)
        others = bool(self.choose(2))  # no watermark for those that run
        assert ok == allocate(core, slot, num_new, 0, lookahead, False, 0, others)
        if not ok:
            self.done["refused"] += 1
            return
        request.computed += num_new
        core.requests[R.num_computed, slot] = request.computed
        if lookahead == 0 and request.computed < edge:
            assert before == (request.table, request.cached)  # a scheduler may leave the call out

    def learn(self) -> None:
        """A computed token becomes known (AsyncScheduler.update_from_output)."""
        slot = self.running()
        if slot is None:
            return
        core, request = self.state.core, self.requests[slot]
        if request.num_tokens < request.computed:
            request.num_tokens += 1
            core.requests[R.num_tokens, slot] += 1
            self.model.cache(request, request.num_tokens)
            cache_blocks(core, slot, request.num_tokens)
            set_edge(core, slot)
        else:
            self.idle = True

    def finish(self) -> None:
        slot = self.pick(lambda slot: True)
        if slot is not None:
            self.model.drop(self.requests.pop(slot))
            finish_request(self.state.core, slot, update.BY_LENGTH)
            self.state.core.count[K.num_records] = 0

    def preempt(self) -> None:
        slot = self.running()
        if slot is not None:
            core = self.state.core
            self.model.drop(self.requests[slot])
            free(core, slot)
            leave_seat(core, slot)
            core.requests[R.num_computed, slot] = 0
            core.requests[R.status, slot] = PREEMPTED

    def reset(self) -> None:
        done = self.model.reset()
        assert done == reset_prefix_cache(self.state.core.pool, self.state.core.tree)
        self.done["reset done" if done else "reset refused"] += 1

    def evict(self) -> None:
        """Forget a cached block wherever it is (BlockPool.evict_blocks)."""
        cached = sorted(self.model.name)
        self.idle = not cached
        if cached:
            block = cached[self.choose(len(cached))]
            self.model.forget(block)
            forget(self.state.core.pool, self.state.core.tree, block)
            self.holes = True

    # comparison

    def compare(self) -> None:
        """Everything a decision can depend on is equal, and the invariants hold."""
        core, model = self.state.core, self.model
        table = core.pool.blocks.tolist()
        order, back = [], []
        block = table[B.next_free][0]
        while block and len(order) < model.num_blocks:
            order.append(block)
            block = table[B.next_free][block]
        block = table[B.prev_free][0]
        while block and len(back) < model.num_blocks:
            back.append(block)
            block = table[B.prev_free][block]
        assert order == list(model.free)
        assert back == order[::-1]
        assert core.pool.count[FREE] == len(order)
        assert table[B.ref_cnt] == model.refs
        assert {b for b in range(1, model.num_blocks) if table[B.ref_cnt][b] == 0} == set(order)

        taken, evicted = drain_taken(core)
        assert (taken, evicted) == (model.taken, model.evicted)
        self.evictions += len(evicted)
        assert core.pool.count[EVICTIONS] == self.evictions
        model.taken, model.evicted = [], []

        cached = {b: chain for b, chain in enumerate(table[B.chain]) if chain}
        assert cached.keys() == model.name.keys()
        by_chain: dict[int, int] = {}
        for b, chain in cached.items():
            assert by_chain.setdefault(chain, model.name[b]) == model.name[b]
        assert len(set(by_chain.values())) == len(by_chain)
        for chain, name in by_chain.items():
            first = int(core.tree.chains[C.block, chain])
            ring, b = [first], table[B.next_duplicate][first]
            while b != first and len(ring) < model.num_blocks:
                assert table[B.prev_duplicate][b] == ring[-1]
                ring.append(b)
                b = table[B.next_duplicate][b]
            assert ring == model.blocks[name]
        assert np.count_nonzero(core.tree.chains[C.block]) == len(by_chain)

        head = core.count[K.seated_head]
        assert head == -1 or core.requests[R.seat, head] != NO_SEAT
        users: Counter[int] = Counter()
        for slot, request in self.requests.items():
            fields = core.requests[:, slot]
            assert fields[R.num_blocks] == len(request.table)
            assert fields[R.num_cached_blocks] == request.cached
            if request.table:
                seat = fields[R.seat]
                assert core.seat_blocks[seat, : len(request.table)].tolist() == request.table
                users.update(request.table)
        assert all(model.refs[b] == users[b] for b in range(model.num_blocks))
        if not (self.holes or model.had_duplicates):
            self.check_prefix_closed()

    def check_prefix_closed(self) -> None:
        """Content is cached only behind its parent, unless somebody dropped a block out of turn."""
        cached = self.model.blocks
        for (parent, _, _), name in self.names.numbers.items():
            assert name not in cached or parent == 0 or parent in cached

    def audit(self) -> None:
        """The tree holds what requests, children and cached content name, and its free lists the rest."""
        core = self.state.core
        tree, nodes = core.tree, core.tree.nodes.tolist()
        free_nodes, node = set(), int(tree.count[FREE_NODE])
        while node:
            free_nodes.add(node)
            node = nodes[N.next_in_bucket][node]
        live = [node for node in range(1, int(tree.count[NODES_USED])) if node not in free_nodes]
        refs = Counter([ROOT])
        refs.update(nodes[N.parent][node] for node in live)
        refs.update(
            int(core.requests[R.node, s]) for s in self.requests if core.requests[R.seat, s] != NO_SEAT
        )
        refs.update(tree.chains[C.node, np.flatnonzero(tree.chains[C.block])].tolist())
        for node in [ROOT, *live]:
            assert nodes[N.refs][node] == refs[node] > 0
        chains: list[int] = []
        for node in live:
            first, n = nodes[N.first_chain][node], nodes[N.num_chains][node]
            assert tree.chains[C.node, first : first + n].tolist() == [node] * n
            chains += range(first, first + n)
        for length in range(1, MAX_RUN + 1):
            first = int(tree.free_runs[length])
            while first:
                chains += range(first, first + length)
                first = int(tree.chains[C.node, first])
        assert sorted(chains) == list(range(1, int(tree.count[CHAINS_USED])))  # each id once
        # equal ids mean equal content, and the other way round, among all that are seated
        name_of: dict[int, int] = {}
        for slot, request in self.requests.items():
            seat = core.requests[R.seat, slot]
            if seat != NO_SEAT:
                for chain, name in zip(core.seat_chains[seat].tolist(), request.names, strict=False):
                    assert name_of.setdefault(chain, name) == name
        assert len(set(name_of.values())) == len(name_of)

    def end(self) -> None:
        """Free and forget everything: nothing is left."""
        self.audit()
        for slot in list(self.requests):
            self.model.drop(self.requests.pop(slot))
            finish_request(self.state.core, slot, update.BY_LENGTH)
            self.state.core.count[K.num_records] = 0
        self.perform("reset")
        self.audit()
        tree = self.state.core.tree
        assert not np.any(tree.buckets)
        assert not self.model.name
        assert self.state.core.count[K.vacant_seats] == 9


class PoolMachine(RuleBasedStateMachine):
    """Bytes are the choices: a zero ends a program, so a failing one shrinks."""

    done: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.program = iter(b"")

    def choose(self, n: int) -> int:
        return next(self.program, 0) % n

    @initialize(setup=st.binary(min_size=10, max_size=10))
    def begin(self, setup: bytes) -> None:
        self.program = iter(setup)
        self.driver = Driver(self.choose)

    @rule(program=st.binary(min_size=150, max_size=600))
    def run(self, program: bytes) -> None:
        self.program = iter(program)
        for operation in self.program:
            if operation == 0:
                break
            operations = self.driver.OPERATIONS
            self.driver.perform(operations[operation % len(operations)])
        self.driver.audit()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.end()
            PoolMachine.done += self.driver.done


OCCASIONS = ("admitted", "hit", "refused", "reset done", "reset refused")


def operations(done: Counter[str]) -> int:
    """How many operations were carried out and compared."""
    return sum(done[name] for name in set(Driver.OPERATIONS))


def drive(seed: int, wanted: int) -> Counter[str]:
    """Run `wanted` seeded random operations, in engines of some hundred operations each."""
    draw = random.Random(seed)
    done: Counter[str] = Counter()
    while operations(done) < wanted:
        driver = Driver(lambda n: int(draw.random() * n))
        for _ in range(draw.randrange(50, 1500)):
            driver.operate()
        driver.end()
        done += driver.done
    return done


def test_pool_against_model() -> None:
    PoolMachine.done.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        PoolMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
        ),
    )
    done = PoolMachine.done + drive(seed=1, wanted=60_000)
    print(dict(done))
    assert operations(done) >= 100_000
    assert all(done[occasion] > 1000 for occasion in OCCASIONS), done


def test_pool_against_model_in_plain_python() -> None:
    run = subprocess.run(
        [sys.executable, __file__, "15000"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 15_000


if __name__ == "__main__":
    print(operations(drive(seed=2, wanted=int(sys.argv[1]))))
