"""The state of one engine: its configuration and a few tables (their columns: sim/columns).

A table is a two-dimensional array with a row for each column, so `requests[R.num_tokens, slot]`
reads as column and item. Few large arrays, not one for each column: passing an array costs compiled
code seven words, and seventy of them made compilation ten times slower.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.blocks import BlockPool
from sim.chains import ChainTree
from sim.history import History
from sim.request import Floats, Ints

# what requests[R.status] says
VACANT, WAITING, RUNNING, PREEMPTED, REFUSED = range(5)
NO_SEAT = -1


class EngineConfig(NamedTuple):
    """What vLLM's CacheConfig and SchedulerConfig decide (lengths in tokens, sizes in blocks)."""

    block_size: int
    num_gpu_blocks: int  # the null block included
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    max_loras: int = 0  # 0: no limit
    priority_policy: bool = False  # else fcfs
    reserve_full_isl: bool = True
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    async_scheduling: bool = False
    free_all_last: bool = False  # the older free rule: uncached blocks to the tail as well
    use_eagle: bool = False  # drop the last hit block (the legacy rule of EAGLE speculative decoding)
    token_fates: bool = False  # keep a history of all that was computed, and say why each token was
    residency: bool = False  # note how long cached blocks stay, and whose are evicted
    memory_states: bool = False  # add up what the KV memory holds, see sim/memory_states.py


class Core(NamedTuple):
    """One engine."""

    config: EngineConfig
    pool: BlockPool
    tree: ChainTree
    history: History  # of no room without token_fates
    requests: Ints  # [R, slot]
    times: Floats  # [T, slot]
    segments: Ints  # [0, i]: segment id, [1, i]: its tokens
    seat_chains: Ints  # [seat, i]: chain id of each full block of prompt and output
    seat_blocks: Ints  # [seat, i]: the block table, as vLLM's worker has it
    vacant_seats: Ints  # a stack
    queues: Ints  # [Q, i]
    steps: Ints  # [S, step, i]
    record_ints: Ints  # [i]: an ended request's first columns, then outputs, how it ended, fates
    record_floats: Floats  # [i]: its first times
    watched: Ints  # request ids of watched requests that ended
    itl_histogram: Ints  # inter-token latencies
    samples: Ints  # [i, X]: see sim/timeseries.py
    count: Ints  # type: ignore[assignment]  # [K]; the name shadows tuple.count
    clock: Floats  # [W]
    memory: Floats  # empty; of two dimensions where memory states are added up: to compiled code a constant
    cache: Any  # of the class that says which cache it is, see sim/caches
