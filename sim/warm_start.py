"""A run that begins with a warm cache: one that a `prime` phase fills first, or one that a run has saved.

Both are a Snapshot in which content bears names of the run before; what this run means by the same
names is workloads/same_content.py's to say. The figures of a run are of its own requests only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.errors import InputError
from sim.snapshot import Snapshot, num_kept, renamed, take
from sim.traffic import requests, think_times
from workloads.errors import WorkloadError
from workloads.same_content import Description, Shared, description, shared
from workloads.streams import of_prime

if TYPE_CHECKING:
    from sim.replicas import Cluster
    from sim.scenario import Scenario
    from sim.totals import Totals

Progress = Callable[[int, float], None]  # told requests done and simulated seconds

COMMON = {True: "the same prompts again", False: "pools, by number"}
NOTHING = "nothing"


class SavedCache(NamedTuple):
    """The cache that a run has left, and what it takes to know its content again."""

    source: str  # what to call it in messages
    model: str
    content: Description
    snapshot: Snapshot


class Start(NamedTuple):
    """How a run begins."""

    snapshots: tuple[Snapshot, ...]  # one for each replica; none: with nothing cached
    again: bool  # its requests have been asked before, so that all they have needs a name
    figures: dict[str, Any]  # of the summary
    notes: list[str]


COLD = Start((), False, {}, [])


def primed(
    scenario: Scenario,
    config: EngineConfig,
    cost: StepCost,
    cluster: Cluster | None,
    progress: Progress | None = None,
) -> Start:
    """Run `scenario.prime` in engines of its own; the caches that it leaves are the start.

    Its requests are drawn apart from those measured, unless they are the same prompts again.
    Raises InputError if none of them can run.
    """
    assert scenario.prime is not None
    if not config.enable_prefix_caching:
        return COLD._replace(notes=["prime was skipped: prefix caching is off, so it could leave nothing"])
    from sim.simulate import simulate

    workload = scenario.prime
    former = description(workload, scenario.seed)
    common = _in_common(f"{scenario.name}: prime", former, scenario)
    seed = np.random.SeedSequence(scenario.seed)
    if not common.again:
        seed = of_prime(seed)
    left: list[Snapshot] = []
    done = dict.fromkeys(("requests", "failed", "input_tokens", "output_tokens"), 0)

    def collect(chunk: dict[str, Any]) -> None:
        ran = chunk["refused"] == 0
        done["requests"] += int(ran.sum())
        done["failed"] += int((~ran).sum())
        done["input_tokens"] += int(chunk["prompt_len"][ran].sum())
        done["output_tokens"] += int((chunk["output_len"] * chunk["n"] * chunk["beam_width"])[ran].sum())

    totals = simulate(
        requests(workload, seed, config.block_size, names=common.again),
        config,
        cost,
        cluster=cluster,
        concurrency=workload.concurrency,
        think_times=think_times(workload, seed),
        on_records=collect,
        progress=progress,
        keep=lambda core: left.append(take(core)),
    )
    if done["requests"] == 0:
        raise InputError(
            f"{scenario.name}: prime: none of its {done['failed']} requests can run, so it warms nothing: "
            "shorten them, or enlarge engine.num_gpu_blocks or engine.max_model_len"
        )
    notes = [f"prime: {done['failed']} requests can never fit and were refused"] if done["failed"] else []
    figures = {"primed_with": workload.kind, **done, "duration": totals.last_time}
    figures["prime_hit_rate"] = totals.prefix_cache_hits / totals.prefix_cache_queries
    return _start(left, common, figures, notes)


def check_keeps(scenario: Scenario) -> None:
    """Raise InputError, one line, if this way to share KV keeps nothing that another run could begin with."""
    if not scenario.cache.looks_up:
        raise InputError(
            f"cache: {scenario.cache.kind} keeps no KV of ended requests: leave --save-cache and "
            "--load-cache out"
        )


def check_savable(scenario: Scenario) -> None:
    """Raise InputError, one line, if the cache that a run leaves cannot be saved."""
    if not scenario.engine.enable_prefix_caching:
        raise InputError(
            "--save-cache: engine.enable_prefix_caching is false, so nothing is cached: turn it on"
        )
    if scenario.cache.kind != "apc":
        raise InputError(f"--save-cache: keeps the cache of apc, and cache is {scenario.cache.kind}")
    if scenario.cluster.replicas > 1:
        raise InputError(
            "--save-cache: keeps the cache of one engine, and cluster.replicas is "
            f"{scenario.cluster.replicas}: set it to 1"
        )


def loaded(cache: SavedCache, scenario: Scenario, config: EngineConfig) -> Start:
    """Begin with a saved cache. Raises InputError, one line, where it cannot be this run's."""
    where = f"--load-cache {cache.source}"
    if scenario.prime is not None:
        raise InputError(f"{where}: the scenario has a prime phase to fill the cache: drop one of the two")
    if scenario.cluster.replicas > 1:
        raise InputError(
            f"{where}: is the cache of one engine, and cluster.replicas is {scenario.cluster.replicas}: "
            "set it to 1, or warm each with prime"
        )
    if scenario.cache.kind != "apc":
        raise InputError(f"{where}: is a cache of apc, and cache is {scenario.cache.kind}")
    if not config.enable_prefix_caching:
        raise InputError(f"{where}: engine.enable_prefix_caching is false: turn it on, or load no cache")
    snapshot = cache.snapshot
    if snapshot.block_size != config.block_size:
        raise InputError(
            f"{where}: has blocks of {snapshot.block_size} tokens, and engine.block_size is "
            f"{config.block_size}: set it to {snapshot.block_size}, or save a cache with {config.block_size}"
        )
    if cache.model != scenario.model:
        raise InputError(
            f"{where}: holds the KV of {cache.model}, and the scenario's model is {scenario.model}: "
            "save a cache with that"
        )
    kind = cache.content["workload"]["kind"]
    if kind != scenario.workload.kind:
        raise InputError(
            f"{where}: holds content of a {kind} workload, of which one of kind {scenario.workload.kind} "
            "can ask nothing again: save a cache with that kind"
        )
    common = _in_common(where, cache.content, scenario)
    start = _start([snapshot], common, {"loaded_from": cache.source}, [])
    notes = [f"{where}: {text}" for text in _told_of_load(cache, scenario, config, common)]
    return start._replace(notes=notes)


def after(start: Start, progress: Progress | None) -> Progress | None:
    """`progress` for what follows: the requests that primed are done already."""
    if progress is None:
        return None
    before = start.figures.get("requests", 0) + start.figures.get("failed", 0)
    return lambda done, seconds: progress(before + done, seconds)


def saved(core: Core, scenario: Scenario) -> SavedCache:
    """The cache of an engine at the end of the scenario's run, in which all content has names."""
    content = description(scenario.workload, scenario.seed)
    return SavedCache(scenario.name, scenario.model, content, take(core))


def warm_start(start: Start, totals: Totals, config: EngineConfig) -> dict[str, Any]:
    """What the summary says of a warm start: where it came from and what was hit of it.

    `totals` are the whole run's, warm-up included.
    """
    if not start.snapshots:
        return {}
    hits = totals.warm_hits * config.block_size
    return {
        "warm_start": {
            **start.figures,
            "blocks_cached": sum(num_kept(one, config.num_gpu_blocks) for one in start.snapshots),
            "hit_tokens": hits,
            "share_of_hits": hits / totals.prefix_cache_hits if totals.prefix_cache_hits else None,
        }
    }


def _in_common(where: str, former: Description, scenario: Scenario) -> Shared:
    """What the scenario's requests have in common with those before. Raises InputError, one line."""
    latter = description(scenario.workload, scenario.seed)
    try:
        return shared(former, latter)
    except WorkloadError as error:
        raise InputError(f"{where}: {error}") from None


def _start(snapshots: Sequence[Snapshot], common: Shared, figures: dict[str, Any], notes: list[str]) -> Start:
    told = figures | {"in_common": COMMON[common.again] if common.ids else NOTHING}
    return Start(tuple(renamed(one, common.ids) for one in snapshots), common.again, told, notes)


def _told_of_load(cache: SavedCache, scenario: Scenario, config: EngineConfig, common: Shared) -> list[str]:
    """What to know of a loaded cache that does not fit as it is."""
    notes = []
    pool, here = len(cache.snapshot.blocks) + 1, config.num_gpu_blocks
    if here != pool:
        text = f"comes from a pool of {pool} blocks, and this one has {here}: "
        lost = num_kept(cache.snapshot, pool) - num_kept(cache.snapshot, here)
        text += f"the {lost} blocks longest unused were dropped" if here < pool else "the others begin empty"
        notes.append(text)
    if not common.ids:
        notes.append(
            "nothing of it can be hit, it only fills the pool: the seed, or what the pools hold, differs"
        )
    elif not common.again and cache.content["seed"] == scenario.seed:
        notes.append(
            "comes from a run of the same seed, which drew groups or documents in the order in which this "
            "one does: prime draws anew, and so does another seed where lengths are constant"
        )
    return notes
