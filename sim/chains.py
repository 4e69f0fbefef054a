"""Chain ids: one number for each distinct content of a full block and everything before it.

vLLM names that content by a chained hash; here it is interned, so equal ids mean equal (parents,
tokens, extra keys) without collisions. The tokens before a block boundary form a path in a tree
whose nodes are pieces of segments. A node owns the chain ids of the block boundaries inside its
piece, in one consecutive run. A node lives while a request, a child or a cached block names it;
then its ids are used again, so memory follows live and cached content, not history.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import inlined, verb
from sim.columns import C, N
from sim.content_key import ROOT_KEY, block_key, namespace_key, segment_key
from sim.request import Ints

ROOT = 0
NO_ROOM = -1
MAX_RUN = 64  # chain ids in one node at most: a long segment can then be forgotten from its tail
NAMESPACE_ROOT = -1  # `skip` of the empty node that stands for a LoRA and cache_salt

# ChainTree.count
FREE_NODE, NODES_USED, CHAINS_USED = range(3)


class ChainTree(NamedTuple):
    """The tree."""

    chains: Ints  # [C, chain id]
    nodes: Ints  # [N, node]
    buckets: Ints  # hash table of nodes
    free_runs: Ints  # by run length: the first free run, 0: none
    count: Ints  # type: ignore[assignment]  # the name shadows tuple.count


def new_tree(num_chains: int, num_nodes: int, num_buckets: int) -> ChainTree:
    """An empty tree with room for so many chain ids and nodes; `num_buckets` is a power of two."""
    chains = np.zeros((C.WIDTH, num_chains), np.int64)
    nodes = np.zeros((N.WIDTH, num_nodes), np.int64)
    nodes[N.refs, ROOT] = 1  # the root is never forgotten
    nodes[N.key, ROOT] = ROOT_KEY
    count = np.array([0, 1, 1], np.int64)
    return ChainTree(
        chains, nodes, np.zeros(num_buckets, np.int64), np.zeros(MAX_RUN + 1, np.int64), count
    )


@verb
def bucket_of(tree: ChainTree, parent: int, branch: int, segment: int, skip: int) -> int:
    """Which bucket a node hangs in (products stay below 2**63, so that plain Python agrees)."""
    folded = (segment ^ (segment >> 31)) & 0x7FFFFFFF
    mixed = parent * 73856093 + branch * 19349663 + folded * 83492791 + (skip + 1) * 15485863
    bucket: int = (mixed ^ (mixed >> 13) ^ (mixed >> 29)) & (len(tree.buckets) - 1)
    return bucket


@verb
def find_node(tree: ChainTree, parent: int, branch: int, segment: int, skip: int) -> int:
    """The child of `parent` that starts `branch` tokens into it with this piece; 0 if there is none."""
    node: int = tree.buckets[bucket_of(tree, parent, branch, segment, skip)]
    while node != 0 and not (
        tree.nodes[N.parent, node] == parent
        and tree.nodes[N.segment, node] == segment
        and tree.nodes[N.branch, node] == branch
        and tree.nodes[N.skip, node] == skip
    ):
        node = tree.nodes[N.next_in_bucket, node]
    return node


@verb
def take_run(tree: ChainTree, num_chains: int) -> int:
    """The first of `num_chains` consecutive unused chain ids; 0 if the columns are full."""
    first: int = tree.free_runs[num_chains]
    if first != 0:
        tree.free_runs[num_chains] = tree.chains[C.node, first]
        return first
    first = tree.count[CHAINS_USED]
    if first + num_chains > tree.chains.shape[1]:
        return 0
    tree.count[CHAINS_USED] = first + num_chains
    return first


@verb
def add_node(
    tree: ChainTree, parent: int, branch: int, segment: int, skip: int, length: int, block_size: int
) -> int:
    """Add a child and give it chain ids; returns 0, with nothing changed, if the columns are full."""
    depth = tree.nodes[N.depth, parent] + branch
    num_chains = (depth + length) // block_size - depth // block_size
    node: int = tree.count[FREE_NODE]
    if node == 0 and tree.count[NODES_USED] == tree.nodes.shape[1]:
        return 0
    first = 0
    if num_chains > 0:
        first = take_run(tree, num_chains)
        if first == 0:
            return 0
    if node != 0:
        tree.count[FREE_NODE] = tree.nodes[N.next_in_bucket, node]
    else:
        node = tree.count[NODES_USED]
        tree.count[NODES_USED] = node + 1
    tree.nodes[N.parent, node] = parent
    tree.nodes[N.branch, node] = branch
    tree.nodes[N.segment, node] = segment
    tree.nodes[N.skip, node] = skip
    tree.nodes[N.length, node] = length
    tree.nodes[N.depth, node] = depth
    tree.nodes[N.first_chain, node] = first
    tree.nodes[N.num_chains, node] = num_chains
    tree.nodes[N.refs, node] = 0
    key = tree.nodes[N.key, parent]
    if skip == 0:
        key = segment_key(key, max(tree.nodes[N.skip, parent], 0) + branch, segment)
    elif skip == NAMESPACE_ROOT:
        key = namespace_key(key, segment)
    tree.nodes[N.key, node] = key
    tree.nodes[N.first_block, node] = depth // block_size + 1
    for chain in range(first, first + num_chains):
        tree.chains[C.node, chain] = node
    bucket = bucket_of(tree, parent, branch, segment, skip)
    tree.nodes[N.next_in_bucket, node] = tree.buckets[bucket]
    tree.buckets[bucket] = node
    tree.nodes[N.refs, parent] += 1
    return node


@verb
def content_key(tree: ChainTree, chain: int) -> int:
    """What routers call the content of a chain id, see sim/kv_index.py."""
    node = tree.chains[C.node, chain]
    block = tree.nodes[N.first_block, node] + chain - tree.nodes[N.first_chain, node]
    key: int = block_key(tree.nodes[N.key, node], block)
    return key


@verb
def release_node(tree: ChainTree, node: int) -> None:
    """Take one reference from a node; forget it, and ancestors that only it kept, at the last one."""
    tree.nodes[N.refs, node] -= 1
    while tree.nodes[N.refs, node] == 0:
        parent = tree.nodes[N.parent, node]
        branch = tree.nodes[N.branch, node]
        bucket = bucket_of(tree, parent, branch, tree.nodes[N.segment, node], tree.nodes[N.skip, node])
        if tree.buckets[bucket] == node:
            tree.buckets[bucket] = tree.nodes[N.next_in_bucket, node]
        else:
            before = tree.buckets[bucket]
            while tree.nodes[N.next_in_bucket, before] != node:
                before = tree.nodes[N.next_in_bucket, before]
            tree.nodes[N.next_in_bucket, before] = tree.nodes[N.next_in_bucket, node]
        num_chains = tree.nodes[N.num_chains, node]
        if num_chains > 0:
            first = tree.nodes[N.first_chain, node]
            tree.chains[C.node, first] = tree.free_runs[num_chains]
            tree.free_runs[num_chains] = first
        tree.nodes[N.next_in_bucket, node] = tree.count[FREE_NODE]
        tree.count[FREE_NODE] = node
        node = parent
        tree.nodes[N.refs, node] -= 1


@inlined
def name_chains(
    tree: ChainTree,
    segments: Ints,
    first: int,
    end: int,
    namespace: int,
    max_tokens: int,
    block_size: int,
    chains: Ints,
) -> int:
    """Write the chain id of every full block of a request's first `max_tokens` tokens into `chains`.

    The request owns `segments[:, first:end]` (ids and lengths). Returns the path's last node, on
    which the request now holds one reference, or NO_ROOM, with nothing changed, if the columns
    are full. The namespace is part of every id, as vLLM's LoRA name and (through the chain from
    block 0) cache_salt are: v1/core/kv_cache_utils.generate_block_hash_extra_keys.
    """
    node = ROOT
    if namespace != 0:
        node = find_node(tree, ROOT, 0, namespace, NAMESPACE_ROOT)
        if node == 0:
            node = add_node(tree, ROOT, 0, namespace, NAMESPACE_ROOT, 0, block_size)
            if node == 0:
                return NO_ROOM
    used = 0  # tokens of the node's piece that the path has walked
    depth = 0
    for i in range(first, end):
        segment = segments[0, i]
        remaining = min(segments[1, i], max_tokens - depth)
        skip = 0
        while remaining > 0:
            child = find_node(tree, node, used, segment, skip)
            if child == 0:
                piece = min(remaining, MAX_RUN * block_size)
                child = add_node(tree, node, used, segment, skip, piece, block_size)
                if child == 0:  # give back what this walk added
                    tree.nodes[N.refs, node] += 1
                    release_node(tree, node)
                    return NO_ROOM
            node = child
            used = min(remaining, tree.nodes[N.length, node])
            start = depth // block_size
            depth += used
            chain = tree.nodes[N.first_chain, node]
            for position in range(start, depth // block_size):
                chains[position] = chain
                chain += 1
            skip += used
            remaining -= used
    tree.nodes[N.refs, node] += 1
    return node
