"""Which tokens of a prompt an earlier request has had, and who last: one tree of all prompts.

The tree is cut at segments, not at blocks, so that one pass answers for every block size. A node
is a piece of a segment that goes on from its parent, `branch` tokens into it. Nothing is ever
forgotten: it is the infinite pool.

Whoever has used a token of a piece has used all before it, so the last users of a piece are older
and older into it: a node names the last user of its first token and how far that one went, and
then a list of who went further, of rows of the same table that are no nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import entry, verb
from sim.request import Batch, Ints

ROOT = 0
NAMESPACE_ROOT = -1  # `skip` of the empty node that stands for a LoRA and cache_salt
NO_NODE = -1  # `parent` of a row that is no node
FEWEST_RUNS = 1 << 16

# Columns of a row: eight, so that one lies in one cache line.
PARENT, BRANCH, SEGMENT, SKIP, USER, END, FURTHER, NEXT_IN_BUCKET = range(8)

# PrefixTree.count
ROWS, VACANT, REQUESTS, RUNS = range(4)


class PrefixTree(NamedTuple):
    """The tree."""

    rows: Ints  # [row, column]
    buckets: Ints  # hash table of nodes
    count: Ints  # type: ignore[assignment]  # the name shadows tuple.count


class Runs(NamedTuple):
    """The tokens that earlier requests have had, in runs with one last user: an entry a run.

    By request; within one from its first token on without a gap, each user older than the one before.
    """

    request: Ints  # that uses the run now, by number
    user: Ints  # that used it last
    begin: Ints  # tokens of the request before the run
    end: Ints


def new_tree(num_rows: int) -> PrefixTree:
    """An empty tree with room for so many nodes (a power of two)."""
    count = np.array([1, 0, 0, 0], np.int64)
    return PrefixTree(np.zeros((num_rows, 8), np.int64), np.zeros(2 * num_rows, np.int64), count)


def add(tree: PrefixTree, batch: Batch, computed_len: Ints) -> tuple[PrefixTree, Runs]:
    """Put the first `computed_len` tokens of a batch's requests into the tree. Modifies `tree`.

    Returns the tree, a larger copy where it was full, and what the requests found there, one after
    the other: each sees those before it.
    """
    n, num_segments = len(computed_len), len(batch.segment_id)
    # A segment adds a node at most, and cuts the use of another in two; a request adds its namespace.
    tree = _with_room(tree, int(tree.count[ROWS]) + 2 * num_segments + n)
    most = min(int(computed_len.max(initial=0)), int(tree.count[REQUESTS]) + n)  # runs of one request
    found = np.empty((4, max(FEWEST_RUNS, most)), np.int64)
    parts = []
    done = 0
    while done < n:
        tree.count[RUNS] = 0
        done = _walk(
            tree, batch.segment_start, batch.segment_id, batch.segment_len, batch.namespace,
            computed_len, done, found,
        )  # fmt: skip
        parts.append(found[:, : tree.count[RUNS]].copy())
    return tree, Runs(*np.concatenate(parts, axis=1)) if parts else Runs(*found[:, :0])


def _with_room(tree: PrefixTree, num_rows: int) -> PrefixTree:
    """A tree of the same content with room for so many rows."""
    if num_rows <= len(tree.rows):
        return tree
    larger = new_tree(1 << num_rows.bit_length())
    used = tree.count[ROWS]
    larger.rows[:used] = tree.rows[:used]
    larger.count[:] = tree.count
    _hang_up(larger)
    return larger


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
        tree.rows[node, PARENT] == parent
        and tree.rows[node, SEGMENT] == segment
        and tree.rows[node, BRANCH] == branch
        and tree.rows[node, SKIP] == skip
    )
    return same


@verb
def find_child(tree: PrefixTree, parent: int, branch: int, segment: int, skip: int) -> int:
    """The child; 0 if there is none."""
    guess = parent + 1  # what one request added lies in a row
    if guess < tree.count[ROWS] and is_child(tree, guess, parent, branch, segment, skip):
        return guess
    node: int = tree.buckets[bucket_of(tree, parent, branch, segment, skip)]
    while node != 0 and not is_child(tree, node, parent, branch, segment, skip):
        node = tree.rows[node, NEXT_IN_BUCKET]
    return node


@verb
def take_row(tree: PrefixTree) -> int:
    """A row that nobody uses; there is room."""
    row: int = tree.count[VACANT]
    if row != 0:
        tree.count[VACANT] = tree.rows[row, FURTHER]
        return row
    row = tree.count[ROWS]
    tree.count[ROWS] = row + 1
    return row


@verb
def add_child(tree: PrefixTree, parent: int, branch: int, segment: int, skip: int, length: int) -> int:
    """Add a child of a piece of `length` tokens; there is room."""
    node = take_row(tree)
    tree.rows[node, PARENT] = parent
    tree.rows[node, BRANCH] = branch
    tree.rows[node, SEGMENT] = segment
    tree.rows[node, SKIP] = skip
    tree.rows[node, END] = length
    tree.rows[node, FURTHER] = 0
    bucket = bucket_of(tree, parent, branch, segment, skip)
    tree.rows[node, NEXT_IN_BUCKET] = tree.buckets[bucket]
    tree.buckets[bucket] = node
    return node


@verb
def hang_up(tree: PrefixTree) -> None:
    """Fill the empty buckets with all nodes."""
    for node in range(1, tree.count[ROWS]):
        if tree.rows[node, PARENT] == NO_NODE:
            continue
        bucket = bucket_of(
            tree,
            tree.rows[node, PARENT],
            tree.rows[node, BRANCH],
            tree.rows[node, SEGMENT],
            tree.rows[node, SKIP],
        )
        tree.rows[node, NEXT_IN_BUCKET] = tree.buckets[bucket]
        tree.buckets[bucket] = node


@verb
def use(tree: PrefixTree, node: int, request: int, tokens: int) -> None:
    """A request uses the first tokens of a piece, which are not more than it has."""
    rows = tree.rows
    further: int = rows[node, FURTHER]
    if rows[node, END] > tokens:  # the user before went further
        further = take_row(tree)
        rows[further, PARENT] = NO_NODE
        rows[further, USER] = rows[node, USER]
        rows[further, END] = rows[node, END]
        rows[further, FURTHER] = rows[node, FURTHER]
    while further != 0 and rows[further, END] <= tokens:
        after: int = rows[further, FURTHER]
        rows[further, FURTHER] = tree.count[VACANT]
        tree.count[VACANT] = further
        further = after
    rows[node, USER] = request
    rows[node, END] = tokens
    rows[node, FURTHER] = further


@verb
def walk(
    tree: PrefixTree,
    starts: Ints,
    segment_ids: Ints,
    segment_lens: Ints,
    namespaces: Ints,
    computed_lens: Ints,
    first: int,
    runs: Ints,
) -> int:
    """Add requests from `first` on; writes `runs` (request, user, begin, end) from RUNS on.

    Returns the first request whose runs might find no room there. Ids below 0 are a request's own:
    nobody can share them, nor what follows, so they are not in the tree.
    """
    for i in range(first, len(computed_lens)):
        request: int = tree.count[REQUESTS]
        first_run: int = tree.count[RUNS]
        num_runs = first_run
        if num_runs + min(request, computed_lens[i]) > runs.shape[1]:
            return i
        node = ROOT
        if namespaces[i] != 0:
            node = find_child(tree, ROOT, 0, namespaces[i], NAMESPACE_ROOT)
            if node == 0:
                node = add_child(tree, ROOT, 0, namespaces[i], NAMESPACE_ROOT, 0)
        used = 0  # tokens of the node's piece that the path has walked
        depth = 0
        known = True
        at = starts[i]
        while at < starts[i + 1] and segment_ids[at] >= 0 and depth < computed_lens[i]:
            remaining = min(segment_lens[at], computed_lens[i] - depth)
            skip = 0
            while remaining > 0:
                child = find_child(tree, node, used, segment_ids[at], skip) if known else 0
                if child == 0:
                    known = False
                    child = add_child(tree, node, used, segment_ids[at], skip, remaining)
                    used = remaining
                    tree.rows[child, USER] = request
                else:
                    used = 0
                    row = child
                    while used < remaining and row != 0:
                        user = tree.rows[row, USER]
                        if num_runs == first_run or runs[1, num_runs - 1] != user:
                            runs[0, num_runs] = request
                            runs[1, num_runs] = user
                            runs[2, num_runs] = depth + used
                            num_runs += 1
                        used = min(remaining, tree.rows[row, END])
                        runs[3, num_runs - 1] = depth + used
                        row = tree.rows[row, FURTHER]
                    use(tree, child, request, used)
                node = child
                depth += used
                skip += used
                remaining -= used
            at += 1
        tree.count[RUNS] = num_runs
        tree.count[REQUESTS] = request + 1
    return len(computed_lens)


_walk = entry(walk)
_hang_up = entry(hang_up)
