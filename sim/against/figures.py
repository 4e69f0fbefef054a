"""The comparison drawn: distributions, the same requests, the engine over time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sim.against.beside import Comparison
from sim.against.sides import Floats
from sim.plots import BLUE, GREY, ORANGE, drawn

SPANS = 200
Draw = Callable[[Axes], object]
LEVELS = {  # of Curves: title, unit, factor
    "kv_cache_usage_perc": ("KV use", "%", 100.0),
    "running": ("Requests running", "requests", 1.0),
    "waiting": ("Requests waiting", "requests", 1.0),
}


def against_figure(comparison: Comparison, path: Path) -> None:
    """Write all panels as a PNG."""
    panels = draws(comparison)
    mean = (comparison.summary[side]["mean_ttft_ms"] for side in ("measured", "simulated"))
    rate = (100 * comparison.summary[side]["prefix_cache_hit_rate"] for side in ("measured", "simulated"))
    title = (
        f"{Path(comparison.summary['recording']).name}, measured and simulated: "
        f"mean TTFT {' and '.join(f'{one:,.1f}' for one in mean)} ms, "
        f"hit rate {' and '.join(f'{one:.1f}' for one in rate)} %"
    )
    with drawn(path, (11.0, 6.4)) as figure:
        axes = figure.subplots(2, 3)
        for place, draw in zip(axes.flat, panels.values(), strict=False):
            draw(place)
        for place in axes.flat[len(panels) :]:
            place.set_axis_off()
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)


def draws(comparison: Comparison) -> dict[str, Draw]:
    """What draws each panel, by its name."""
    measured, simulated = comparison.measured, comparison.simulated
    panels: dict[str, Draw] = {
        "against-ttft": lambda axes: cdfs(axes, "Time to first token", measured.ttft_ms, simulated.ttft_ms),
        "against-e2el": lambda axes: cdfs(axes, "End-to-end latency", measured.e2el_ms, simulated.e2el_ms),
    }
    if comparison.same:
        panels["against-scatter"] = lambda axes: scatter(axes, measured.ttft_ms, simulated.ttft_ms)
    for name, (title, unit, scale) in LEVELS.items():
        panels[f"against-{name}"] = functools.partial(
            over_time, comparison=comparison, name=name, title=title, unit=unit, scale=scale
        )
    return panels


def cdfs(axes: Axes, title: str, measured_ms: Floats, simulated_ms: Floats) -> Axes:
    """Cumulative distributions, in seconds."""
    levels = np.linspace(0.0, 100.0, 501)
    for values, label, colour, width in sides(measured_ms, simulated_ms):
        axes.plot(np.percentile(values / 1e3, levels), levels, color=colour, lw=width, label=label)
    axes.set(title=title, xlabel="seconds", ylabel="% of requests at or below", ylim=(0, 101))
    axes.set_xlim(left=0.0)
    axes.legend(loc="lower right")
    return axes


def scatter(axes: Axes, measured_ms: Floats, simulated_ms: Floats) -> Axes:
    """Each request's TTFT, simulated over measured, in seconds."""
    top = 1.05 * max(measured_ms.max(), simulated_ms.max()) / 1e3
    axes.plot([0.0, top], [0.0, top], color=GREY, lw=1.0)
    axes.plot(measured_ms / 1e3, simulated_ms / 1e3, ".", color=BLUE, ms=5.0, alpha=0.6, mew=0.0)
    axes.set(xlim=(0.0, top), ylim=(0.0, top), title="TTFT of each request")
    axes.set(xlabel="measured, s", ylabel="simulated, s")
    return axes


def over_time(axes: Axes, comparison: Comparison, name: str, title: str, unit: str, scale: float) -> Axes:
    """One level of the engine, in means over spans of time, the simulated over the measured."""
    time = comparison.measured_curves.time
    each = len(time) // SPANS
    both = (
        scale * getattr(curves, name)[: each * SPANS].reshape(SPANS, each).mean(axis=1)
        for curves in (comparison.measured_curves, comparison.simulated_curves)
    )
    begin = time[: each * SPANS : each]
    top = 1.0
    for values, label, colour, width in sides(*both):
        axes.plot(begin, values, color=colour, lw=width, label=label, drawstyle="steps-post")
        top = max(top, float(values.max()))
    axes.set(title=title, xlabel="seconds since the first request", ylabel=unit)
    axes.set_xlim(0.0, time[-1])
    axes.set_ylim(0.0, 1.25 * top)  # room for the legend
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="upper right", ncols=2)
    return axes


def sides(measured: Floats, simulated: Floats) -> list[tuple[Floats, str, str, float]]:
    """Values, label, colour and line width of both: the measured one lies below."""
    return [(measured, "measured", ORANGE, 2.6), (simulated, "simulated", BLUE, 1.2)]
