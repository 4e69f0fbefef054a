"""The state of one engine: a few tables, and the names of their columns.

A table is a two-dimensional array with a row for each column, so `requests[R.num_tokens, slot]`
reads as column and item. Few large arrays, not one for each column: passing an array costs compiled
code seven words, and seventy of them made compilation ten times slower.
"""

from __future__ import annotations

from typing import NamedTuple

from sim.blocks import BlockPool
from sim.chains import ChainTree
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


class RequestColumns(NamedTuple):
    """Columns of `requests`, by slot; a request keeps its slot from loading to its end."""

    request_id: int = 0  # -1: the slot is vacant
    prompt_len: int = 1
    output_len: int = 2
    max_tokens: int = 3
    priority: int = 4
    namespace: int = 5
    lora: int = 6
    session_id: int = 7
    tenant: int = 8
    prefix_group: int = 9
    rank: int = 10  # the last tie-break of the priority order
    first_segment: int = 11  # its row of segments
    num_segments: int = 12
    status: int = 13
    num_tokens: int = 14  # prompt + outputs so far
    num_computed: int = 15  # tokens whose KV exists or is scheduled (num_computed_tokens)
    num_blocks: int = 16  # length of its block table
    num_cached_blocks: int = 17  # how many of them are registered
    edge: int = 18  # scheduling up to this many tokens needs a block or completes one
    seat: int = 19
    node: int = 20  # where its path ends in the chain tree, held while seated
    in_flight: int = 21  # tokens scheduled and not yet returned
    placeholders: int = 22  # output tokens scheduled and not yet known (async)
    stale: int = 23  # in flight when it was preempted (async)
    num_preemptions: int = 24
    num_cached_tokens: int = 25  # hit tokens at the first admission, -1: not yet admitted
    watched: int = 26  # its end causes something outside the engine
    wait_class: int = 27  # order in the waiting queue: class, then time, then rank


class TimeColumns(NamedTuple):
    """Columns of `times`, by slot, seconds."""

    arrival_time: int = 0
    ready_time: int = 1  # when the front end hands it to the scheduler
    scheduled_time: int = 2
    first_token_time: int = 3
    last_token_time: int = 4
    wait_time: int = 5


class QueueRows(NamedTuple):
    """Rows of `queues`: lists of slots, each as long as a number in `count` says."""

    running: int = 0  # in order of admission
    waiting: int = 1  # a binary heap on (wait_class, wait_time, rank)
    aside: int = 2  # taken out of the waiting queue for the rest of a step
    arrivals: int = 3  # arrived and not yet in the waiting queue
    vacant: int = 4  # a stack of unused slots
    preempted: int = 5  # in the current step, in order
    admitted: int = 6  # in the current step, in order
    due: int = 7  # by place in the running list, see decode_run


class StepRows(NamedTuple):
    """Rows of `steps[row, step]`: what the (up to two) steps in flight run, in scheduled order."""

    slot: int = 0
    request_id: int = 1  # at that time: a slot may have changed hands
    tokens: int = 2
    samples: int = 3  # whether the step yields a token for it


class CountNames(NamedTuple):
    """The engine's numbers, `count`."""

    num_running: int = 0
    num_waiting: int = 1
    num_aside: int = 2
    arrived: int = 3  # end of the arrivals list
    taken_in: int = 4  # its begin
    vacant_slots: int = 5
    vacant_seats: int = 6
    num_preempted: int = 7
    num_admitted: int = 8
    seated_head: int = 9  # the one waiting slot with a seat, -1: none
    front_class: int = 10
    back_class: int = 11
    finished_unflushed: int = 12  # ended requests that no step has reported
    admitting_budget: int = 13  # token budget of an interrupted admission, -1: none
    oldest_step: int = 14
    steps_in_flight: int = 15
    step_size: int = 16  # and 17: requests in each row of steps
    step_watched: int = 18  # and 19: whether a watched request may end in it
    num_records: int = 20
    num_watched: int = 21  # watched requests that ended
    blocked_request: int = 22  # the head that was not admitted, and what its lookup found
    blocked_tokens: int = 23
    blocked_hit: int = 24
    blocked_pinned: int = 25
    blocked_changes: int = 26
    num_steps: int = 27
    num_scheduled_tokens: int = 28
    num_scheduled_seqs: int = 29
    num_running_sum: int = 30
    max_num_running: int = 31
    max_concurrent: int = 32
    queries: int = 33
    hits: int = 34
    preempted_queries: int = 35
    preempted_hits: int = 36
    num_admissions: int = 37
    num_readmissions: int = 38
    num_preemptions: int = 39
    num_lookups: int = 40
    max_blocks_used: int = 41
    itl_count: int = 42
    shape_outputs: int = 43  # of the last scheduled step: sampled tokens
    shape_decodes: int = 44  # sequences with one token
    shape_decode_kv: int = 45  # their KV lengths
    shape_prefills: int = 46  # the other sequences, with q tokens over c computed ones
    shape_tokens: int = 47  # sum of q
    shape_squares: int = 48  # sum of q * q
    shape_cross: int = 49  # sum of q * c
    shape_context: int = 50  # sum of c
    any_watched: int = 51  # whether any request is watched


class ClockNames(NamedTuple):
    """The engine's times and sums of times, `clock`, seconds."""

    now: int = 0
    step_end: int = 1  # and 2: of each row of steps
    front_end_free: int = 3
    last_update: int = 4
    busy: int = 5
    usage: int = 6  # used blocks x time
    itl_sum: int = 7
    itl_sum_squares: int = 8
    wake: int = 9  # when the engine wants to go on


R = RequestColumns()
T = TimeColumns()
Q = QueueRows()
S = StepRows()
K = CountNames()
W = ClockNames()

RECORD_INTS = 9
RECORD_FLOATS = 4


class Core(NamedTuple):
    """One engine."""

    config: EngineConfig
    pool: BlockPool
    tree: ChainTree
    requests: Ints  # [R, slot]
    times: Floats  # [T, slot]
    segments: Ints  # [0, i]: segment id, [1, i]: its tokens
    seat_chains: Ints  # [seat, i]: chain id of each full block of prompt and output
    seat_blocks: Ints  # [seat, i]: the block table, as vLLM's worker has it
    vacant_seats: Ints  # a stack
    queues: Ints  # [Q, i]
    steps: Ints  # [S, step, i]
    record_ints: Ints  # [i]: ended requests, see update.record
    record_floats: Floats
    watched: Ints  # request ids of watched requests that ended
    itl_histogram: Ints  # inter-token latencies
    count: Ints  # type: ignore[assignment]  # [K]; the name shadows tuple.count
    clock: Floats  # [W]
