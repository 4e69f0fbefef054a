"""The run of a scenario: requests made, simulated, recorded and summed up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.errors import InputError, Livelock
from sim.groups import breakdowns
from sim.metrics import Slo, summarize
from sim.records import Records
from sim.resolve import Resolved, resolve
from sim.scenario import Scenario, SloLimits
from sim.traffic import requests, think_times
from sim.warm_up import effect, measured
from workloads.errors import told_by_workload
from workloads.streams import Stream, stream_seed
from workloads.trace_rows import LATEST

if TYPE_CHECKING:
    from sim.core import Core
    from sim.recorder import Recorder
    from sim.replicas import Cluster
    from sim.warm_start import SavedCache


class Result(NamedTuple):
    """A finished run. `records` is closed, and is the caller's to discard."""

    resolved: Resolved
    summary: dict[str, Any]
    records: Records
    timeseries: dict[str, npt.NDArray[Any]]  # see sim/timeseries.py
    cache: SavedCache | None = None  # what the run has left, where that was asked for


def run(
    scenario: Scenario,
    *,
    progress: Callable[[int, float], None] | None = None,
    folder: Path | None = None,
    recorder: Recorder | None = None,
    cache: SavedCache | None = None,
    save_cache: bool = False,
) -> Result:
    """Simulate; records go to `folder`/requests.parquet if there is a folder.

    progress(requests done, simulated seconds) is called now and then; `recorder` takes down its part
    of the run, see sim/recorder.py. The run begins with `cache`; with `save_cache`, so can another
    with what it leaves: then memory grows with the number of requests, whose own content is remembered.
    Raises InputError if no request can run or `cache` is not for this scenario, WorkloadError for bad
    data in the workload's files.
    """
    resolved = resolve(scenario)
    from sim.domain import domain_warnings, with_share_on_kappa
    from sim.simulate import simulate  # slow to load; what does not resolve is told without it
    from sim.timeseries import time_series
    from sim.warm_start import COLD, after, loaded, primed, saved, warm_start

    caching = resolved.config.enable_prefix_caching
    config = resolved.config._replace(token_fates=caching, residency=caching)
    workload = scenario.workload
    begin = scenario.measure_from if scenario.measure_from is not None else -math.inf
    records = Records(folder / "requests.parquet" if folder else None, begin)
    refused: list[int] = []
    num_refused = longest = over_context = 0

    def collect(chunk: dict[str, Any]) -> None:
        nonlocal num_refused, longest, over_context
        bad = chunk["request_id"][chunk["refused"] != 0]
        num_refused += len(bad)
        refused.extend(bad[: 10 - len(refused)].tolist())
        longest = max(longest, int(chunk["prompt_len"].max(initial=0)))
        hit = np.maximum(chunk["num_cached_tokens"], 0)
        in_chunks = chunk["prompt_len"] - hit > config.max_num_batched_tokens
        over_context += int((((hit > 0) | in_chunks) & (chunk["refused"] == 0)).sum())
        records.append(chunk)

    seed = np.random.SeedSequence(scenario.seed)
    stops: dict[str, Any] = {}
    if recorder is not None:
        stops = {"horizon": recorder.horizon, "observe": recorder.observe}
    told: list[str] = []
    if save_cache and not config.enable_prefix_caching:
        raise InputError(
            "--save-cache: engine.enable_prefix_caching is false, so nothing is cached: turn it on"
        )
    if save_cache and scenario.cluster.replicas > 1:
        raise InputError(
            "--save-cache: keeps the cache of one engine, and cluster.replicas is "
            f"{scenario.cluster.replicas}: set it to 1"
        )
    start = COLD if cache is None else loaded(cache, scenario, config)
    kept: SavedCache | None = None

    def keep(core: Core) -> None:
        nonlocal kept
        kept = saved(core, scenario)

    try:
        with told_by_workload(told), np.errstate(over="ignore", invalid="ignore"):
            if scenario.prime is not None:
                cluster = _cluster(scenario, seed)
                start = primed(scenario, config, resolved.step_time.cost, cluster, progress)
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
                resolved.step_time.cost,
                concurrency=workload.concurrency,
                think_times=think_times(workload, seed),
                reset_prefix_cache=scenario.reset_prefix_cache,
                measure_from=scenario.measure_from,
                on_records=collect,
                cluster=_cluster(scenario, seed),
                cache=start.snapshots,
                keep=keep if save_cache else None,
                progress=progress,
                **stops,
            )
        records.close()
        limit = min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size)
        num_requests = records.num_rows + records.num_left_out
        if num_requests == 0:
            raise InputError(f"{scenario.name}: the workload has no requests")
        if num_refused == num_requests:
            raise InputError(
                f"{scenario.name}: none of the {num_refused} requests can run: the limit is {limit} tokens "
                f"(engine.max_model_len {config.max_model_len}; engine.num_gpu_blocks "
                f"{config.num_gpu_blocks}, less the null block, of {config.block_size}); raise the smaller"
            )
        if not totals.last_time < LATEST:
            raise InputError(
                f"{scenario.name}: the run ends {totals.last_time:g} s after it starts, too late for a clock "
                f"that knows milliseconds up to {LATEST:g} s; check arrivals, think times and step times"
            )
        if records.num_rows == 0:
            raise InputError(
                f"{scenario.name}: measure_from: all {num_requests} requests arrive before {begin:g} s, "
                "so nothing is left to measure; lower it"
            )
        slo = Slo(**scenario.slo.model_dump()) if scenario.slo else None
        counted = totals if scenario.measure_from is None else measured(totals, records)
        figures = summarize(records, counted, config, slo, resolved.step_time.cost)
        if scenario.measure_from is not None:
            figures |= effect(totals, records)
        figures |= warm_start(start, totals, config)
        from sim.by_replica import by_replica

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
    cost = resolved.step_time.cost
    outside = domain_warnings(totals.steps_outside, totals.num_steps, cost)
    assumed = with_share_on_kappa(resolved.assumed, over_context, num_requests, cost)
    notes = [*resolved.step_time.warnings, *outside, *told, *start.notes]
    if num_refused:
        named = ", ".join(map(str, refused)) + (", …" if num_refused > len(refused) else "")
        of_all = f"{num_refused} of {num_requests} requests"
        notes.append(f"{of_all} can never fit in {limit} tokens and were refused: {named}")
    if config.enable_prefix_caching and longest <= config.block_size:
        notes.append(
            f"no prompt is longer than one block of {config.block_size} tokens (the longest has {longest}): "
            "hits will be 0; lower engine.block_size"
        )
    asked = len(scenario.reset_prefix_cache)
    if asked:
        figures |= {"prefix_cache_resets_asked": asked, "prefix_cache_resets": totals.num_resets}
    if asked and totals.num_resets < asked:
        notes.append(
            f"{asked - totals.num_resets} of {asked} resets of the prefix cache failed, as in vLLM, since "
            "requests held blocks then; move reset_prefix_cache to times without running requests"
        )
    notes += _idle_limits(scenario.slo)
    head = {"name": scenario.name, "model": scenario.model, "gpu": scenario.gpu, "seed": scenario.seed}
    hashing = {
        "prefix_caching_hash_algo": scenario.engine.prefix_caching_hash_algo,
        "hash_us_per_block": resolved.step_time.cost.hash_us_per_block,
    }
    timing = resolved.step_time
    errors = {component: error.mape for component, error in timing.errors.items()}
    told_of_steps = {"calibration": timing.name, "calibration_mape": errors, "assumed": assumed}
    tail = hashing | told_of_steps | {"warnings": notes}
    series = time_series(totals.samples, (config.num_gpu_blocks - 1) * scenario.cluster.replicas)
    return Result(resolved, head | figures | tail, records, series, kept)


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
