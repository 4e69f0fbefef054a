"""The figure of a sweep: curves over an axis of numbers, or a heat map over two.

An axis of words (true and false, labels) gives one curve each, so that rate with caching on and off
is two curves and not a map. Where there are no numbers, the first axis of words lies along the bottom.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from sim.out_file import replace_bytes
from sim.plots import BLUE, ORANGE, drawn
from sim.sweeps.axes import Axis
from sim.sweeps.table import PointBands, Results, by_point, label_of_metric, scale_of

CURVES, HEATMAP = "curves.png", "heatmap.png"
MOST_CURVES = 8
MOST_PANELS = 4
DECADES = 100.0  # largest over smallest, from which on a scale is logarithmic
TICKS = 12  # labels along an axis; more would touch
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#000000", "#56B4E9", "#D55E00", "#F0E442")
MARKERS = "osD^v<>P"


class Shape(NamedTuple):
    """Which axes lie where, by number: along the bottom, up the side (of a map), and one curve each."""

    bottom: int
    side: int | None
    curves: list[int]


def shape_of(axes: Sequence[Axis]) -> Shape | None:
    """How a sweep is drawn; None where it has more dimensions than a figure."""
    numbers = [i for i, axis in enumerate(axes) if axis.numbers is not None and len(axis.steps) > 1]
    words = [i for i in range(len(axes)) if i not in numbers and len(axes[i].steps) > 1]
    if not numbers:
        bottom, *rest = words or [0]
        shape = Shape(bottom, None, rest)
    elif len(numbers) == 1:
        shape = Shape(numbers[0], None, words)
    elif len(numbers) == 2 and not words:
        shape = Shape(numbers[0], numbers[1], [])
    else:
        return None
    return shape if math.prod(len(axes[i].steps) for i in shape.curves) <= MOST_CURVES else None


def write_figure(results: Results, folder: Path) -> bool:
    """Write the figure of a sweep, curves.png or heatmap.png; False where there is none to draw."""
    found = figure_of(results)
    if found is None:
        return False
    name, picture = found
    replace_bytes(folder / name, picture)
    return True


def figure_of(results: Results) -> tuple[str, bytes] | None:
    """The figure's file name and PNG; None where there is none to draw."""
    shape = shape_of(results.axes)
    if shape is None or all(run.error for run in results.runs):
        return None
    picture = io.BytesIO()
    panels = results.metrics[:MOST_PANELS]
    if shape.side is None:
        with drawn(picture, (7.2, 0.9 + 2.3 * len(panels))) as figure:
            _curves(figure, results, shape, panels)
        return CURVES, picture.getvalue()
    with drawn(picture, (1.0 + 4.6 * min(len(panels), 2), 0.6 + 3.6 * math.ceil(len(panels) / 2))) as figure:
        _maps(figure, results, shape, panels)
    return HEATMAP, picture.getvalue()


def _curves(figure: Figure, results: Results, shape: Shape, panels: list[str]) -> None:
    axes = [row[0] for row in figure.subplots(len(panels), 1, sharex=True, squeeze=False)]
    places = _places(results.axes)
    grouped: dict[tuple[int, ...], list[tuple[int, PointBands]]] = {}
    for point in by_point(results):
        place = places(point.number)
        grouped.setdefault(tuple(place[i] for i in shape.curves), []).append((place[shape.bottom], point))
    bottom = results.axes[shape.bottom]
    across = bottom.numbers or list(range(len(bottom.steps)))
    for (steps, line), colour, marker in zip(sorted(grouped.items()), COLOURS, MARKERS, strict=False):
        name = ", ".join(results.axes[i].steps[k][0].label for i, k in zip(shape.curves, steps, strict=True))
        line.sort(key=lambda one: across[one[0]])
        x = np.array([across[step] for step, _ in line], dtype=np.float64)
        for panel, metric in zip(axes, panels, strict=True):
            points, joined = [point for _, point in line], bottom.numbers is not None
            curve(panel, x, points, metric, colour, marker, name, joined=joined)
    for panel, metric in zip(axes, panels, strict=True):
        panel.set_title(label_of_metric(metric))
        _upright(panel, [scale_of(metric) * point.bands[metric].mean for point in by_point(results)])
        if metric == panels[0] and shape.curves:
            panel.legend(title=" and ".join(results.axes[i].name for i in shape.curves), fontsize=8)
    _ticks(axes[-1], bottom, across)
    _head(figure, results, "mean and 95 % band", "hollow")


def curve(
    panel: Axes,
    x: np.ndarray,
    points: Sequence[PointBands],
    metric: str,
    colour: str,
    marker: str,
    name: str,
    *,
    joined: bool,
) -> None:
    """Draw a metric's means, its band, and hollow marks where the engine did not keep up."""
    bands = [point.bands[metric] for point in points]
    mean, low, high, _ = scale_of(metric) * np.array(bands).T
    panel.plot(x, mean, marker, ls="-" if joined else "", color=colour, lw=1.6, ms=4, label=name or None)
    if joined:
        panel.fill_between(x, low, high, color=colour, alpha=0.25, lw=0)
    else:
        panel.errorbar(x, mean, [mean - low, high - mean], fmt="none", ecolor=colour, capsize=4)
    behind = np.array([point.saturation != "STABLE" for point in points])
    panel.plot(x[behind], mean[behind], marker, color=colour, ms=5, mfc="white")


def _maps(figure: Figure, results: Results, shape: Shape, panels: list[str]) -> None:
    assert shape.side is not None
    bottom, side = results.axes[shape.bottom], results.axes[shape.side]
    places = _places(results.axes)
    columns = min(len(panels), 2)
    grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False)
    points = by_point(results)
    for panel, metric in itertools.zip_longest(grid.flat, panels):
        if metric is None:
            panel.set_visible(False)
            continue
        values = np.full((len(side.steps), len(bottom.steps)), np.nan)
        for point in points:
            place = places(point.number)
            values[place[shape.side], place[shape.bottom]] = scale_of(metric) * point.bands[metric].mean
        known = values[~np.isnan(values)]
        norm = "log" if len(known) and _wide(known) else "linear"
        image = panel.imshow(values, aspect="auto", origin="lower", cmap="cividis", norm=norm)
        figure.colorbar(image, ax=panel)
        for point in points:
            if point.saturation not in ("STABLE", ""):
                place = places(point.number)
                for colour, width in (("black", 3.0), ("white", 1.4)):  # seen on light and dark
                    panel.plot(place[shape.bottom], place[shape.side], "x", color=colour, ms=5, mew=width)
        panel.grid(False)
        panel.set(title=label_of_metric(metric), xlabel=bottom.name, ylabel=side.name)
        for axis, steps in ((panel.xaxis, bottom.steps), (panel.yaxis, side.steps)):
            every = math.ceil(len(steps) / TICKS)
            axis.set_major_locator(FixedLocator(range(0, len(steps), every)))
            axis.set_ticklabels([step[0].label for step in steps[::every]])
    _head(figure, results, "mean", "crossed")


def _places(axes: Sequence[Axis]) -> Callable[[int], tuple[int, ...]]:
    """From a point's number to its place along each axis."""
    sizes = tuple(len(axis.steps) for axis in axes)
    return lambda number: tuple(int(place) for place in np.unravel_index(number, sizes))


def _ticks(panel: Axes, axis: Axis, across: Sequence[float]) -> None:
    """Label the bottom; on a logarithmic axis where the values are spread like that."""
    panel.set_xlabel(axis.name)
    every = math.ceil(len(across) / TICKS)
    if axis.numbers and _grows(sorted(across)):
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_minor_formatter(NullFormatter())
    elif axis.numbers:
        return
    panel.xaxis.set_major_locator(FixedLocator(list(across[::every])))
    panel.set_xticks(list(across[::every]), [step[0].label for step in axis.steps[::every]])


def _grows(values: Sequence[float]) -> bool:
    """Whether the gaps between values grow with them, as between powers."""
    return len(values) > 2 and values[0] > 0 and values[-1] - values[-2] > 5 * (values[1] - values[0])


def _wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) > DECADES


def _upright(panel: Axes, means: Sequence[float]) -> None:
    """From zero, but where that would flatten what differs; logarithmic where it spans decades."""
    known = [mean for mean in means if not math.isnan(mean)]
    if not known:
        return
    low, high = min(known), max(known)
    if _wide(known):
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
    elif low < high / 2:
        panel.set_ylim(bottom=0.0)
    if panel.get_ylim()[1] >= 1e4:
        panel.yaxis.set_major_formatter("{x:,.0f}")


def _head(figure: Figure, results: Results, drawn_of_seeds: str, marked: str) -> None:
    seeds = len({run.seed for run in results.runs})
    words = [
        f"{results.name}: {drawn_of_seeds} over {seeds} seeds" if seeds > 1 else f"{results.name}: one seed"
    ]
    if any(run.figures.get("saturation", "STABLE") != "STABLE" for run in results.runs):
        words.append(f"{marked}: the engine did not keep up, and TTFT grows with the run")
    figure.suptitle("\n".join(words), x=0.01, ha="left", fontsize=9)
