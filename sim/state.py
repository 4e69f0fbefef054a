"""The arrays behind one engine: made, grown between steps, and told of arrivals."""

from __future__ import annotations

import numpy as np

from sim.arena import Arena, grown
from sim.blocks import new_pool
from sim.chains import ChainTree, new_tree
from sim.columns import K, Q, R, S, T, W, X
from sim.core import Core, EngineConfig
from sim.fates import MISSES
from sim.histogram import new_histogram
from sim.history import NODES_PER_SEGMENT, enlarged, new_history
from sim.timeseries import SAMPLES, start_sampling

HISTORY_NODES = 1 << 16  # to begin with: a power of two; untouched pages cost nothing


class State:
    """Owner of an engine's arrays; `core` is replaced when one of them grows."""

    core: Core

    def __init__(
        self,
        config: EngineConfig,
        arena: Arena | None = None,
        *,
        num_records: int = 4096,
        taken_log: int = 0,
        table_len: int = 0,
        kv_events: bool = False,
    ) -> None:
        """Make an empty engine for requests of `arena`, its own if there is none.

        It collects `num_records` ended requests and, for replays, `taken_log` entries of
        BlockPool.taken; `table_len` lengthens the seats where requests may outgrow the pool. With
        `kv_events` it tells what is cached and evicted, see sim/kv_index.py.
        """
        assert config.block_size > 0 and config.num_gpu_blocks > 1, config
        pool_size = min(config.num_gpu_blocks, 1 << 20).bit_length()
        seats = config.max_num_seqs + 1
        # a request with a longer table is refused before it is seated; untouched pages cost nothing
        row = max(min(config.max_model_len // config.block_size, config.num_gpu_blocks), table_len) + 2
        count = np.zeros(K.WIDTH, np.int64)
        count[K.vacant_seats] = seats
        count[K.seated_head] = count[K.admitting_budget] = -1
        count[K.history_nodes] = 1  # the root
        clock = np.zeros(W.WIDTH)
        clock[W.next_sample] = np.inf
        num_fates = len(MISSES) if config.token_fates else 0
        self.sampling = False
        self.num_arrived = 0  # requests so far, where a sample is one
        self.arena = arena or Arena(config)
        self.core = Core(
            config=config,
            pool=new_pool(config.num_gpu_blocks, taken_log, config.residency, kv_events),
            tree=new_tree(1024 << pool_size >> 10, 1024 << pool_size >> 12, 1 << max(10, pool_size)),
            history=new_history(HISTORY_NODES if config.token_fates else 0),
            requests=self.arena.requests,
            times=self.arena.times,
            segments=self.arena.segments,
            seat_chains=np.zeros((seats, row), np.int64),
            seat_blocks=np.zeros((seats, row), np.int64),
            vacant_seats=np.arange(seats)[::-1].copy(),
            queues=np.zeros((Q.WIDTH, self.arena.requests.shape[1]), np.int64),
            steps=np.zeros((S.WIDTH, 2, seats), np.int64),
            record_ints=np.zeros((num_records, R.RECORDED + 2 + num_fates), np.int64),
            record_floats=np.zeros((num_records, T.RECORDED)),
            watched=np.zeros(num_records, np.int64),
            itl_histogram=new_histogram(),
            samples=np.zeros((SAMPLES, X.WIDTH), np.int64),
            count=count,
            clock=clock,
            memory=np.zeros((0,) * (1 + config.memory_states)),
            cache=self.arena.kind.module.new_cache(self.arena.kind, config),
        )
        begin = getattr(self.arena.kind.module, "begin", None)
        if begin is not None:
            begin(self.core.cache, self.core.pool, self.core.tree)
        self.arena.states.append(self)

    def share(self) -> None:
        """Take over the arena's arrays, of which one has grown."""
        arena = self.arena
        self.core = self.core._replace(
            requests=arena.requests,
            times=arena.times,
            segments=arena.segments,
            queues=grown(self.core.queues, arena.requests.shape[1]),
        )

    def count_owners(self, num_owners: int) -> None:
        """Make room to count what so many owners lose."""
        pool = self.core.pool
        have = len(pool.evicted_from)
        if num_owners > have:
            larger = np.zeros(2 * num_owners, np.int64)
            larger[:have] = pool.evicted_from
            self.core = self.core._replace(pool=pool._replace(evicted_from=larger))

    def widen(self, width: int) -> None:
        """Make room for groups of `width` sequences, where the cache keeps a table of each."""
        widened = getattr(self.arena.kind.module, "widened", None)
        if widened is not None:
            self.core = self.core._replace(cache=widened(self.core.cache, width))

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

    def arrive(self, slot: int, now: float) -> None:
        """Put a loaded request, whose arrival_time is set, into the front end's queue."""
        self.num_arrived += 1
        count, queues = self.core.count, self.core.queues
        self.core.times[T.submitted_time, slot] = now
        if not self.sampling:
            start_sampling(self.core, now)
            self.sampling = True
        end = count[K.arrived]
        if end == queues.shape[1]:
            begin = count[K.taken_in]
            queues[Q.arrivals, : end - begin] = queues[Q.arrivals, begin:end].copy()
            count[K.taken_in] = 0
            end -= begin
        queues[Q.arrivals, end] = slot
        count[K.arrived] = end + 1
