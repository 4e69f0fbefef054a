"""Which tokens of a prompt an earlier request has had, and how long ago: one tree of all prompts.

The tree is cut at segments, not at blocks, so that one pass answers for every block size. A node
is a piece of a segment that goes on from its parent, `branch` tokens into it. Nothing is ever
forgotten: it is the infinite pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import entry, verb
from sim.request import Batch, Ints

ROOT = 0
NAMESPACE_ROOT = -1  # `skip` of the empty node that stands for a LoRA and cache_salt

# Columns of a node: eight, so that one lies in one cache line.
PARENT, BRANCH, SEGMENT, SKIP, LENGTH, LAST_USER, NEXT_IN_BUCKET, _UNUSED = range(8)

# PrefixTree.count
NODES, REQUESTS, RUNS = range(3)


class PrefixTree(NamedTuple):
    """The tree, and the tokens that each request was the last to use."""

    nodes: Ints  # [node, column]
    buckets: Ints  # hash table of nodes
    last_used: Ints  # Fenwick tree over requests, from 1: tokens that no later request has used
    count: Ints  # type: ignore[assignment]  # the name shadows tuple.count


class Reuse(NamedTuple):
    """What a walk finds: a column entry a request, then one a run of tokens with one last user."""

    shared: Ints  # leading tokens of the prompt that an earlier request has had
    request: Ints  # the request that uses the run, by number
    user: Ints  # the one that used it last
    tokens: Ints
    distance: Ints  # distinct tokens that the requests between have used


def new_tree(num_nodes: int, num_requests: int) -> PrefixTree:
    """An empty tree with room for so many nodes and requests (powers of two)."""
    nodes = np.zeros((num_nodes, 8), np.int64)
    buckets = np.zeros(2 * num_nodes, np.int64)
    return PrefixTree(nodes, buckets, np.zeros(num_requests + 1, np.int64), np.array([1, 0, 0], np.int64))


def add(tree: PrefixTree, batch: Batch) -> tuple[PrefixTree, Reuse]:
    """Put a batch's requests into the tree, one after the other. Modifies `tree`.

    Returns the tree, a larger copy where it was full, and what the requests found there: each sees
    those before it, their prompts and their answers (less the last token, which is never computed).
    """
    n, num_segments = len(batch.prompt_len), len(batch.segment_id)
    tree = _with_room(tree, int(tree.count[NODES]) + num_segments + n, int(tree.count[REQUESTS]) + n)
    shared = np.zeros(n, np.int64)
    runs = np.zeros((4, num_segments), np.int64)
    tree.count[RUNS] = 0
    _walk(
        tree, batch.segment_start, batch.segment_id, batch.segment_len, batch.namespace,
        batch.prompt_len, batch.prompt_len + batch.output_len - 1, shared, runs,
    )  # fmt: skip
    return tree, Reuse(shared, *(column[: tree.count[RUNS]].copy() for column in runs))


def distinct_tokens(tree: PrefixTree) -> int:
    """The different tokens (with all that precedes them) of all requests so far."""
    return int(_walk_sum(tree.last_used, tree.count[REQUESTS]))


def _with_room(tree: PrefixTree, num_nodes: int, num_requests: int) -> PrefixTree:
    """A tree of the same content with room for so many nodes and requests."""
    if num_requests >= len(tree.last_used):
        size = 1 << num_requests.bit_length()
        larger = np.zeros(size + 1, np.int64)
        _grow_sums(tree.last_used, larger, tree.count[REQUESTS])
        tree = tree._replace(last_used=larger)
    if num_nodes > len(tree.nodes):
        nodes = np.zeros((1 << num_nodes.bit_length(), 8), np.int64)
        nodes[: tree.count[NODES]] = tree.nodes[: tree.count[NODES]]
        tree = tree._replace(nodes=nodes, buckets=np.zeros(2 * len(nodes), np.int64))
        _hang_up(tree)
    return tree


@verb
def bucket_of(tree: PrefixTree, parent: int, branch: int, segment: int, skip: int) -> int:
    """Which bucket a node hangs in (products stay below 2**63, so that plain Python agrees)."""
    folded = (segment ^ (segment >> 31)) & 0x7FFFFFFF
    mixed = parent * 73856093 + branch * 19349663 + folded * 83492791 + (skip + 1) * 15485863
    bucket: int = (mixed ^ (mixed >> 13) ^ (mixed >> 29)) & (len(tree.buckets) - 1)
    return bucket


@verb
def is_child(tree: PrefixTree, node: int, parent: int, branch: int, segment: int, skip: int) -> bool:
    """Whether a node is the child of `parent` that starts `branch` tokens into it with this piece."""
    same: bool = (
        tree.nodes[node, PARENT] == parent
        and tree.nodes[node, SEGMENT] == segment
        and tree.nodes[node, BRANCH] == branch
        and tree.nodes[node, SKIP] == skip
    )
    return same


@verb
def find_child(tree: PrefixTree, parent: int, branch: int, segment: int, skip: int) -> int:
    """The child; 0 if there is none."""
    guess = parent + 1  # what one request added lies in a row
    if guess < tree.count[NODES] and is_child(tree, guess, parent, branch, segment, skip):
        return guess
    node: int = tree.buckets[bucket_of(tree, parent, branch, segment, skip)]
    while node != 0 and not is_child(tree, node, parent, branch, segment, skip):
        node = tree.nodes[node, NEXT_IN_BUCKET]
    return node


@verb
def add_child(tree: PrefixTree, parent: int, branch: int, segment: int, skip: int, length: int) -> int:
    """Add a child; there is room."""
    node: int = tree.count[NODES]
    tree.count[NODES] = node + 1
    tree.nodes[node, PARENT] = parent
    tree.nodes[node, BRANCH] = branch
    tree.nodes[node, SEGMENT] = segment
    tree.nodes[node, SKIP] = skip
    tree.nodes[node, LENGTH] = length
    bucket = bucket_of(tree, parent, branch, segment, skip)
    tree.nodes[node, NEXT_IN_BUCKET] = tree.buckets[bucket]
    tree.buckets[bucket] = node
    return node


@verb
def hang_up(tree: PrefixTree) -> None:
    """Fill the empty buckets with all nodes."""
    for node in range(1, tree.count[NODES]):
        bucket = bucket_of(
            tree,
            tree.nodes[node, PARENT],
            tree.nodes[node, BRANCH],
            tree.nodes[node, SEGMENT],
            tree.nodes[node, SKIP],
        )
        tree.nodes[node, NEXT_IN_BUCKET] = tree.buckets[bucket]
        tree.buckets[bucket] = node


@verb
def change(sums: Ints, index: int, amount: int) -> None:
    """Add to the entry of a request (Fenwick tree)."""
    at = index + 1
    while at < len(sums):
        sums[at] += amount
        at += at & -at


@verb
def sum_to(sums: Ints, num: int) -> int:
    """The sum of the first `num` entries."""
    total = 0
    at = num
    while at > 0:
        total += sums[at]
        at -= at & -at
    return total


@verb
def grow_sums(old: Ints, new: Ints, num: int) -> None:
    """Copy the first `num` entries into the empty `new`."""
    before = 0
    for index in range(num):
        upto = sum_to(old, index + 1)
        change(new, index, upto - before)
        before = upto


@verb
def walk(
    tree: PrefixTree,
    starts: Ints,
    segment_ids: Ints,
    segment_lens: Ints,
    namespaces: Ints,
    prompt_lens: Ints,
    computed_lens: Ints,
    shared: Ints,
    runs: Ints,
) -> None:
    """Add requests; writes `shared` and, from RUNS on, `runs` (request, user, tokens, distance).

    A piece counts as used whole where a request uses its beginning. Ids below 0 are a request's
    own: nobody can share them, nor what follows, so they are not in the tree.
    """
    for i in range(len(prompt_lens)):
        request: int = tree.count[REQUESTS]
        all_used = sum_to(tree.last_used, request)
        first_run: int = tree.count[RUNS]
        num_runs = first_run
        node = ROOT
        if namespaces[i] != 0:
            node = find_child(tree, ROOT, 0, namespaces[i], NAMESPACE_ROOT)
            if node == 0:
                node = add_child(tree, ROOT, 0, namespaces[i], NAMESPACE_ROOT, 0)
        used = 0  # tokens of the node's piece that the path has walked
        depth = 0
        known = True
        at = starts[i]
        while at < starts[i + 1] and segment_ids[at] >= 0:
            remaining = min(segment_lens[at], computed_lens[i] - depth)
            skip = 0
            while remaining > 0:
                child = find_child(tree, node, used, segment_ids[at], skip) if known else 0
                if child == 0:
                    known = False
                    child = add_child(tree, node, used, segment_ids[at], skip, remaining)
                    used = remaining
                else:
                    used = min(remaining, tree.nodes[child, LENGTH])
                    user = tree.nodes[child, LAST_USER]
                    if num_runs == first_run or runs[1, num_runs - 1] != user:
                        runs[0, num_runs] = request
                        runs[1, num_runs] = user
                        runs[2, num_runs] = 0
                        num_runs += 1
                    runs[2, num_runs - 1] += used
                    shared[i] = depth + used
                tree.nodes[child, LAST_USER] = request
                node = child
                depth += used
                skip += used
                remaining -= used
            at += 1
        for run in range(first_run, num_runs):
            runs[3, run] = all_used - sum_to(tree.last_used, runs[1, run] + 1)
        for run in range(first_run, num_runs):
            change(tree.last_used, runs[1, run], -runs[2, run])
        change(tree.last_used, request, computed_lens[i])
        # Of an answer that is the same as before, no prompt token is used again.
        beyond = shared[i] - prompt_lens[i]
        shared[i] = min(shared[i], prompt_lens[i])
        while beyond > 0:
            cut = min(beyond, runs[2, num_runs - 1])
            runs[2, num_runs - 1] -= cut
            beyond -= cut
            if runs[2, num_runs - 1] == 0:
                num_runs -= 1
        tree.count[RUNS] = num_runs
        tree.count[REQUESTS] = request + 1


_walk = entry(walk)
_walk_sum = entry(sum_to)
_hang_up = entry(hang_up)
_grow_sums = entry(grow_sums)
