"""results/three_systems.md: which way to share prefixes gives what on which load, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from sim.out_file import replace_text
from sim.pages import rendered
from sim.three_systems.figures import write_figures
from sim.three_systems.means import Means
from sim.validate.section import table

COMMAND = "python -m sim.three_systems"
WIDE = 80.78  # %: the hit rate of the page's other command
SHOWN = {  # in the summary: heading, factor, form
    "prefix_cache_hit_rate": ("hit rate %", 100.0, ".1f"),
    "lost_tail_tokens": ("lost tail tokens", 1.0, ",.0f"),
    "num_computed_tokens": ("computed tokens", 1.0, ",.0f"),
    "metadata_entries_per_1k_slots": ("metadata", 1.0, ",.1f"),
    "num_evictions": ("evicted blocks", 1.0, ",.0f"),
    "mean_ttft_ms": ("mean TTFT ms", 1.0, ",.1f"),
    "p95_ttft_ms": ("P95 TTFT ms", 1.0, ",.1f"),
    "output_throughput": ("output tok/s", 1.0, ",.0f"),
}


def write(found: Means, page: Path) -> None:
    """Write the page, and its figures into the folder beside it of the same stem, which exists."""
    write_figures(found, page.with_suffix(""))
    replace_text(page, text(found))


def text(found: Means) -> str:
    """The page itself; each of its figures but WIDE is in `found`."""

    def percent(load: str, cache: str, block_size: int = 16) -> str:
        return f"{100.0 * found.at(load, cache, 'prefix_cache_hit_rate', block_size):.1f}"

    def number(load: str, cache: str, metric: str, block_size: int = 16) -> str:
        return f"{found.at(load, cache, metric, block_size):,.0f}"

    def tail(load: str, cache: str) -> str:
        lost = found.at(load, cache, "lost_tail_tokens")
        return f"{lost / found.at(load, cache, 'completed'):.1f}"

    def difference(load: str, one: str, other: str, metric: str) -> str:
        return f"{found.at(load, one, metric) - found.at(load, other, metric):.1f}"

    def seconds(load: str, cache: str, block_size: int) -> str:
        return f"{found.at(load, cache, 'mean_ttft_ms', block_size) / 1e3:.0f}"

    return rendered(
        "three_systems.md",
        command=COMMAND,
        num_seeds=found.num_seeds,
        summary="\n".join(summary(found)),
        same_lpm=_listed([load for load in found.loads if lpm_is_alike(found, load)]),
        costs="\n".join(costs(found)),
        wide=WIDE,
        at=found.at,
        percent=percent,
        number=number,
        tail=tail,
        difference=difference,
        seconds=seconds,
    )


def summary(found: Means) -> list[str]:
    """The table of all loads and caches in blocks of 16, radix lpm only where it differs from radix."""
    headings = ["load", "cache", *(heading for heading, _, _ in SHOWN.values()), ""]
    return table(headings, (row for load in found.loads for row in rows(found, load)))


def rows(found: Means, load: str) -> Iterator[list[str]]:
    """The summary's rows of a load."""
    for cache in found.caches:
        if cache == "radix lpm" and lpm_is_alike(found, load):
            continue
        cells = (
            _cell(factor * found.at(load, cache, metric), form) for metric, (_, factor, form) in SHOWN.items()
        )
        yield [load, cache, *cells, found.saturation[load, cache, 16]]


def lpm_is_alike(found: Means, load: str) -> bool:
    """Whether the order of admission makes no difference in blocks of 16."""
    return all(found.at(load, "radix lpm", metric) == found.at(load, "radix", metric) for metric in SHOWN)


def costs(found: Means) -> list[str]:
    """What finding prefixes takes in each load: lookups and, for apc by block size, hashing."""
    sizes = [size for size in (1, 16, 256) if size in found.block_sizes]
    hashed = [f"{what}, B = {size}" for size in sizes for what in ("blocks hashed", "front end ms a prompt")]
    lines = []
    for load in found.loads:
        line = [load, *(_cell(found.at(load, cache, "num_lookups"), ",.0f") for cache in ("apc", "radix"))]
        for size in sizes:
            line.append(_cell(found.at(load, "apc", "num_hashed_blocks", size), ",.0f"))
            line.append(_cell(found.at(load, "apc", "mean_front_end_time_ms", size), ".2f"))
        lines.append(line)
    return table(["load", "lookups, apc", "lookups, radix", *hashed], lines)


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else "".join(names)
