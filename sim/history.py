"""Everything ever computed: how long a prefix of a prompt has had KV before, in the cache still or not.

A radix tree over segments. The tokens before a segment form a path of pieces, and all requests on
one path have computed a prefix of each piece, so a piece needs only the longest of them. A node is
found by (parent, where it branches off, segment) in a hash table: what else branches off there
costs nothing. Requests under a LoRA or a cache_salt walk the same nodes; each such namespace keeps
its own extents in nodes beside them.

A token is computed when it is in num_computed_tokens after a schedule: its KV exists or is
scheduled, as a block is findable from its allocation. What a preemption in the same schedule takes
back was not computed. A running request writes its progress down when somebody is admitted, and
when it ends or is preempted.

Memory grows with the distinct sharable content, 56 bytes a node: a segment of a path, once, and
once more for each namespace but 0. A negative segment id names content that no other request can
name, so neither it nor what follows it is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import entry, verb
from sim.columns import H
from sim.request import Ints

ROOT = 0
NODES_PER_SEGMENT = 2  # at most: the piece's and the namespace's own


class History(NamedTuple):
    """The tree; how many nodes it has is in count[K.history_nodes]."""

    nodes: Ints  # [node, H]
    buckets: Ints  # hash table of nodes


def new_history(num_nodes: int) -> History:
    """An empty tree with room for so many nodes, 0 or a power of two."""
    return History(np.zeros((num_nodes, H.WIDTH), np.int64), np.zeros(num_nodes, np.int64))


def enlarged(history: History, used: int, wanted: int) -> History:
    """A copy of a tree of `used` nodes with room for at least `wanted`."""
    larger = new_history(1 << (wanted - 1).bit_length())
    larger.nodes[:used] = history.nodes[:used]
    rehash(larger, used)
    return larger


@verb
def bucket_of(history: History, parent: int, branch: int, segment: int) -> int:
    """Which bucket a node hangs in (products stay below 2**63, so that plain Python agrees)."""
    folded = (segment ^ (segment >> 31)) & 0x7FFFFFFF
    mixed = parent * 73856093 + branch * 19349663 + folded * 83492791
    bucket: int = (mixed ^ (mixed >> 13) ^ (mixed >> 29)) & (len(history.buckets) - 1)
    return bucket


@verb
def find(history: History, parent: int, branch: int, segment: int) -> int:
    """The node of this piece; ROOT if there is none."""
    nodes = history.nodes
    node: int = history.buckets[bucket_of(history, parent, branch, segment)]
    while node != ROOT and not (
        nodes[node, H.parent] == parent
        and nodes[node, H.segment] == segment
        and nodes[node, H.branch] == branch
    ):
        node = nodes[node, H.next_in_bucket]
    return node


@verb
def add(history: History, node: int, parent: int, branch: int, segment: int) -> None:
    """Make `node`, which is unused, the node of this piece."""
    history.nodes[node, H.parent] = parent
    history.nodes[node, H.branch] = branch
    history.nodes[node, H.segment] = segment
    hang(history, node)


@verb
def hang(history: History, node: int) -> None:
    """Put a node into its bucket."""
    nodes = history.nodes
    bucket = bucket_of(history, nodes[node, H.parent], nodes[node, H.branch], nodes[node, H.segment])
    nodes[node, H.next_in_bucket] = history.buckets[bucket]
    history.buckets[bucket] = node


@verb
def hang_all(history: History, used: int) -> None:
    """Put all nodes but the root into empty buckets."""
    for node in range(1, used):
        hang(history, node)


rehash = entry(hang_all)


@verb
def computed_under(history: History, node: int, namespace: int) -> int:
    """How many tokens of a node's piece requests of a namespace have computed."""
    if namespace == 0:
        tokens: int = history.nodes[node, H.plain]
    else:
        tokens = history.nodes[find(history, node, -namespace, 0), H.computed]
    return tokens


@verb
def raise_computed(history: History, node: int, namespace: int, tokens: int) -> None:
    """A request of a namespace has computed `tokens` tokens of a node's piece."""
    nodes = history.nodes
    nodes[node, H.computed] = max(nodes[node, H.computed], tokens)
    if namespace == 0:
        nodes[node, H.plain] = max(nodes[node, H.plain], tokens)
    else:
        own = find(history, node, -namespace, 0)
        nodes[own, H.computed] = max(nodes[own, H.computed], tokens)
