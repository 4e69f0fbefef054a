"""The first difference of a recorded case, and what the pool looks like to a recording."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from sim import blocks
from sim._jit import entry
from sim.blocks import FREE, TAKEN_LOGGED
from sim.columns import B, C
from sim.core import Core
from sim.request import Ints
from sim.verify.contents import crc

free_order = entry(blocks.free_order)

ABSENT = "nothing"


class Mismatch(Exception):
    """A recorded decision that the core did not make."""

    def __init__(self, step: object, field: str, recorded: object, replayed: object) -> None:
        super().__init__(step, field, recorded, replayed)
        self.step, self.field, self.recorded, self.replayed = step, field, recorded, replayed
        self.note = ""  # what may explain it

    def __str__(self) -> str:
        found = f"step {self.step}, {self.field}: "
        found += f"recorded {_short(self.recorded)}, replayed {_short(self.replayed)}"
        return f"{found} ({self.note})" if self.note else found


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else text[:297] + "..."


def compare(step: object, recorded: Mapping[str, Any], replayed: Mapping[str, Any], prefix: str = "") -> None:
    """Raise Mismatch at the first field in which two results differ, missing and surplus ones included.

    Of lists it names the first entry that differs.
    """
    for field in [*recorded, *(name for name in replayed if name not in recorded)]:
        wanted, have = recorded.get(field, ABSENT), replayed.get(field, ABSENT)
        if isinstance(wanted, Mapping) and isinstance(have, Mapping):
            compare(step, wanted, have, f"{prefix}{field}.")
        elif wanted != have:
            place = ""
            if isinstance(wanted, list) and isinstance(have, list):
                pairs = itertools.zip_longest(wanted, have, fillvalue=ABSENT)
                index, (wanted, have) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
                place = f"[{index}]"
            raise Mismatch(step, prefix + field + place, wanted, have)


def free_queue(core: Core) -> list[int]:
    """The free queue, head first."""
    return _free_queue(core).tolist()  # type: ignore[no-any-return]


def _free_queue(core: Core) -> Ints:
    order = np.zeros(core.pool.blocks.shape[1], np.int64)
    return order[: free_order(core.pool, order)]


def pool_state(core: Core) -> dict[str, int]:
    """Free count and order, reference counts and distinct keys, as every recorded step has them."""
    refs = core.pool.blocks[B.ref_cnt, 1:]
    return {
        "nfree": int(core.pool.count[FREE]),
        "fcrc": _crc_of(_free_queue(core).tobytes()),
        "rsum": int(refs.sum()),
        "rcrc": _crc_of(refs.tobytes()),
        "nhash": int(np.count_nonzero(core.tree.chains[C.block])),
    }


@functools.lru_cache(maxsize=4)
def _crc_of(data: bytes) -> int:
    """The checksum of an array's numbers: most steps change neither the free queue nor the counts."""
    numbers = np.frombuffer(data, np.int64)
    text = _decimals(int(numbers.max(initial=0)).bit_length())
    return crc(map(text.__getitem__, numbers.tolist()))


@functools.cache
def _decimals(bits: int) -> list[str]:
    """The numbers below 2**bits as text, which is half of the time a checksum takes."""
    return [str(number) for number in range(1 << bits)]


def drain_taken(core: Core) -> tuple[list[int], list[int]]:
    """The blocks taken since the last call, and those of them that were evicted, in order."""
    log = core.pool.taken[: core.pool.count[TAKEN_LOGGED]].tolist()
    core.pool.count[TAKEN_LOGGED] = 0
    return [abs(block) for block in log], [-block for block in log if block < 0]
