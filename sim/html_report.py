"""The report of a run as one HTML page that needs nothing else: figures, tables, scenario, provenance.

The page asks the network for nothing and forbids it by a policy of its own. It has no date and no
path of this machine but those that the scenario gives, so equal runs give equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
from matplotlib.axes import Axes

from sim import __version__, cache_plots, plots
from sim.metrics import HIT_RATE_DEFINITION
from sim.report import FATE_MEANINGS, HEADINGS, OF_REPLICAS, PART_NAMES, VERDICTS
from sim.scenario_file import to_yaml
from sim.simulation import Result

if TYPE_CHECKING:
    from sim.against.beside import Comparison

INCHES = (5.0, 3.3)  # of a figure: about the width of a phone, so that its text keeps its size
SHOWN_ROWS = 100  # of a table by tenant
Row = list[str]
BLOCK_ROWS = {
    "kv_block_lifetime_seconds": "lifetime of evicted blocks",
    "kv_block_idle_before_evict_seconds": "their idle time before eviction",
    "kv_block_reuse_gap_seconds": "gap between two hits of a block",
}
WHAT_IF = "Each a whole run with the same seed."
_GROUP_HEADER = (
    "requests", "hit rate", "mean TTFT", "P95 TTFT", "evicted", "cold", "evictions caused", "suffered",
    "tokens hit", "looked up", "failed",
)  # fmt: skip


class Table(NamedTuple):
    """A table of texts; columns after the first are numbers."""

    title: str
    header: Row
    rows: list[Row]
    note: str = ""


def to_html(result: Result, comparison: Comparison | None = None) -> str:
    """The page, with a recording beside the run where there is a comparison.

    Reads the records of `result`, which must not be discarded yet; modifies nothing.
    """
    loader = jinja2.PackageLoader("sim", "templates")
    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    pages = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **options)
    summary = result.summary
    return pages.get_template("report.html").render(
        s=summary,
        version=__version__,
        verdict=VERDICTS[summary["saturation"]],
        cards=_cards(summary),
        figures=list(_figures(result)),
        against=_against(comparison) if comparison is not None else None,
        tables=[table for table in _tables(summary) if table.rows],
        scenario=to_yaml(result.resolved.scenario),
        pool=_pool(result),
    )


def _against(comparison: Comparison) -> dict[str, Any]:
    """The section of the recording: its figures as SVG elements, its table, and what else there is to say."""
    from sim.against.figures import draws
    from sim.against.tables import remarks, rows

    return {
        "recording": Path(comparison.summary["recording"]).name,
        "figures": [plots.svg(draw, INCHES, name) for name, draw in draws(comparison).items()],
        "rows": [list(row) for row in rows(comparison.summary)],
        "remarks": [*remarks(comparison.summary), *comparison.summary["warnings"]],
    }


def _cards(s: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers that are read first, with their names."""
    endless = "pools that never evict" if s["num_replicas"] > 1 else "a pool that never evicts"
    cards = [
        ("hit rate", _percent(s["prefix_cache_hit_rate"])),
        (f"with {endless}", _percent(s["prefix_cache_ceiling"])),
        ("mean TTFT", _ms(s["mean_ttft_ms"])),
        ("P95 TTFT", _ms(s["p95_ttft_ms"])),
        ("mean TPOT", _ms(s["mean_tpot_ms"])),
        ("requests a second", _number(s["request_throughput"])),
    ]
    if "request_goodput" in s:
        cards.append(("of them good", _number(s["request_goodput"])))
    return cards


def _figures(result: Result) -> Iterator[str]:
    """The figures as SVG elements."""
    records, series = result.records, result.timeseries
    start = min(float(arrival.min()) for (arrival,) in records.chunks("arrival_time"))
    end = result.summary["duration"] or 1.0
    parts = plots.prompt_parts(result.summary)
    edges = np.linspace(0.0, end, plots.BINS + 1)

    def tokens(axes: Axes) -> None:
        plots.tokens_over_time(axes, records, edges, start, parts)
        axes.legend(loc="upper right", ncols=3, fontsize=8)  # six names are wider than the figure
        axes.set_ylim(top=1.15 * axes.get_ylim()[1])

    draws: dict[str, Callable[[Axes], object]] = {
        "ttft": lambda axes: plots.ttft_cdf(axes, records),
        "parts": lambda axes: plots.latency_breakdown(axes, records),
        "tokens": tokens,
        "cache": lambda axes: cache_plots.cache_over_time(axes, series, start, end),
        "churn": lambda axes: cache_plots.churn_over_time(axes, series, start, end),
        "requests": lambda axes: plots.requests_over_time(axes, series, start, end),
    }
    durations = {name: result.summary[name] for name in BLOCK_ROWS}
    if any(durations.values()):
        draws["blocks"] = lambda axes: cache_plots.block_durations(axes, durations)
    for name, draw in draws.items():
        yield plots.svg(draw, INCHES, name)


def _tables(s: dict[str, Any]) -> Iterator[Table]:
    figures = ("mean", "median", "p90", "p95", "p99")
    latencies = {name: name.upper() for name in HEADINGS}
    latencies |= {part: f"TTFT: {title.lower()}" for part, title in PART_NAMES.items()}
    rows = [
        [title, *(_number(s[f"{figure}_{name}_ms"]) for figure in figures)]
        for name, title in latencies.items()
    ]
    yield Table("Latencies", ["ms", "mean", "median", "P90", "P95", "P99"], rows)
    yield Table("Prefix cache", ["", "tokens"], _cache_rows(s), "Hit rate: " + " ".join(HIT_RATE_DEFINITION))
    yield Table("What if", ["", "hit rate", "mean TTFT", "P95 TTFT", "load"], _what_if_rows(s), WHAT_IF)
    fates = s["token_fates"] or {}
    total = sum(fates.values())
    rows = [
        [f"{name}: {FATE_MEANINGS[name]}", f"{tokens:,}", _percent(tokens / total if total else None)]
        for name, tokens in fates.items()
    ]
    note = "; ".join(OF_REPLICAS).capitalize() + "." if s["num_replicas"] > 1 else ""
    yield Table("Prompt tokens by fate", ["", "tokens", "share"], rows, note)
    more, evictions = len(s["by_tenant"]) - SHOWN_ROWS, s["num_evictions"]
    note = f"And {more} smaller ones: by_tenant in the summary." if more > 0 else ""
    yield Table("Tenants", ["tenant", *_GROUP_HEADER], _group_rows(s["by_tenant"], evictions, "tenant"), note)
    named = ["tenant", "prefix_group"] if s["by_tenant"] else ["prefix_group"]
    groups = _group_rows(s["by_prefix_group"], evictions, *named)
    yield Table("Prefix groups", ["group", *_GROUP_HEADER], groups, "Those with the most prompt tokens.")
    yield Table("Replicas", _REPLICA_HEADER, _replica_rows(s), _evenness(s))
    turns = _group_rows(s["by_turn"], evictions, "turn")
    yield Table("Turns of sessions", ["turn", *_GROUP_HEADER], turns, _sessions(s))
    rows = [
        [text, f"{one['count']:,}", *(_number(one[f"p{q}"]) for q in (50, 90, 99))]
        for name, text in BLOCK_ROWS.items()
        if (one := s[name]) is not None
    ]
    yield Table("Cached blocks", ["seconds", "number", "median", "P90", "P99"], rows)
    errors = [[name, f"{mape:g}"] for name, mape in s["calibration_mape"].items()]
    note = "Of fits, on points that they did not see; of steps, against the tables that were fitted."
    yield Table("Errors of the step time", ["fit", "mean %"], errors, note)


def _cache_rows(s: dict[str, Any]) -> list[Row]:
    figures = {
        "hit": "prefix_cache_hits",
        "looked up": "prefix_cache_queries",
        "hit after preemption": "preempted_hits",
        "looked up after preemption": "preempted_queries",
        "computed": "num_computed_tokens",
    }
    return [[name, _number(s[key])] for name, key in figures.items()]


def _what_if_rows(s: dict[str, Any]) -> list[Row]:
    """A row a run, or why there is none."""
    return [
        [entry["change"], f"not run: {entry['excluded']}", "", "", ""]
        if "excluded" in entry
        else [
            entry["change"],
            _percent(entry["prefix_cache_hit_rate"]),
            _ms(entry["mean_ttft_ms"]),
            _ms(entry["p95_ttft_ms"]),
            entry["saturation"],
        ]
        for entry in s.get("what_if", ())
    ]


def _group_rows(groups: list[dict[str, Any]], num_evictions: int, *names: str) -> list[Row]:
    counts = ("prefix_cache_hits", "prefix_cache_queries", "failed")
    return [
        [
            " ".join(str(group[name]) for name in names),
            _number(group["requests"]),
            _percent(group["prefix_cache_hit_rate"]),
            _ms(group["mean_ttft_ms"]),
            _ms(group["p95_ttft_ms"]),
            *(_share(group, fate) for fate in ("evicted", "cold")),
            *(_of_evictions(group, side, num_evictions) for side in ("caused", "suffered")),
            *(_number(group[count]) for count in counts),
        ]
        for group in groups[:SHOWN_ROWS]
    ]


_REPLICA_HEADER = [
    "replica", "requests", "hit rate", "mean TTFT", "P95 TTFT", "tokens computed", "busy seconds",
    "evictions",
]  # fmt: skip


def _replica_rows(s: dict[str, Any]) -> list[Row]:
    return [
        [
            str(row["replica"]),
            _number(row["requests"]),
            _percent(row["prefix_cache_hit_rate"]),
            _ms(row["mean_ttft_ms"]),
            _ms(row["p95_ttft_ms"]),
            *(_number(row[name]) for name in ("num_computed_tokens", "busy_time", "num_evictions")),
        ]
        for row in s["by_replica"][:SHOWN_ROWS]
    ]


def _evenness(s: dict[str, Any]) -> str:
    if s["imbalance"] is None:
        return ""
    even = {name: _number(value) for name, value in s["imbalance"].items()}
    more = s["num_replicas"] - SHOWN_ROWS
    left = f" And {more} more: by_replica in the summary." if more > 0 else ""
    return (
        f"The replica with most has {even['requests']} times the mean in requests, "
        f"{even['num_computed_tokens']} in tokens computed, {even['busy_time']} in busy time.{left}"
    )


def _share(group: dict[str, Any], fate: str) -> str:
    """The share of a group's prompt tokens that had this fate."""
    fates, tokens = group["token_fates"], group["prefix_cache_queries"]
    return _percent(fates[fate] / tokens if fates and tokens else None)


def _of_evictions(group: dict[str, Any], side: str, num_evictions: int) -> str:
    """The share of all evictions that a group caused or suffered; a turn owns no blocks."""
    blocks = group.get(f"num_evictions_{side}")
    return _percent(None if blocks is None or not num_evictions else blocks / num_evictions)


def _sessions(s: dict[str, Any]) -> str:
    sessions = s["sessions"]
    if sessions is None:
        return ""
    mean, most = sessions["mean_turns"], sessions["max_turns"]
    return f"{sessions['num_sessions']:,} sessions of {mean:.1f} turns in the mean, {most} at most."


def _pool(result: Result) -> str:
    """The engine's pool and how full it was, in a sentence."""
    s = result.summary
    mean, most = _percent(s["mean_kv_cache_usage_perc"]), _percent(s["max_kv_cache_usage_perc"])
    each = f" at each of {s['num_replicas']} replicas" if s["num_replicas"] > 1 else ""
    return (
        f"{s['num_gpu_blocks']:,} blocks of {s['block_size']} tokens{each}, {mean} in use in the mean, "
        f"{most} at most; {s['num_evictions']:,} evictions, {s['num_preemptions']:,} preemptions"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
