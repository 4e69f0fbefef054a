"""The arrays behind one engine: made, filled with requests, and grown between steps."""

from __future__ import annotations

import numpy as np

from sim.blocks import new_pool
from sim.chains import ChainTree, new_tree
from sim.columns import K, Q, R, S, T, W, X
from sim.core import NO_SEAT, REFUSED, VACANT, WAITING, Core, EngineConfig
from sim.fates import MISSES
from sim.histogram import new_histogram
from sim.history import NODES_PER_SEGMENT, enlarged, new_history
from sim.request import Batch, Ints
from sim.timeseries import SAMPLES, start_sampling

Owner = tuple[int, int]  # tenant and prefix group, -1: none
NOBODY: Owner = (-1, -1)
HISTORY_NODES = 1 << 16  # to begin with: a power of two; untouched pages cost nothing


def grown(table: Ints, width: int) -> Ints:
    """A copy of a table with room for `width` items, the new ones 0."""
    wider = np.zeros((len(table), width), table.dtype)
    wider[:, : table.shape[1]] = table
    return wider


class State:
    """Owner of an engine's arrays; `core` is replaced when one of them grows."""

    core: Core

    def __init__(
        self, config: EngineConfig, *, num_records: int = 4096, taken_log: int = 0, table_len: int = 0
    ) -> None:
        """Make an empty engine.

        It collects `num_records` ended requests and, for replays, `taken_log` entries of
        BlockPool.taken; `table_len` lengthens the seats where requests may outgrow the pool.
        """
        assert config.block_size > 0 and config.num_gpu_blocks > 1, config
        pool_size = min(config.num_gpu_blocks, 1 << 20).bit_length()
        seats = config.max_num_seqs + 1
        # a request with a longer table is refused before it is seated; untouched pages cost nothing
        row = max(min(config.max_model_len // config.block_size, config.num_gpu_blocks), table_len) + 2
        count = np.zeros(K.WIDTH, np.int64)
        count[K.vacant_seats] = seats
        count[K.seated_head] = count[K.blocked_request] = count[K.admitting_budget] = -1
        count[K.history_nodes] = 1  # the root
        clock = np.zeros(W.WIDTH)
        clock[W.next_sample] = np.inf
        num_fates = len(MISSES) if config.token_fates else 0
        self.next_id = 0
        self.segments_used = 0
        self.sampling = False
        self.owners: dict[Owner, int] = {NOBODY: 0}
        self.core = Core(
            config=config,
            pool=new_pool(config.num_gpu_blocks, taken_log, config.residency),
            tree=new_tree(1024 << pool_size >> 10, 1024 << pool_size >> 12, 1 << max(10, pool_size)),
            history=new_history(HISTORY_NODES if config.token_fates else 0),
            requests=np.zeros((R.WIDTH, 0), np.int64),
            times=np.zeros((T.WIDTH, 0)),
            segments=np.zeros((2, 4096), np.int64),
            seat_chains=np.zeros((seats, row), np.int64),
            seat_blocks=np.zeros((seats, row), np.int64),
            vacant_seats=np.arange(seats)[::-1].copy(),
            queues=np.zeros((Q.WIDTH, 0), np.int64),
            steps=np.zeros((S.WIDTH, 2, seats), np.int64),
            record_ints=np.zeros((num_records, R.RECORDED + 2 + num_fates), np.int64),
            record_floats=np.zeros((num_records, T.RECORDED)),
            watched=np.zeros(num_records, np.int64),
            itl_histogram=new_histogram(),
            samples=np.zeros((SAMPLES, X.WIDTH), np.int64),
            count=count,
            clock=clock,
        )
        self.grow_requests(max(1024, seats))

    def grow(self) -> None:
        """Make room after NO_ROOM: in the history if the next request needs it there, else in the tree."""
        core = self.core
        head = core.queues[Q.waiting, 0]
        wanted = int(core.count[K.history_nodes] + NODES_PER_SEGMENT * core.requests[R.num_segments, head])
        if core.config.token_fates and wanted > len(core.history.nodes):
            larger = enlarged(core.history, int(core.count[K.history_nodes]), wanted)
            self.core = core._replace(history=larger)
        else:
            self.grow_tree()

    def grow_tree(self) -> None:
        """Double the room for chain ids and nodes."""
        tree = self.core.tree
        self.core = self.core._replace(
            tree=ChainTree(
                grown(tree.chains, 2 * tree.chains.shape[1]),
                grown(tree.nodes, 2 * tree.nodes.shape[1]),
                tree.buckets,
                tree.free_runs,
                tree.count,
            )
        )

    def grow_requests(self, wanted: int) -> None:
        """Make room for at least `wanted` more requests."""
        core = self.core
        have = core.requests.shape[1]
        width = have + max(wanted, have)
        self.core = core = core._replace(
            requests=grown(core.requests, width),
            times=grown(core.times, width),  # type: ignore[arg-type]
            queues=grown(core.queues, width),
        )
        height = int(core.count[K.vacant_slots])
        core.queues[Q.vacant, height : height + width - have] = np.arange(width - 1, have - 1, -1)
        core.count[K.vacant_slots] += width - have
        core.requests[R.request_id, have:] = -1

    def load(self, batch: Batch) -> Ints:
        """Copy a batch into vacant slots, in order; returns the slots. The requests have not arrived yet.

        A request that can never run is REFUSED here: its prompt leaves no room for a token within
        max_model_len, or it needs more KV than the pool holds.
        """
        n = len(batch.prompt_len)
        if self.core.count[K.vacant_slots] < n:
            self.grow_requests(n)
        first_segment = self.store_segments(batch)
        core = self.core
        config, requests = core.config, core.requests
        height = int(core.count[K.vacant_slots])
        slots: Ints = core.queues[Q.vacant, height - n : height][::-1].copy()
        core.count[K.vacant_slots] -= n
        requests[:, slots] = 0
        core.times[:, slots] = np.nan
        for name in ("prompt_len", "output_len", "max_tokens", "priority", "namespace", "lora",
                     "session_id", "tenant", "prefix_group"):  # fmt: skip
            requests[getattr(R, name), slots] = getattr(batch, name)
        core.times[T.arrival_time, slots] = batch.arrival_time
        requests[R.request_id, slots] = np.arange(self.next_id, self.next_id + n)
        requests[R.rank, slots] = requests[R.request_id, slots]
        self.next_id += n
        requests[R.num_tokens, slots] = batch.prompt_len
        requests[R.first_segment, slots] = first_segment
        requests[R.num_segments, slots] = np.diff(batch.segment_start)
        requests[R.seat, slots] = NO_SEAT
        requests[R.num_cached_tokens, slots] = -1
        requests[R.edge, slots] = 1
        if config.residency:
            requests[R.owner, slots] = self.number_owners(batch)
        longest = np.minimum(batch.prompt_len + batch.output_len, config.max_model_len)
        blocks_needed = (longest - 1 + config.block_size - 1) // config.block_size
        refused = (batch.prompt_len >= config.max_model_len) | (blocks_needed > config.num_gpu_blocks - 1)
        requests[R.status, slots] = np.where(refused, REFUSED, WAITING)
        return slots

    def number_owners(self, batch: Batch) -> Ints:
        """The number of each request's owner; makes room to count what new ones lose."""
        if not ((batch.tenant >= 0) | (batch.prefix_group >= 0)).any():
            return np.zeros(len(batch.tenant), np.int64)
        pairs, place = np.unique([batch.tenant, batch.prefix_group], axis=1, return_inverse=True)
        numbers = [self.owners.setdefault((t, g), len(self.owners)) for t, g in pairs.T.tolist()]
        pool = self.core.pool
        if len(self.owners) > len(pool.evicted_from):
            more = np.zeros(2 * len(self.owners), np.int64)
            more[: len(pool.evicted_from)] = pool.evicted_from
            self.core = self.core._replace(pool=pool._replace(evicted_from=more))
        return np.array(numbers, np.int64)[place.ravel()]

    def vacate(self, slot: int) -> None:
        """Give back the slot of a loaded request that never arrives at the scheduler."""
        core = self.core
        core.requests[R.request_id, slot] = -1
        core.requests[R.status, slot] = VACANT
        core.queues[Q.vacant, core.count[K.vacant_slots]] = slot
        core.count[K.vacant_slots] += 1

    def store_segments(self, batch: Batch) -> Ints:
        """Append a batch's segments, dropping those of ended requests when room lacks; returns row starts."""
        k = len(batch.segment_id)
        if self.segments_used + k > self.core.segments.shape[1]:
            self.compact_segments(k)
        start = self.segments_used
        self.core.segments[0, start : start + k] = batch.segment_id
        self.core.segments[1, start : start + k] = batch.segment_len
        self.segments_used += k
        return batch.segment_start[:-1] + start

    def compact_segments(self, wanted: int) -> None:
        """Move the live requests' segments together, with room for `wanted` more and as much again."""
        requests, segments = self.core.requests, self.core.segments
        live = np.flatnonzero(requests[R.status] != VACANT)
        lengths = requests[R.num_segments, live]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(live) else 0
        shift = np.repeat(requests[R.first_segment, live] - (ends - lengths), lengths)
        kept = segments[:, np.arange(total) + shift]
        self.core = self.core._replace(segments=grown(kept, max(segments.shape[1], 2 * (total + wanted))))
        requests[R.first_segment, live] = ends - lengths
        self.segments_used = total

    def arrive(self, slot: int) -> None:
        """Put a loaded request, whose arrival_time is set, into the front end's queue."""
        count, queues = self.core.count, self.core.queues
        if not self.sampling:
            start_sampling(self.core, float(self.core.times[T.arrival_time, slot]))
            self.sampling = True
        end = count[K.arrived]
        if end == queues.shape[1]:
            begin = count[K.taken_in]
            queues[Q.arrivals, : end - begin] = queues[Q.arrivals, begin:end].copy()
            count[K.taken_in] = 0
            end -= begin
        queues[Q.arrivals, end] = slot
        count[K.arrived] = end + 1
