"""The run of a scenario: requests made, simulated, recorded and summed up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.equip import equipped
from sim.errors import InputError, Livelock
from sim.groups import breakdowns
from sim.metrics import Slo, summarize
from sim.recorded_server import told as told_of_server
from sim.records import Records
from sim.request import ABORTED
from sim.resolve import Resolved, resolve
from sim.scenario import Scenario, SloLimits
from sim.traffic import requests, think_times
from sim.warm_up import effect, measured
from workloads.errors import told_by_workload
from workloads.streams import Stream, stream_seed
from workloads.trace_rows import LATEST

if TYPE_CHECKING:
    from sim.cache_kinds import CacheKind
    from sim.core import Core, EngineConfig
    from sim.replicas import Cluster
    from sim.totals import Totals
    from sim.warm_start import SavedCache
    from sim.watcher import Watcher

NAMED = 10  # refused requests that a warning names


class Result(NamedTuple):
    """A finished run. `records` is closed, and is the caller's to discard."""

    resolved: Resolved
    summary: dict[str, Any]
    records: Records
    timeseries: dict[str, npt.NDArray[Any]]  # see sim/timeseries.py
    cache: SavedCache | None = None  # what the run has left, where that was asked for


@dataclass
class Tally:
    """What the records of a run say as they come, and no column keeps."""

    config: EngineConfig
    measure_from: float
    num_refused: int = 0
    num_aborted: int = 0  # before their first token
    refused: list[int] = field(default_factory=list)  # the first ids
    longest: int = 0  # tokens of a prompt
    over_context: int = 0  # requests with prefill over cached context: after a hit, or in chunks
    full_blocks: int = 0  # of all sequences of the measured requests

    def add(self, chunk: dict[str, Any]) -> None:
        """Take in a chunk of records, which is not modified."""
        self.num_aborted += int((chunk["refused"] == ABORTED).sum())
        bad = chunk["request_id"][chunk["refused"] == 1]
        self.num_refused += len(bad)
        self.refused.extend(bad[: NAMED - len(self.refused)].tolist())
        self.longest = max(self.longest, int(chunk["prompt_len"].max(initial=0)))
        in_chunks = chunk["prompt_len"] - chunk["num_cached_tokens"] > self.config.max_num_batched_tokens
        over_context = (chunk["prefix_cache_hits"] > 0) | in_chunks
        self.over_context += int((over_context & (chunk["refused"] == 0)).sum())
        counts = (chunk["refused"] == 0) & (chunk["arrival_time"] >= self.measure_from)
        blocks = (chunk["prompt_len"] + chunk["output_len"]) // self.config.block_size
        self.full_blocks += int((blocks * chunk["n"])[counts].sum())


def run(
    scenario: Scenario,
    *,
    progress: Callable[[int, float], None] | None = None,
    folder: Path | None = None,
    watcher: Watcher | None = None,
    cache: SavedCache | None = None,
    save_cache: bool = False,
) -> Result:
    """Simulate; records go to `folder`/requests.parquet if there is a folder.

    progress(requests done, simulated seconds) is called now and then; `watcher` looks at the engine
    between its steps, see sim/watcher.py. The run begins with `cache`; with `save_cache`, so can another
    with what it leaves: then memory grows with the number of requests, whose own content is remembered.
    Raises InputError if no request can run or `cache` is not for this scenario, WorkloadError for bad
    data in the workload's files.
    """
    resolved = resolve(scenario)
    from sim.by_replica import by_replica
    from sim.cache_figures import cache_figures
    from sim.domain import domain_warnings, with_share_on_kappa
    from sim.recorded_cost import leader_of
    from sim.simulate import simulate  # slow to load; what does not resolve is told without it
    from sim.timeseries import time_series
    from sim.warm_start import COLD, after, check_keeps, check_savable, loaded, primed, saved, warm_start

    cost = resolved.step_time.cost
    caching = resolved.config.enable_prefix_caching and scenario.cache.looks_up
    config = resolved.config._replace(token_fates=caching, residency=caching, memory_states=True)
    if save_cache or cache is not None:
        check_keeps(scenario)
    if save_cache:
        check_savable(scenario)
    start = COLD if cache is None else loaded(cache, scenario, config)
    workload = scenario.workload
    begin = scenario.measure_from if scenario.measure_from is not None else -math.inf
    records = Records(folder / "requests.parquet" if folder else None, begin)
    tally = Tally(config, begin)

    def collect(chunk: dict[str, Any]) -> None:
        tally.add(chunk)
        records.append(chunk)

    seed = np.random.SeedSequence(scenario.seed)
    kind, assumed_of_cache = equipped(resolved, seed)
    leader = leader_of(scenario)
    stops: dict[str, Any] = {}
    if watcher is not None:
        stops = {"horizon": watcher.horizon, "observe": watcher.observe}
    told: list[str] = []
    kept: SavedCache | None = None

    def keep(core: Core) -> None:
        nonlocal kept
        kept = saved(core, scenario)

    try:
        with told_by_workload(told), np.errstate(over="ignore", invalid="ignore"):
            if scenario.prime is not None:
                cluster = _cluster(scenario, seed)
                start = primed(scenario, config, cost, cluster, progress)
                progress = after(start, progress)
            totals = simulate(
                requests(
                    workload,
                    seed,
                    config.block_size,
                    names=start.again or save_cache,
                    priorities=config.priority_policy,
                ),
                config,
                cost,
                kind=kind,
                concurrency=workload.concurrency,
                think_times=think_times(workload, seed),
                reset_prefix_cache=scenario.reset_prefix_cache,
                measure_from=scenario.measure_from,
                on_records=collect,
                cluster=_cluster(scenario, seed),
                cache=start.snapshots,
                keep=keep if save_cache else None,
                progress=progress,
                leader=leader,
                **stops,
            )
        records.close()
        _check_measurable(scenario.name, config, kind, records, tally, totals.last_time)
        slo = Slo(**scenario.slo.model_dump()) if scenario.slo else None
        counted = totals if scenario.measure_from is None else measured(totals, records)
        figures = summarize(records, counted, config, slo, cost)
        figures |= cache_figures(kind, counted, figures["token_fates"], tally.full_blocks if caching else 0)
        if scenario.measure_from is not None:
            figures |= effect(totals, records)
        figures |= warm_start(start, totals, config)
        figures |= by_replica(records, counted, config, fates=caching)
        figures |= breakdowns(
            records, workload.tenant_names, fates=caching, evicted_from=counted.evicted_from
        )
    except Livelock as problem:
        records.discard()
        raise InputError(
            f"{scenario.name}: {problem}, as in vLLM; enlarge engine.num_gpu_blocks, or keep "
            "engine.scheduler_reserve_full_isl on"
        ) from None
    except BaseException:
        records.discard()
        raise
    outside = domain_warnings(totals.steps_outside, totals.num_steps, cost)
    num_requests = records.num_rows + records.num_left_out
    assumed = with_share_on_kappa(resolved.assumed, tally.over_context, num_requests, cost)
    assumed = [*assumed, *assumed_of_cache]
    notes = [*resolved.step_time.warnings, *outside, *told, *start.notes]
    notes += _notes(scenario, config, tally, num_requests, totals)
    figures |= told_of_server(scenario)
    if leader is not None:
        figures["steps_as_recorded"] = leader.num_steps
        notes += leader.notes()
    if asked := len(scenario.reset_prefix_cache):
        figures |= {"prefix_cache_resets_asked": asked, "prefix_cache_resets": totals.num_resets}
    head = {"name": scenario.name, "model": scenario.model, "gpu": scenario.gpu, "seed": scenario.seed}
    hashing = {
        "prefix_caching_hash_algo": scenario.engine.prefix_caching_hash_algo,
        "hash_us_per_block": cost.hash_us_per_block,
    }
    timing = resolved.step_time
    errors = {component: error.mape for component, error in timing.errors.items()}
    told_of_steps = {"calibration": timing.name, "calibration_mape": errors, "assumed": assumed}
    tail = hashing | told_of_steps | {"warnings": notes}
    series = time_series(totals.samples, (config.num_gpu_blocks - 1) * scenario.cluster.replicas)
    return Result(resolved, head | figures | tail, records, series, kept)


def _check_measurable(
    name: str, config: EngineConfig, kind: CacheKind, records: Records, tally: Tally, last_time: float
) -> None:
    """Raise InputError if a finished run has nothing to sum up, or ends beyond all clocks."""
    num_requests = records.num_rows + records.num_left_out
    if num_requests == 0:
        raise InputError(f"{name}: the workload has no requests")
    if tally.num_refused == num_requests:
        raise InputError(
            f"{name}: none of the {num_requests} requests can run: the limit is {_limit(config)} tokens "
            f"(engine.max_model_len {config.max_model_len}; engine.num_gpu_blocks "
            f"{config.num_gpu_blocks}, less the null block, of {config.block_size})"
            f"{kind.beyond_tokens(config) or '; raise the smaller'}"
        )
    if not last_time < LATEST:
        raise InputError(
            f"{name}: the run ends {last_time:g} s after it starts, too late for a clock "
            f"that knows milliseconds up to {LATEST:g} s; check arrivals, think times and step times"
        )
    if records.num_rows == 0:
        raise InputError(
            f"{name}: measure_from: all {num_requests} requests arrive before {records.measure_from:g} s, "
            "so nothing is left to measure; lower it"
        )


def _notes(
    scenario: Scenario, config: EngineConfig, tally: Tally, num_requests: int, totals: Totals
) -> Iterator[str]:
    """What to know of a run beside its figures."""
    if tally.num_refused:
        named = ", ".join(map(str, tally.refused)) + (", …" if tally.num_refused > len(tally.refused) else "")
        of_all = f"{tally.num_refused} of {num_requests} requests"
        beyond = scenario.cache.beyond_tokens(config)
        yield f"{of_all} can never fit in {_limit(config)} tokens{beyond}, and were refused: {named}"
    if tally.num_aborted:
        yield f"{tally.num_aborted} requests were aborted before their first token, and count as failed"
    if config.enable_prefix_caching and tally.longest <= config.block_size:
        yield (
            f"no prompt is longer than one block of {config.block_size} tokens (the longest has "
            f"{tally.longest}): hits will be 0; lower engine.block_size"
        )
    asked = len(scenario.reset_prefix_cache)
    if asked and totals.num_resets < asked:
        yield (
            f"{asked - totals.num_resets} of {asked} resets of the prefix cache failed, as in vLLM, since "
            "requests held blocks then; move reset_prefix_cache to times without running requests"
        )
    yield from _idle_limits(scenario.slo)


def _limit(config: EngineConfig) -> int:
    """The tokens that a request can have at most."""
    return min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size)


def _cluster(scenario: Scenario, seed: np.random.SeedSequence) -> Cluster | None:
    """The replicas and their router; None for one engine alone."""
    from sim.replicas import Cluster

    told = scenario.cluster
    if told.replicas == 1:
        return None
    return Cluster(told.replicas, told.router, told.view_delay, stream_seed(seed, Stream.ROUTER))


def _idle_limits(slo: SloLimits | None) -> list[str]:
    """A warning of limits that were probably meant in seconds."""
    limits = slo.model_dump(exclude_none=True) if slo else {}
    return [
        f"slo.{name} is {limit:g} milliseconds; if seconds were meant, set it to {1000 * limit:g}"
        for name, limit in limits.items()
        if limit < 1.0
    ]
