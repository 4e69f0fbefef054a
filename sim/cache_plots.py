"""Figures of the prefix cache: hit rate and KV use over time, what was evicted, how long blocks stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sim.plots import BINS, BLUE, ORANGE

Floats = npt.NDArray[np.float64]


def cache_over_time(axes: Axes, series: dict[str, Floats], start: float, end: float) -> Axes:
    """KV use, and the hit rate of the admissions in each of at most BINS spans of time, in %.

    The rate of a span is what the counters of hits and queries grew by in it; a gap where nobody
    was admitted.
    """
    places = np.unique(np.linspace(0, len(series["time"]) - 1, BINS + 1).astype(np.int64))
    if len(series["time"]):
        time = series["time"][places] - start
        queries, hits = (np.diff(series[f"prefix_cache_{name}"][places]) for name in ("queries", "hits"))
        rate = np.divide(hits, queries, out=np.full(len(queries), np.nan), where=queries > 0)
        use = series["kv_cache_usage_perc"][places]
        axes.plot(time, 100 * use, color=ORANGE, lw=1.5, ls="--", label="KV use")
        axes.plot(time[1:], 100 * rate, color=BLUE, lw=1.5, label="hit rate", drawstyle="steps-pre")
        axes.legend(loc="upper right", ncols=2)
    axes.set(title="Prefix cache", xlabel="simulated seconds", ylabel="%")
    axes.set_xlim(0.0, end)
    axes.set_ylim(0.0, 118.0)  # room for the legend
    return axes


def churn_over_time(axes: Axes, series: dict[str, Floats], start: float, end: float) -> Axes:
    """Evictions and preemptions a second in each of at most BINS spans of time."""
    places = np.unique(np.linspace(0, len(series["time"]) - 1, BINS + 1).astype(np.int64))
    styles = {"evictions": (BLUE, "-"), "preemptions": (ORANGE, "--")}
    if len(places) > 1:
        time = series["time"][places] - start
        for name, (colour, dashes) in styles.items():
            rate = np.diff(series[f"num_{name}"][places]) / np.diff(time)
            axes.plot(time[1:], rate, color=colour, lw=1.5, ls=dashes, label=name, drawstyle="steps-pre")
        axes.legend(loc="upper right", ncols=2)
    axes.set(title="Blocks evicted, requests preempted", xlabel="simulated seconds", ylabel="per second")
    axes.set_xlim(0.0, end)
    axes.set_ylim(0.0, 1.2 * max(1.0, axes.get_ylim()[1]))  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    return axes


def block_durations(axes: Axes, durations: dict[str, dict[str, Any] | None]) -> Axes:
    """Shares of blocks, or gaps, by their duration, of the durations in a summary (sim/residency.py)."""
    names = {
        "kv_block_lifetime_seconds": ("lifetime", BLUE, "-"),
        "kv_block_idle_before_evict_seconds": ("idle before eviction", ORANGE, "--"),
        "kv_block_reuse_gap_seconds": ("gap between hits", "#009E73", ":"),
    }
    for name, (label, colour, dashes) in names.items():
        if (counted := durations[name]) is not None:
            upper, counts = np.array(counted["buckets"]).T
            low, high = np.round(np.log2(upper[[0, -1]])).astype(int)
            shares = np.zeros(high - low + 1)
            shares[np.round(np.log2(upper)).astype(int) - low] = 100 * counts / counted["count"]
            edges = 2.0 ** np.arange(low - 1, high + 1)
            axes.stairs(shares, edges, color=colour, ls=dashes, lw=1.8, label=label)
    axes.set(title="Cached blocks, by powers of two", xlabel="seconds", ylabel="% of blocks or gaps")
    axes.set(xscale="log")
    axes.set_xlim(left=max(axes.get_xlim()[0], 1e-3))  # gaps within a step have no length
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.0, 1.25 * max(1.0, axes.get_ylim()[1]))
    axes.legend(loc="upper left")
    return axes
