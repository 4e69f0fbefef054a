"""The radix tree against an independent one of real tokens: hits, evictions, sizes after each operation."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_pool import tokens_of
from model_radix import ModelTree, Node, Tokens

from sim import blocks, chains
from sim._jit import entry
from sim.blocks import EVICTIONS, FREE, NULL_BLOCK, new_pool
from sim.caches.radix import tree
from sim.caches.radix.tree import EVICTABLE, NEXT, NODE, ROOT, new_radix_tree
from sim.chains import CHAINS_USED, FREE_NODE, NODES_USED, new_tree
from sim.columns import B, C, E, N

name_chains = entry(chains.name_chains)
release_node = entry(chains.release_node)
take = entry(blocks.take)
match = entry(tree.match)
cached_pages = entry(tree.cached_pages)
evict = entry(tree.evict)
insert = entry(tree.insert)
lock = entry(tree.lock)
unlock = entry(tree.unlock)
make_room = entry(tree.make_room)
free_page = entry(tree.free_page)

CASES = 10_000
ROW = 256


class Holder:
    """A request: its tokens, its table of pages, how many of them the tree holds for it."""

    def __init__(self, namespace: int, tokens: Tokens, row: np.ndarray, node: int) -> None:
        self.namespace, self.tokens, self.row, self.node = namespace, tokens, row, node
        self.table = np.zeros(ROW, np.int64)
        self.computed = 0  # tokens
        self.num_pages = 0  # of its table
        self.protected = 0  # pages
        self.held: Node | None = None


class Pair:
    """The core's tree and the model's side by side."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.page_size = rng.choice((1, 1, 2, 3, 16))
        self.num_blocks = 1 + rng.choice((6, 20, 50, 120))
        self.pool = new_pool(self.num_blocks)
        self.chains = new_tree(4096, 1024, 16)
        self.tree = new_radix_tree(self.num_blocks)
        self.model = ModelTree(self.page_size)
        self.holders: list[Holder] = []
        self.done: Counter[str] = Counter()
        self.paths: list[list[tuple[int, int]]] = []

    # what happens

    def arrive(self) -> Holder:
        """A request that goes on where an earlier one was cut, or a new one."""
        rng = self.rng
        longest = min(ROW - 1, self.num_blocks) * self.page_size
        segments: list[tuple[int, int]] = []
        if self.paths and rng.random() < 0.8:
            segments = list(rng.choice(self.paths))[: rng.randint(1, 4)]
            if rng.random() < 0.5:
                segment, length = segments[-1]
                segments[-1] = (segment, rng.randint(1, length))
        for _ in range(rng.randint(not segments, 3)):
            segments.append((rng.randrange(6), rng.randint(1, 3 * self.page_size + 2)))
        tokens = tokens_of(segments)[:longest]
        self.paths.append(segments)
        namespace = rng.choice((0, 0, 0, 1, 2))
        row = np.zeros(ROW, np.int64)
        array = np.array(segments, np.int64).T.copy()
        node = name_chains(self.chains, array, 0, len(segments), namespace, longest, self.page_size, row)
        assert node >= 0
        return Holder(namespace, tuple(tokens), row, int(node))

    def admit(self) -> None:
        """Match all but the last token; lock what was found."""
        request = self.arrive()
        lookable = request.tokens[:-1]
        hit = int(match(self.tree, self.chains, request.row, len(lookable) // self.page_size))
        node, expected = self.model.match(request.namespace, lookable)
        assert hit * self.page_size == expected
        self.done["hit"] += hit > 0
        if self.rng.random() < 0.15:
            release_node(self.chains, request.node)  # a lookup and no more
            return
        for i in range(hit):
            request.table[i] = self.chains.chains[C.block, request.row[i]]
        request.computed = hit * self.page_size
        request.num_pages = request.protected = hit
        request.held = node
        lock(self.tree, self.pool, NULL_BLOCK, request.table[hit - 1] if hit else NULL_BLOCK)
        self.model.lock(node, 1)
        self.holders.append(request)

    def compute(self) -> None:
        """Take pages for some more tokens, evicting for them; then perhaps put them into the tree."""
        request = self.some()
        if request is None:
            return
        left = len(request.tokens) - request.computed
        more = self.rng.choice((left, self.rng.randint(0, left)))
        if not self.grow(request, more):
            self.done["refused"] += 1
            return
        if self.rng.random() < 0.6:
            self.put_in(request)

    def grow(self, request: Holder, more: int) -> bool:
        wanted = -(-(request.computed + more) // self.page_size) - request.num_pages
        if wanted > self.pool.count[FREE]:
            return False
        free = self.free_pages()
        gone = []
        if free < wanted:
            gone = self.model.evict(wanted * self.page_size)
        before, cached = int(self.pool.count[EVICTIONS]), self.contents()
        make_room(self.tree, self.pool, self.chains, wanted)
        lost = cached - self.contents()
        assert lost == {(n, p) for n, path in gone for p in self.prefixes(n, path)}
        assert self.pool.count[EVICTIONS] - before == len(lost)
        self.done["evicted"] += len(gone)
        for _ in range(wanted):
            request.table[request.num_pages] = take(self.pool, self.chains, 0)
            request.num_pages += 1
        request.computed += more
        return True

    def put_in(self, request: Holder) -> None:
        """cache_unfinished_req: insert, match again, move the lock."""
        whole = request.computed // self.page_size
        tokens = request.tokens[: whole * self.page_size]
        had = insert(self.tree, self.pool, self.chains, request.row, request.table, request.protected, whole)
        assert had * self.page_size == self.model.insert(request.namespace, tokens)
        node, found = self.model.match(request.namespace, tokens)
        assert found == len(tokens)
        assert request.held is not None
        self.model.lock(request.held, -1)
        self.model.lock(node, 1)
        first = request.table[request.protected - 1] if request.protected else NULL_BLOCK
        lock(self.tree, self.pool, first, request.table[whole - 1] if whole else NULL_BLOCK)
        request.protected, request.held = whole, node

    def finish(self) -> None:
        """cache_finished_req, or a retraction, which inserts nothing."""
        request = self.some()
        if request is None:
            return
        self.holders.remove(request)
        last = request.table[request.protected - 1] if request.protected else NULL_BLOCK
        kept = request.protected
        if self.rng.random() < 0.7:
            kept = request.computed // self.page_size
            had = insert(
                self.tree, self.pool, self.chains, request.row, request.table, request.protected, kept
            )
            expected = self.model.insert(request.namespace, request.tokens[: kept * self.page_size])
            assert had * self.page_size == expected
            self.done["duplicates"] += had > request.protected
        else:
            self.done["retracted"] += 1
        for i in range(kept, request.num_pages):
            free_page(self.pool, request.table[i])
        unlock(self.tree, self.pool, last)
        assert request.held is not None
        self.model.lock(request.held, -1)
        release_node(self.chains, request.node)

    def some(self) -> Holder | None:
        return self.rng.choice(self.holders) if self.holders else None

    # what is so

    def prefixes(self, namespace: int, path: Tokens) -> set[Tokens]:
        """The prefixes of whole pages of a path that the model no longer has."""
        left = {p for n, p in self.model_contents() if n == namespace}
        ends = range(self.page_size, len(path) + 1, self.page_size)
        return {path[:end] for end in ends} - left

    def model_contents(self) -> set[tuple[int, Tokens]]:
        found = set()
        for node in self.model.nodes():
            namespace, path = self.model.path(node)
            for end in range(len(path) - len(node.tokens), len(path), self.page_size):
                found.add((namespace, path[: end + self.page_size]))
        return found

    def contents(self) -> set[tuple[int, Tokens]]:
        """What is cached, by namespace and tokens: from the chain ids that requests gave it."""
        for request in self.holders:
            for i in range(len(request.tokens) // self.page_size):
                self.names[int(request.row[i])] = (
                    request.namespace,
                    request.tokens[: (i + 1) * self.page_size],
                )
        return {self.names[int(c)] for c in self.pool.blocks[B.chain] if c}

    names: dict[int, tuple[int, Tokens]]

    def free_pages(self) -> int:
        return int(self.pool.count[FREE] - self.tree.count[EVICTABLE])

    def compare(self) -> None:
        assert self.contents() == self.model_contents()
        size = self.page_size
        assert self.tree.count[EVICTABLE] * size == self.model.size(locked=False)
        own = sum(r.num_pages - r.protected for r in self.holders)
        protected = self.model.size(locked=True) // size
        assert self.pool.count[FREE] == self.num_blocks - 1 - own - protected
        self.audit()

    def audit(self) -> None:
        """The tables agree with each other."""
        nodes, pages = self.tree.nodes, self.tree.pages
        listed, node = [], nodes[ROOT, E.after]
        while node != ROOT:
            assert nodes[nodes[node, E.before], E.after] == node and nodes[node, E.lock_ref] == 0
            listed.append(int(node))
            node = nodes[node, E.after]
        assert sorted(listed, key=lambda n: nodes[n, E.last_access]) == listed
        held = {int(pages[b, NODE]) for b in np.flatnonzero(self.pool.blocks[B.chain])}
        assert set(listed) == {n for n in held if nodes[n, E.lock_ref] == 0}
        place = {node: i for i, node in enumerate(listed)}
        children: Counter[int] = Counter()
        for node in held:
            parent = int(pages[nodes[node, E.parent_page], NODE])
            children[parent] += 1
            if node in place and parent in place:
                assert place[node] < place[parent]
            assert parent == ROOT or nodes[parent, E.lock_ref] >= nodes[node, E.lock_ref]
            above = 0 if parent == ROOT else nodes[parent, E.depth] + nodes[parent, E.num_pages]
            assert nodes[node, E.depth] == above
            page = nodes[node, E.first_page]
            for _ in range(nodes[node, E.num_pages]):
                assert pages[page, NODE] == node and self.pool.blocks[B.chain, page]
                page = pages[page, NEXT]
        assert all(nodes[node, E.num_children] == children[node] for node in held)

    def end(self) -> None:
        """All ends and all is evicted: nothing is left, in any table."""
        while self.holders:
            self.finish()
            self.compare()
        make_room(self.tree, self.pool, self.chains, self.num_blocks)
        assert self.pool.count[FREE] == self.num_blocks - 1 and self.tree.count[EVICTABLE] == 0
        unused, node = 0, self.chains.count[FREE_NODE]
        while node:
            unused, node = unused + 1, self.chains.nodes[N.next_in_bucket, node]
        assert self.chains.count[NODES_USED] == unused + 1
        assert self.chains.count[CHAINS_USED] < 4096


def run_case(seed: int) -> Counter[str]:
    """The life of a tree that a seed says."""
    return live(random.Random(seed))


def live(rng: random.Random) -> Counter[str]:
    """One random life of a tree, compared after every operation."""
    pair = Pair(rng)
    pair.names = {}
    for _ in range(pair.rng.randint(10, 80)):
        getattr(pair, pair.rng.choice(("admit", "admit", "compute", "compute", "compute", "finish")))()
        pair.compare()
    pair.end()
    return pair.done


class Small:
    """A tree of pages of one token, written letter by letter: a known answer reads at a glance."""

    def __init__(self, num_pages: int) -> None:
        self.pool, self.chains = new_pool(num_pages + 1), new_tree(256, 256, 16)
        self.tree = new_radix_tree(num_pages + 1)

    def row(self, text: str) -> np.ndarray:
        row = np.zeros(32, np.int64)
        letters = np.array([[ord(c) for c in text], [1] * len(text)], np.int64)
        name_chains(self.chains, letters, 0, len(text), 0, 32, 1, row)
        return row

    def put(self, text: str) -> int:
        table = np.zeros(32, np.int64)
        for i in range(len(text)):
            table[i] = take(self.pool, self.chains, 0)
        return int(insert(self.tree, self.pool, self.chains, self.row(text), table, 0, len(text)))

    def find(self, text: str) -> int:
        return int(match(self.tree, self.chains, self.row(text), len(text)))

    def evict(self, num_pages: int) -> int:
        return int(evict(self.tree, self.pool, self.chains, num_pages))

    def has(self, text: str) -> int:
        return int(cached_pages(self.chains, self.row(text), len(text)))


def test_the_leaf_used_longest_ago_goes_whole() -> None:
    small = Small(20)
    assert [small.put(text) for text in ("abcd", "abxyz", "pq")] == [0, 2, 0]
    assert small.find("abcd") == 4
    assert small.evict(1) == 3  # xyz, though one page was asked for
    assert [small.has(text) for text in ("abxyz", "abcd", "pq")] == [2, 4, 2]
    assert small.evict(3) == 4  # pq, then cd; ab is the last, used after cd
    assert [small.has(text) for text in ("abcd", "pq")] == [2, 0]
    assert small.evict(99) == 2
    assert small.pool.count[FREE] == 20


def test_what_a_match_splits_off_counts_as_used() -> None:
    small = Small(20)
    small.put("abcd")
    small.put("pq")
    assert small.find("abx") == 2
    small.evict(1)
    assert [small.has(text) for text in ("abcd", "pq")] == [4, 0]  # cd counts as used


def test_what_an_insertion_splits_off_counts_as_used_before_the_new_leaf() -> None:
    for first in ("abcd", "abcdefgh"):  # the shorter half is renamed: once the upper, once the lower
        small = Small(20)
        small.put(first)
        small.put("pq")
        small.put("abx")
        small.evict(1)
        assert [small.has(text) for text in (first, "pq", "abx")] == [len(first), 0, 3]
        small.evict(1)
        assert [small.has(text) for text in (first, "abx")] == [2, 3]


def test_room_is_made_by_as_much_as_is_wanted() -> None:
    small = Small(10)
    for text in "abcdefgh":
        small.put(text)
    make_room(small.tree, small.pool, small.chains, 2)
    assert small.pool.count[EVICTIONS] == 0  # two pages are free
    make_room(small.tree, small.pool, small.chains, 3)
    assert small.pool.count[EVICTIONS] == 3  # not one


def test_random_lives_agree() -> None:
    done: Counter[str] = Counter()
    for seed in range(150):
        done += run_case(seed)
    assert all(done[what] > 20 for what in ("hit", "evicted", "refused", "duplicates", "retracted")), done


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_any_life_agrees(rng: random.Random) -> None:
    live(rng)


@pytest.mark.slow
def test_ten_thousand_random_lives_agree() -> None:
    for seed in range(CASES):
        run_case(seed)


def test_plain_python_agrees() -> None:
    script = "import test_radix_tree as t\nfor seed in range(1000, 1012): t.run_case(seed)"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
