"""What every cache is put through, whatever it does: a cache is tested by being in KINDS.

A variant is a kind with one value of each option that is a Literal: every one is tried.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from sim.blocks import FREE
from sim.cache_kinds import KINDS, CacheKind
from sim.columns import B, K, Q, R
from sim.core import RUNNING, Core


def variants() -> list[CacheKind]:
    """Every kind with every choice of its options."""
    return [kind for cls in KINDS for kind in _of(cls)]


def name_of(kind: CacheKind) -> str:
    """How a test's id calls a variant."""
    told = kind.model_dump()
    if isinstance(told, str):
        return told
    return "-".join(str(value) for value in told.values() if value is not None)


def _of(cls: type[CacheKind]) -> Iterator[CacheKind]:
    choices = {}
    hints = typing.get_type_hints(cls)
    for name in cls.model_fields:
        values = list(_choices(hints[name]))
        if name != "kind" and values:
            choices[name] = values
    for values in itertools.product(*choices.values()):
        yield cls.model_validate({"kind": cls().kind, **dict(zip(choices, values, strict=True))})


def _choices(annotation: Any) -> Iterator[Any]:
    if annotation is type(None):
        yield None
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _choices(part)


def audit(core: Core) -> None:
    """What holds between any two steps of any cache."""
    count, requests = core.count, core.requests
    usable = core.config.num_gpu_blocks - 1
    free = int(core.pool.count[FREE])
    assert 0 <= free <= usable
    running = core.queues[Q.running, : count[K.num_running]]
    waiting = core.queues[Q.waiting, : count[K.num_waiting]]
    assert len(set(running.tolist()) | set(waiting.tolist())) == len(running) + len(waiting)
    assert (requests[R.status, running] == RUNNING).all()
    assert (requests[R.status, waiting] != RUNNING).all()
    seats = requests[R.seat, running]
    assert (seats >= 0).all() and len(set(seats.tolist())) == len(seats)
    assert (requests[R.num_computed, running] >= 0).all()
    blocks = core.pool.blocks
    assert (blocks[B.ref_cnt] >= 0).all()
    assert int((blocks[B.ref_cnt, 1:] > 0).sum()) <= usable - free
    queued = _free_queue(blocks)
    assert not blocks[B.ref_cnt, queued].any(), "a block in the free queue has no owner"
    own = getattr(_module(core), "audit", None)
    if own is not None:
        own(core)


def _free_queue(blocks: Any) -> list[int]:
    queued = []
    block = int(blocks[B.next_free, 0])
    while block != 0:
        queued.append(block)
        assert len(queued) <= blocks.shape[1]
        block = int(blocks[B.next_free, block])
    return queued


def _module(core: Core) -> Any:
    import sys

    return sys.modules[type(core.cache).__module__]


def at_every_step(_: Any) -> float:
    """A horizon that stops the engine after every step."""
    return -math.inf


MACHINES = {  # of each cache: the test file whose state machine, or random lives, it is held against
    "apc": "test_pool_machine.py",
    "radix": "test_radix_tree.py",
    "paged": "test_block_tables.py",
    "contiguous": "test_buddy.py",
}
