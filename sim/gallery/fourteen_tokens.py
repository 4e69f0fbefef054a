"""The 14-token example at scale: the hit rates of a sweep on the curve that arithmetic gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from sim.explore.two_prompts import hit_length
from sim.plots import BLUE, GREY, ORANGE, SOFT, drawn
from sim.sweeps.grid import points
from sim.sweeps.schema import load_sweep
from workloads import FourteenTokens

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens: the labels of the axis
METRIC = "prefix_cache_hit_rate"


def draw(folder: Path) -> Path:
    """Draw hit_rate.png from the sweep in `folder`, and return its path.

    Raises InputError, one line, or OSError where there is no sweep.
    """
    load = next(points(load_sweep(folder / "sweep.yaml"))).scenario.workload
    assert isinstance(load, FourteenTokens)
    found = pd.read_csv(folder / "curves.csv").query("metric == @METRIC")
    rates = dict(zip(found["engine.block_size"], found["mean"], strict=True))
    with drawn(folder / "hit_rate.png", (8.4, 4.3)) as figure:
        hit_rates(figure.subplots(), load, rates)
    return folder / "hit_rate.png"


def closed_form(load: FourteenTokens, block_size: int) -> float:
    """The hit rate of `load` in a pool that never evicts: all requests but the first hit the same tokens."""
    hit = hit_length(load.shared_len, load.prompt_len, block_size)
    return hit / load.prompt_len * (1 - 1 / load.num_requests)


def hit_rates(axes: Axes, load: FourteenTokens, rates: Mapping[int, float]) -> Axes:
    """Simulated hit rates by block size, as shares, over those of the closed form at every size."""
    sizes = range(1, load.shared_len + 25)
    exact = [100 * closed_form(load, size) for size in sizes]
    shared = 100 * load.shared_len / load.prompt_len
    axes.axhline(shared, color=GREY, ls=":", lw=1.2)
    axes.annotate(f"all that is shared: {shared:.1f} %", (1, shared), (0, 4), color=SOFT,
                  textcoords="offset points", fontsize=8)  # fmt: skip
    axes.plot(sizes, exact, color=ORANGE, lw=1.2, label="closed form: full blocks of what is shared")
    simulated = [100 * rate for rate in rates.values()]
    axes.plot(list(rates), simulated, "o", color=BLUE, ms=6, label="simulated", clip_on=False)
    told = {100: ((0, 8), "left"), 512: ((-9, -3), "right"), 1024: ((-9, 6), "right")}
    for size, (offset, side) in told.items():
        rate = 100 * rates[size]
        axes.annotate(f"blocks of {size:,}: {rate:.1f} %", (size, rate), offset, ha=side,
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set(xscale="log", ylim=(0, 80), xlabel="block size (tokens)", ylabel="hit rate (%)")
    axes.set_title(
        f"{load.num_requests:,} prompts of {load.prompt_len:,} tokens, the first {load.shared_len:,} the same"
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.legend(loc="lower left")
    return axes
