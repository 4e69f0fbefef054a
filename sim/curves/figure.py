"""The figure of a curve: hit rate against capacity."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from operator import mul
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from sim.curves.curve import KNEE
from sim.curves.report import Scale, asked_for
from sim.curves.study import Study
from sim.memory import GIB
from sim.plots import BLUE, GREY, GROUND, INK, ORANGE, drawn

COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MOST_POINTS = 2000  # of a drawn curve: more than a figure has columns
NAME = 0.03  # of the width, which the name of a mark takes


def write_figure(studies: Sequence[Study], scale: Scale, path: Path | io.BytesIO) -> None:
    """Write the curves as a PNG: one against its blocks, those of several block sizes against tokens."""
    with drawn(path, (8.4, 4.8)) as figure:
        draw(figure.subplots(), studies, scale)


def draw(axes: Axes, studies: Sequence[Study], scale: Scale) -> None:
    """The curves with their names, and the marks of a single one."""
    single = len(studies) == 1
    for study, colour in zip(studies, COLOURS * len(studies), strict=False):
        draw_curve(axes, study, scale, colour, single=single)
    name = Path(studies[0].load.name).name
    axes.set(xscale="log", ylabel="hit rate (%)", title=f"{name}: hit rate by pool capacity")
    axes.set_xlabel(f"blocks of {studies[0].curve.block_size} tokens" if single else "tokens in the pool")
    highest = max(100 * one.curve.hit_rate(one.curve.ceiling) for one in studies)
    axes.set_ylim(0.0, (1.4 if single else 1.1) * highest or 1.0)  # room for the names of the marks
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= 100])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if single:
        _draw_marks(axes, studies[0], scale)
    axes.legend(loc="lower right", frameon=single, facecolor=GROUND)
    if scale.kv_bytes_per_token is not None:
        unit = (studies[0].curve.block_size if single else 1) * scale.kv_bytes_per_token / GIB
        weight = axes.secondary_xaxis("top", functions=(partial(mul, unit), partial(mul, 1 / unit)))
        weight.set_xlabel("GiB of KV cache on a GPU")
        weight.xaxis.set_major_formatter("{x:,g}")


def draw_curve(axes: Axes, study: Study, scale: Scale, colour: str, *, single: bool) -> None:
    """One curve, its ceiling and knee, and the timed runs where there are any."""
    curve = study.curve

    def place(usable: float) -> float:
        return usable + scale.null_block if single else usable * curve.block_size

    last = max(len(curve.hits) - 1, 1)
    some = np.unique(np.geomspace(max(last / 4096, 1), 1.5 * last, MOST_POINTS).astype(np.int64))
    rate = 100 * curve.hit_tokens(some) / curve.prompt_tokens
    label = "one pass, LRU" if single else f"blocks of {curve.block_size}"
    axes.plot([place(one) for one in some], rate, color=colour, lw=1.8, label=label)
    ceiling = 100 * curve.hit_rate(curve.ceiling)
    axes.axhline(ceiling, color=colour if not single else GREY, ls=":", lw=1.2)
    if curve.knee is not None:
        at = 100 * curve.hit_rate(int(curve.hit_tokens(np.array([curve.knee]))[0]))
        knee = f"knee: {KNEE} % of the ceiling" if single else None
        axes.plot([place(curve.knee)], [at], "o", color=colour, ms=7, label=knee)
    if study.timed:
        shade = ORANGE if single else colour
        blocks = np.array([point.blocks for point in study.timed])
        rates = [100 * point.hit_rate for point in study.timed]
        axes.plot([place(one) for one in blocks], rates, "s--", color=shade, ms=5, lw=1.2, label="timed runs")
        within = np.union1d(some[(some > blocks[0]) & (some < blocks[-1])], blocks)
        between = np.interp(np.log(within), np.log(blocks), rates)
        above = 100 * curve.hit_tokens(within) / curve.prompt_tokens
        axes.fill_between([place(one) for one in within], between, above, color=shade, alpha=0.2, lw=0)


def sides_of(places: Sequence[float], span: float) -> list[int]:
    """On which side of each mark its name stands, -1 the left; `places` rise, `span` is the axis' logarithm.

    It is the left, unless the mark before, or its name, stands there and the right is free.
    """
    sides: list[int] = []
    for i, place in enumerate(places):
        room = np.log(place / places[i - 1]) / (NAME * span)  # names that fit between it and the one before
        crowded = i > 0 and (room < 1 if sides[-1] < 0 else 1 <= room < 2)
        sides.append(1 if crowded else -1)
    return sides


def _draw_marks(axes: Axes, study: Study, scale: Scale) -> None:
    """Ceiling, working sets, the scenario's pool, and FIFO and Belady at the capacities asked for."""
    curve = study.curve
    marks = {f"used in {seconds // 60} min": blocks for seconds, blocks in curve.working_set.items()}
    marks["all blocks"] = curve.distinct_blocks
    if scale.pool is not None and scale.pool[0] == curve.block_size:
        marks["the scenario's pool"] = scale.pool[1]
    places = sorted((scale.blocks(usable), label) for label, usable in marks.items())
    for x, _ in places:
        axes.axvline(x, color=GREY, lw=0.9, ls="--")
    left, right = axes.get_xlim()
    sides = sides_of([x for x, _ in places], np.log(right / left))
    for (x, label), side in zip(places, sides, strict=True):
        axes.annotate(
            label, (x, 0.98), (3 * side, 0), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
            rotation=90, va="top", ha="left" if side > 0 else "right", fontsize=7.5,
        )  # fmt: skip
    ceiling = 100 * curve.hit_rate(curve.ceiling)
    axes.annotate(
        f"ceiling {ceiling:.1f} %", (0.01, ceiling), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    if study.capacities:
        rows = asked_for(study, scale)
        for column, label, marker in (("fifo_hit_rate", "FIFO", "v"), ("belady_hit_rate", "Belady", "^")):
            axes.plot(rows["blocks"], 100 * rows[column], marker, color=INK, ms=6, label=label)
