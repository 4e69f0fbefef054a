"""What limits a point: what is used up where the promise breaks first."""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.planning.evaluate import Evaluation
from sim.scenario import Scenario

FULL = 0.95  # of the KV pool
BUSY = 0.95  # of the time
ALONE = 1.5  # requests in a step of an engine, in the mean: hardly any shares it
LOST = 0.5  # of the tokens that missed: so many had been in the cache


class Limiting(NamedTuple):
    """What gives way: `sequences`, `kv`, `compute`, or only the `slo`; and the figures that say so."""

    by: str
    text: str


def limiting(broken: Evaluation, scenario: Scenario) -> Limiting:
    """Judge the worst run of the first point that breaks the promise; `scenario` is that point's.

    Of several replicas, the peaks are those of the fullest.
    """
    run = broken.worst
    if run.error:
        return Limiting("kv", run.error)
    f = run.figures
    span = f["duration"] * scenario.cluster.replicas
    busy = min(f["busy_time"] / span, 1.0) if span else 0.0
    waits = f["saturation"] != "STABLE"
    text = (
        f"busy {busy:.0%} of the time, KV usage up to {f['max_kv_cache_usage_perc']:.0%}, "
        f"up to {f['max_num_requests_running']} running, {f['num_preemptions']} preemptions, "
        f"queueing {f['queueing_share']:.0%} of TTFT"
    )
    if f["refused_by_pool"]:
        return Limiting("kv", f"{run.broken}; {text}")
    if f["max_num_requests_running"] >= scenario.engine.max_num_seqs:
        return Limiting(
            "sequences", f"as many run as max_num_seqs allows ({scenario.engine.max_num_seqs}); {text}"
        )
    if f["num_preemptions"] or f["max_kv_cache_usage_perc"] >= min(FULL, 1.0 - _need(f)):
        return Limiting("kv", f"the KV pool is full; {text}")
    lost = _lost(f)
    if lost >= LOST:
        return Limiting("kv", f"{lost:.0%} of the missed prompt tokens had been evicted; {text}")
    if waits and busy >= BUSY:
        return Limiting("compute", f"requests wait for a GPU that works all the time; {text}")
    if f["mean_num_requests_running"] < ALONE:
        return Limiting("slo", f"nothing is used up: a request alone takes longer than promised; {text}")
    return Limiting("slo", f"nothing is used up: a step for so many takes longer than promised; {text}")


def _need(figures: dict[str, Any]) -> float:
    """The share of the pool that a prompt takes in the mean, less what it hits: with less room it waits."""
    missed = (figures["total_input_tokens"] - figures["prefix_cache_hits"]) / max(figures["completed"], 1)
    return float(missed / (figures["num_gpu_blocks"] * figures["block_size"]))


def _lost(figures: dict[str, Any]) -> float:
    """The share of the prompt tokens that missed which an infinite pool would have hit."""
    missed = figures["prefix_cache_queries"] - figures["prefix_cache_hits"]
    fates = figures["token_fates"]
    return fates["evicted"] / missed if fates and missed > 0 else 0.0
