"""The figure of a sweep: curves over an axis of numbers, or a heat map over two.

An axis of words (true and false, labels) gives one curve each, so that rate with caching on and off
is two curves and not a map. Where there are no numbers, the first axis of words lies along the bottom.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from sim.out_file import replace_bytes
from sim.plots import BLUE, GROUND, INK, ORANGE, SOFT, drawn
from sim.sweeps.axes import Axis, Value, label_of
from sim.sweeps.table import PointBands, Results, by_point, label_of_metric, scale_of

CURVES, HEATMAP = "curves.png", "heatmap.png"
MOST_CURVES = 8
MOST_PANELS = 4
LAYOUTS = {1: ["a"], 2: ["ab"], 3: ["aa", "bc"], 4: ["ab", "cd"]}  # of panels; the first metric comes first
DECADES = 100.0  # largest over smallest, from which on a scale is logarithmic
ROOM = 12  # characters of labels an inch of axis; more would touch
TICKS = 12  # labels along a side of a map
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", INK, "#56B4E9", "#D55E00", "#F0E442")
MARKERS = "osD^v<>P"
HEADING: Any = {"weight": "bold", "size": 12}
AXES = {  # how a field is called along an axis, with its unit; others by their path
    "cluster.replicas": "replicas",
    "cluster.router": "router",
    "engine.block_size": "block size (tokens)",
    "engine.enable_prefix_caching": "prefix caching",
    "engine.max_num_batched_tokens": "largest step (tokens)",
    "engine.num_gpu_blocks": "pool (blocks)",
    "workload.output_len": "answer (tokens)",
    "workload.prefix_len": "shared prefix (tokens)",
    "workload.request_rate": "request rate (requests/s)",
    "workload.session_rate": "session rate (sessions/s)",
    "workload.suffix_len": "own part of a prompt (tokens)",
}


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
        layout = LAYOUTS[len(panels)]
        inches = (9.2, 3.8) if len(panels) == 2 else (8.4, 0.9 + 2.9 * len(layout))
        with drawn(picture, inches) as figure:
            _curves(figure, results, shape, panels)
        return CURVES, picture.getvalue()
    with drawn(picture, (1.0 + 4.6 * min(len(panels), 2), 0.6 + 3.6 * math.ceil(len(panels) / 2))) as figure:
        _maps(figure, results, shape, panels)
    return HEATMAP, picture.getvalue()


def panels_of(results: Results) -> dict[str, Callable[[Axes], None]]:
    """What draws the curves of each metric on Axes, by metric; nothing of a sweep that is no curves."""
    shape = shape_of(results.axes)
    if shape is None or shape.side is not None:
        return {}
    return {name: partial(_panel, results=results, shape=shape, metric=name) for name in results.metrics}


def _curves(figure: Figure, results: Results, shape: Shape, panels: list[str]) -> None:
    mosaic = figure.subplot_mosaic("\n".join(LAYOUTS[len(panels)]))
    for place, metric in zip(sorted(mosaic), panels, strict=True):
        _panel(mosaic[place], results, shape, metric)
    if shape.curves:
        _legend(figure, results)
    else:
        figure.suptitle(_title(results), x=0.01, ha="left", **HEADING)
    _note(figure, results, "Mean and 95 % band", "Hollow")


def _panel(panel: Axes, results: Results, shape: Shape, metric: str) -> None:
    """The curves of a metric."""
    places = _places(results.axes)
    points = by_point(results)
    grouped: dict[tuple[int, ...], list[tuple[int, PointBands]]] = {}
    for point in points:
        place = places(point.number)
        grouped.setdefault(tuple(place[i] for i in shape.curves), []).append((place[shape.bottom], point))
    bottom = results.axes[shape.bottom]
    across = bottom.numbers or list(range(len(bottom.steps)))
    for (steps, line), colour, marker in zip(sorted(grouped.items()), COLOURS, MARKERS, strict=False):
        name = ", ".join(_said(results.axes[i].steps[k][0]) for i, k in zip(shape.curves, steps, strict=True))
        line.sort(key=lambda one: across[one[0]])
        x = np.array([across[step] for step, _ in line], dtype=np.float64)
        joined = bottom.numbers is not None
        curve(panel, x, [point for _, point in line], metric, colour, marker, name, joined=joined)
    panel.set_title(label_of_metric(metric))
    _upright(panel, [scale_of(metric) * point.bands[metric].mean for point in points])
    _ticks(panel, bottom, across)


def _legend(figure: Figure, results: Results) -> None:
    """The curves, above all panels; the figure's title is the legend's."""
    name = name_of_curves(results.axes)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        [Line2D([], [], ls=""), *handles], [f"{name}:", *labels], loc="outside upper left",
        title=_title(results), title_fontproperties=FontProperties(**HEADING), alignment="left",
        ncols=MOST_CURVES // 2 + 1, handlelength=1.6, columnspacing=1.4, borderpad=0.1, borderaxespad=0.5,
    )  # fmt: skip


def name_of_curves(axes: Sequence[Axis]) -> str:
    """What each curve of a sweep is another of; empty where there is one curve."""
    shape = shape_of(axes)
    curves = [] if shape is None else shape.curves
    return " and ".join(label_of_axis(axes[i]).partition(" (")[0] for i in curves)


def label_of_axis(axis: Axis) -> str:
    """How an axis is called beside its values, with its unit."""
    return AXES.get(axis.name, axis.name)


def _said(value: Value) -> str:
    """A value as a reader calls it."""
    switch = isinstance(value.value, bool) and value.label == label_of(value.value)
    return ("off", "on")[bool(value.value)] if switch else value.label


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
    panel.plot(x, mean, marker, ls="-" if joined else "", color=colour, lw=1.8, ms=4.5, label=name or None)
    if joined:
        panel.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
    else:
        panel.errorbar(x, mean, [mean - low, high - mean], fmt="none", ecolor=colour, capsize=4)
    behind = np.array([point.saturation != "STABLE" for point in points])
    panel.plot(x[behind], mean[behind], marker, color=colour, ms=5.5, mew=1.4, mfc=GROUND)


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
        panel.set(title=label_of_metric(metric), xlabel=label_of_axis(bottom), ylabel=label_of_axis(side))
        for axis, steps in ((panel.xaxis, bottom.steps), (panel.yaxis, side.steps)):
            every = math.ceil(len(steps) / TICKS)
            axis.set_major_locator(FixedLocator(range(0, len(steps), every)))
            axis.set_ticklabels([_said(step[0]) for step in steps[::every]])
    figure.suptitle(_title(results), x=0.01, ha="left", **HEADING)
    _note(figure, results, "Mean", "Crossed")


def _places(axes: Sequence[Axis]) -> Callable[[int], tuple[int, ...]]:
    """From a point's number to its place along each axis."""
    sizes = tuple(len(axis.steps) for axis in axes)
    return lambda number: tuple(int(place) for place in np.unravel_index(number, sizes))


def _ticks(panel: Axes, axis: Axis, across: Sequence[float]) -> None:
    """Label the bottom; on a logarithmic axis where the values are spread like that."""
    panel.set_xlabel(label_of_axis(axis))
    if axis.numbers and _grows(sorted(across)):
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_minor_formatter(NullFormatter())
    elif axis.numbers:
        return
    labels = [_said(step[0]) for step in axis.steps]
    crowded = sum(len(label) + 1.5 for label in labels) / (ROOM * _width(panel))
    every = max(math.ceil(crowded), 1) if axis.numbers else math.ceil(len(labels) / TICKS)
    panel.xaxis.set_major_locator(FixedLocator(list(across[::every])))
    panel.set_xticks(list(across[::every]), labels[::every])
    if crowded > every:
        for label in panel.get_xticklabels():
            label.set(rotation=30, ha="right", rotation_mode="anchor")


def _width(panel: Axes) -> float:
    """Inches of the figure that a panel takes."""
    place, figure = panel.get_subplotspec(), panel.figure
    assert place is not None and isinstance(figure, Figure)
    return figure.get_figwidth() * len(place.colspan) / place.get_gridspec().ncols


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


def _title(results: Results) -> str:
    name = results.name.replace("_", " ")
    return name[0].upper() + name[1:]


def _note(figure: Figure, results: Results, drawn_of_seeds: str, marked: str) -> None:
    """Below the figure, how it was drawn."""
    seeds = len({run.seed for run in results.runs})
    words = [f"{drawn_of_seeds} over {seeds} seeds." if seeds > 1 else "One seed."]
    if any(run.figures.get("saturation", "STABLE") != "STABLE" for run in results.runs):
        words.append(f"{marked}: the engine did not keep up, and TTFT grows with the run.")
    figure.supxlabel(" ".join(words), x=0.01, ha="left", fontsize=8, color=SOFT)
