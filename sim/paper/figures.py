"""The figures of results/paper.md. Each panel is a function that draws on the Axes it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from sim.memory_plots import memory_by_state
from sim.paper.published import BEST_BLOCK_SIZES, MEMORY, MEMORY_PAGED, PREFIX_RATIOS
from sim.paper.rates import ratio
from sim.plots import BLUE, GREY, ORANGE

Row = dict[str, Any]
Draw = Callable[[Axes], object]

NAMES = {
    "paged": "paged, prefix reserved",
    "oracle": "contiguous, oracle",
    "apc": "apc",
    "radix": "radix",
    "pow2": "contiguous, pow2",
    "max": "contiguous, max",
}
COLOURS = {"paged": BLUE, "oracle": "#009E73", "apc": ORANGE, "radix": "#CC79A7"}


def figures(tables: Mapping[str, Sequence[Row]]) -> dict[str, tuple[Draw, tuple[float, float]]]:
    """By name: what draws it, and its size in inches."""
    latency = tables["prefix_latency"]
    return {
        "latency_80": (lambda axes: _latency(axes, latency, 80), (6.4, 3.6)),
        "latency_341": (lambda axes: _latency(axes, latency, 341), (6.4, 3.6)),
        "ratio": (lambda axes: _ratios(axes, tables["prefix_rates"]), (6.4, 3.6)),
        "memory": (lambda axes: memory_by_state(axes, _memory_bars(tables["memory"])), (8.4, 4.2)),
        "sharing": (lambda axes: _sharing(axes, tables["sharing"]), (7.2, 3.6)),
        "block_sizes": (lambda axes: _block_sizes(axes, tables["block_sizes"]), (6.4, 3.6)),
    }


def _latency(axes: Axes, rows: Sequence[Row], prefix_len: int) -> None:
    for system, colour in COLOURS.items():
        points = [
            (row["rate"], row["normalized_latency_s"])
            for row in rows
            if (row["prefix_len"], row["system"], row["step_time"]) == (prefix_len, system, "engine of 2023")
        ]
        if points:
            rates, latencies = zip(*sorted(points), strict=True)
            axes.plot(rates, latencies, color=colour, marker="o", ms=3, lw=1.5, label=NAMES[system])
    axes.set(title=f"A shared prefix of {prefix_len} tokens", xlabel="requests per second")
    axes.set(ylabel="s per token", xlim=(0, None), ylim=(0, 1))
    axes.legend(loc="upper center")


def _ratios(axes: Axes, rows: Sequence[Row]) -> None:
    for (prefix_len, published), colour in zip(PREFIX_RATIOS.items(), (ORANGE, BLUE), strict=True):
        bounds = sorted({row["bound_s_per_token"] for row in rows})
        found = [ratio(rows, prefix_len, bound) for bound in bounds]
        axes.plot(bounds, found, color=colour, marker="o", ms=3, lw=1.5, label=f"{prefix_len} tokens")
        axes.axhline(published, color=colour, ls="--", lw=1)
        axes.axhspan(0.85 * published, 1.15 * published, color=colour, alpha=0.12, lw=0)
    axes.set(title="Highest rate of paged over contiguous (oracle); dashed: published, band: 15 %")
    axes.set(xlabel="bound on mean normalised latency, s per token", ylabel="ratio", xscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=1.0)
    axes.legend(loc="upper left")


def _memory_bars(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    names = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation")
    bars = {}
    for system in ("max", "pow2", "oracle", "paged", "apc"):
        row = next(row for row in rows if (row["data"], row["system"]) == ("sharegpt", system))
        bars[NAMES[system].split(", prefix")[0]] = {name: row[name] for name in (*names, "free")}
        if system in MEMORY:
            bars[f"  published, {system}"] = dict(zip(names, (x / 100 for x in MEMORY[system]), strict=True))
        elif system == "paged":
            bars["  published, vLLM"] = {"token_states": MEMORY_PAGED / 100}
    return bars


def _sharing(axes: Axes, rows: Sequence[Row]) -> None:
    labels = [f"{row['data']}\n{row['way']} {row['sequences']}" for row in rows]
    places = range(len(rows))
    axes.bar([p - 0.2 for p in places], [row["saved"] for row in rows], 0.4, color=BLUE, label="simulated")
    known = [(p + 0.2, row["published"]) for p, row in zip(places, rows, strict=True) if row["published"]]
    axes.bar([p for p, _ in known], [y for _, y in known], 0.4, color=GREY, label="published")
    axes.set_xticks(list(places), labels, fontsize=6.5)
    axes.set(title="Blocks saved by sharing within a request", ylabel="%")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")


def _block_sizes(axes: Axes, rows: Sequence[Row]) -> None:
    for name, colour in (("sharegpt", BLUE), ("alpaca", ORANGE)):
        own = [row for row in rows if row["data"] == name]
        sizes = [row["block_size"] for row in own]
        latencies = [row["normalized_latency_s"] for row in own]
        axes.plot(sizes, latencies, color=colour, marker="o", ms=3, label=name)
        low, high = BEST_BLOCK_SIZES[name]
        axes.axvspan(low, high, color=colour, alpha=0.12, lw=0)
    axes.set(title="Block size; shaded: best in the paper", xlabel="tokens", ylabel="s per token")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left")
