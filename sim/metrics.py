"""The summary of a run, from its records and sums.

Times are seconds inside and milliseconds in names that end in `_ms`. Keys are those of
`vllm bench serve` and of vLLM's own counters.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim import histogram
from sim.cache_figures import memory_shares
from sim.fates import FATES
from sim.records import FATE_COLUMNS, Records
from sim.residency import block_durations
from sim.saturation import front_end_work, saturation

if TYPE_CHECKING:

    from sim.core import EngineConfig
    from sim.cost import StepCost
    from sim.totals import Totals

Floats = npt.NDArray[np.float64]

QUANTILES = (50, 90, 95, 99)

TTFT_PARTS = ("front_end_time", "queue_time", "prefill_time")

HIT_RATE_DEFINITION = (
    "prompt tokens found in the cache / prompt tokens looked up,",
    "once per request, at its first admission;",
    "re-admissions after preemption are counted apart",
)


class Slo(NamedTuple):
    """Limits in milliseconds that a good request keeps; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


class Counts(NamedTuple):
    """What one pass over the records adds up."""

    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    sequences: int  # answers and beams of the completed
    good: int
    first_arrival: float
    last_arrival: float
    last_finish: float
    max_prompt_len: int


def count(records: Records, slo: Slo) -> Counts:
    """Add up the records; a request is good if it keeps every limit of `slo`."""
    completed = failed = input_tokens = output_tokens = sequences = good = max_prompt_len = 0
    first_arrival, last_arrival, last_finish = math.inf, -math.inf, -math.inf
    names = ("refused", "prompt_len", "output_len", "num_sequences", "arrival_time", "finish_time")
    for refused, prompt, output, width, arrival, finish, *latencies in records.chunks(
        *names, "ttft_ms", "tpot_ms", "e2el_ms"
    ):
        ran = refused == 0
        completed += int(np.count_nonzero(ran))
        failed += int(np.count_nonzero(~ran))
        input_tokens += int(prompt[ran].sum())
        output_tokens += int((output[ran] * width[ran]).sum())
        sequences += int(width[ran].sum())
        keeps = ran.copy()
        for latency, limit in zip(latencies, slo, strict=True):
            if limit is not None:
                keeps &= ~(latency > limit)  # NaN, the TPOT of one token, breaks no limit
        good += int(np.count_nonzero(keeps))
        first_arrival = min(first_arrival, float(arrival.min()))
        last_arrival = max(last_arrival, float(arrival.max()))
        max_prompt_len = max(max_prompt_len, int(prompt.max()))
        if ran.any():
            last_finish = max(last_finish, float(finish[ran].max()))
    return Counts(
        completed, failed, input_tokens, output_tokens, sequences, good,
        first_arrival, last_arrival, last_finish, max_prompt_len,
    )  # fmt: skip


def count_fates(records: Records) -> dict[str, int]:
    """Prompt tokens of all requests by their fate, see sim/fates.py."""
    totals = dict.fromkeys(FATES, 0)
    for columns in records.chunks(*FATE_COLUMNS):
        for name, column in zip(FATES, columns, strict=True):
            totals[name] += int(column.sum())
    return totals


def ceiling(records: Records) -> float:
    """The hit rate of a pool that never evicts, of all samples, where fates were decided."""
    queries = hits = 0
    for looked_up, *found in records.chunks(
        "prefix_cache_queries", "prefix_cache_hits", "prefix_cache_evicted"
    ):
        queries += int(looked_up.sum())
        hits += int(sum(column.sum() for column in found))
    return _ratio(hits, queries)


def distribution(values: Floats, name: str) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles of `values` in ms, keyed like vLLM's.

    NaN values (no TPOT, refused) are left out. `values` is overwritten.
    """
    valid = int(np.count_nonzero(~np.isnan(values)))
    if valid < len(values):
        values = values[~np.isnan(values)]
    if valid == 0:
        mean = std = math.nan
        quantiles = [math.nan] * len(QUANTILES)
    else:
        mean = float(values.mean())
        quantiles = [float(q) for q in np.percentile(values, QUANTILES, overwrite_input=True)]
        values -= mean
        np.square(values, out=values)
        std = math.sqrt(float(values.mean()))
    return _keyed(name, mean, std, quantiles)


def itl_distribution(totals: Totals) -> dict[str, float]:
    """The same for the times between tokens of all requests; percentiles within 0.1 %."""
    if totals.itl_count == 0:
        return _keyed("itl", math.nan, math.nan, [math.nan] * len(QUANTILES))
    mean = totals.itl_sum / totals.itl_count
    variance = totals.itl_sum_squares / totals.itl_count - mean * mean
    quantiles = [1e3 * histogram.percentile(totals.itl_histogram, q) for q in QUANTILES]
    return _keyed("itl", 1e3 * mean, 1e3 * math.sqrt(max(variance, 0.0)), quantiles)


def _keyed(name: str, mean: float, std: float, quantiles: list[float]) -> dict[str, float]:
    median = quantiles[QUANTILES.index(50)]
    keyed = {f"mean_{name}_ms": mean, f"median_{name}_ms": median, f"std_{name}_ms": std}
    return keyed | {f"p{q}_{name}_ms": value for q, value in zip(QUANTILES, quantiles, strict=True)}


def summarize(
    records: Records, totals: Totals, config: EngineConfig, slo: Slo | None, cost: StepCost | None = None
) -> dict[str, Any]:
    """The summary of a run: finite numbers, or None where a figure is not defined.

    `duration` runs from the first arrival to the last completion, in simulated seconds. The
    records must be closed. Keys keep one order, so equal runs give equal text.
    """
    counts = count(records, slo or Slo())
    duration = counts.last_finish - counts.first_arrival
    work = functools.partial(front_end_work, cost, config) if cost is not None else None
    verdict = saturation(records, counts.first_arrival, counts.last_arrival, work)
    fates = count_fates(records) if config.token_fates else None
    several = counts.sequences > counts.completed
    usable = config.num_gpu_blocks - 1  # block 0 is the null block
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": counts.completed,
        "failed": counts.failed,
        "total_input_tokens": counts.input_tokens,
        "total_output_tokens": counts.output_tokens,
        "request_throughput": _ratio(counts.completed, duration),
    }
    if several:
        summary["num_sequences"] = counts.sequences
    if slo is not None:
        summary["request_goodput"] = _ratio(counts.good, duration)
    summary |= {
        "output_throughput": _ratio(counts.output_tokens, duration),
        "total_token_throughput": _ratio(counts.input_tokens + counts.output_tokens, duration),
        "max_concurrent_requests": totals.max_concurrent_requests,
    }
    for name in ("ttft", "tpot", "e2el"):
        summary |= distribution(records.column(f"{name}_ms"), name)
        if name == "tpot":
            summary |= itl_distribution(totals)
    for name in TTFT_PARTS:
        summary |= distribution(records.column(f"{name}_ms"), name)
    summary |= {
        "saturation": verdict.verdict,
        "completion_ratio": verdict.completion_ratio,
        "queueing_share": verdict.queueing_share,
        "waiting_tokens_at_thirds": list(verdict.waiting_tokens),
        "prefix_cache_queries": totals.prefix_cache_queries,
        "prefix_cache_hits": totals.prefix_cache_hits,
        "prefix_cache_hit_rate": _ratio(totals.prefix_cache_hits, totals.prefix_cache_queries),
        "prefix_cache_ceiling": math.nan if fates is None else ceiling(records),
        "token_fates": fates,
        "preempted_queries": totals.preempted_queries,
        "preempted_hits": totals.preempted_hits,
        "num_admissions": totals.num_admissions,
        "num_readmissions": totals.num_readmissions,
        "num_preemptions": totals.num_preemptions,
        "num_evictions": totals.num_evictions,
    }
    summary |= block_durations(totals.durations)
    summary |= {
        "num_computed_tokens": totals.num_scheduled_tokens,
        "mean_kv_cache_usage_perc": _ratio(totals.usage_time, totals.busy_time * usable),
        "max_kv_cache_usage_perc": _ratio(totals.max_blocks_used, usable),
    }
    summary |= memory_shares(totals, config, max(1, len(totals.replicas)))
    summary |= {
        "num_steps": totals.num_steps,
        "mean_num_requests_running": _ratio(totals.num_running_sum, totals.num_steps),
        "max_num_requests_running": totals.max_num_running,
        "busy_time": totals.busy_time,
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
    }
    return {key: _finite(value) for key, value in summary.items()}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else math.nan


def _finite(value: Any) -> Any:
    """JSON has no NaN: None, for a figure that is not defined."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
