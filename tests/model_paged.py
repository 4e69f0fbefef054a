"""Groups of sequences over block tables, written down a second time: lists, no columns, no clock.

Blocks are objects that count their holders. What the rules are is in sim/caches/paged; nothing of
it is used here but the hash that draws the parents of beams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Block:
    """A physical block."""

    def __init__(self) -> None:
        self.holders = 1


class Group:
    """A request of `width` sequences."""

    def __init__(self, number: int, prompt: int, outputs: int, width: int, beam: bool, prefix: int) -> None:
        self.number, self.prompt, self.outputs = number, prompt, outputs
        self.width, self.beam, self.prefix = width, beam, prefix
        self.tokens = prompt
        self.computed = 0
        self.room = 0  # tokens that its tables have blocks for
        self.tables: list[list[Block]] = []
        self.host: list[list[Any]] | None = None
        self.preemptions = 0


class Model:
    """The engine with its pool; every group is there from the first step."""

    def __init__(
        self, *, block_size: int, blocks: int, budget: int, max_seqs: int, watermark: int, mode: str | None,
        prefixes: list[int], parents: Callable[[Group], list[int]],
    ) -> None:  # fmt: skip
        self.size, self.budget, self.max_seqs, self.spare = block_size, budget, max_seqs, watermark
        self.mode, self.parents = mode, parents
        self.total = self.free = blocks
        self.prefixes = [(tokens, [self.take() for _ in range(self.blocks(tokens))]) for tokens in prefixes]
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.copies = self.swapped_out = self.swapped_in = self.preemptions = 0
        self.steps = self.computed_tokens = self.used_sum = self.entries_sum = 0
        self.finished: list[int] = []

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self) -> Block:
        assert self.free > 0
        self.free -= 1
        return Block()

    def drop(self, block: Block) -> None:
        block.holders -= 1
        assert block.holders >= 0
        self.free += block.holders == 0

    def is_reserved(self, block: Block) -> bool:
        return any(block is other for _, blocks in self.prefixes for other in blocks)

    def grow(self, table: list[Block], start: int, end: int) -> None:
        """One sequence writes tokens start … end - 1."""
        place = start // self.size
        if place < len(table) and table[place].holders > 1:
            self.drop(table[place])
            table[place] = self.take()
            self.copies += 1
        while len(table) < self.blocks(end):
            table.append(self.take())

    def admit(self, group: Group) -> tuple[bool, int]:
        """Whether it may run, and how many of its tokens it has."""
        if sum(other.width for other in self.running) + group.width > self.max_seqs:
            return False, 0
        if group.host is not None:
            here: dict[int, Block] = {}
            coming = {id(name) for table in group.host for name in table if not isinstance(name, Block)}
            if self.free - len(coming) - group.width < self.spare:
                return False, 0
            for table in group.host:
                for i, name in enumerate(table):
                    if not isinstance(name, Block):
                        if id(name) in here:
                            here[id(name)].holders += 1
                        else:
                            here[id(name)] = self.take()
                        table[i] = here[id(name)]
            self.swapped_in += len(coming)
            group.tables, group.host = group.host, None
            if group.tokens > group.room:
                self.append(group, group.computed, group.tokens)
            return True, group.computed
        hit, shared = 0, []
        if group.prefix >= 0 and self.prefixes:
            tokens, blocks = self.prefixes[group.prefix]
            hit = min(tokens, group.prompt - 1)
            shared = blocks[: self.blocks(hit)]
        again = group.tokens > group.prompt
        needed = self.blocks(group.prompt) - hit // self.size
        if again:
            needed += group.width * (self.blocks(group.tokens) - self.blocks(group.prompt))
            needed += group.width - 1 if group.prompt % self.size else 0
        if self.free - needed < self.spare:
            return False, 0
        before = self.free
        for block in shared:
            block.holders += 1
        first = list(shared)
        self.grow(first, hit, group.prompt)
        group.tables = [first] + [list(first) for _ in range(group.width - 1)]
        for block in first:
            block.holders += group.width - 1
        group.room = group.prompt
        if again:
            self.append(group, group.prompt, group.tokens)
        assert before - self.free == needed
        return True, hit

    def append(self, group: Group, start: int, end: int) -> None:
        for table in group.tables:
            self.grow(table, start, end)
        group.room = end

    def preempt(self, group: Group) -> None:
        self.preemptions += 1
        group.preemptions += 1
        swaps = self.mode == "swap" or (self.mode is None and group.width > 1)
        if swaps:
            names: dict[int, object] = {}
            group.host = [
                [b if self.is_reserved(b) else names.setdefault(id(b), object()) for b in table]
                for table in group.tables
            ]
            self.swapped_out += len(names)
            for table in group.tables:
                for block in table:
                    if not self.is_reserved(block):
                        self.drop(block)
        else:
            self.release(group)
            group.computed = 0
        group.tables = []
        self.waiting.insert(0, group)

    def release(self, group: Group) -> None:
        for table in group.tables:
            for block in table:
                self.drop(block)
        group.tables = []

    def chunk(self, group: Group, computed: int, budget: int) -> tuple[int, int]:
        """Tokens of each sequence in the next step, and the sequences."""
        num = group.tokens - computed
        if computed < group.prompt:
            if group.width > 1:
                num = min(num, group.prompt - computed)
            return min(num, budget), 1
        return min(num, budget // group.width), group.width

    def step(self) -> None:
        budget = self.budget
        work: list[tuple[Group, int, int]] = []
        preempted = False
        i = 0
        while i < len(self.running) and budget > 0:
            group = self.running[i]
            num, width = self.chunk(group, group.computed, budget)
            if num == 0:
                i += 1
                continue
            if group.computed + num > group.room:
                while self.free < group.width:
                    victim = self.running.pop()
                    self.preempt(victim)
                    preempted = True
                    if victim is group:
                        break
                else:
                    self.append(group, group.computed, group.computed + num)
                if group not in self.running:
                    break
            work.append((group, num, width))
            budget -= num * width
            i += 1
        while not preempted and budget > 0 and self.waiting and len(self.running) < self.max_seqs:
            group = self.waiting[0]
            fits, computed = self.admit_if(group, budget)
            if not fits:
                break
            num, width = self.chunk(group, computed, budget)
            group.computed = computed
            self.running.append(self.waiting.pop(0))
            work.append((group, num, width))
            budget -= num * width
        if not work:
            assert preempted
            return
        self.steps += 1
        self.computed_tokens += sum(num * width for _, num, width in work)
        self.used_sum += self.total - self.free
        self.entries_sum += sum(len(table) for group in self.running for table in group.tables)
        self.entries_sum += sum(len(blocks) for _, blocks in self.prefixes)
        for group, num, _ in work:
            group.computed += num
            if group.computed < group.tokens:
                continue
            if group.beam and group.tokens > group.prompt:
                self.branch(group)
            group.tokens += 1
            if group.tokens - group.prompt == group.outputs:
                self.release(group)
                self.running.remove(group)
                self.finished.append(group.number)

    def admit_if(self, group: Group, budget: int) -> tuple[bool, int]:
        if group.host is not None and group.computed >= group.prompt and group.width > budget:
            return False, 0
        return self.admit(group)

    def branch(self, group: Group) -> None:
        """Every candidate has a parent; the first child of each keeps the table."""
        parents = self.parents(group)
        extra = [p for p in range(group.width) for _ in range(parents.count(p) - 1)]
        old = [list(table) for table in group.tables]
        for j in range(group.width):
            if j not in parents:
                new = old[extra.pop(0)]
                for block in new:
                    block.holders += 1
                for block in group.tables[j]:
                    self.drop(block)
                group.tables[j] = list(new)

    def run(self, groups: list[Group]) -> None:
        self.waiting = list(groups)
        while self.waiting or self.running:
            self.step()
