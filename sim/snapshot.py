"""The prefix cache between two runs: what is cached, in which order it goes, what was ever computed.

A snapshot is taken when no request holds a block, so every block is in the free queue. Content is
kept as the chain tree names it, by pieces of segments, and so is the history that token fates need.
A run that begins with a snapshot makes the decisions that the run before would have made next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim._jit import entry, verb
from sim.blocks import FREE, NULL_BLOCK, BlockPool, register
from sim.chains import NAMESPACE_ROOT, NODES_USED, ROOT, ChainTree, add_node
from sim.columns import B, C, H, K, N
from sim.core import Core
from sim.history import History, enlarged
from sim.request import Ints
from sim.residency import LAST_ACCESS
from sim.state import State

# columns of Snapshot.nodes, as those of sim/columns/nodes.py
PARENT, BRANCH, SEGMENT, SKIP, LENGTH = range(5)
# columns of Snapshot.blocks
BLOCK, NODE, PLACE, COPY = range(4)
# columns of Snapshot.history are the first of sim/columns/history.py
HISTORY_COLUMNS = H.next_in_bucket

NAMELESS = -(2**62)  # from here down: segments that no request can name any more


class Snapshot(NamedTuple):
    """A prefix cache without its engine. Row 0 of the trees is the root; parents stand before children."""

    block_size: int  # tokens
    nodes: Ints  # [node, PARENT … LENGTH]: the paths of what is cached
    blocks: Ints  # [i, BLOCK … COPY]: the free queue from its head: block id, the node that holds its
    # content (0: not cached), which of the node's full blocks it is, and which of the blocks of
    # this content in the order they were cached
    history: Ints  # [node, H.parent … H.plain]


def take(core: Core) -> Snapshot:
    """Copy the cache of an engine in which no request holds a block. Modifies nothing."""
    pool, tree = core.pool, core.tree
    assert pool.count[FREE] == pool.blocks.shape[1] - 1, "a request still holds blocks"
    table = tree.nodes[:, : tree.count[NODES_USED]]
    live = 1 + np.flatnonzero(table[N.refs, 1:] > 0)
    # Deeper means later; only the empty nodes of namespaces have children as deep as themselves.
    live = live[np.lexsort((table[N.skip, live] != NAMESPACE_ROOT, table[N.depth, live]))]
    number = np.zeros(table.shape[1], np.int64)
    number[live] = 1 + np.arange(len(live))
    nodes = np.zeros((1 + len(live), LENGTH + 1), np.int64)
    for column, name in enumerate((N.parent, N.branch, N.segment, N.skip, N.length)):
        nodes[1:, column] = table[name, live]
    nodes[:, PARENT] = number[nodes[:, PARENT]]

    order = _free_order(pool)
    chain = pool.blocks[B.chain, order]
    node = tree.chains[C.node, chain]  # chain 0, no content, belongs to the root
    place = chain - table[N.first_chain, node]
    blocks = np.column_stack([order, number[node], place, _copies(pool, tree)[order]])
    history = core.history.nodes[: core.count[K.history_nodes], :HISTORY_COLUMNS].copy()
    if not core.config.token_fates:
        history = np.zeros((1, HISTORY_COLUMNS), np.int64)
    return Snapshot(core.config.block_size, nodes, blocks, history)


def restore(state: State, snapshot: Snapshot) -> None:
    """Begin with a cache: fill an engine that has not run. Modifies `state`.

    What is cached counts as allocated when the run begins, by nobody: see sim/residency.py.
    A smaller pool keeps the blocks at the tail of the free queue, those that would be evicted last:
    no block outlives the ones before it in a prompt. A larger one has more free blocks at the head.
    """
    config = state.core.config
    assert snapshot.block_size == config.block_size
    blocks = _within_pool(snapshot, config.num_gpu_blocks).copy()
    blocks[:, BLOCK] = 1 + np.argsort(np.argsort(blocks[:, BLOCK]))  # the ids they had, or without gaps
    nodes = _without_unused(snapshot.nodes, blocks)
    wanted = _most_chains(nodes, config.block_size)
    while min(state.core.tree.nodes.shape[1], state.core.tree.chains.shape[1]) <= wanted:
        state.grow_tree()
    pool, tree = state.core.pool, state.core.tree
    spare = np.arange(1 + len(blocks), config.num_gpu_blocks)
    queue = np.concatenate([[NULL_BLOCK], spare, blocks[:, BLOCK]])
    pool.blocks[B.next_free, queue] = np.roll(queue, -1)
    pool.blocks[B.prev_free, queue] = np.roll(queue, 1)
    cached = blocks[blocks[:, NODE] > 0]
    pool.blocks[B.warm, cached[:, BLOCK]] = 1
    if config.residency:
        pool.times[cached[:, BLOCK], LAST_ACCESS] = math.nan
    cached = cached[np.argsort(cached[:, COPY], kind="stable")]
    _plant(pool, tree, nodes, np.zeros(len(nodes), np.int64), cached, config.block_size)
    if config.token_fates:
        used = len(snapshot.history)
        known = np.zeros((used, H.WIDTH), np.int64)
        known[:, :HISTORY_COLUMNS] = snapshot.history
        room = max(used, len(state.core.history.nodes))
        larger = enlarged(History(known, np.zeros(0, np.int64)), used, room)
        state.core = state.core._replace(history=larger)
        state.core.count[K.history_nodes] = used


def num_kept(snapshot: Snapshot, num_gpu_blocks: int) -> int:
    """How many blocks with content a pool of `num_gpu_blocks` begins with."""
    return int(np.count_nonzero(_within_pool(snapshot, num_gpu_blocks)[:, NODE]))


def renamed(snapshot: Snapshot, known: Sequence[tuple[int, int]]) -> Snapshot:
    """The snapshot for requests that mean the same by segment ids in the ranges `known` only.

    Other content stays cached until it is evicted, but under names that no request bears; it is
    dropped from the history, where it could not be found again. Modifies nothing.
    """
    nodes = snapshot.nodes.copy()
    foreign = ~_within(nodes[:, SEGMENT], known) & (nodes[:, SKIP] != NAMESPACE_ROOT)
    foreign[ROOT] = False
    # One each: pieces of one name beside each other would lie in one bucket.
    nodes[foreign, SEGMENT] = NAMELESS - np.unique(nodes[foreign, SEGMENT], return_inverse=True)[1]
    return snapshot._replace(nodes=nodes, history=_only_known(snapshot.history, known))


def _within_pool(snapshot: Snapshot, num_gpu_blocks: int) -> Ints:
    """The rows of `blocks` that find room beside the null block."""
    return snapshot.blocks[max(len(snapshot.blocks) - (num_gpu_blocks - 1), 0) :]


def _only_known(history: Ints, known: Sequence[tuple[int, int]]) -> Ints:
    """The rows of a history whose whole paths are in `known`, numbered anew."""
    parent = history[:, H.parent]
    keep = _within(history[:, H.segment], known) | (history[:, H.branch] < 0)  # which no segment has
    keep[ROOT] = True
    while (keep & ~keep[parent]).any():
        keep &= keep[parent]
    number = np.cumsum(keep) - 1
    kept = history[keep]
    kept[:, H.parent] = number[kept[:, H.parent]]
    return kept


def _within(ids: Ints, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    found = np.zeros(len(ids), np.bool_)
    for first, end in ranges:
        found |= (ids >= first) & (ids < end)
    return found


def _free_order(pool: BlockPool) -> Ints:
    """The free queue, head first."""
    following = pool.blocks[B.next_free].tolist()
    order, block = [], following[NULL_BLOCK]
    while block != NULL_BLOCK:
        order.append(block)
        block = following[block]
    return np.array(order, np.int64)


def _copies(pool: BlockPool, tree: ChainTree) -> Ints:
    """By block id: how many blocks of the same content were cached before it."""
    copies = np.zeros(pool.blocks.shape[1], np.int64)
    is_alone = pool.blocks[B.next_duplicate] == np.arange(len(copies))
    several = np.flatnonzero((pool.blocks[B.chain] != 0) & ~is_alone)
    first = np.unique(tree.chains[C.block, pool.blocks[B.chain, several]])
    block, rank = pool.blocks[B.next_duplicate, first], 1
    while len(block):
        copies[block] = rank
        block, rank = pool.blocks[B.next_duplicate, block], rank + 1
        more = block != first
        block, first = block[more], first[more]
    return copies


def _without_unused(nodes: Ints, blocks: Ints) -> Ints:
    """The nodes on the paths of the blocks' content, numbered anew, as are the blocks' (modified)."""
    used = np.zeros(len(nodes), np.bool_)
    used[ROOT] = True
    path = np.unique(blocks[:, NODE])
    while len(path := path[~used[path]]):
        used[path] = True
        path = np.unique(nodes[path, PARENT])
    number = np.cumsum(used) - 1
    blocks[:, NODE] = number[blocks[:, NODE]]
    kept = nodes[used]
    kept[:, PARENT] = number[kept[:, PARENT]]
    return kept


def _most_chains(nodes: Ints, block_size: int) -> int:
    """An upper bound of how many chain ids the nodes own, and of how many nodes there are."""
    return int(len(nodes) + nodes[:, LENGTH].sum() // block_size)


@verb
def plant(pool: BlockPool, tree: ChainTree, nodes: Ints, number: Ints, blocks: Ints, block_size: int) -> None:
    """Give an empty tree the nodes of a snapshot, and cache its blocks in the order given.

    `number`, all 0, gets the nodes' numbers in the tree. There is room enough.
    """
    for i in range(1, len(nodes)):
        number[i] = add_node(
            tree,
            number[nodes[i, PARENT]],
            nodes[i, BRANCH],
            nodes[i, SEGMENT],
            nodes[i, SKIP],
            nodes[i, LENGTH],
            block_size,
        )
    for i in range(len(blocks)):
        node = number[blocks[i, NODE]]
        register(pool, tree, blocks[i, BLOCK], tree.nodes[N.first_chain, node] + blocks[i, PLACE])


_plant = entry(plant)
