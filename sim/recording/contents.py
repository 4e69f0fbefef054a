"""What a request's tokens are, as segments of equal tokens.

A segment id stands for a sequence of tokens: equal ids mean equal tokens, as in sim.request.Batch.
A chunk of a recording is a segment of its own, named by the chunk's hash, which covers all before
it. What is not known of a request (its last tokens, which fill no chunk) is its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from sim.recording.header import Header

Segments = list[tuple[int, int]]  # segment id, tokens; of a negative id nobody else has any
NAMES = 62  # bits of a chunk's id that are kept


class Unreadable(ValueError):
    """Content that is not what the header says; the text says how."""


def segments_of(
    header: Header, row: int, prompt_len: int, num_tokens: int, prompt: Sequence[Any], answer: Sequence[Any]
) -> Segments:
    """A request's segments, `num_tokens` in all, from the content of its `add` and `o` lines.

    Raises Unreadable where the content is not of the recording's form, or longer than the request.
    """
    form, size = header.content.form, header.content.tokens
    if form == "segments":
        known = _pairs([*prompt, *answer])
        if sum(length for _, length in known[: len(prompt)]) != prompt_len:
            raise Unreadable(f"segs add up to other than the prompt's {prompt_len} tokens")
    else:
        if form == "token_ids":
            if len(prompt) != prompt_len:
                raise Unreadable(f"c has {len(prompt)} token ids of a prompt of {prompt_len}")
            ids = list(_chunk_ids([*prompt, *answer], size))
        else:
            if len(prompt) != prompt_len // size:
                raise Unreadable(f"c has {len(prompt)} chunks of a prompt of {prompt_len} tokens")
            ids = [_number(name) for name in (*prompt, *answer)]
        known = [(number, size) for number in ids]
    rest = num_tokens - sum(length for _, length in known)
    if rest < 0:
        raise Unreadable(f"content of more than its {num_tokens} tokens")
    return [*known, (-1 - row, rest)] if rest else known


def _pairs(content: Sequence[Any]) -> Segments:
    known = []
    for one in content:
        if not (isinstance(one, (list, tuple)) and len(one) == 2 and all(type(part) is int for part in one)):
            raise Unreadable(f"a segment should be [id, tokens], not {str(one)[:40]}")
        if not (0 <= one[0] < 2**NAMES and 0 < one[1] < 2**40):
            raise Unreadable(f"a segment with an id or length out of range: {one}")
        known.append((one[0], one[1]))
    return known


def _number(name: Any) -> int:
    """A chunk's id as a segment id."""
    if not isinstance(name, str):
        raise Unreadable(f"a chunk's id should be text, not {str(name)[:40]}")
    try:
        return int(name, 16) % (1 << NAMES)
    except ValueError:
        raise Unreadable(f"a chunk's id should be hexadecimal, not {name[:40]!r}") from None


def _chunk_ids(tokens: Sequence[Any], size: int) -> Iterator[int]:
    """Ids of the full chunks of token ids, each covering all before it."""
    before = b""
    try:
        for start in range(0, len(tokens) - size + 1, size):
            chunk = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + size])
            before = hashlib.blake2b(before + chunk, digest_size=8).digest()
            yield int.from_bytes(before, "little") % 2**NAMES
    except (AttributeError, OverflowError):
        raise Unreadable("token ids should be whole numbers from 0 up") from None
