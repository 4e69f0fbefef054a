"""The same load several times, one field changed: figures side by side.

Every run has the scenario's seed, so what the field does not touch, arrivals above all, is the same.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.cache_kinds import KINDS
from sim.errors import InputError
from sim.scenario import Scenario
from sim.scenario_file import load

LABEL = 32
FIGURES = {  # of the summary, by key
    "prefix_cache_hit_rate": "Hit rate (%)",
    "mean_ttft_ms": "Mean TTFT (ms)",
    "median_ttft_ms": "Median TTFT (ms)",
    "p95_ttft_ms": "P95 TTFT (ms)",
    "p99_ttft_ms": "P99 TTFT (ms)",
    "mean_tpot_ms": "Mean TPOT (ms)",
    "median_tpot_ms": "Median TPOT (ms)",
    "p99_tpot_ms": "P99 TPOT (ms)",
    "mean_e2el_ms": "Mean E2EL (ms)",
    "median_e2el_ms": "Median E2EL (ms)",
    "p99_e2el_ms": "P99 E2EL (ms)",
    "completed": "Successful requests",
    "failed": "Failed requests",
    "request_throughput": "Request throughput (req/s)",
    "request_goodput": "Request goodput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "saturation": "Load",
    "num_evictions": "Evicted blocks",
    "num_preemptions": "Preemptions",
}
OF_CACHES = {  # besides, where caches are compared
    "prefix_cache_hits": "Prompt tokens hit",
    "lost_tail_tokens": "Lost tail tokens",
    "num_computed_tokens": "Tokens computed",
    "num_lookups": "Lookups",
    "num_hashed_blocks": "Blocks hashed",
    "metadata_entries_per_1k_slots": "Metadata per 1000 KV slots",
    "mean_kv_cache_usage_perc": "Mean KV usage (%)",
}


def load_all(path: Path | None, overrides: Sequence[str], compared: str) -> tuple[str, dict[str, Scenario]]:
    """Read the scenario once for each value of `compared`, such as "engine.block_size=16,32".

    Returns the field, and the scenarios by value as given. Raises InputError, one line, for less than
    two values or one given twice, and for what sim.scenario.load and sim.resolve.resolve refuse.
    """
    field, equals, text = compared.partition("=")
    field = field.strip()
    values = split(text)
    where = f"--compare {compared}"
    if not equals or not field or len(values) < 2 or not all(values):
        raise InputError(f"{where}: should read path=value,value, as in engine.block_size=16,64")
    if len(set(values)) < len(values):
        raise InputError(f"{where}: has a value twice; give different ones")
    from sim.resolve import resolve  # slow to load, with numba; a bad list is told without it

    scenarios = {}
    for value in values:
        override = f"{field}={value}"
        try:
            scenarios[value] = load(path, [*overrides, override])
            resolve(scenarios[value])  # what has no numbers is told before the first run
        except InputError as error:
            raise InputError(str(error).replace(f"--set {override}", f"--compare {override}")) from None
    return field, scenarios


def split(text: str) -> list[str]:
    """The values of a list: cut at the commas outside brackets, braces and quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def lines(field: str, summaries: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The console table as (style, text) lines, a column for each value.

    What is assumed and warned of follows, with the values it is true of where not all.
    """
    width = max(14, *(len(value) + 2 for value in summaries))
    total = LABEL + width * len(summaries)
    some = next(iter(summaries.values()))
    yield "bold", " Comparison ".center(total, "=")
    yield "", f"{some['name']}: {some['model']} on {some['gpu']}, seed {some['seed']}"
    yield "cyan", f"{field:<{LABEL}}" + "".join(f"{value:>{width}}" for value in summaries)
    for key, label in _figures(summaries).items():
        cells = (_cell(label, summary.get(key)) for summary in summaries.values())
        yield "", f"{label + ':':<{LABEL}}" + "".join(f"{cell:>{width}}" for cell in cells)
    if len(caches := {summary["cache"]: summary["metadata"] for summary in summaries.values()}) > 1:
        kept = ", ".join(f"{metadata} ({cache})" for cache, metadata in caches.items())
        yield "dim", f"metadata: {kept}"
    yield "bold", "=" * total
    for key, style, word in (("assumed", "dim", "assumed"), ("warnings", "yellow", "warning")):
        for text, values in _said(key, summaries).items():
            of = "" if len(values) == len(summaries) else f" ({', '.join(values)})"
            yield style, f"{word}{of}: {text}"


def to_object(field: str, summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What `--format json` prints: the field, and each value with its whole summary."""
    return {
        "compare": field,
        "runs": [{"value": value, "summary": summary} for value, summary in summaries.items()],
    }


def to_csv(field: str, summaries: dict[str, dict[str, Any]]) -> str:
    """One row a value: the field, then the table's figures by their keys in the summary, rates of 1."""
    keys = list(_figures(summaries))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field, *keys])
    writer.writerows([value, *(summary.get(key) for key in keys)] for value, summary in summaries.items())
    return text.getvalue()


def folder_names(field: str, values: Iterable[str]) -> list[str]:
    """A folder's name for each value: field=value in harmless characters, numbered where two are alike."""
    names: list[str] = []
    for value in values:
        name = re.sub(r"[^A-Za-z0-9=.+-]+", "_", f"{field.rpartition('.')[2]}={value}")[:60]
        alike = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{alike + 1}" if alike else name)
    return names


def _figures(summaries: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The keys of the summaries that the table shows, with their labels."""
    shown = dict(FIGURES)
    from sim.cache_figures import labels  # slow to load, with numba

    caches = {summary["cache"] for summary in summaries.values()}
    if len(caches) > 1:
        shown |= OF_CACHES
    for cls in KINDS:
        if (kind := cls()).kind in caches:
            shown |= labels(kind)
    return {key: label for key, label in shown.items() if any(key in one for one in summaries.values())}


def _said(key: str, summaries: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """The texts under `key` of all summaries, each with the values it was said of."""
    said: dict[str, list[str]] = {}
    for value, summary in summaries.items():
        for text in summary[key]:
            said.setdefault(text, []).append(value)
    return said


def _cell(label: str, value: Any) -> str:
    if value is None:
        return "-"
    if "(%)" in label:
        value *= 100.0
    return f"{value:.2f}" if isinstance(value, float) else str(value)
