"""The cache between two runs: cut anywhere idle, a run goes on as if it had not been."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import APART, Run, engine, prompts, run
from test_fates import fates
from test_known_answers import either_scheduling

from sim.blocks import FREE
from sim.columns import B, C, H, K, N
from sim.core import Core, EngineConfig
from sim.request import Batch
from sim.residency import block_durations
from sim.snapshot import BLOCK, COPY, NAMELESS, PLACE, SEGMENT, Snapshot, num_kept, renamed, restore, take
from sim.state import State
from workloads.merge import cut

ALL = ((0, 2**63 - 1),)


def explained(**changes: Any) -> EngineConfig:
    return engine(token_fates=True, **changes)


def ending(load: Batch, config: EngineConfig, **options: Any) -> tuple[Run, Core, Snapshot]:
    """A run, its engine at the end, and the snapshot of that."""
    cores: list[Core] = []
    result = run(load, config, keep=cores.append, **options)
    return result, cores[0], take(cores[0])


def mixed(n: int, seed: int, namespaces: int = 1) -> Batch:
    """Prompts over a few prefixes, again and again whole and in part, with answers that others go on from."""
    rng = np.random.default_rng(seed)
    tokens, outputs = [], []
    for _ in range(n):
        unit = rng.choice([1, 16])  # a prompt of whole blocks computes its last one again: a duplicate
        parts = [(int(rng.integers(4)), int(unit * rng.integers(1, 80 // unit)))]
        if rng.random() < 0.7:
            parts.append((int(rng.integers(4, 8)), int(unit * rng.integers(1, 60 // unit))))
        tokens.append(parts)
        outputs.append(int(rng.integers(1, 30)))
    load = prompts(tokens, output_len=outputs, namespace=rng.integers(namespaces, size=n))
    ids = load.segment_id.copy()
    last = load.segment_start[1:] - 1
    named = rng.random(n) < 0.5  # some answers are content of the pool too
    ids[last[named]] = 8 + rng.integers(3, size=named.sum())
    return load._replace(segment_id=ids)


def contents(core: Core) -> list[tuple[int, Any]]:
    """The free queue: block ids, and each block's content as the path to it."""
    tree = core.tree

    def path(chain: int) -> Any:
        node = int(tree.chains[C.node, chain])
        place = chain - int(tree.nodes[N.first_chain, node])
        steps = []
        while node != 0:
            columns = (N.branch, N.segment, N.skip, N.length)
            steps.append(tuple(int(tree.nodes[column, node]) for column in columns))
            node = int(tree.nodes[N.parent, node])
        return place, tuple(steps)

    order, block = [], int(core.pool.blocks[B.next_free, 0])
    while block != 0:
        chain = int(core.pool.blocks[B.chain, block])
        order.append((block, path(chain) if chain else None))
        block = int(core.pool.blocks[B.next_free, block])
    return order


def computed(snapshot: Snapshot) -> list[tuple[int, ...]]:
    return [tuple(row) for row in snapshot.history.tolist()]


@either_scheduling
@pytest.mark.parametrize("num_gpu_blocks", [14, 25, 60, 2000])
@pytest.mark.parametrize("seed", [1, 2])
def test_cut_in_two_it_goes_on_alike(seed: int, num_gpu_blocks: int, async_scheduling: bool) -> None:
    """Hits, fates, evictions, block ids, the free queue and the history are those of the whole run."""
    config = explained(num_gpu_blocks=num_gpu_blocks, async_scheduling=async_scheduling)
    load, n = mixed(120, seed, namespaces=3), 70
    whole, core, at_end = ending(load, config)
    first, _, snapshot = ending(cut(load, 0, n), config)
    later = cut(load, n, 120)
    second, continued, again = ending(
        later._replace(arrival_time=later.arrival_time - n * APART), config, cache=[snapshot]
    )
    assert first.hits + second.hits == whole.hits
    assert fates(first) + fates(second) == fates(whole)
    assert first.totals.num_evictions + second.totals.num_evictions == whole.totals.num_evictions
    assert contents(continued) == contents(core)
    assert computed(again) == computed(at_end)
    assert again.blocks[:, [BLOCK, COPY]].tolist() == at_end.blocks[:, [BLOCK, COPY]].tolist()
    if num_gpu_blocks < 2000:
        assert second.totals.num_evictions > 20
        assert any(fate.get("evicted", 0) for fate in fates(second))
    else:
        assert snapshot.blocks[:, COPY].max() > 0  # two blocks of one content are among what was cut


def test_blocks_of_one_content_keep_their_order() -> None:
    """A prompt of whole blocks computes its last one each time; the first is found, and gone first."""
    config = explained(num_gpu_blocks=10)
    *_, snapshot = ending(prompts([[(0, 32)]] * 4), config)
    copies = snapshot.blocks[snapshot.blocks[:, COPY].argsort(kind="stable")]
    assert sorted(snapshot.blocks[:, COPY].tolist()) == [0] * 6 + [1, 2, 3]
    state = State(config)
    restore(state, snapshot)
    blocks = [int(row[BLOCK]) for row in copies if row[PLACE] == 1]
    first = blocks[0]
    found = state.core.tree.chains[C.block, state.core.pool.blocks[B.chain, first]]
    following = [first]
    for _ in range(3):
        following.append(int(state.core.pool.blocks[B.next_duplicate, following[-1]]))
    assert found == first and following == blocks


@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(10, 40))
@settings(max_examples=60, deadline=None)
def test_taken_again_it_is_the_same(seed: int, n: int, num_gpu_blocks: int) -> None:
    config = explained(num_gpu_blocks=num_gpu_blocks, max_model_len=140)
    *_, snapshot = ending(mixed(n, seed, namespaces=2), config)
    state = State(config)
    restore(state, snapshot)
    again = take(state.core)
    for table, other in zip(snapshot[1:], again[1:], strict=True):
        np.testing.assert_array_equal(table, other)
    check_pool(state.core)


def check_pool(core: Core) -> None:
    """Free blocks in a ring; every cached block among those of its content; references counted."""
    pool, tree = core.pool, core.tree
    order = contents(core)
    usable = core.config.num_gpu_blocks - 1
    assert sorted(block for block, _ in order) == list(range(1, usable + 1)) and pool.count[FREE] == usable
    for block in range(1, usable + 1):
        assert pool.blocks[B.prev_free, pool.blocks[B.next_free, block]] == block
        if pool.blocks[B.chain, block]:
            assert pool.blocks[B.prev_duplicate, pool.blocks[B.next_duplicate, block]] == block
    holders = np.zeros(tree.nodes.shape[1], np.int64)
    for chain in set(pool.blocks[B.chain].tolist()) - {0}:
        holders[tree.chains[C.node, chain]] += 1
    live = np.flatnonzero(tree.nodes[N.refs] > 0)
    np.add.at(holders, tree.nodes[N.parent, live[1:]], 1)
    holders[0] += 1
    np.testing.assert_array_equal(tree.nodes[N.refs], holders)


def chain_of(blocks: int) -> Batch:
    """One prompt of so many full blocks of 16, and one token more."""
    return prompts([[(0, 16 * blocks)], [(1, 16)]], gap=APART)


@pytest.mark.parametrize("room", [19, 15, 9, 8, 5, 2, 1])
def test_a_smaller_pool_keeps_what_was_used_last(room: int) -> None:
    """Of a prompt the first blocks, for its last go first; the other's block was used after all."""
    *_, snapshot = ending(chain_of(8), explained(num_gpu_blocks=20))
    config = explained(num_gpu_blocks=room + 1)
    state = State(config)
    restore(state, snapshot)
    check_pool(state.core)
    kept = [found for _, found in contents(state.core) if found is not None]
    first = min(room - 1, 8)
    assert [place for place, _ in kept] == [*reversed(range(first)), 0]
    assert [steps[0][1] for _, steps in kept] == first * [0] + [1]
    assert num_kept(snapshot, room + 1) == first + 1
    asked = 16 * min(room, 8) + (room > 8)
    second = run(prompts([[(0, asked)]]), config, cache=[snapshot])
    assert second.hits == [min(16 * first, (asked - 1) // 16 * 16)]


def test_a_larger_pool_fills_its_new_blocks_first() -> None:
    *_, snapshot = ending(chain_of(8), explained(num_gpu_blocks=11))
    config = explained(num_gpu_blocks=21)
    state = State(config)
    restore(state, snapshot)
    check_pool(state.core)
    order = contents(state.core)
    assert [block for block, _ in order[:10]] == list(range(11, 21))
    assert all(found is None for _, found in order[:10])
    second = run(prompts([[(9, 16 * 10)], [(0, 129)]]), config, cache=[snapshot])
    assert second.hits == [0, 128] and second.totals.num_evictions == 0


def test_fates_after_a_cut() -> None:
    """What the first run computed and its pool lost is evicted, not cold; what nobody had is cold."""
    config = explained(num_gpu_blocks=9)
    *_, snapshot = ending(prompts([[(0, 65)], [(1, 81)]]), config)  # 5 blocks, then 6 of 8
    second = run(prompts([[(0, 65)], [(2, 33)]]), config, cache=[snapshot])
    assert fates(second)[0] == {"hit": 32, "evicted": 32, "last_token": 1}
    assert fates(second)[1] == {"cold": 33}


def test_without_names_in_common_nothing_is_hit_and_all_is_cold() -> None:
    config = explained(num_gpu_blocks=40)
    *_, snapshot = ending(mixed(40, 3), config)
    foreign = renamed(snapshot, ())
    assert len(foreign.history) == 1
    assert (foreign.nodes[1:, SEGMENT] <= NAMELESS).all()
    named, nameless = (len(np.unique(nodes[1:, SEGMENT])) for nodes in (snapshot.nodes, foreign.nodes))
    assert named == nameless  # one name for all would put them into one bucket
    assert num_kept(foreign, 40) == num_kept(snapshot, 40) > 0
    load = cut(mixed(40, 3), 39, 40)
    assert run(load, config, cache=[snapshot]).hits[0] > 0
    second = run(load, config, cache=[foreign])
    assert second.hits == [0] and set(fates(second)[0]) == {"cold"}
    known = run(mixed(40, 4), config, cache=[foreign])
    assert known.hits == run(mixed(40, 4), config, cache=[renamed(foreign, ALL)]).hits


def test_only_known_content_keeps_its_name() -> None:
    config = explained(num_gpu_blocks=40)
    load = prompts([[(0, 32), (5, 33)], [(7, 40)]], namespace=[2, 0])
    *_, snapshot = ending(load, config)
    partly = renamed(snapshot, ((0, 5),))
    second = run(prompts([[(0, 32), (5, 33)], [(7, 40)]], namespace=[2, 0]), config, cache=[partly])
    assert second.hits == [32, 0]
    assert fates(second) == [{"hit": 32, "cold": 33}, {"cold": 40}]
    assert sorted(set(partly.history[:, H.segment].tolist())) == [0]
    assert (partly.history[:, H.branch] == -2).sum() == 1


def test_namespaces_and_paths_outlive_what_has_lost_its_name() -> None:
    """Segment 8 under namespace 2 and behind segment 9, with forgotten content beside them in the tree."""
    config = explained(num_gpu_blocks=40)
    first = prompts([[(70, 40)], [(8, 32)], [(71, 20)], [(9, 32), (8, 33)]], namespace=[0, 2, 0, 0])
    *_, snapshot = ending(first, config)
    partly = renamed(snapshot, ((8, 10),))
    assert len(partly.history) == 1 + 4
    load = prompts([[(8, 40)], [(9, 32), (8, 33)], [(8, 40)]], namespace=[2, 0, 3])
    second = run(load, config, cache=[partly])
    assert second.hits == [32, 64, 0]
    assert fates(second) == [
        {"hit": 32, "cold": 8},
        {"hit": 64, "last_token": 1},
        {"isolated": 39, "last_token": 1},
    ]


def test_what_was_there_counts_as_allocated_at_the_start() -> None:
    """The second prompt is hit, its first access here; the third evicts the first, 2 s after the start."""
    config = explained(num_gpu_blocks=10, residency=True)
    *_, snapshot = ending(prompts([[(0, 64)], [(1, 63)]]), config)
    load = prompts([[(1, 63)], [(2, 65)]])
    second = run(load._replace(arrival_time=np.array([1.0, 2.0])), config, cache=[snapshot])
    assert second.hits == [48, 0]
    told = block_durations(second.totals.durations)
    lifetime, idle = told["kv_block_lifetime_seconds"], told["kv_block_idle_before_evict_seconds"]
    assert lifetime is not None and idle == lifetime
    assert lifetime["count"] == second.totals.num_evictions > 0
    assert lifetime["p50"] == pytest.approx(2.0, rel=0.05)
    assert told["kv_block_reuse_gap_seconds"] is None
    assert second.totals.evicted_from == {(-1, -1): second.totals.num_evictions}


def test_warm_hits_are_those_of_blocks_that_were_there() -> None:
    config = explained()
    *_, snapshot = ending(prompts([[(0, 160)]]), config)
    second = run(prompts([[(0, 161)], [(1, 160)], [(1, 161)], [(0, 161)]]), config, cache=[snapshot])
    assert second.hits == [160, 0, 160, 160]
    assert second.totals.warm_hits == 20
    tight = explained(num_gpu_blocks=13)  # so that blocks are used again
    *_, snapshot = ending(prompts([[(0, 160)]]), tight)
    after_reset = run(prompts([[(0, 161)], [(0, 161)]]), tight, cache=[snapshot], reset_prefix_cache=[0.0])
    assert after_reset.hits == [0, 160] and after_reset.totals.warm_hits == 0


def test_a_hit_after_a_preemption_is_not_counted_again() -> None:
    config = explained(num_gpu_blocks=11)
    *_, snapshot = ending(prompts([[(0, 64)]]), config)
    second = run(prompts([[(0, 65)]] * 2, output_len=60, gap=0.0), config, cache=[snapshot])
    assert second.totals.num_preemptions > 0 and second.totals.preempted_hits > 0
    assert second.hits == [64, 64] and second.totals.warm_hits == 8


def test_a_request_in_the_pool_is_no_end() -> None:
    state = State(explained())
    state.core.pool.count[FREE] -= 1
    with pytest.raises(AssertionError, match="holds blocks"):
        take(state.core)


def test_without_fates_there_is_no_history() -> None:
    *_, snapshot = ending(mixed(10, 1), engine())
    assert len(snapshot.history) == 1
    second, core, _ = ending(mixed(10, 1), explained(), cache=[snapshot])
    assert second.totals.warm_hits > 0 and core.count[K.history_nodes] > 1


def continued(load: Batch, more: Batch) -> str:
    """All that comes of two runs, the second of which knows a part of what the first did."""
    config = explained(num_gpu_blocks=25)
    *_, snapshot = ending(load, config)
    second, _, again = ending(more, config, cache=[renamed(snapshot, ((0, 6),))])
    return repr((second.hits, fates(second), second.totals.num_evictions, [x.tolist() for x in again[1:]]))


PLAIN = "import test_snapshot as t; print(t.continued(t.mixed(30, 5, 2), t.mixed(15, 6, 2)))"


def test_the_same_in_plain_python() -> None:
    plain = subprocess.run(
        [sys.executable, "-c", PLAIN],
        cwd=Path(__file__).parent,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert plain.stdout.strip() == continued(mixed(30, 5, 2), mixed(15, 6, 2))
