"""What the sweep of the three systems has found: means over its seeds."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from sim.errors import InputError
from sim.sweeps.table import WORST_FIRST

LOAD, CACHE, BLOCK_SIZE = "workload", "cache", "engine.block_size"  # columns of sweep.csv


class Means(NamedTuple):
    """Figures of each load, cache and block size, in the order of the sweep."""

    loads: list[str]
    caches: list[str]
    block_sizes: list[int]
    num_seeds: int
    figures: dict[tuple[str, str, int], dict[str, float]]  # NaN: this cache has no such figure
    saturation: dict[tuple[str, str, int], str]  # the worst of the seeds

    def at(self, load: str, cache: str, metric: str, block_size: int = 16) -> float:
        return self.figures[load, cache, block_size][metric]


def read(table: Path) -> Means:
    """The means of a sweep.csv. Raises InputError if a run of it failed."""
    runs: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["error"]:
                raise InputError(f"{table}: point {row['point']}, seed {row['seed']}: {row['error']}")
            runs.setdefault((row[LOAD], row[CACHE], int(row[BLOCK_SIZE])), []).append(row)
    some = next(iter(runs.values()))
    names = list(some[0])
    metrics = [name for name in names[names.index("seed") + 1 : -1] if name != "saturation"]
    return Means(
        loads=list(dict.fromkeys(load for load, _, _ in runs)),
        caches=list(dict.fromkeys(cache for _, cache, _ in runs)),
        block_sizes=list(dict.fromkeys(size for _, _, size in runs)),
        num_seeds=len(some),
        figures={
            key: {metric: _mean([row[metric] for row in rows]) for metric in metrics}
            for key, rows in runs.items()
        },
        saturation={
            key: next(word for word in WORST_FIRST for row in rows if row["saturation"] == word)
            for key, rows in runs.items()
        },
    )


def _mean(texts: list[str]) -> float:
    return math.nan if "" in texts else statistics.fmean(map(float, texts))
