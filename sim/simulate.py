"""A whole run as SimPy processes: clients, engines, and what an operator does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sim.arena import Arena
from sim.cache_kinds import APC, CacheKind
from sim.clients import clients, measuring, resets
from sim.clock import Clock
from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.engine import Engine, Records
from sim.replicas import Cluster, Replicas
from sim.request import Batch, Session
from sim.snapshot import Snapshot, restore
from sim.totals import Totals

if TYPE_CHECKING:
    from sim.leader import Leader


def simulate(
    requests: Iterator[Batch] | Iterator[Session],
    config: EngineConfig,
    cost: StepCost,
    *,
    kind: CacheKind = APC,
    on_records: Callable[[Records], None],
    cluster: Cluster | None = None,
    concurrency: int | None = None,
    think_times: Iterator[float] | None = None,
    reset_prefix_cache: Sequence[float] = (),
    measure_from: float | None = None,
    cache: Sequence[Snapshot] = (),
    keep: Callable[[Core], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
    horizon: Callable[[Clock], float] = Clock.horizon,
    observe: Callable[[Core], None] | None = None,
    leader: Leader | None = None,
) -> Totals:
    """Run requests through one engine, or the engines of a cluster, until all have ended.

    `kind` is the cache. Open loop: requests arrive at their arrival_time, sessions at their start.
    With `concurrency`, so many users send them in order, each the next one when its former has ended
    and it has thought for the next of `think_times` seconds (a session has pauses of its own, and no
    other).
    The prefix cache is reset at each of `reset_prefix_cache` seconds where no block is in use then,
    see Engine.reset_prefix_cache; Totals.warm_up is what had been added up by `measure_from` seconds.
    The engines begin with the snapshots of `cache`, if there are any, and `keep` is shown each at the
    end, in their order. `on_records` gets columns of ended or refused requests (INT_FIELDS,
    FLOAT_FIELDS, "refused", "replica") in order of their end, NaN where a time does not exist.
    `progress` is told requests done and simulated seconds. `horizon` says how far an engine may run
    ahead; anything up to Clock.horizon gives the same results. `observe` is shown a lone engine each
    time that it stops, and may not touch it; `leader` says when a lone engine makes its steps.
    """
    clock = Clock()
    arena = Arena(config, kind)
    entrance: Engine | Replicas
    if cluster is None:
        entrance = Engine(clock, arena, cost, on_records, horizon, leader=leader)
        entrance.observe = observe
    else:
        assert observe is None and leader is None, "only a lone engine can be observed, or led"
        entrance = Replicas(clock, arena, cost, on_records, horizon, cluster)
    engines = [entrance] if isinstance(entrance, Engine) else entrance.engines
    assert len(cache) in (0, len(engines))
    for engine, snapshot in zip(engines, cache, strict=False):
        restore(engine.state, snapshot)
    for process in clients(clock, entrance, requests, concurrency, think_times):
        clock.process(process)
    clock.process(resets(clock, entrance, reset_prefix_cache))
    if measure_from is not None:
        clock.process(measuring(clock, entrance, measure_from))
    entrance.progress = progress
    clock.run()
    entrance.deliver()
    if keep is not None:
        for engine in engines:
            keep(engine.state.core)
    return entrance.totals()
