"""What a request's tokens are, as segments of equal tokens.

A segment id stands for a sequence of tokens: equal ids mean equal tokens, as in sim.request.Batch.
A chunk of a recording is a segment of its own, named by the chunk's hash, which covers all before
it. What is not known of a request (its last tokens, which fill no chunk) is its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from sim.recording.header import Header

Segments = list[tuple[int, int]]  # segment id, tokens; of a negative id nobody else has any
Content = str | Sequence[Any]  # as it stands in a line
NAMES = 62  # bits of a chunk's id that are kept


class Unreadable(ValueError):
    """Content that is not what the header says; the text says how."""


def segments_of(
    header: Header, row: int, prompt_len: int, num_tokens: int, prompt: Content, answer: Content
) -> Segments:
    """A request's segments, `num_tokens` in all, from the content of its `add` and `o` lines.

    Raises Unreadable where the content is not of the recording's form, or longer than the request.
    """
    form, size = header.content.form, header.content.tokens
    if form == "segments":
        of_prompt = _pairs(prompt)
        if sum(length for _, length in of_prompt) != prompt_len:
            raise Unreadable(f"segs add up to other than the prompt's {prompt_len} tokens")
        known = [*of_prompt, *_pairs(answer)]
    elif form == "token_ids":
        if not len(prompt) == prompt_len:
            raise Unreadable(f"c has {len(prompt)} token ids of a prompt of {prompt_len}")
        known = [(chunk, size) for chunk in _hashed([*prompt, *answer], size)]
    else:
        chunks = _named(prompt)
        if len(chunks) != prompt_len // size:
            raise Unreadable(f"c has {len(chunks)} chunks of a prompt of {prompt_len} tokens")
        known = [(chunk, size) for chunk in (*chunks, *_named(answer))]
    rest = num_tokens - sum(length for _, length in known)
    if rest < 0:
        raise Unreadable(f"content of more than its {num_tokens} tokens")
    return [*known, (-1 - row, rest)] if rest else known


def _pairs(content: Content) -> Segments:
    known = []
    for one in content:
        if not (isinstance(one, (list, tuple)) and len(one) == 2 and all(type(part) is int for part in one)):
            raise Unreadable(f"a segment should be [id, tokens], not {str(one)[:40]}")
        if not (0 <= one[0] < 2**NAMES and 0 < one[1] < 2**40):
            raise Unreadable(f"a segment with an id or length out of range: {one}")
        known.append((one[0], one[1]))
    return known


def _named(content: Content) -> list[int]:
    """The segment ids of chunks whose ids stand one after the other, 16 hexadecimal digits each."""
    try:
        assert isinstance(content, str)
        data = bytes.fromhex(content)
        ids = [number % (1 << NAMES) for (number,) in struct.iter_unpack(">Q", data)]
    except (AssertionError, ValueError, struct.error):
        raise Unreadable(
            f"c should be text of 16 hexadecimal digits a chunk, not {str(content)[:40]!r}"
        ) from None
    return ids


def _hashed(tokens: Sequence[Any], size: int) -> Iterator[int]:
    """Segment ids of the full chunks of token ids, each covering all before it."""
    before = b""
    try:
        for start in range(0, len(tokens) - size + 1, size):
            chunk = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + size])
            before = hashlib.blake2b(before + chunk, digest_size=8).digest()
            yield int.from_bytes(before, "little") % (1 << NAMES)
    except (AttributeError, OverflowError):
        raise Unreadable("token ids should be whole numbers from 0 up") from None
