"""What a summary says of a cache besides hits: bookkeeping, its memory, and what only this one counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cache_kinds import CacheKind
from sim.memory_states import STATES
from sim.request import Floats, Ints

if TYPE_CHECKING:
    from sim.core import EngineConfig
    from sim.totals import Totals


def cache_figures(
    kind: CacheKind, totals: Totals, fates: dict[str, int] | None, num_full_blocks: int
) -> dict[str, Any]:
    """`cache` and its figures for the summary; `num_full_blocks` are those of all tokens of all sequences.

    metadata_entries_per_1k_slots: what the cache keeps to find KV (`metadata` says what that is), for
    each 1000 slots of that KV.
    """
    entries, slots = totals.metadata.tolist()
    figures: dict[str, Any] = {
        "cache": kind.kind,
        "lost_tail_tokens": None if fates is None else fates["partial_block"],
        "num_lookups": totals.num_lookups if kind.looks_up else 0,
        "num_hashed_blocks": num_full_blocks if kind.hashes else 0,
        "metadata": kind.metadata,
        "metadata_entries_per_1k_slots": 1000.0 * entries / slots if slots > 0 else None,
    }
    if len(totals.cache_sums):
        figures |= kind.module.figures(totals.cache_sums)
    return figures


def labels(kind: CacheKind) -> dict[str, str]:
    """How a report calls the figures that only this cache has; those in % are parts of 1 in the summary."""
    return getattr(kind.module, "LABELS", {})


def own_figures(kind: CacheKind, summary: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    """The figures that only this cache has, each with its label."""
    for key, label in labels(kind).items():
        value = summary[key]
        yield label, 100.0 * value if "%" in label and value is not None else value


def memory_shares(totals: Totals, config: EngineConfig, engines: int) -> dict[str, Any]:
    """Shares of the pool by STATES, for the summary: in the mean over busy time, and in the fullest step.

    Of several engines: of all pools together, each in its own fullest step.
    """
    slots = (config.num_gpu_blocks - 1) * config.block_size
    return {
        "kv_memory_shares": _shares(totals.state_times, slots * totals.busy_time),
        "kv_memory_shares_when_fullest": _shares(totals.fullest_states, slots * engines),
    }


def _shares(parts: Floats | Ints, whole: float) -> dict[str, float] | None:
    """By name; None where there was no time."""
    if whole <= 0:
        return None
    shares = [float(part) / whole for part in parts]
    return dict(zip(STATES, [*shares, 1.0 - float(np.sum(shares))], strict=True))
