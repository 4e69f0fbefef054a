"""The figures of a trace as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_QUANTILE_ROWS = {
    "prompt_len": "Prompt tokens",
    "output_len": "Output tokens",
    "shared_prefix_len": "Shared tokens",
    "reuse_gap_s": "Reused after (s)",
    "reuse_distance_requests": "… requests",
    "reuse_distance_tokens": "Tokens between",
}
_COLUMNS = ("mean", "p10", "p50", "p90", "p99", "max")


def show(figures: dict[str, Any], console: Console) -> None:
    """Print what `describe` returned."""
    console.print(Text(f"{figures['path']}: {figures['format']}"))
    facts = Table(show_header=False, box=None)
    for label, text in _facts(figures):
        facts.add_row(label, text)
    console.print(facts)
    spread = Table("", *_COLUMNS, box=None)
    for column in spread.columns[1:]:
        column.justify = "right"
    for key, label in _QUANTILE_ROWS.items():
        values = figures[key]
        if values is not None:
            spread.add_row(label, *(_number(values.get(name)) for name in _COLUMNS))
    console.print(spread)
    console.print("Ideal hit rate by block size")
    rates = Table(*figures["ideal_hit_rate"], box=None)
    rates.add_row(*(f"{rate:.4f}" for rate in figures["ideal_hit_rate"].values()))
    console.print(rates)
    if figures["ideal_hit_rate_whole_ids"] is not None:
        console.print(f"counting whole ids: {figures['ideal_hit_rate_whole_ids']:.4f}")
    for note in figures["notes"]:
        console.print(Text(f"note: {note}"))
    if figures["skipped"]:
        console.print(Text(f"skipped {figures['skipped']} bad lines; the first: {figures['first_skipped']}"))


def _facts(figures: dict[str, Any]) -> list[tuple[str, str]]:
    sessions = f" of {figures['sessions']:,} sessions" if figures["sessions"] else ""
    facts = [
        ("Requests", f"{figures['requests']:,}{sessions}"),
        ("Span", f"{figures['span_s']:,.3f} s"),
        ("Tokens in, out", f"{figures['total_input_tokens']:,}, {figures['total_output_tokens']:,}"),
        ("Distinct tokens", f"{figures['distinct_tokens']:,}"),
        ("Requests that share", f"{figures['requests_that_share']:.1%}"),
    ]
    if figures["request_rate"] is not None:
        facts.insert(2, ("Requests per second", f"{figures['request_rate']:.4g}"))
        facts.insert(3, ("CV of the gaps between arrivals", f"{figures['arrival_cv']:.2f}"))
    if figures["mm_items"]:
        of = f"{figures['mm_items']:,} ({figures['distinct_mm_items']:,} different)"
        facts.append(("Multimodal items", f"{of}, {figures['mm_tokens']:,} tokens"))
    if figures["trace_block_size"] is not None:
        facts.append(("Tokens an id stands for", f"{figures['trace_block_size']:,}"))
    return facts


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
