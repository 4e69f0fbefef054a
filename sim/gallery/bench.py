"""Requests simulated in a second of wall time, beside NVIDIA's Dynamo mocker on the same works."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from sim.plots import BLUE, GREY, drawn

COLOURS = {"prefixsim": BLUE, "Dynamo mocker": GREY}
WORKS = {"S": "10,000 requests, one prefix", "M": "Mooncake's conversation trace"}


def draw(folder: Path) -> Path:
    """Draw requests_per_s.png from bench.csv in `folder`, and return its path. Raises OSError without it."""
    table = pd.read_csv(folder / "bench.csv")
    with drawn(folder / "requests_per_s.png", (8.4, 3.4)) as figure:
        requests_per_second(figure.subplots(), table)
    return folder / "requests_per_s.png"


def requests_per_second(axes: Axes, table: pd.DataFrame) -> Axes:
    """A bar for each simulator and work; the table has a row each, with `requests_per_s`."""
    speed = table.pivot(index=["work", "block_size"], columns="simulator", values="requests_per_s")
    speed = speed.sort_index(ascending=[False, True])
    highest = float(speed.to_numpy().max())
    for number, (simulator, colour) in enumerate(COLOURS.items()):
        for place, rate in enumerate(speed[simulator]):
            at = place + 0.38 * number
            label = simulator if place == 0 else None
            axes.barh(at, rate, 0.36, color=colour, label=label)
            times = f" ({rate / speed['Dynamo mocker'].iloc[place]:.1f} times)" if number == 0 else ""
            axes.text(rate + 0.008 * highest, at, f"{rate:,}{times}", va="center", fontsize=8)
    axes.set_yticks(
        [place + 0.19 for place in range(len(speed))],
        [f"{WORKS[work]}\nblocks of {size}" for work, size in speed.index],
    )
    axes.invert_yaxis()
    axes.set(title="Requests simulated per second of wall time, on one core", xlim=(0, 1.2 * highest))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return axes
