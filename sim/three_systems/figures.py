"""The figures of results/three_systems.md. Each panel is a function that draws on the Axes it is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from sim.plots import BLUE, GREY, INK, ORANGE, drawn
from sim.three_systems.means import Means

STYLES = {  # colour, marker and its size, line: what lies on one line stays to be seen
    "none": (GREY, "x", 5.0, "-"),
    "apc": (ORANGE, "o", 7.5, "-"),
    "radix": (BLUE, "s", 4.5, "-"),
    "radix lpm": (INK, ".", 3.0, ":"),
    "paged": ("#009E73", "^", 4.5, "-"),
}
DECADE = 10.0  # largest over smallest, from which on a scale is logarithmic
COLUMNS = 3
METADATA_OF = ("system prompts", "chat", "long answers")


def write_figures(found: Means, folder: Path) -> list[str]:
    """Write the figures as PNGs into `folder`; returns their names."""
    draws: dict[str, tuple[list[str], Callable[[Axes, Means, str], None]]] = {
        "hit_rate": (found.loads, hit_rate),
        "lost_tail": ([load for load in found.loads if load != "no sharing"], lost_tail),
        "metadata": ([load for load in METADATA_OF if load in found.loads], metadata),
        "ttft": (found.loads, ttft),
    }
    for name, (loads, draw) in draws.items():
        _panels(found, loads, draw, folder / f"{name}.png")
    return [f"{name}.png" for name in draws]


def hit_rate(axes: Axes, found: Means, load: str) -> None:
    """Hit rate over block size."""
    _curves(axes, found, load, "prefix_cache_hit_rate", 100.0)
    axes.set_ylabel("hit rate (%)")
    axes.set_ylim(-3.0, 100.0)


def lost_tail(axes: Axes, found: Means, load: str) -> None:
    """Tokens of a shared part block for each request, beside half a block less half a token."""
    sizes = [size for size in found.block_sizes if size > 1]
    axes.plot(sizes, [(size - 1) / 2 for size in sizes], color=GREY, lw=1.0, ls="--", label="(B - 1) / 2")
    for cache in ("apc", "radix", "radix lpm"):
        lost = [
            found.at(load, cache, "lost_tail_tokens", size) / found.at(load, cache, "completed", size)
            for size in sizes
        ]
        _curve(axes, cache, sizes, [value or math.nan for value in lost])
    axes.set_ylabel("tokens lost a request")
    axes.set_yscale("log")


def metadata(axes: Axes, found: Means, load: str) -> None:
    """Metadata over block size."""
    _curves(axes, found, load, "metadata_entries_per_1k_slots")
    axes.set_ylabel("entries per 1,000 slots")
    axes.set_yscale("log")


def ttft(axes: Axes, found: Means, load: str) -> None:
    """Mean TTFT over block size, logarithmic where it spans a decade."""
    _curves(axes, found, load, "mean_ttft_ms")
    axes.set_ylabel("mean TTFT (ms)")
    low, high = axes.dataLim.intervaly
    if high > DECADE * low:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0.0, 1.1 * high)


def _panels(found: Means, loads: list[str], draw: Callable[[Axes, Means, str], None], path: Path) -> None:
    rows = math.ceil(len(loads) / COLUMNS)
    with drawn(path, (9.0, 0.5 + 2.5 * rows)) as figure:
        grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
        for axes, load in zip(grid, loads, strict=False):
            draw(axes, found, load)
            axes.set_title(load)
            _block_sizes(axes, found.block_sizes)
        for axes in grid[len(loads) :]:
            axes.set_axis_off()
        entries: dict[str, object] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(list(entries.values()), list(entries), loc="outside upper left", ncols=len(entries))  # type: ignore[call-overload]


def _curves(axes: Axes, found: Means, load: str, metric: str, scale: float = 1.0) -> None:
    for cache in found.caches:
        values = [scale * found.at(load, cache, metric, size) for size in found.block_sizes]
        if not all(map(math.isnan, values)):
            _curve(axes, cache, found.block_sizes, values)


def _curve(axes: Axes, cache: str, sizes: list[int], values: list[float]) -> None:
    colour, marker, size, line = STYLES[cache]
    inside = "none" if cache == "apc" else colour
    axes.plot(sizes, values, color=colour, marker=marker, ms=size, mfc=inside, ls=line, lw=1.4, label=cache)


def _block_sizes(axes: Axes, sizes: list[int]) -> None:
    axes.set_xlabel("block size (tokens)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=7.5)
    axes.xaxis.set_minor_locator(NullLocator())
