"""Prefill over cached context: the only public table of it, Vidur's of an A100.

FlashAttention, 32 query and 4 KV heads, chunks of 64 to 4,096 tokens over up to 4,032 cached ones.
The fit sees the rows without context and four with it; all others test it. Without those four, kappa
has to be assumed, and the errors say what that costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibrate.build import KAPPA, KAPPA_OF
from sim.calibrate.fit import fit_prefill, prefill
from sim.calibration import PrefillAttention
from sim.errors import InputError
from sim.validate.section import Section, at_most, skipped, table

Floats = npt.NDArray[np.float64]

TITLE = "Prefill over cached context on an A100"
FILE = Path("calibration", "vidur_a100_attention.csv.gz")
SEEN_Q, SEEN_C = (256, 1024), (1024, 2048)  # of the context rows in the fit
BAR = 9.0
FREE = 1e9  # a kappa
_BAR = "prefill over context (Vidur A100, four context rows in the fit)"
_COLUMNS = {
    "is_prefill": "is_prefill",
    "batch_size": "batch",
    "prefill_chunk_size": "q",
    "kv_cache_size": "c",
    "time_stats.attn_prefill.median": "latency_us",
}


def section(data: Path) -> Section:
    """`data`: the folder that holds FILE."""
    path = data / FILE
    if not path.is_file():
        return skipped(TITLE, [_BAR], f"no {FILE.as_posix()} in the data folder")
    points = read_points(path)
    unseen = points[(points.c > 0) & ~_seen(points)]
    rows = []
    for how, fit in fits(points):
        errors = np.abs(context_errors(fit, unseen))
        rows.append((how, f"{errors.mean():.2f}", f"{np.percentile(errors, 95):.1f}"))
    heads = ["context rows in the fit", "MAPE, %", "p95, %"]
    reached = float(np.abs(context_errors(fit_with_context(points), unseen)).mean())
    lines = [f"Errors on {len(unseen)} points with context, none of them in a fit.", "", *table(heads, rows)]
    return Section(TITLE, [at_most(_BAR, reached, BAR)], lines)


def read_points(path: Path) -> pd.DataFrame:
    """Points of (batch, q, c, latency_us); of a point that was timed again, the median.

    Raises InputError, one line, for a file that is no such table.
    """
    try:
        frame = pd.read_csv(path, usecols=list(_COLUMNS))
    except (OSError, EOFError, ValueError) as problem:
        raise InputError(f"{path}: not Vidur's table of attention times: {problem}") from None
    frame = frame.rename(columns=_COLUMNS)
    frame = frame[frame.is_prefill.astype(bool)].astype("float64")
    points = frame.groupby(["batch", "q", "c"])[["latency_us"]].median().reset_index()
    return points.assign(latency_us=1e3 * points.latency_us)  # from ms


def fits(points: pd.DataFrame) -> Iterator[tuple[str, PrefillAttention]]:
    """The fit with context rows, and those that had to assume kappa."""
    few = fit_with_context(points)
    yield f"four: kappa = {few.kappa:.2f}, a3 = {few.a3:.4f} us a cached token", few
    without = points[points.c == 0]
    yield f"none: kappa = {KAPPA}, as assumed where nothing was measured", fit_prefill(without, KAPPA)
    a100 = KAPPA_OF["a100-sxm"]
    yield f"four for kappa alone: kappa = {a100}, as the A100's files have it", fit_prefill(without, a100)
    yield "none: kappa = 1, a cached token costs what a new one does", fit_prefill(without, 1.0)
    yield "none: a cached token costs nothing", fit_prefill(without, FREE)


def fit_with_context(points: pd.DataFrame) -> PrefillAttention:
    """Through the rows without context and the few with it."""
    return fit_prefill(points[(points.c == 0) | _seen(points)], None)


def context_errors(fit: PrefillAttention, points: pd.DataFrame) -> Floats:
    """Relative errors, percent."""
    result: Floats = 100.0 * (prefill(fit, points) / points.latency_us.to_numpy(np.float64) - 1.0)
    return result


def _seen(points: pd.DataFrame) -> pd.Series[bool]:
    return points.q.isin(SEEN_Q) & points.c.isin(SEEN_C)
