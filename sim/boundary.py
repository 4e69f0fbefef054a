"""The one busy way from Python into compiled code.

Handing over a named tuple of arrays costs microseconds a call, the same arrays one by one a tenth
of that, and a run makes a call for nearly every arrival. So `advance` goes through flat arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sim._jit import entry, jit_disabled, verb
from sim.advance import advance
from sim.blocks import BlockPool
from sim.chains import ChainTree
from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.request import Floats, Ints

_TABLES = 3  # StepCost begins with its tables


def flatten(core: Core, cost: StepCost) -> tuple[Any, ...]:
    """The arguments of `advance_flat` after the times; the arrays are shared, not copied."""
    if jit_disabled():
        return core, cost  # nothing to save, and the caller is plain Python
    config = np.array(core.config, np.float64)
    coefficients = np.array(cost[_TABLES:], np.float64)
    return config, coefficients, *cost[:_TABLES], *core.pool, *core.tree, *core[3:]


@verb
def advance_flat(
    now: float, horizon: float, config: Floats, c: Floats,
    token_us: Floats, decode_us: Floats, output_us: Floats,
    blocks: Ints, pool_count: Ints, taken: Ints,
    chains: Ints, nodes: Ints, buckets: Ints, free_runs: Ints, tree_count: Ints,
    requests: Ints, times: Floats, segments: Ints, seat_chains: Ints, seat_blocks: Ints, vacant_seats: Ints,
    queues: Ints, steps: Ints, record_ints: Ints, record_floats: Floats, watched: Ints, itl_histogram: Ints,
    count: Ints, clock: Floats,
) -> int:  # fmt: skip
    """`advance` with the arguments that `flatten` made."""
    core = Core(
        EngineConfig(
            int(config[0]), int(config[1]), int(config[2]), int(config[3]), int(config[4]), int(config[5]),
            config[6], int(config[7]), config[8] != 0, config[9] != 0, config[10] != 0, config[11] != 0,
            config[12] != 0, config[13] != 0, config[14] != 0,
        ),
        BlockPool(blocks, pool_count, taken),
        ChainTree(chains, nodes, buckets, free_runs, tree_count),
        requests, times, segments, seat_chains, seat_blocks, vacant_seats, queues, steps,
        record_ints, record_floats, watched, itl_histogram, count, clock,
    )  # fmt: skip
    cost = StepCost(
        token_us, decode_us, output_us,
        c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11], c[12],
    )  # fmt: skip
    return advance(core, cost, now, horizon)


def _advance_plain(now: float, horizon: float, core: Core, cost: StepCost) -> int:
    return advance(core, cost, now, horizon)


advance_from_python = _advance_plain if jit_disabled() else entry(advance_flat)
