"""Why each block of a request was or was not a hit, and why a request still waits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sim.blocks import FREE
from sim.caches.apc.blocked_head import REQUEST
from sim.columns import K
from sim.core import Core, EngineConfig
from sim.explain.events import Board, Looked, Verdict
from sim.explain.tokens import NONE_HASH


def judge(
    tokens: Sequence[int],
    hashes: Sequence[bytes],
    num_hits: int,
    board: Board,
    once_cached: Collection[bytes],
    *,
    block_size: int,
    caching: bool,
) -> Iterator[Looked]:
    """Explain a lookup that found `num_hits` blocks when the board was `board`.

    `tokens` are the request's known tokens (its outputs too after a preemption), `hashes` those of
    its full blocks, `once_cached` every hash that has ever been in the table.
    """
    limit = (len(tokens) - 1) // block_size
    for i, start in enumerate(range(0, len(tokens), block_size)):
        own = tuple(tokens[start : start + block_size])
        name = hashes[i] if i < len(hashes) else None
        if not caching:
            yield Looked(own, None, Verdict.CACHING_OFF)
        elif name is None:
            yield Looked(own, name, Verdict.NOT_FULL)
        elif i < num_hits:
            yield Looked(own, name, Verdict.HIT, board.hashes[name][0])
        elif i > num_hits:
            yield Looked(own, name, Verdict.AFTER_MISS)
        elif name in board.hashes:
            assert i >= limit, "a cached block was not found"
            yield Looked(own, name, Verdict.LAST_TOKEN, board.hashes[name][0])
        elif name in once_cached:
            yield Looked(own, name, Verdict.EVICTED)
        else:
            yield _nearest(own, name, hashes[i - 1] if i else NONE_HASH, board)


def _nearest(tokens: tuple[int, ...], name: bytes, parent: bytes, board: Board) -> Looked:
    """The miss of a block, with the block that follows the same parent and agrees with it longest."""
    best = Looked(tokens, name, Verdict.UNKNOWN)
    for block, content in board.contents.items():
        if content.parent != parent:
            continue
        common = 0
        for mine, other in zip(tokens, content.tokens, strict=False):
            if mine != other:
                break
            common += 1
        if common > best.common:
            unfinished = common == len(content.tokens)
            verdict = Verdict.UNFINISHED if unfinished else Verdict.DIFFERS
            best = Looked(tokens, name, verdict, block, common)
    return best


def why_waiting(core: Core, config: EngineConfig, head: int, num_tokens: int, preempted: bool) -> str:
    """Why a step of `num_tokens` did not admit request `head`, the first of the waiting queue."""
    if preempted:
        return "a step that preempts admits nobody"
    if core.count[K.num_running] >= config.max_num_seqs:
        return f"max_num_seqs ({config.max_num_seqs}) requests run already"
    if num_tokens >= config.max_num_batched_tokens:
        return f"the step's budget of {config.max_num_batched_tokens} tokens is used up"
    if core.cache.blocked[REQUEST] == head:
        return f"its blocks do not fit in the {core.pool.count[FREE]} free ones"
    return "its whole prompt exceeds the budget left, or its LoRA adapter has no place"
