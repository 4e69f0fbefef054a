"""The results of a sweep as tables: a row for each run, a band for each point, and what is printed."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sim.compare import FIGURES
from sim.sweeps.axes import Axis
from sim.sweeps.bands import Band, band
from sim.sweeps.work import ALWAYS

SHOWN = 60  # points on the console
SHARES = ("prefix_cache_hit_rate", "prefix_cache_ceiling")  # printed and drawn in %
LABELS = {**FIGURES, "prefix_cache_ceiling": "Ceiling (%)"}
WORST_FIRST = ("OVERLOADED", "BACKLOGGED", "STABLE")


class Run(NamedTuple):
    """One finished run of a sweep."""

    point: int
    labels: tuple[str, ...]  # of the point's values
    seed: int
    figures: dict[str, Any]  # none if it failed
    error: str


class Results(NamedTuple):
    """A finished sweep: its runs by point and seed."""

    name: str
    axes: list[Axis]
    metrics: list[str]
    runs: list[Run]

    @property
    def paths(self) -> list[str]:
        return [path for axis in self.axes for path in axis.paths]

    @property
    def errors(self) -> list[Run]:
        return [run for run in self.runs if run.error]


class PointBands(NamedTuple):
    """A point over all seeds."""

    number: int
    labels: tuple[str, ...]
    bands: dict[str, Band]  # by metric
    saturation: str  # the worst of the seeds; empty if none ran
    errors: int


def by_point(results: Results) -> list[PointBands]:
    """The points of a sweep in their order."""
    runs: dict[int, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.point, []).append(run)
    return [
        PointBands(
            number,
            some[0].labels,
            {name: band(run.figures.get(name) for run in some) for name in results.metrics},
            next((word for word in WORST_FIRST for run in some if run.figures.get("saturation") == word), ""),
            sum(bool(run.error) for run in some),
        )
        for number, some in runs.items()
    ]


def to_csv(results: Results) -> str:
    """sweep.csv: one row a run, with its axes, seed, metrics, load, and error."""
    names = [*results.metrics, *(name for name in ALWAYS if name not in results.metrics)]
    rows = (
        [run.point, *run.labels, run.seed, *(run.figures.get(name) for name in names), run.error]
        for run in results.runs
    )
    return _csv(["point", *results.paths, "seed", *names, "error"], rows)


def curves_csv(results: Results) -> str:
    """curves.csv: one row a point and metric, with mean, 95 % band and number of seeds."""
    rows = (
        [point.number, *point.labels, name, *(_defined(value) for value in one)]
        for point in by_point(results)
        for name, one in point.bands.items()
    )
    return _csv(["point", *results.paths, "metric", *Band._fields], rows)


def to_object(results: Results) -> dict[str, Any]:
    """What `--format json` prints."""
    points = [
        {
            "point": point.number,
            "axes": dict(zip(results.paths, point.labels, strict=True)),
            "metrics": {
                name: {field: _defined(value) for field, value in one._asdict().items()}
                for name, one in point.bands.items()
            },
            "saturation": point.saturation or None,
        }
        for point in by_point(results)
    ]
    errors = [{"point": run.point, "seed": run.seed, "error": run.error} for run in results.errors]
    return {"sweep": results.name, "runs": len(results.runs), "points": points, "errors": errors}


def lines(results: Results) -> Iterator[tuple[str, str]]:
    """The console table as (style, text) lines: a line a point, mean ± half the 95 % band."""
    points = by_point(results)
    names = [axis.name for axis in results.axes]
    places = [results.paths.index(name) for name in names]
    heads = [*_short(names), *(label_of_metric(name) for name in results.metrics), "Load"]
    rows = [
        [
            *(point.labels[place] for place in places),
            *(_cell(name, one) for name, one in point.bands.items()),
            point.saturation or "failed",
        ]
        for point in points[:SHOWN]
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) + 2 for i in range(len(heads))]
    seeds = len({run.seed for run in results.runs})
    yield "bold", f" Sweep {results.name} ".center(sum(widths), "=")
    told = f"seeds each: {seeds}; mean ± 95 % band over seeds" if seeds > 1 else "one seed each"
    yield "", f"points: {len(points)}, {told}"
    yield "cyan", "".join(head.rjust(width) for head, width in zip(heads, widths, strict=True))
    for row in rows:
        yield "", "".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    if len(points) > SHOWN:
        yield "dim", f"and {len(points) - SHOWN} more, in curves.csv"
    yield "bold", "=" * sum(widths)
    for error, number in Counter(run.error for run in results.errors).most_common():
        yield "red", f"failed ({number} of {len(results.runs)} runs): {error}"


def label_of_metric(name: str) -> str:
    """How a metric is called beside its numbers, with its unit."""
    if name in LABELS:
        return LABELS[name]
    words = name.replace("token_fates.", "prompt tokens: ").replace("_ms", " (ms)").replace("_itl", " ITL")
    return (words[0].upper() + words[1:]).replace("_", " ")


def scale_of(name: str) -> float:
    """What a metric's value is multiplied with where a person reads it."""
    return 100.0 if name in SHARES else 1.0


def _short(paths: Sequence[str]) -> list[str]:
    """The last words of paths, or the paths where those are alike."""
    last = [path.rpartition(".")[2] for path in paths]
    return last if len(set(last)) == len(last) else list(paths)


def _cell(name: str, one: Band) -> str:
    if one.n == 0:
        return "-"
    scale = scale_of(name)
    spread = "" if math.isnan(one.low) else f" ± {_digits(scale * (one.high - one.mean))}"
    return f"{_digits(scale * one.mean)}{spread}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.4g}"


def _defined(value: float) -> float | int | None:
    return None if isinstance(value, float) and math.isnan(value) else value


def _csv(head: Sequence[str], rows: Iterator[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
