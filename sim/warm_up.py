"""The warm-up of a run: requests that arrive before `measure_from` and fill the cache, uncounted.

Figures of requests are of those that arrive from then on. Figures of the engine (steps, evictions,
preemptions, KV use, times between tokens) add up from that instant on, whoever they are for; the
largest values, the time series and the steps beyond the calibration are the whole run's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.records import Records
    from sim.totals import Totals

SUMS = (
    "num_steps", "num_scheduled_tokens", "num_scheduled_seqs", "num_running_sum", "preempted_queries",
    "preempted_hits", "num_admissions", "num_readmissions", "num_preemptions", "num_evictions", "num_lookups",
    "busy_time", "durations", "itl_histogram", "itl_count", "itl_sum", "itl_sum_squares", "usage_time",
    "cache_sums", "state_times",
)  # fmt: skip


def measured(totals: Totals, records: Records) -> Totals:
    """The totals without the warm-up: SUMS since it ended, the cache's of the measured requests."""
    queries = hits = 0
    for looked_up, hit in records.chunks("prefix_cache_queries", "prefix_cache_hits"):
        queries += int(looked_up.sum())
        hits += int(hit.sum())
    replicas = tuple(map(_since, totals.replicas))
    return _since(totals)._replace(
        prefix_cache_queries=queries, prefix_cache_hits=hits, replicas=replicas
    )


def _since(totals: Totals) -> Totals:
    """The totals with SUMS since the warm-up ended."""
    before = totals.warm_up
    assert before is not None, "measure_from was not given"
    sums: dict[str, Any] = {name: getattr(totals, name) - getattr(before, name) for name in SUMS}
    lost_before = before.evicted_from
    lost = {owner: blocks - lost_before.get(owner, 0) for owner, blocks in totals.evicted_from.items()}
    return totals._replace(**sums, evicted_from=lost)


def effect(totals: Totals, records: Records) -> dict[str, Any]:
    """What the summary says of the warm-up: its end, its requests, and the hit rate had they counted.

    `totals` are the whole run's.
    """
    whole = totals.prefix_cache_queries
    return {
        "measure_from": records.measure_from,
        "num_requests_left_out": records.num_left_out,
        "prefix_cache_hit_rate_with_warm_up": totals.prefix_cache_hits / whole if whole else None,
    }
