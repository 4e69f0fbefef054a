"""Two prompts that share their beginning: what the second finds in the cache, token by token."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import NamedTuple

from sim.scenario import Scenario
from sim.simulation import run

MOST_TOKENS = 32  # of a prompt
LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+-"  # of two prompts
FATES = ("hit", "evicted", "last_token", "partial_block", "isolated", "cold")


class Block(NamedTuple):
    """A block of the second prompt: its place, its tokens as letters, and each token's fate."""

    number: int
    text: str
    fates: tuple[str, ...]
    full: bool

    @property
    def verdict(self) -> str:
        """What becomes of the block as a whole."""
        if "hit" in self.fates:
            return "hit"
        if not self.full:
            return "recomputed: not full, so it has no hash"
        if "last_token" in self.fates:
            return "recomputed: it holds the prompt's last token"
        shared = self.fates.count("partial_block")
        return f"recomputed: only its first {shared} shared" if shared else "recomputed: nothing shared"


class TwoPrompts(NamedTuple):
    """The second of two prompts of `prompt_len` tokens, of which the first `shared` are the first one's."""

    shared: int
    prompt_len: int
    block_size: int
    fates: dict[str, int]  # tokens of the second prompt by fate; they add up to prompt_len

    @property
    def hit(self) -> int:
        """Tokens that the second prompt takes from the cache."""
        return self.fates["hit"]

    @property
    def lost_tail(self) -> int:
        """Tokens that it shares and computes all the same."""
        return self.shared - self.hit

    @property
    def first(self) -> str:
        """The first prompt, a letter a token."""
        return LETTERS[: self.prompt_len]

    @property
    def second(self) -> str:
        """The second prompt: its own tokens are other letters."""
        own = self.prompt_len - self.shared
        return self.first[: self.shared] + LETTERS[::-1][:own][::-1]

    def blocks(self) -> Iterator[Block]:
        """The second prompt's blocks, in their order."""
        by_token = [name for name in FATES for _ in range(self.fates[name])]
        for number, start in enumerate(range(0, self.prompt_len, self.block_size)):
            end = start + self.block_size
            fates = tuple(by_token[start:end])
            yield Block(number, self.second[start:end], fates, len(fates) == self.block_size)


def hit_length(shared: int, prompt_len: int, block_size: int) -> int:
    """Tokens that hit, by vLLM's rule: full blocks of what is shared, and never a prompt's last token.

    vLLM, v1/core/kv_cache_manager.py, KVCacheManager.get_computed_blocks.
    """
    return min(shared, prompt_len - 1) // block_size * block_size


def two_prompts(shared: int, prompt_len: int = 14, block_size: int = 4) -> TwoPrompts:
    """Run the two prompts, one after the other, through the engine; `shared` is cut at prompt_len."""
    shared = min(shared, prompt_len)
    blocks = -(-(prompt_len + 1) // block_size)
    scenario = Scenario.model_validate(
        {
            "name": "two prompts",
            "engine": {
                "block_size": block_size,
                "num_gpu_blocks": 2 * blocks + 1,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 2,
                "max_model_len": 64,
            },
            "workload": {
                "kind": "fourteen_tokens",
                "num_requests": 2,
                "prompt_len": prompt_len,
                "shared_len": shared,
                "output_len": 1,
                "arrival": "constant",
                "request_rate": 1,
            },
        }
    )
    result = run(scenario)
    fates = {name: int(result.records.column(f"fate_{name}")[1]) for name in FATES}
    result.records.discard()
    return TwoPrompts(shared, prompt_len, block_size, fates)
