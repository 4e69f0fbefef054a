"""Tokens for requests that have none: numbers to hash, letters to draw.

A workload says only which segments requests share. Here every token of every segment gets a
number, so that blocks have real hashes, and a sign that fits on a whiteboard.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from sim.chains import ROOT, ChainTree
from sim.columns import C, N
from sim.explain.events import Content
from sim.hashing import block_hashes, none_hash
from sim.request import Batch

NONE_HASH = none_hash("sha256")
EMPTY = "_"  # a place in a block that holds no token yet


class Tokens:
    """The tokens of a few requests."""

    def __init__(self, batches: Iterable[Batch], block_size: int) -> None:
        self.block_size = block_size
        lengths: dict[int, int] = {}
        for batch in batches:
            for segment, length in zip(batch.segment_id.tolist(), batch.segment_len.tolist(), strict=True):
                lengths[segment] = max(length, lengths.get(segment, 0))
        self._first: dict[int, int] = {}  # by segment
        self._signs: list[tuple[str, int]] = []  # by token: its segment's letter, and its place there
        for i, (segment, length) in enumerate(lengths.items()):
            self._first[segment] = len(self._signs)
            self._signs += [(_letters(i), place) for place in range(length)]
        self._contents: dict[tuple[object, ...], Content] = {}

    @property
    def one_letter_each(self) -> bool:
        """Whether there are few enough tokens to draw each as a letter."""
        return len(self._signs) <= len(string.ascii_letters)

    def legend(self) -> str:
        """How `draw` draws."""
        if self.one_letter_each:
            return "Tokens are drawn as letters; as token ids, a is 0, b is 1, and so on."
        return (
            "A0-3 are the first four tokens of text A, which requests share where they have the same "
            "text (_x4: four places without a token); token ids count from 0 through all texts."
        )

    def of_pieces(self, pieces: Iterable[tuple[int, int, int]]) -> tuple[int, ...]:
        """The tokens of pieces of segments: (segment, tokens skipped, length)."""
        return tuple(
            self._first[segment] + skip + i for segment, skip, length in pieces for i in range(length)
        )

    def hashes(self, tokens: Sequence[int], namespace: int) -> tuple[bytes, ...]:
        """The sha256 hashes of the full blocks; a namespace other than 0 counts as a cache_salt."""
        salt = str(namespace) if namespace else None
        return tuple(
            block_hashes(tokens, self.block_size, algo="sha256", none_hash=NONE_HASH, cache_salt=salt)
        )

    def of_chain(self, tree: ChainTree, chain: int) -> Content:
        """What a chain id stands for, read off the tree."""
        node = int(tree.chains[C.node, chain])
        index = (
            int(tree.nodes[N.depth, node]) // self.block_size + chain - int(tree.nodes[N.first_chain, node])
        )
        end = (index + 1) * self.block_size
        pieces: list[tuple[int, int, int]] = []
        namespace = 0
        while node != ROOT:
            parent, _, segment, skip, _, depth = tree.nodes[: N.depth + 1, node].tolist()
            if skip < 0:  # the empty node below the root
                namespace = segment
            else:
                pieces.insert(0, (segment, skip, end - depth))
            end, node = depth, parent
        key = (namespace, *pieces)
        if key not in self._contents:
            tokens = self.of_pieces(pieces)
            hashes = (NONE_HASH, *self.hashes(tokens, namespace))
            self._contents[key] = Content(tokens[-self.block_size :], hashes[-2], hashes[-1])
        return self._contents[key]

    def draw(self, tokens: Sequence[int], width: int = 0) -> str:
        """Tokens as text: `abcd`, or with many tokens `A0-3 B0-1`; filled up to `width` tokens."""
        empty = max(width - len(tokens), 0)
        if self.one_letter_each:
            return "".join(string.ascii_letters[token] for token in tokens) + EMPTY * empty
        runs: list[tuple[str, int, int]] = []
        for token in tokens:
            letter, place = self._signs[token]
            if runs and runs[-1][0] == letter and runs[-1][2] == place - 1:
                runs[-1] = (letter, runs[-1][1], place)
            else:
                runs.append((letter, place, place))
        text = [f"{letter}{a}" if a == b else f"{letter}{a}-{b}" for letter, a, b in runs]
        return " ".join([*text, f"{EMPTY}x{empty}"] if empty else text)


def _letters(number: int) -> str:
    """A, B, … Z, AA, AB, …"""
    text = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        text = string.ascii_uppercase[letter] + text
    return text
