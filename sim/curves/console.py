"""A study as lines for the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sim.curves.curve import KNEE, Curve
from sim.curves.report import Scale, asked_for, assumptions, points, pool, timed_rows
from sim.curves.study import Study

WIDTH = 76
SHOWN = 12  # capacities, where none were asked for


def lines(study: Study, scale: Scale) -> Iterator[tuple[str, str]]:
    """The console block as (style, text) lines."""
    curve = study.curve
    yield "bold", " Hit Rate at Every Capacity ".center(WIDTH, "=")
    yield "", f"{study.load.name}: blocks of {curve.block_size:,} tokens"
    refused = f"; {curve.num_refused:,} refused by max_model_len" if curve.num_refused else ""
    yield _line("Requests:", f"{curve.num_requests:,} with {curve.prompt_tokens:,} prompt tokens{refused}")
    yield _line("Ceiling:", f"{100 * curve.hit_rate(curve.ceiling):.2f} %, {curve.ceiling:,} tokens hit")
    if curve.knee is not None:
        yield _line(f"Knee ({KNEE} % of it):", _size(curve, curve.knee, scale))
    for seconds, blocks in curve.working_set.items():
        yield _line(f"Working set of {seconds // 60} min:", _size(curve, blocks, scale))
    yield _line("All different blocks:", _size(curve, curve.distinct_blocks, scale))
    if (usable := pool(study, scale)) is not None:
        rate = curve.hit_rate(int(curve.hit_tokens(np.array([usable]))[0]))
        yield _line("The scenario's pool:", f"{_size(curve, usable, scale)}: {100 * rate:.2f} %")
    yield from _rows(_shown(study, scale))
    if study.timed:
        rows = timed_rows(study, scale)
        yield "cyan", " Timed runs ".center(WIDTH, "-")
        shown = rows[
            ["blocks", "curve_hit_rate", "hit_rate", "gap", "num_preemptions", "failed", "saturation"]
        ]
        yield from _rows(shown)
        yield _line("Gap, mean and max (points):", f"{rows['gap'].mean():.2f}, {rows['gap'].max():.2f}")
    yield "bold", "=" * WIDTH
    for text in assumptions(study, scale):
        yield "dim", f"assumed: {text}"


def _shown(study: Study, scale: Scale) -> pd.DataFrame:
    """What the console shows: what was asked for, or some capacities over the curve."""
    if study.capacities:
        return asked_for(study, scale).drop(columns=["fifo_hit_tokens", "belady_hit_tokens"])
    last = len(study.curve.hits) - 1
    some = np.unique(np.geomspace(max(last / 1024, 1), max(last, 1), SHOWN).round().astype(np.int64))
    return points(study.curve, some, scale)


def _size(curve: Curve, usable: int, scale: Scale) -> str:
    gib = scale.gib(usable, curve.block_size)
    weight = "" if gib is None else f", {gib:,.1f} GiB"
    return f"{scale.blocks(usable):,} blocks, {usable * curve.block_size:,} tokens{weight}"


def _line(label: str, text: str) -> tuple[str, str]:
    return "", f"{label:<28}{text}"


def _rows(rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """A table of columns, each as wide as it needs."""
    cells = [
        [str(name).replace("_", " "), *(_cell(str(name), value) for value in rows[name].tolist())]
        for name in rows
    ]
    widths = [max(map(len, column)) for column in cells]
    for number, row in enumerate(zip(*cells, strict=True)):
        text = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "cyan" if number == 0 else "", text


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if name.endswith("rate") else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
