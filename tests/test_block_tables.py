"""Block tables under random work, against a memory that is really written.

The model knows tokens and nothing of reference counts: each sequence is the list of its tokens, and
a physical memory holds what was written where. What a sequence reads through its table must be its
own tokens, whoever wrote them: a missing copy, or one copy too few, is read by somebody.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sim._jit import entry
from sim.blocks import FREE, new_pool
from sim.caches.paged import block_tables as verbs
from sim.caches.paged.block_tables import COPIES, ENTRIES, RESERVED, SWAPPED_IN, SWAPPED_OUT, new_tables
from sim.chains import new_tree
from sim.columns import B

share = entry(verbs.share)
write = entry(verbs.write)
blocks_to_write = entry(verbs.blocks_to_write)
fork = entry(verbs.fork)
reorder = entry(verbs.reorder)
release = entry(verbs.release)
swap_out = entry(verbs.swap_out)
swap_in = entry(verbs.swap_in)
forget_swapped = entry(verbs.forget_swapped)
draw_parent = entry(verbs.draw_parent)

SEATS, WIDEST, LONGEST = 5, 6, 64
Token = tuple[str, int, int]  # whose, its place, which try


class Group:
    """A seated group: its sequences are their tokens."""

    def __init__(self, seat: int, width: int, prompt: list[Token]) -> None:
        self.first = seat * WIDEST
        self.width = width
        self.prompt = prompt
        self.tokens: list[list[Token]] = [list(prompt)]  # of one sequence until the prompt is there
        self.num_blocks = 0
        self.swapped = 0  # blocks on the host, 0: it runs
        self.steps = 0


class Machine(RuleBasedStateMachine):
    """Verbs and memory side by side."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_blocks=st.integers(10, 60),
        prefixes=st.lists(st.integers(1, 14), max_size=2),
    )
    def begin(self, block_size: int, num_blocks: int, prefixes: list[int]) -> None:
        self.block_size = block_size
        self.pool = new_pool(num_blocks)
        self.tree = new_tree(2, 2, 1)
        self.tables = new_tables(SEATS, WIDEST, LONGEST, num_blocks)
        self.memory: dict[int, list[Token | None]] = {b: [None] * block_size for b in range(num_blocks)}
        self.host: dict[tuple[int, int], list[Token | None]] = {}
        self.groups: dict[int, Group] = {}
        self.reserved: list[tuple[list[int], list[Token]]] = []
        self.copies = self.out = self.back = self.made = 0
        for i, length in enumerate(prefixes):
            blocks = -(-length // block_size)
            if blocks > min(self.free, 5):
                continue
            seat_row = (SEATS - 1) * WIDEST  # borrowed
            self.write_row(seat_row, 1, 0, 0, length)
            names = self.tables.rows[seat_row, :blocks].tolist()
            tokens: list[Token] = [("prefix", i, k) for k in range(length)]
            for k, token in enumerate(tokens):
                self.memory[names[k // block_size]][k % block_size] = token
            self.tables.marks[names] = RESERVED
            self.reserved.append((names, tokens))

    @property
    def free(self) -> int:
        return int(self.pool.count[FREE])

    def row(self, group: Group, j: int) -> list[int]:
        return self.tables.rows[group.first + j, : group.num_blocks].tolist()

    def write_row(self, first: int, width: int, num_blocks: int, start: int, end: int) -> int:
        """`write`, and in the memory the copies that the GPU would make."""
        most = int(blocks_to_write(self.block_size, width, num_blocks, start, end))
        assert most <= self.free
        before = self.tables.rows[first : first + width, :num_blocks].tolist()
        contents = {block: list(cells) for block, cells in self.memory.items()}
        had = self.free
        length = int(
            write(self.tables, self.pool, self.tree, self.block_size, first, width, num_blocks, start, end, 0)
        )
        assert had - self.free <= most
        for j, old in enumerate(before):
            new = self.tables.rows[first + j, :num_blocks].tolist()
            for i, (a, b) in enumerate(zip(old, new, strict=True)):
                if a != b:
                    assert i == start // self.block_size == num_blocks - 1
                    self.memory[b] = list(contents[a])
                    self.copies += 1
        return length

    def generate(self, group: Group, length: int) -> None:
        """Write `length` tokens of its own for each sequence."""
        start = len(group.tokens[0])
        width = len(group.tokens)
        group.num_blocks = self.write_row(group.first, width, group.num_blocks, start, start + length)
        self.made += 1
        for j, tokens in enumerate(group.tokens):
            for place in range(start, start + length):
                token = (f"{self.made}", j, place)
                tokens.append(token)
                self.memory[self.row(group, j)[place // self.block_size]][place % self.block_size] = token

    def needed(self, group: Group, length: int) -> int:
        start = len(group.tokens[0])
        end = start + length
        return int(blocks_to_write(self.block_size, len(group.tokens), group.num_blocks, start, end))

    def pick(self, data: st.DataObject, *, swapped: bool = False) -> Group | None:
        seats = [seat for seat, group in self.groups.items() if (group.swapped > 0) == swapped]
        return self.groups[data.draw(st.sampled_from(seats))] if seats else None

    @rule(data=st.data(), width=st.integers(1, WIDEST), length=st.integers(1, 20), outputs=st.integers(0, 6))
    def arrive(self, data: st.DataObject, width: int, length: int, outputs: int) -> None:
        """A prompt behind a reserved prefix or none, forked; with outputs, as after a recomputation."""
        vacant = set(range(SEATS)) - set(self.groups)
        if not vacant:
            return
        seat = min(vacant)
        group = Group(seat, width, [])
        most = (width + 1) * (1 + -(-(length + outputs) // self.block_size)) + 1
        if most > self.free:
            return
        if self.reserved and data.draw(st.booleans()):
            names, tokens = self.reserved[data.draw(st.integers(0, len(self.reserved) - 1))]
            hit = min(len(tokens), max(length - 1, 0))
            blocks = -(-hit // self.block_size)
            share(self.tables, self.pool, group.first, np.array(names), blocks)
            group.num_blocks = blocks
            group.tokens = [list(tokens[:hit])]
            length -= hit
        else:
            group.tokens = [[]]
        self.generate(group, length)
        for j in range(1, width):
            fork(self.tables, self.pool, group.first, group.first + j, group.num_blocks)
            group.tokens.append(list(group.tokens[0]))
        if outputs:
            self.generate(group, outputs)
        self.groups[seat] = group

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        group = self.pick(data)
        if group is None or len(group.tokens[0]) + 1 > 40 or self.needed(group, 1) > self.free:
            return
        assert self.needed(group, 1) == group.width
        self.generate(group, 1)

    @rule(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def beam(self, data: st.DataObject, seed: int) -> None:
        """Rows with children keep their tokens, the others read those of the parents that have more."""
        group = self.pick(data)
        if group is None:
            return
        group.steps += 1
        draws = [int(draw_parent(seed, group.steps, j, group.width)) for j in range(group.width)]
        births = Counter(draws)
        extra = [p for p in sorted(births) for _ in range(births[p] - 1)]
        childless = [j for j in range(group.width) if births[j] == 0]
        old = [list(tokens) for tokens in group.tokens]
        for j, p in zip(childless, extra, strict=True):
            group.tokens[j] = list(old[p])
        free = self.free
        reorder(self.tables, self.pool, group.first, group.width, group.num_blocks, seed, group.steps)
        assert self.free >= free  # a fork takes nothing

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        group = self.pick(data)
        if group is not None:
            release(self.tables, self.pool, group.first, group.width, group.num_blocks)
            del self.groups[group.first // WIDEST]

    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        group = self.pick(data)
        if group is None:
            return
        before = [self.row(group, j) for j in range(group.width)]
        kept = {block for names, _ in self.reserved for block in names}
        own = {block for row in before for block in row} - kept
        if not own:
            return
        free = self.free
        contents = {block: list(cells) for block, cells in self.memory.items()}
        group.swapped = int(swap_out(self.tables, self.pool, group.first, group.width, group.num_blocks))
        assert group.swapped == len(own) == self.free - free
        for j, row in enumerate(before):
            for old, new in zip(row, self.row(group, j), strict=True):
                assert (new > 0) == (old in kept)
                if new < 0:
                    self.host[group.first, -new] = contents[old]
        self.out += group.swapped

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        group = self.pick(data, swapped=True)
        if group is None or group.swapped > self.free:
            return
        before = [self.row(group, j) for j in range(group.width)]
        free = self.free
        swap_in(self.tables, self.pool, self.tree, group.first, group.width, group.num_blocks, 0)
        assert free - self.free == group.swapped
        for j, row in enumerate(before):
            for old, new in zip(row, self.row(group, j), strict=True):
                if old < 0:
                    self.memory[new] = list(self.host[group.first, -old])
        self.back += group.swapped
        group.swapped = 0

    @rule(data=st.data())
    def abort_swapped(self, data: st.DataObject) -> None:
        group = self.pick(data, swapped=True)
        if group is not None:
            forget_swapped(self.tables, self.pool, group.first, group.width, group.num_blocks)
            del self.groups[group.first // WIDEST]

    @invariant()
    def reads_its_own_tokens(self) -> None:
        for group in self.groups.values():
            for j, tokens in enumerate(group.tokens):
                row = self.row(group, j)
                assert len(row) == -(-len(tokens) // self.block_size)
                for place, token in enumerate(tokens):
                    block = row[place // self.block_size]
                    cells = self.memory[block] if block > 0 else self.host[group.first, -block]
                    assert cells[place % self.block_size] == token
        for names, tokens in self.reserved:
            for place, token in enumerate(tokens):
                assert self.memory[names[place // self.block_size]][place % self.block_size] == token

    @invariant()
    def conserves_blocks(self) -> None:
        named: Counter[int] = Counter()
        entries = 0
        for names, _ in self.reserved:
            named.update(names)
            entries += len(names)
        for group in self.groups.values():
            for j in range(group.width):
                named.update(block for block in self.row(group, j) if block > 0)
            entries += 0 if group.swapped else group.width * group.num_blocks
        refs = self.pool.blocks[B.ref_cnt].tolist()
        assert refs == [named[block] for block in range(len(refs))]
        assert self.free == len(refs) - 1 - len(named)
        queue, block = set(), int(self.pool.blocks[B.next_free, 0])
        while block:
            assert block not in queue
            queue.add(block)
            block = int(self.pool.blocks[B.next_free, block])
        assert queue == set(range(1, len(refs))) - set(named)
        for block in queue:
            self.memory[block] = [None] * self.block_size  # whoever reads it still, notices
        assert self.tables.count[ENTRIES] == entries
        assert self.tables.count[COPIES] == self.copies
        assert (self.tables.count[SWAPPED_OUT], self.tables.count[SWAPPED_IN]) == (self.out, self.back)
        assert {b for b, mark in enumerate(self.tables.marks.tolist()) if mark} == {
            block for names, _ in self.reserved for block in names
        }


def work(examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=list(Phase),
            suppress_health_check=checks,
        ),
    )


def test_tables_read_what_was_written() -> None:
    work(60, 40)


@pytest.mark.slow
def test_tables_read_what_was_written_at_length() -> None:
    work(1500, 60)


def test_last_holder_writes_in_place() -> None:
    """Three samples of a prompt of 5 at block size 4: block 0 stays shared, the tail is copied twice."""
    pool, tree, tables = new_pool(20), new_tree(2, 2, 1), new_tables(1, 3, 8, 20)
    assert write(tables, pool, tree, 4, 0, 1, 0, 0, 5, 0) == 2
    for child in (1, 2):
        fork(tables, pool, 0, child, 2)
    assert write(tables, pool, tree, 4, 0, 3, 2, 5, 6, 0) == 2
    assert tables.count[COPIES] == 2
    assert len(set(tables.rows[:3, 0].tolist())) == 1
    assert len(set(tables.rows[:3, 1].tolist())) == 3
    assert write(tables, pool, tree, 4, 0, 3, 2, 6, 7, 0) == 2  # nobody shares it any more
    assert tables.count[COPIES] == 2
    assert pool.count[FREE] == 19 - 4
    assert tables.count[ENTRIES] == 6


def test_reserved_tail_is_copied_by_every_writer() -> None:
    """A reserved prefix of 6 at block size 4: two requests share its full block and copy its tail."""
    pool, tree, tables = new_pool(20), new_tree(2, 2, 1), new_tables(3, 1, 8, 20)
    write(tables, pool, tree, 4, 2, 1, 0, 0, 6, 0)
    names = tables.rows[2, :2].copy()
    for row in (0, 1):
        share(tables, pool, row, names, 2)
        assert write(tables, pool, tree, 4, row, 1, 2, 6, 9, 0) == 3
    assert tables.count[COPIES] == 2
    assert pool.blocks[B.ref_cnt, names].tolist() == [3, 1]
    assert tables.rows[0, 0] == tables.rows[1, 0] == names[0]
    assert len({int(names[1]), int(tables.rows[0, 1]), int(tables.rows[1, 1])}) == 3


def test_parents_are_uniform_and_independent() -> None:
    """Chi-square of 6 parents, and of the pairs that two candidates draw, at the 0.1 % level."""
    draws = np.array([[draw_parent(seed, 3, j, 6) for j in range(2)] for seed in range(6000)])
    single = np.bincount(draws[:, 0], minlength=6)
    pairs = np.bincount(draws[:, 0] * 6 + draws[:, 1], minlength=36)
    assert ((single - 1000) ** 2 / 1000).sum() < 20.5
    assert ((pairs - 6000 / 36) ** 2 / (6000 / 36)).sum() < 66.6


DRAWS = """
from sim.caches.paged import block_tables
from sim._jit import entry
draw = entry(block_tables.draw_parent)
print([int(draw(s, t, j, 6)) for s in (0, 7, 2**32 - 1) for t in (0, 1, 10**6) for j in range(6)])
"""


def test_draws_are_the_same_compiled_and_plain() -> None:
    plain = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONWARNINGS": "error"}
    home = Path(__file__).resolve().parent.parent
    said = [
        subprocess.run(
            [sys.executable, "-c", DRAWS], env=env, cwd=home, capture_output=True, text=True, check=True
        ).stdout
        for env in (plain, dict(os.environ))
    ]
    assert said[0] == said[1]


class Mutation(NamedTuple):
    """A change of the verbs that the machine must notice."""

    old: str
    new: str


REF = "pool.blocks[B.ref_cnt, block]"
MUTATIONS = (
    Mutation(f"            if {REF} > 1:\n", "            if False:\n"),
    Mutation(f"            if {REF} > 1:\n", f"            if {REF} > 2:\n"),
    Mutation(f"                {REF} -= 1\n", ""),
    Mutation("        unref(pool, rows[child, i])\n        rows[child", "        rows[child"),
    Mutation("while children[parent] < 2:", "while children[parent] < 1:"),
    Mutation("            children[parent] -= 1\n", ""),
    Mutation("            if marks[block] == RESERVED:\n                continue\n", ""),
    Mutation(f"            if {REF} == 0:\n                marks[block] = 0\n", ""),
    Mutation("                pool.blocks[B.ref_cnt, moved[number]] += 1\n", "                pass\n"),
    Mutation("            if number > moving:\n", "            if number > 0:\n"),
)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_machine_notices(number: int, tmp_path: Path) -> None:
    """The same machine over changed verbs fails."""
    home = Path(__file__).resolve().parent.parent
    source = (home / "sim" / "caches" / "paged" / "block_tables.py").read_text()
    old, new = MUTATIONS[number]
    assert source.count(old) == 1
    changed = tmp_path / "changed_tables.py"
    changed.write_text(source.replace(old, new))
    test = (home / "tests" / "test_block_tables.py").read_text()
    own = "from sim.caches.paged import block_tables as verbs"
    test = test.replace(own, "import changed_tables as verbs")
    test = test.replace("from sim.caches.paged.block_tables import", "from changed_tables import")
    test = test.replace("list(Phase)", "[Phase.generate]").replace("work(60", "work(400")
    (tmp_path / "test_changed.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "test_changed.py", "-k", "written and not length"]
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": f"{tmp_path}:{home}"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
