"""What the core's pool and cache manager should do, written again: tokens, lists and an OrderedDict.

From the rules alone (BlockPool, FreeKVCacheBlockQueue, KVCacheManager of vLLM V1), with no tree of
segments, no chain ids and no columns. Content is named the way vLLM's block hashes name it: by the
parent's name, the block's real tokens and the extra key.
"""

from __future__ import annotations

from collections import OrderedDict


def tokens_of(segments: list[tuple[int, int]]) -> list[int]:
    """The tokens of a request's segments (id, length).

    As unlike as two segments must be, and no more: only their first tokens differ (ids above -1000).
    """
    return [-1000 - segment if j == 0 else j for segment, length in segments for j in range(length)]


class Names:
    """A number for each distinct (parent, tokens, extra key), never used again."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, tuple[int, ...], int], int] = {}

    def of(self, tokens: list[int], block_size: int, extra: int) -> list[int]:
        """The names of all full blocks."""
        names, parent = [], 0
        for i in range(0, len(tokens) - block_size + 1, block_size):
            content = (parent, tuple(tokens[i : i + block_size]), extra if i == 0 else 0)
            parent = self.numbers.setdefault(content, len(self.numbers) + 1)
            names.append(parent)
        return names


class ModelRequest:
    """A request as the manager sees it; `names` covers prompt and output, known or not."""

    def __init__(self, tokens: list[int], prompt_len: int, names: list[int]) -> None:
        self.total = len(tokens)
        self.names = names
        self.num_tokens = prompt_len
        self.computed = 0
        self.cached = 0
        self.table: list[int] = []


class ModelManager:
    """Pool and manager in one."""

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool, all_last: bool, watermark: float,
        max_model_len: int, eagle: bool,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.all_last = all_last
        self.watermark = watermark
        self.max_model_len = max_model_len
        self.eagle = eagle
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.name: dict[int, int] = {}  # of cached blocks
        self.blocks: dict[int, list[int]] = {}  # by name, earliest first
        self.taken: list[int] = []
        self.evicted: list[int] = []
        self.had_duplicates = False

    # the pool

    def forget(self, block: int) -> None:
        name = self.name.pop(block)
        self.blocks[name].remove(block)
        if not self.blocks[name]:
            del self.blocks[name]

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.taken.append(block)
        if block in self.name:
            self.evicted.append(block)
            self.forget(block)
        self.refs[block] = 1
        return block

    def touch(self, block: int) -> None:
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        first, last = [], []
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (last if block in self.name or self.all_last else first).append(block)
        self.free = OrderedDict.fromkeys([*first, *self.free, *last])

    def reset(self) -> bool:
        if len(self.free) < self.num_blocks - 1:
            return False
        self.name.clear()
        self.blocks.clear()
        return True

    # the manager

    def lookup(self, request: ModelRequest) -> list[int]:
        """The hit blocks."""
        found: list[int] = []
        if self.caching:
            for name in request.names[: (request.num_tokens - 1) // self.block_size]:
                if name not in self.blocks:
                    break
                found.append(self.blocks[name][0])
        return found[:-1] if self.eagle else found

    def allocate(
        self, request: ModelRequest, num_new: int, hit: list[int], *, lookahead: int = 0,
        full_fit: bool = False, reserved: int = 0, watermark: bool = False,
    ) -> bool:  # fmt: skip
        """Blocks for the hit and `num_new` tokens behind what is computed, or nothing at all."""

        def needed(tokens: int) -> int:
            blocks = -(-tokens // self.block_size) - len(hit) - len(request.table)
            return max(blocks, 0) + sum(self.refs[block] == 0 for block in hit)

        spare = int(self.watermark * self.num_blocks) if watermark else 0
        total = min(request.computed + len(hit) * self.block_size, self.max_model_len)
        whole = min(request.num_tokens, self.max_model_len)
        if full_fit and needed(whole) + spare > len(self.free):
            return False
        slots = min(total + num_new + lookahead, self.max_model_len)
        if needed(slots) + spare > len(self.free) - reserved:
            return False
        for block in hit:
            self.touch(block)
        request.table += hit
        if hit:
            request.cached = len(hit)
        while len(request.table) * self.block_size < slots:
            request.table.append(self.take())
        self.cache(request, min(total + num_new, request.num_tokens))
        return True

    def cache(self, request: ModelRequest, num_tokens: int) -> None:
        """Register the blocks that the first `num_tokens` tokens fill."""
        if not self.caching:
            return
        for i in range(request.cached, num_tokens // self.block_size):
            block, name = request.table[i], request.names[i]
            self.name[block] = name
            self.blocks.setdefault(name, []).append(block)
            self.had_duplicates |= len(self.blocks[name]) > 1
            request.cached = i + 1

    def drop(self, request: ModelRequest) -> None:
        """Free a request's blocks; it starts again from nothing."""
        self.release(request.table)
        request.table = []
        request.computed = request.cached = 0
