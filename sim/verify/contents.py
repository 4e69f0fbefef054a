"""Recorded prompts as segments: the tokens, their real block hashes, and interned contents."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from sim.hashing import Lora, block_hashes, none_hash
from sim.request import Batch, make_batch

GOLDEN_VOCABULARY = 99991  # of the recorded manager and scheduler cases
_NONE_HASH = none_hash("sha256", "0")


def crc(items: Iterable[object]) -> int:
    """The recordings' checksum of a list: crc32 of its comma-separated text."""
    return zlib.crc32(",".join(map(str, items)).encode())


def known_tokens(segment: int, length: int, vocabulary: int) -> list[int]:
    """The first tokens of a recorded segment: tok(s, j) = 10 + (s * 1000003 + j * 7919) mod vocabulary."""
    tokens = 10 + (segment * 1000003 + np.arange(length) * 7919) % vocabulary
    return tokens.tolist()


class Contents:
    """Gives equal block hashes equal segment ids, so that the core interns what vLLM hashed."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.by_hash: dict[bytes, int] = {}
        self.tails = 0

    def segments(
        self, tokens: Sequence[int], salt: str | None = None, lora: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Segment ids and lengths of a request's tokens: one for each full block, one for the rest."""
        adapter = None if lora is None else Lora(f"lora{lora}", f"/lora/{lora}")
        hashes = block_hashes(
            tokens, self.block_size, algo="sha256", none_hash=_NONE_HASH, lora=adapter, cache_salt=salt
        )
        ids = [self.by_hash.setdefault(digest, len(self.by_hash)) for digest in hashes]
        lengths = [self.block_size] * len(ids)
        rest = len(tokens) - self.block_size * len(ids)
        if rest:
            self.tails -= 1  # never a full block, so never shared
            ids.append(self.tails)
            lengths.append(rest)
        return ids, lengths

    def batch(
        self,
        tokens: Sequence[int],
        prompt_len: int,
        *,
        arrival_time: float = 0.0,
        max_tokens: int | None = None,
        priority: int = 0,
        salt: str | None = None,
        lora: int | None = None,
    ) -> Batch:
        """A batch of this one request, whose tokens are the prompt and then the outputs."""
        ids, lengths = self.segments(tokens, salt, lora)
        output_len = len(tokens) - prompt_len
        return make_batch(
            [arrival_time],
            [prompt_len],
            [output_len],
            [0, len(ids)],
            ids,
            lengths,
            max_tokens=output_len if max_tokens is None else max_tokens,
            priority=priority,
            lora=0 if lora is None else lora + 1,
        )
