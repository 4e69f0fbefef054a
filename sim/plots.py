"""The figure of a run. Each panel is a function that draws on the Axes it is given.

Figures go through their own Agg canvas, so pyplot's state and the user's backend are left alone,
and the PNG holds no date or version: equal runs give equal bytes with the same matplotlib and Pillow.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from PIL import Image

if TYPE_CHECKING:
    from sim.records import Records
    from sim.simulation import Result

Floats = npt.NDArray[np.float64]

# Okabe and Ito's colours, told apart by every kind of colour vision.
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
BINS = 120
Parts = dict[str, tuple[str, str]]  # by column of the records: label and colour

FATES: Parts = {
    "fate_hit": ("hit", BLUE),
    "fate_evicted": ("evicted", ORANGE),
    "fate_last_token": ("last_token", "#CC79A7"),
    "fate_partial_block": ("partial_block", "#F0E442"),
    "fate_isolated": ("isolated", "#009E73"),
    "fate_cold": ("cold", GREY),
}
TTFT_PARTS: Parts = {
    "front_end_time_ms": ("front end", "#CC79A7"),
    "queue_time_ms": ("queueing", GREY),
    "prefill_time_ms": ("prefill", BLUE),
}
UNCACHED: Parts = {"prompt_len": ("all computed: prefix caching is off", GREY)}
RESERVED: Parts = {
    "num_cached_tokens": ("hit in a reserved prefix", BLUE),
    "prompt_len": ("computed: nothing is looked up", GREY),
}

DPI = 150  # pixels an inch: sharp where a page shows a figure at half of them
# What is read first, what stands around it, the grid, and the ground: colours that nothing else has, so
# that a page can put its own in their place.
INK, SOFT, GRID, GROUND = "#1f2328", "#59636e", "#e3e6ea", "#fefefe"
_ON_A_PAGE = {
    INK: "currentColor",
    SOFT: "var(--soft)",
    GRID: "var(--grid)",
    GROUND: "var(--ground)",
    BLUE.lower(): "var(--blue)",
}

_STYLE: Any = {  # matplotlib types the keys as a Literal
    "font.size": 9.0,
    "text.color": INK,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
}


def run_figure(result: Result, path: Path) -> None:
    """Write the figure of a run as a PNG: TTFT, load, and where the prompt tokens came from."""
    s = result.summary
    start = _first_arrival(result.records)
    edges = np.linspace(0.0, s["duration"] or 1.0, BINS + 1)
    with drawn(path, (10.0, 6.4)) as figure:
        axes = figure.subplot_mosaic([["ttft", "load"], ["tokens", "tokens"]])
        ttft_cdf(axes["ttft"], result.records)
        requests_over_time(axes["load"], result.timeseries, start, edges[-1])
        tokens_over_time(axes["tokens"], result.records, edges, start, prompt_parts(s))
        rate = s["prefix_cache_hit_rate"]
        hits = "no prompt was looked up" if rate is None else f"hit rate {100 * rate:.1f} %"
        figure.suptitle(
            f"{s['name']}: {s['model']} on {s['gpu']}, blocks of {s['block_size']} tokens, "
            f"{s['num_gpu_blocks']:,} blocks; {hits}; {s['saturation']}",
            x=0.01,
            ha="left",
            fontsize=11,
        )


@contextlib.contextmanager
def drawn(path: Path | io.BytesIO, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure to draw on, in the house's style; written as a PNG when the block ends well.

    In 256 colours, each near one that was drawn: enough for lines and bars, in less than half the bytes.
    """
    with mpl.rc_context(rc=mpl.rcParamsDefault), mpl.rc_context(rc=_STYLE):
        figure = Figure(figsize=inches, dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        yield figure
        figure.savefig(pixels := io.BytesIO(), format="rgba", dpi=DPI)
    width, height = canvas.get_width_height()
    picture = Image.frombytes("RGBA", (width, height), pixels.getvalue()).convert("RGB")
    few = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, format="png", optimize=True)


def svg(
    draw: Callable[[Axes], object],
    inches: tuple[float, float],
    name: str,
    margins: tuple[float, float, float, float] | None = None,
) -> str:
    """What `draw` draws, as an SVG element to put into a page beside others of other names.

    Text stays text, the ground is transparent, and the figure takes the page's colours: that of its text,
    and the CSS variables --soft, --grid, --ground and --blue. The ids that remain are this figure's own.
    The axes keep to `margins` (left, bottom, right, top, as shares of the figure), which takes half the
    time of a layout that is computed from every text.
    """
    rules: Any = _STYLE | {"svg.fonttype": "none", "svg.hashsalt": name}
    if margins:
        rules |= {"axes.titley": 1.0}  # nor is the title's place
    with mpl.rc_context(rc=mpl.rcParamsDefault), mpl.rc_context(rc=rules):
        figure = Figure(figsize=inches, layout=None if margins else "constrained")
        if margins:
            figure.subplots_adjust(*margins)
        figure.patch.set_visible(False)
        axes = figure.subplots()
        axes.patch.set_visible(False)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    element = text.getvalue()
    element = element[element.index("<svg") :].strip()
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element).replace("xlink:href", "href")
    element = re.sub(r'<g id="[^"]*"', "<g", element)  # groups that nothing refers to
    for colour, name_there in _ON_A_PAGE.items():
        element = element.replace(colour, name_there)
    return element


def ttft_cdf(axes: Axes, records: Records) -> Axes:
    """Cumulative distribution of TTFT and of its queueing part, in seconds."""
    columns = (("queue_time_ms", "queueing", GREY), ("ttft_ms", "TTFT", BLUE))
    return distributions(axes, ((records.column(name), label, colour) for name, label, colour in columns))


def distributions(axes: Axes, times: Iterable[tuple[Floats, str, str]]) -> Axes:
    """Cumulative distributions of times to the first token: ms, label and colour of each; NaN is left out.

    The arrays are used up.
    """
    levels = np.linspace(0.0, 100.0, 501)
    for values, label, colour in times:
        if np.isnan(values).any():
            values = values[~np.isnan(values)]
        if len(values):
            values /= 1e3
            quantiles = np.percentile(values, levels, overwrite_input=True)
            axes.plot(quantiles, levels, color=colour, label=label, lw=1.8)
    axes.set(title="Time to first token", xlabel="seconds", ylabel="% of requests at or below", ylim=(0, 101))
    axes.set_xlim(left=0.0)
    axes.legend(loc="lower right")
    return axes


def compare_figure(field: str, ttft: dict[str, Floats], path: Path) -> None:
    """Write the figure of a comparison as a PNG: the TTFT, in ms, of the runs with each value of a field."""
    with drawn(path, (7.2, 4.2)) as figure:
        ttft_cdfs(figure.subplots(), ttft).set(title=f"Time to first token by {field}")


def ttft_cdfs(axes: Axes, ttft: dict[str, Floats]) -> Axes:
    """Cumulative distributions of several runs' TTFT, given in ms, by label; NaN is left out.

    In seconds on a logarithmic axis, for caching can change TTFT a hundredfold.
    """
    levels = np.linspace(0.0, 100.0, 501)
    styles = itertools.product(("-", "--", ":", "-."), (BLUE, ORANGE, "#009E73", "#CC79A7", INK))
    for (label, values), (dashes, colour) in zip(ttft.items(), itertools.cycle(styles), strict=False):
        values = values[~np.isnan(values)]
        if len(values):
            quantiles = np.percentile(values / 1e3, levels)
            axes.plot(quantiles, levels, color=colour, ls=dashes, label=label, lw=1.8)
    axes.set(xlabel="seconds", ylabel="% of requests at or below", ylim=(0, 101), xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="lower right")
    return axes


def requests_over_time(axes: Axes, series: dict[str, Floats], start: float, end: float) -> Axes:
    """Requests waiting and running, from `start` on, over `end` seconds; means of at most 2 * BINS spans."""
    samples = max(1, len(series["time"]) // (2 * BINS))  # to a span
    time = series["time"][samples - 1 :: samples] - start
    running, waiting = (
        series[f"num_requests_{state}"][: len(time) * samples].reshape(-1, samples).mean(axis=1)
        for state in ("running", "waiting")
    )
    axes.plot(time, running, color=BLUE, lw=1.5, label="running", drawstyle="steps-pre")
    axes.plot(time, waiting, color=ORANGE, lw=1.5, ls="--", label="waiting", drawstyle="steps-pre")
    axes.set(title="Requests in the scheduler", xlabel="simulated seconds", ylabel="requests")
    axes.set_xlim(0.0, end)
    axes.set_ylim(0.0, 1.2 * max(running.max(initial=1), waiting.max(initial=1)))
    axes.legend(loc="upper right", ncols=2)
    return axes


def prompt_parts(summary: Mapping[str, Any]) -> Parts:
    """What a run knows of where its prompt tokens went."""
    if summary["token_fates"] is not None:
        return FATES
    return RESERVED if summary["prefix_cache_hits"] else UNCACHED


def tokens_over_time(axes: Axes, records: Records, edges: Floats, start: float, parts: Parts) -> Axes:
    """Prompt tokens a second, stacked by their parts, by the time of first admission.

    `prompt_len`, where it stands last, is what the parts before it leave.
    """
    tokens = np.zeros((len(parts), len(edges) - 1))
    for scheduled, *columns in _ran(records, "scheduled_time", *parts):
        for total, column in zip(tokens, columns, strict=True):
            total += np.histogram(scheduled - start, edges, weights=column)[0]
    if "prompt_len" in parts:
        tokens[-1] -= tokens[:-1].sum(axis=0)
    tops = np.cumsum(tokens, axis=0) / (edges[1] - edges[0])
    low = np.zeros(len(edges) - 1)
    for (label, colour), share, top in zip(parts.values(), tokens, tops, strict=True):
        if share.any():
            axes.stairs(top, edges, baseline=low, fill=True, color=colour, label=label)
        low = top
    axes.set(title="Prompt tokens by fate, at first admission")
    axes.set(xlabel="simulated seconds", ylabel="tokens per second")
    axes.set_xlim(0.0, edges[-1])
    axes.set_ylim(0.0, 1.2 * max(float(low.max()), 1.0))  # room for the legend
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="upper right", ncols=len(parts))
    return axes


def latency_breakdown(axes: Axes, records: Records) -> Axes:
    """TTFT by its parts, in seconds: means over requests in the order of their TTFT, 5 % at a time.

    The fastest are on the left. Parts are stacked, so that the top of a bar is the mean TTFT.
    """
    ttft = records.column("ttft_ms")
    order = np.argsort(ttft, kind="stable")[: np.count_nonzero(~np.isnan(ttft))]  # NaN, refused, sorts last
    bars = min(20, len(order))
    edges = np.linspace(0.0, 100.0, bars + 1)
    low = np.zeros(bars)
    for name, (label, colour) in TTFT_PARTS.items():
        slices = np.array_split(records.column(name)[order], bars) if bars else []
        top = low + np.array([part.mean() for part in slices]) / 1e3
        axes.stairs(top, edges, baseline=low, fill=True, color=colour, label=label)
        low = top
    axes.set(title="Parts of TTFT", xlabel="percentile of TTFT", ylabel="seconds")
    axes.set_xlim(0.0, 100.0)
    axes.set_ylim(bottom=0.0)
    axes.legend(loc="upper left")
    return axes


def _ran(records: Records, *names: str) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    """The columns without refused requests, a chunk at a time."""
    for refused, *columns in records.chunks("refused", *names):
        kept = refused == 0
        yield tuple(column[kept] for column in columns)


def _first_arrival(records: Records) -> float:
    return min(float(arrival.min()) for (arrival,) in records.chunks("arrival_time"))
