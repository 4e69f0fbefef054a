"""Chain ids: equal exactly where the tokens so far and the namespace are equal; none is kept for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_pool import Names, tokens_of

from sim import chains
from sim._jit import entry
from sim.chains import CHAINS_USED, FREE_NODE, MAX_RUN, NO_ROOM, NODES_USED, ChainTree, new_tree
from sim.columns import N

name_chains = entry(chains.name_chains)
release_node = entry(chains.release_node)

Segments = list[tuple[int, int]]


class Namer:
    """A tree and the requests that hold it."""

    def __init__(self, block_size: int, tree: ChainTree | None = None) -> None:
        self.block_size = block_size
        self.tree = new_tree(4096, 4096, 1) if tree is None else tree

    def name(
        self, segments: Segments, namespace: int = 0, max_tokens: int = 1 << 30
    ) -> tuple[list[int], int]:
        """The chain ids, and the node that the request now holds (or NO_ROOM)."""
        table = np.array([(7, 7), *segments], np.int64).T.copy()  # as if behind another request's
        total = min(sum(n for _, n in segments), max_tokens)
        row = np.zeros(total // self.block_size + 1, np.int64)
        node = name_chains(
            self.tree, table, 1, len(segments) + 1, namespace, max_tokens, self.block_size, row
        )
        assert row[-1] == 0  # nothing behind the last full block
        return row[:-1].tolist(), int(node)

    def release(self, node: int) -> None:
        release_node(self.tree, node)

    def live_nodes(self) -> int:
        """Nodes in use, the root aside."""
        unused, node = 0, self.tree.count[FREE_NODE]
        while node:
            unused += 1
            node = self.tree.nodes[N.next_in_bucket, node]
        return int(self.tree.count[NODES_USED]) - unused - 1


SEGMENTS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 13)), min_size=1, max_size=5)


@given(st.integers(1, 6), st.lists(st.tuples(SEGMENTS, st.integers(0, 2), st.integers(1, 40)), max_size=12))
def test_ids_are_equal_where_tokens_are(block_size: int, requests: list[tuple[Segments, int, int]]) -> None:
    namer, names = Namer(block_size), Names()
    name_of: dict[int, int] = {}
    nodes = []
    for segments, namespace, max_tokens in requests:
        got, node = namer.name(segments, namespace, max_tokens)
        expected = names.of(tokens_of(segments)[:max_tokens], block_size, namespace)
        assert len(got) == len(expected)
        for chain, name in zip(got, expected, strict=True):
            assert chain > 0
            assert name_of.setdefault(chain, name) == name
        nodes.append(node)
    assert len(set(name_of.values())) == len(name_of)
    for node in nodes:
        namer.release(node)
    assert namer.live_nodes() == 0
    assert not namer.tree.buckets.any()


def test_requests_share_up_to_where_they_diverge() -> None:
    namer = Namer(4)
    first, _ = namer.name([(1, 10), (2, 6)])
    second, _ = namer.name([(1, 10), (3, 6)])
    third, _ = namer.name([(1, 9), (2, 7)])  # parts inside the third block too
    assert first[:2] == second[:2] == third[:2]
    assert len({*first, *second, *third}) == 2 + 3 * 2


def test_a_longer_request_continues_a_shorter_one() -> None:
    namer = Namer(4)
    short, _ = namer.name([(1, 6)])
    long, _ = namer.name([(1, 30)])
    again, _ = namer.name([(1, 12), (2, 4)])
    assert long[:1] == short
    assert again[:3] == long[:3]
    assert again[3] not in long


def test_a_repeated_segment_is_not_its_own_continuation() -> None:
    namer = Namer(4)
    assert namer.name([(1, 8), (1, 8)])[0][:2] == namer.name([(1, 16)])[0][:2]
    assert namer.name([(1, 8), (1, 8)])[0][2] != namer.name([(1, 16)])[0][2]


def test_the_namespace_parts_everything() -> None:
    namer = Namer(4)
    ids = [namer.name([(1, 8)], namespace)[0] for namespace in (0, 1, 2)]
    assert len({chain for row in ids for chain in row}) == 6
    assert namer.name([(1, 8)], 1)[0] == ids[1]


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_long_segment_is_forgotten_from_its_tail(block_size: int) -> None:
    """While its beginning is still cached or shared, the ids of the rest are used again."""
    namer = Namer(block_size)
    _, start = namer.name([(1, MAX_RUN * block_size)])
    for i in range(20):
        ids, node = namer.name([(1, 5 * MAX_RUN * block_size)])
        assert len(set(ids)) == 5 * MAX_RUN
        assert namer.live_nodes() == 5, i
        namer.release(node)
        assert namer.live_nodes() == 1
    assert namer.tree.count[CHAINS_USED] == 5 * MAX_RUN + 1
    namer.release(start)
    assert namer.live_nodes() == 0


def test_memory_follows_live_content() -> None:
    """A thousand requests, one after the other, need the ids of one."""
    namer = Namer(4)
    for segment in range(1000):
        ids, node = namer.name([(0, 20), (segment + 1, 12)])
        assert len(ids) == 8
        namer.release(node)
    assert namer.tree.count[CHAINS_USED] == 1 + 8
    assert namer.tree.count[NODES_USED] == 1 + 2


@pytest.mark.parametrize(
    ("num_chains", "num_nodes"), [(9, 100), (100, 4), (5, 100), (100, 2), (100, 1), (1, 100)]
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_walk_without_room_changes_nothing(num_chains: int, num_nodes: int, shared: bool) -> None:
    namer = Namer(4, new_tree(num_chains, num_nodes, 16))
    if shared and namer.name([(1, 4)], 3)[1] == NO_ROOM:
        return
    live, nodes = namer.live_nodes(), namer.tree.nodes[N.refs].copy()
    for _ in range(3):
        assert namer.name([(1, 4), (2, 10), (3, 9), (4, 20)], 3)[1] == NO_ROOM
        assert namer.live_nodes() == live
        assert (namer.tree.nodes[N.refs] == nodes).all()
