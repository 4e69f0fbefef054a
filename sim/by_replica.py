"""The figures of a run by replica, and how evenly the work was spread."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim.core import EngineConfig
from sim.groups import rows_of
from sim.records import Records
from sim.totals import Totals


def by_replica(records: Records, totals: Totals, config: EngineConfig, *, fates: bool) -> dict[str, Any]:
    """`num_replicas`, `by_replica` and `imbalance` of a run, for its summary.

    `by_replica` has a row for each of several replicas. `imbalance` is what the one with most has over
    the mean: 1 is even, and num_replicas is all at one of them; None for one engine alone. Refused
    requests, which count as the first replica's, are left out of it.
    """
    engines = totals.replicas
    if not engines:
        return {"num_replicas": 1, "by_replica": [], "imbalance": None}
    rows = rows_of(records, len(engines), records.column("replica").astype(np.int64), fates)
    usable = config.num_gpu_blocks - 1
    for replica, (row, engine) in enumerate(zip(rows, engines, strict=True)):
        del row["num_evictions_caused"]
        rows[replica] = {"replica": replica} | row | {
            "num_computed_tokens": engine.num_scheduled_tokens,
            "num_evictions": engine.num_evictions,
            "num_preemptions": engine.num_preemptions,
            "busy_time": engine.busy_time,
            "mean_kv_cache_usage_perc": (
                engine.usage_time / (engine.busy_time * usable) if engine.busy_time else None
            ),
            "max_kv_cache_usage_perc": engine.max_blocks_used / usable,
        }  # fmt: skip
    imbalance = {"requests": _imbalance([row["requests"] - row["failed"] for row in rows])}
    for name in ("num_computed_tokens", "busy_time"):
        imbalance[name] = _imbalance([row[name] for row in rows])
    return {"num_replicas": len(engines), "by_replica": rows, "imbalance": imbalance}


def _imbalance(values: list[float]) -> float | None:
    """The largest over the mean; None where all are 0."""
    whole = sum(values)
    return max(values) * len(values) / whole if whole else None
