"""The comparison in words and numbers: console lines, rows for the page, the CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sim.against.beside import Comparison

WIDTH, LABEL, CELL = 72, 30, 14
ROWS = {  # by key of each side: label, and what it is multiplied by to be shown
    "mean_ttft_ms": ("Mean TTFT (ms)", 1.0),
    "median_ttft_ms": ("Median TTFT (ms)", 1.0),
    "p90_ttft_ms": ("P90 TTFT (ms)", 1.0),
    "p99_ttft_ms": ("P99 TTFT (ms)", 1.0),
    "mean_e2el_ms": ("Mean E2EL (ms)", 1.0),
    "median_e2el_ms": ("Median E2EL (ms)", 1.0),
    "p90_e2el_ms": ("P90 E2EL (ms)", 1.0),
    "p99_e2el_ms": ("P99 E2EL (ms)", 1.0),
    "prefix_cache_hit_rate": ("Hit rate (%)", 100.0),
    "num_preemptions": ("Preemptions", 1.0),
    "mean_kv_cache_usage_perc": ("Mean KV use (%)", 100.0),
    "mean_num_requests_running": ("Mean running requests", 1.0),
    "mean_num_requests_waiting": ("Mean waiting requests", 1.0),
    "num_steps": ("Engine steps with tokens", 1.0),
    "requests": ("Requests", 1.0),
}
CLOCKS = {
    "client": "from the client's call to the token it sees",
    "engine": "from the engine's queue to its token",
}


def rows(against: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """A row a figure: its name, measured, simulated, and what the second is beside the first."""
    for key, (label, scale) in ROWS.items():
        measured, simulated = (scale * against[side][key] for side in ("measured", "simulated"))
        digits = 0 if isinstance(against["measured"][key], int) else 2
        if key.endswith("_ms"):
            difference = f"{100 * (simulated / measured - 1):+.1f} %" if measured else "-"
        else:
            difference = f"{simulated - measured:+,.{digits}f}" + (" points" if scale != 1.0 else "")
        yield label, f"{measured:,.{digits}f}", f"{simulated:,.{digits}f}", difference


def remarks(against: dict[str, Any]) -> Iterator[str]:
    """What the table does not say: the clock, which requests, and where decisions part."""
    yield f"TTFT and E2EL: {CLOCKS[against['clock']]}"
    if not against["same_requests"]:
        yield "the scenario's workload is not that recording: distributions compare, requests do not"
        return
    requests = against["measured"]["requests"]
    yield f"hits are equal for {against['requests_with_equal_hits']} of {requests} requests"
    if against["ttft_correlation"] is not None:
        yield f"correlation of the TTFT of the same requests: {against['ttft_correlation']:.4f}"
    parting = against["first_difference"]
    if parting is None:
        yield f"decisions are the same in all {against['steps_alike']} steps"
    else:
        alike = against["steps_alike"]
        yield f"decisions are the same in {alike} steps; step {parting['step']}: {parting['why']}"


def lines(against: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The console block as (style, text) lines."""
    yield "bold", " Simulated beside measured ".center(WIDTH, "=")
    yield "", f"recording: {against['recording']}"
    yield "cyan", f"{'':<{LABEL}}{'measured':>{CELL}}{'simulated':>{CELL}}{'difference':>{CELL}}"
    for label, *cells in rows(against):
        yield "", f"{label + ':':<{LABEL}}" + "".join(f"{cell:>{CELL}}" for cell in cells)
    for text in remarks(against):
        yield "dim", text
    for text in against["warnings"]:
        yield "yellow", f"warning: {text}"
    yield "bold", "=" * WIDTH


COLUMNS = ("ttft_ms", "e2el_ms", "num_cached_tokens", "num_preemptions")


def to_csv(comparison: Comparison) -> str:
    """A row a request with what both sides have of it; of other loads, a row a percentile of both."""
    measured = comparison.measured
    if comparison.same:
        columns: dict[str, Iterable[Any]] = {"request": measured.row, "name": comparison.names}
        columns |= {name: getattr(measured, name) for name in ("prompt_len", "output_len")}
        columns |= pairs(comparison, *COLUMNS)
    else:
        percents = np.arange(101)
        latencies = pairs(comparison, *COLUMNS[:2])
        columns = {"percentile": percents}
        columns |= {name: np.percentile(values, percents) for name, values in latencies.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(cell, row) for row in zip(*columns.values(), strict=True))
    return text.getvalue()


def pairs(comparison: Comparison, *names: str) -> dict[str, Any]:
    """The named columns of both sides, one beside the other."""
    both = {"measured": comparison.measured, "simulated": comparison.simulated}
    return {f"{side}_{name}": getattr(of, name) for name in names for side, of in both.items()}


def cell(value: Any) -> str:
    """Names and counts as they are, times to the microsecond."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)
