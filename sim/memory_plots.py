"""The figure of what KV memory holds, of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from sim.plots import BLUE, GREY, ORANGE, Parts

STATES: Parts = {
    "token_states": ("token states", BLUE),
    "reserved": ("reserved", ORANGE),
    "internal_fragmentation": ("internal fragmentation", "#CC79A7"),
    "external_fragmentation": ("external fragmentation", GREY),
    "free": ("free", "#e3e3e3"),
}


def memory_by_state(axes: Axes, shares: Mapping[str, Mapping[str, float]]) -> Axes:
    """Shares of the KV memory by state, in %, a bar for each run, by label; kv_memory_shares of a summary.

    States that a run's shares lack count as none.
    """
    labels = list(shares)
    low = [0.0] * len(labels)
    for name, (label, colour) in STATES.items():
        parts = [100 * shares[run].get(name, 0.0) for run in labels]
        axes.barh(labels, parts, left=low, color=colour, label=label, height=0.62)
        for place, (start, part) in enumerate(zip(low, parts, strict=True)):
            if part >= 4.0:
                ink = "black" if name in ("free", "reserved") else "white"
                where: dict[str, Any] = {"ha": "center", "va": "center", "color": ink, "fontsize": 8}
                axes.text(start + part / 2, place, f"{part:.1f}", **where)
        low = [start + part for start, part in zip(low, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(title="KV memory by what it holds", xlabel="% of the slots", xlim=(0, 100))
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=len(STATES))
    return axes
