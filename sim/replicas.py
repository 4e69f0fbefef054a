"""Several engines of one kind and the router before them: to clients and records, one server.

An engine may run ahead to the next outside event, as a lone one does; where the end of a request
makes a client send another, perhaps to another replica, no engine passes the earliest step end of
the others. Records come out in the order of their ends, equal ones by replica, however the engines
were cut.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from simpy.events import Event

from sim.arena import Arena
from sim.blocks import FREE, NUM_EVENTS
from sim.clock import Clock, Process
from sim.columns import K, R
from sim.content_key import prefix_key
from sim.cost import StepCost
from sim.engine import ROWS, Engine, Records
from sim.kv_index import KvIndex
from sim.request import Ints
from sim.router import AFFINITY_TOKENS, CENTRAL_QUEUE, ROUTERS, Arrival, Views
from sim.totals import Totals, total


class Cluster(NamedTuple):
    """How many engines there are, and how requests are spread over them."""

    replicas: int
    router: str  # of ROUTERS, or CENTRAL_QUEUE
    view_delay: float = 0.0  # seconds between two looks of the router; 0: it looks at each arrival
    seed: np.random.SeedSequence = np.random.SeedSequence(0)


class Replicas:
    """The engines of a cluster and their router."""

    def __init__(
        self,
        clock: Clock,
        arena: Arena,
        cost: StepCost,
        on_records: Callable[[Records], None],
        horizon: Callable[[Clock], float],
        cluster: Cluster,
    ) -> None:
        self.clock = clock
        self.arena = arena
        self.cluster = cluster
        self.on_records = on_records
        self.progress: Callable[[int, float], None] | None = None
        self.ends_cause_arrivals = False
        self.max_concurrent = 0
        self.num_routed = 0
        self.queued: deque[tuple[int, Event | None]] = deque()  # of a central queue
        self.rng = np.random.default_rng(cluster.seed)
        self.index = KvIndex(cluster.replicas) if cluster.router == "kv_aware" else None
        self.seen: Views | None = None  # by the last look, with a view delay
        self.looking = False
        self._horizon = horizon
        self._collected: list[Records] = []
        self._num_collected = 0
        self.engines = [
            Engine(clock, arena, cost, self.collect, self.horizon_of(i), i, kv_events=self.index is not None)
            for i in range(cluster.replicas)
        ]
        for engine in self.engines:
            engine.progress = self.tell_progress

    def horizon_of(self, replica: int) -> Callable[[Clock], float]:
        """How far an engine may run ahead."""

        def horizon(clock: Clock) -> float:
            bound = self._horizon(clock)
            if self.ends_cause_arrivals:
                for engine in self.engines:
                    if engine.replica != replica and engine.next_wake < bound:
                        bound = engine.next_wake
            return bound

        return horizon

    def submit(self, slot: int) -> None:
        """A loaded request arrives now."""
        if self.cluster.router == CENTRAL_QUEUE and slot not in self.arena.refused:
            self.queued.append((slot, None))
            self.serve_queue()
        else:
            self.send(slot).submit(slot)
        self.note_arrival()

    def submit_watched(self, slot: int) -> Event:
        """A loaded request arrives now; the event, at its end, may cause other arrivals."""
        self.ends_cause_arrivals = True
        if self.cluster.router == CENTRAL_QUEUE and slot not in self.arena.refused:
            done = self.clock.event()
            self.queued.append((slot, done))
            self.serve_queue()
        else:
            done = self.send(slot).submit_watched(slot)
        self.note_arrival()
        return done

    def send(self, slot: int) -> Engine:
        """Choose the engine of a request; a refused one goes to the first, which says so."""
        return self.engines[0 if slot in self.arena.refused else self.choose(slot)]

    def choose(self, slot: int) -> int:
        """Ask the router."""
        router = self.cluster.router
        requests = self.arena.requests
        prompt_len = int(requests[R.prompt_len, slot])
        key = 0
        if router == "prefix_affinity":
            shared = min(AFFINITY_TOKENS, prompt_len)
            key = int(prefix_key(self.arena.segments_of(slot), requests[R.namespace, slot], shared))
        draws = (0.0, 0.0)
        if router in ("random", "power_of_two"):
            draws = (self.rng.random(), self.rng.random())
        arrival = Arrival(self.num_routed, int(requests[R.session_id, slot]), key, prompt_len, draws)
        self.num_routed += 1
        return ROUTERS[router](arrival, self.views(slot))

    def views(self, slot: int) -> Views:
        """What the router sees of the replicas when this request arrives."""
        if self.cluster.view_delay == 0.0:
            seen = self.look()
        else:
            if self.seen is None:
                self.seen = self.look()
            if not self.looking:
                self.looking = True
                self.clock.process(self.look_again())
            seen = self.seen
        if self.index is None:
            return seen
        config, requests = self.arena.config, self.arena.requests
        if not config.enable_prefix_caching:
            return seen
        prompt_len, namespace = requests[R.prompt_len, slot], requests[R.namespace, slot]
        segments = self.arena.segments_of(slot)
        cached = self.index.cached_tokens(segments, namespace, prompt_len, config.block_size)
        return seen._replace(cached_tokens=cached)

    def look(self) -> Views:
        """The replicas as they are now."""
        nothing = np.zeros(len(self.engines), np.int64)
        waiting, usage = nothing.copy(), np.zeros(len(self.engines))
        if self.index is not None:
            usable = self.arena.config.num_gpu_blocks - 1
            for i, engine in enumerate(self.engines):
                pool, count = engine.state.core.pool, engine.state.core.count
                self.index.apply(i, pool.events[: pool.count[NUM_EVENTS]])
                pool.count[NUM_EVENTS] = 0
                usage[i] = (usable - pool.count[FREE]) / usable
                waiting[i] = count[K.num_waiting] + count[K.arrived] - count[K.taken_in]
        return Views(self.outstanding(), waiting, usage, nothing)

    def look_again(self) -> Process:
        """Look at every multiple of the view delay, as long as there is something to see."""
        delay = self.cluster.view_delay
        while True:
            instant = (self.clock.now // delay + 1) * delay
            yield self.clock.at(max(instant, np.nextafter(self.clock.now, np.inf)))
            self.seen = self.look()
            if not self.seen.outstanding.any():
                self.looking = False
                return

    def outstanding(self) -> Ints:
        """Requests sent to each replica that have not ended."""
        return np.array([engine.outstanding() for engine in self.engines])

    def serve_queue(self) -> None:
        """Send the requests of a central queue, in order, as long as a replica has a place."""
        while self.queued:
            taken = np.array([engine.seats_taken() for engine in self.engines])
            replica = int(taken.argmin())
            if taken[replica] >= self.arena.config.max_num_seqs:
                return
            slot, done = self.queued.popleft()
            ended = self.engines[replica].submit_watched(slot)
            assert ended.callbacks is not None
            ended.callbacks.append(functools.partial(self.make_room, done))

    def make_room(self, done: Event | None, _: Event) -> None:
        """A request of a central queue has ended: tell its client, and let the next one in."""
        if done is not None:
            done.succeed()
        self.serve_queue()

    def note_arrival(self) -> None:
        """Keep the largest number of requests in the system; hand records on when there are many."""
        self.max_concurrent = max(self.max_concurrent, int(self.outstanding().sum()) + len(self.queued))
        if self._num_collected >= ROWS:
            self.deliver(self.clock.now)

    def reset_prefix_cache(self) -> None:
        """Reset every replica's cache, see Engine.reset_prefix_cache."""
        for engine in self.engines:
            engine.reset_prefix_cache()

    def begin_measuring(self) -> None:
        """Keep the sums of the time before now."""
        for engine in self.engines:
            engine.begin_measuring()

    def tell_progress(self, _: int, now: float) -> None:
        """Tell how many requests are done at all replicas."""
        if self.progress is not None:
            self.progress(sum(engine.num_done for engine in self.engines), now)

    def collect(self, chunk: Records) -> None:
        """Take an engine's records, which are in the order of their ends."""
        self._collected.append(chunk)
        self._num_collected += len(chunk["request_id"])

    def deliver(self, until: float = np.inf) -> None:
        """Hand on the records of requests that ended before `until`, which all engines have reached."""
        for engine in self.engines:
            engine.deliver()
        if not self._collected:
            return
        names = self._collected[0]
        merged = {name: np.concatenate([chunk[name] for chunk in self._collected]) for name in names}
        end = np.where(merged["refused"] != 0, merged["arrival_time"], merged["finish_time"])
        order = np.lexsort((merged["replica"], end))
        num_ended = int(np.searchsorted(end[order], until))
        ended, rest = order[:num_ended], order[num_ended:]
        self._collected = [{name: column[rest] for name, column in merged.items()}] if len(rest) else []
        self._num_collected = len(rest)
        if num_ended:
            self.on_records({name: column[ended] for name, column in merged.items()})

    def totals(self) -> Totals:
        """The sums of all replicas so far."""
        sums = total([engine.totals() for engine in self.engines])
        return sums._replace(max_concurrent_requests=self.max_concurrent)
