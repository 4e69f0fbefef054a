"""SGLang's radix tree of cached pages: match, insert, lock, evict.

Follows srt/mem_cache/radix_cache.RadixCache and TreeNode of SGLang 0.5.9 with its default LRU
strategy. A node is a run of pages; the runs on the way from the root spell a prefix. A chain id
(sim/chains.py, with the page as its block) names a page's content and all before it, so tokens are
never compared: the longest cached prefix is found by bisection over a request's chain ids, and its
path by going up. A page knows its node and a node the last page above it, so a split renames the
shorter half of a run and nothing else.

An unlocked node has only unlocked nodes below it. They lie in one list by last use, and a use goes
from a node up to the root, deepest first, so that the head of the list is always the leaf which was
used longest ago: SGLang's heap of leaves would pop the same one.

pool.count[FREE] counts the pages of the free queue and those of unlocked nodes; only the former are
there to take before `evict`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim._jit import hot, verb
from sim.blocks import EVICTIONS, FREE, NULL_BLOCK, BlockPool, forget, insert_after, register
from sim.chains import ChainTree
from sim.columns import B, C, E
from sim.core import Core
from sim.request import Ints
from sim.residency import note_eviction

ROOT = 0
NODE, NEXT = range(2)  # columns of RadixTree.pages

# RadixTree.count
EVICTABLE, LAST_ACCESS, UNUSED_NODE, NODES_USED = range(4)


class RadixTree(NamedTuple):
    """The tree; physical pages are the pool's blocks, and page 0 stands for the root's end."""

    nodes: Ints  # [node, E]
    pages: Ints  # [block, column]: the node that holds it, and the next page of its run
    count: Ints  # type: ignore[assignment]  # the name shadows tuple.count


def new_radix_tree(num_gpu_blocks: int) -> RadixTree:
    """An empty tree over so many pages: a node has one at least, so it never lacks a node."""
    return RadixTree(
        np.zeros((num_gpu_blocks, E.WIDTH), np.int64),
        np.zeros((num_gpu_blocks, 2), np.int64),
        np.array([0, 0, 0, 1], np.int64),
    )


@hot
def tree_of(core: Core) -> RadixTree:
    """The tree of an engine whose cache is sim/caches/radix."""
    return RadixTree(core.cache.nodes, core.cache.pages, core.cache.tree_count)


@verb
def cached_pages(chain_tree: ChainTree, chains: Ints, num_pages: int) -> int:
    """How many of the first `num_pages` pages are in the tree; where one is, all before it are."""
    cached = 0
    missing = 1  # the first so many pages are not all there, once it has stopped growing
    while missing <= num_pages and chain_tree.chains[C.block, chains[missing - 1]] != 0:
        cached = missing
        missing *= 2
    missing = min(missing, num_pages + 1)
    while missing - cached > 1:
        middle = (cached + missing) // 2
        if chain_tree.chains[C.block, chains[middle - 1]] != 0:
            cached = middle
        else:
            missing = middle
    return cached


@verb
def parent_of(radix: RadixTree, node: int) -> int:
    """The node above."""
    parent: int = radix.pages[radix.nodes[node, E.parent_page], NODE]
    return parent


@verb
def unlist(radix: RadixTree, node: int) -> None:
    """Take a node out of the list."""
    before = radix.nodes[node, E.before]
    after = radix.nodes[node, E.after]
    radix.nodes[before, E.after] = after
    radix.nodes[after, E.before] = before


@verb
def enlist(radix: RadixTree, node: int) -> None:
    """Put an unlocked node into the list where its last use belongs, most often the end."""
    nodes = radix.nodes
    before = nodes[ROOT, E.before]
    while before != ROOT and nodes[before, E.last_access] > nodes[node, E.last_access]:
        before = nodes[before, E.before]
    after = nodes[before, E.after]
    nodes[before, E.after] = node
    nodes[node, E.before] = before
    nodes[node, E.after] = after
    nodes[after, E.before] = node


@verb
def use(radix: RadixTree, node: int) -> None:
    """A node is used now."""
    radix.count[LAST_ACCESS] += 1
    radix.nodes[node, E.last_access] = radix.count[LAST_ACCESS]
    if radix.nodes[node, E.lock_ref] == 0:
        unlist(radix, node)
        enlist(radix, node)


@verb
def use_path(radix: RadixTree, node: int) -> None:
    """A node and all above it are used now, it first."""
    while node != ROOT:
        use(radix, node)
        node = parent_of(radix, node)


@verb
def new_node(radix: RadixTree, parent_page: int, first_page: int, num_pages: int, depth: int) -> int:
    """An unlocked node without children, used now, for a run of pages; they are not told of it."""
    nodes = radix.nodes
    node: int = radix.count[UNUSED_NODE]
    if node != 0:
        radix.count[UNUSED_NODE] = nodes[node, E.after]
    else:
        node = radix.count[NODES_USED]
        radix.count[NODES_USED] = node + 1
    nodes[node, E.parent_page] = parent_page
    nodes[node, E.first_page] = first_page
    nodes[node, E.num_pages] = num_pages
    nodes[node, E.depth] = depth
    nodes[node, E.lock_ref] = 0
    nodes[node, E.num_children] = 0
    radix.count[LAST_ACCESS] += 1
    nodes[node, E.last_access] = radix.count[LAST_ACCESS]
    enlist(radix, node)
    return node


@verb
def hold_run(radix: RadixTree, node: int) -> None:
    """Tell the pages of a node's run which node holds them."""
    page = radix.nodes[node, E.first_page]
    for _ in range(radix.nodes[node, E.num_pages]):
        radix.pages[page, NODE] = node
        page = radix.pages[page, NEXT]


@verb
def split_behind(radix: RadixTree, page: int, num_before: int) -> int:
    """Make `page`, the last of `num_before` pages of a path, the last of its node's run.

    Returns the node of what came behind it, both with the same locks, or that of the page where
    nothing did. The halves are to be used next (RadixCache._split_node).
    """
    nodes = radix.nodes
    node: int = radix.pages[page, NODE]
    kept = num_before - nodes[node, E.depth]
    rest = nodes[node, E.num_pages] - kept
    if rest == 0:
        return node
    nodes[node, E.num_pages] = kept
    first = nodes[node, E.first_page]
    behind = radix.pages[page, NEXT]
    if rest <= kept:
        lower = new_node(radix, page, behind, rest, num_before)
        nodes[lower, E.num_children] = nodes[node, E.num_children]
        nodes[node, E.num_children] = 1
        half = lower
    else:
        half = new_node(radix, nodes[node, E.parent_page], first, kept, nodes[node, E.depth])
        nodes[half, E.num_children] = 1
        nodes[node, E.parent_page] = page
        nodes[node, E.first_page] = behind
        nodes[node, E.num_pages] = rest
        nodes[node, E.depth] = num_before
        lower = node
    hold_run(radix, half)
    if nodes[node, E.lock_ref] > 0:
        unlist(radix, half)
        nodes[half, E.lock_ref] = nodes[node, E.lock_ref]
    return lower


@verb
def match(radix: RadixTree, chain_tree: ChainTree, chains: Ints, num_pages: int) -> int:
    """How many of a request's first `num_pages` pages are cached; they are used now.

    Where the match ends inside a run it is split there, and the half that was not matched counts
    as used all the same (RadixCache.match_prefix, _match_prefix_helper).
    """
    num_hit = cached_pages(chain_tree, chains, num_pages)
    if num_hit > 0:
        use_path(radix, split_behind(radix, chain_tree.chains[C.block, chains[num_hit - 1]], num_hit))
    return num_hit


@hot
def free_page(pool: BlockPool, page: int) -> None:
    """Put a page that nobody holds into the free queue."""
    pool.blocks[B.ref_cnt, page] = 0
    insert_after(pool, pool.blocks[B.prev_free, NULL_BLOCK], page)


@verb
def insert(
    radix: RadixTree,
    pool: BlockPool,
    chain_tree: ChainTree,
    chains: Ints,
    table: Ints,
    num_protected: int,
    num_pages: int,
) -> int:
    """Give the tree a request's first `num_pages` pages, all computed; returns how many it had.

    Of those the request keeps the tree's: its own, behind the `num_protected` that it has from the
    tree already, go back to the pool, and its table names the others. The rest become a new
    unlocked node, never part of the node above. All on the way are used now; a run that is left
    half way is split (RadixCache.insert, cache_unfinished_req, cache_finished_req).
    """
    if num_pages == 0:
        return 0
    num_had = cached_pages(chain_tree, chains, num_pages)
    for i in range(num_protected, num_had):
        free_page(pool, table[i])
        table[i] = chain_tree.chains[C.block, chains[i]]
    above = NULL_BLOCK
    end = ROOT
    if num_had > 0:
        above = table[num_had - 1]
        end = split_behind(radix, above, num_had)
    num_new = num_pages - num_had
    if num_new > 0:
        if end != ROOT:
            use(radix, end)  # what is split off is used before the new leaf beside it
        radix.nodes[radix.pages[above, NODE], E.num_children] += 1
        end = new_node(radix, above, table[num_had], num_new, num_had)
        for i in range(num_had, num_pages):
            page = table[i]
            register(pool, chain_tree, page, chains[i])
            pool.blocks[B.ref_cnt, page] = 0
            radix.pages[page, NODE] = end
            radix.pages[page, NEXT] = table[i + 1] if i + 1 < num_pages else NULL_BLOCK
        radix.count[EVICTABLE] += num_new
        pool.count[FREE] += num_new
    use_path(radix, end)
    return num_had


@verb
def lock(radix: RadixTree, pool: BlockPool, first_page: int, last_page: int) -> None:
    """Hold the nodes from that of `last_page` up to, without it, that of `first_page`, an ancestor.

    They cannot be evicted while held; each request holds each of its nodes once
    (RadixCache.inc_lock_ref). Page 0 is the root's.
    """
    nodes = radix.nodes
    node = radix.pages[last_page, NODE]
    end = radix.pages[first_page, NODE]
    while node != end:
        if nodes[node, E.lock_ref] == 0:
            unlist(radix, node)
            radix.count[EVICTABLE] -= nodes[node, E.num_pages]
            pool.count[FREE] -= nodes[node, E.num_pages]
        nodes[node, E.lock_ref] += 1
        node = parent_of(radix, node)


@verb
def unlock(radix: RadixTree, pool: BlockPool, last_page: int) -> None:
    """Let go of the nodes from that of `last_page` up (RadixCache.dec_lock_ref)."""
    nodes = radix.nodes
    node = radix.pages[last_page, NODE]
    while node != ROOT:
        nodes[node, E.lock_ref] -= 1
        if nodes[node, E.lock_ref] == 0:
            enlist(radix, node)
            radix.count[EVICTABLE] += nodes[node, E.num_pages]
            pool.count[FREE] += nodes[node, E.num_pages]
        node = parent_of(radix, node)


@verb
def forget_leaf(radix: RadixTree, pool: BlockPool, chain_tree: ChainTree, evicting: bool) -> int:
    """Forget the unlocked leaf that was used longest ago; returns how many pages it had.

    They go to the free queue, and count as evicted or not.
    """
    nodes = radix.nodes
    leaf = nodes[ROOT, E.after]
    unlist(radix, leaf)
    num_pages: int = nodes[leaf, E.num_pages]
    page = nodes[leaf, E.first_page]
    for _ in range(num_pages):
        forget(pool, chain_tree, page)
        if evicting and len(pool.times) > 0:
            note_eviction(pool.times, pool.durations, pool.evicted_from, page)
        free_page(pool, page)
        page = radix.pages[page, NEXT]
    pool.count[FREE] -= num_pages  # they were counted as free already
    radix.count[EVICTABLE] -= num_pages
    nodes[parent_of(radix, leaf), E.num_children] -= 1
    nodes[leaf, E.after] = radix.count[UNUSED_NODE]
    radix.count[UNUSED_NODE] = leaf
    return num_pages


@verb
def evict(radix: RadixTree, pool: BlockPool, chain_tree: ChainTree, num_pages: int) -> int:
    """Evict least recently used leaves, each whole, until `num_pages` pages or all unlocked ones went.

    Returns how many went to the free queue (RadixCache.evict).
    """
    evicted = 0
    while evicted < num_pages and radix.count[EVICTABLE] > 0:
        evicted += forget_leaf(radix, pool, chain_tree, True)
    pool.count[EVICTIONS] += evicted
    return evicted


@verb
def make_room(radix: RadixTree, pool: BlockPool, chain_tree: ChainTree, num_pages: int) -> None:
    """Have `num_pages` pages in the free queue, if the unlocked nodes allow it.

    Where they lack, as many are evicted as are wanted, not as lack (evict_from_tree_cache).
    """
    if pool.count[FREE] - radix.count[EVICTABLE] < num_pages:
        evict(radix, pool, chain_tree, num_pages)
