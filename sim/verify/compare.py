"""The first difference of a recorded case, and what the pool looks like to a recording."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sim import blocks
from sim._jit import entry
from sim.blocks import FREE, TAKEN_LOGGED
from sim.columns import B, C
from sim.core import Core
from sim.verify.contents import crc

free_order = entry(blocks.free_order)


class Mismatch(Exception):
    """A recorded decision that the core did not make."""

    def __init__(self, step: object, field: str, expected: object, got: object) -> None:
        super().__init__(f"step {step}, {field}: expected {_short(expected)}, got {_short(got)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:297] + "..."


def compare(step: object, expected: Mapping[str, Any], got: Mapping[str, Any], prefix: str = "") -> None:
    """Raise Mismatch at the first field in which two results differ, missing and surplus ones included."""
    for field in [*expected, *(name for name in got if name not in expected)]:
        wanted, have = expected.get(field, "absent"), got.get(field, "absent")
        if isinstance(wanted, Mapping) and isinstance(have, Mapping):
            compare(step, wanted, have, f"{prefix}{field}.")
        elif wanted != have:
            raise Mismatch(step, prefix + field, wanted, have)


def free_queue(core: Core) -> list[int]:
    """The free queue, head first."""
    order = np.zeros(core.pool.blocks.shape[1], np.int64)
    return order[: free_order(core.pool, order)].tolist()  # type: ignore[no-any-return]


def pool_state(core: Core) -> dict[str, int]:
    """Free count and order, reference counts and distinct keys, as every recorded step has them."""
    refs = core.pool.blocks[B.ref_cnt, 1:].tolist()
    return {
        "nfree": int(core.pool.count[FREE]),
        "fcrc": crc(free_queue(core)),
        "rsum": sum(refs),
        "rcrc": crc(refs),
        "nhash": int(np.count_nonzero(core.tree.chains[C.block])),
    }


def drain_taken(core: Core) -> tuple[list[int], list[int]]:
    """The blocks taken since the last call, and those of them that were evicted, in order."""
    log = core.pool.taken[: core.pool.count[TAKEN_LOGGED]].tolist()
    core.pool.count[TAKEN_LOGGED] = 0
    return [abs(block) for block in log], [-block for block in log if block < 0]
