"""What the notebooks share: a trace of the user's in place of a workload, and the project's figures."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from sim.curves.figure import write_figure
from sim.curves.report import Scale
from sim.curves.study import Study
from sim.plots import drawn
from sim.scenario import Scenario
from sim.sweeps.axes import Axis, Value, label_of
from sim.sweeps.figures import figure_of
from sim.sweeps.table import Results, Run
from sim.sweeps.work import ALWAYS

if TYPE_CHECKING:
    import pandas as pd

MOST_REQUESTS = 2000  # of a trace: a notebook answers at once


def with_trace(scenario: Scenario, path: str | None) -> Scenario:
    """The scenario with the first MOST_REQUESTS of a trace's file as its load; without a path, itself.

    Raises InputError for a path that is none.
    """
    if not path:
        return scenario
    return scenario.changed(f"workload={{kind: trace, path: {json.dumps(path)}, limit: {MOST_REQUESTS}}}")


def of_sweep(frame: pd.DataFrame, name: str) -> bytes:
    """The figure of what `sim.sweep` returned of crossed axes, as a PNG."""
    found = figure_of(_results(frame, name))
    assert found is not None, "a sweep of too many axes"
    return found[1]


def of_curves(studies: Sequence[Study], scale: Scale) -> bytes:
    """The figure of `prefixsim mrc`, as a PNG."""
    picture = io.BytesIO()
    write_figure(studies, scale, picture)
    return picture.getvalue()


def of_panels(draws: Sequence[Callable[[Axes], object]], inches: tuple[float, float]) -> bytes:
    """Panels beside each other, as a PNG."""
    picture = io.BytesIO()
    with drawn(picture, inches) as figure:
        for axes, draw in zip(figure.subplots(1, len(draws), squeeze=False)[0], draws, strict=True):
            draw(axes)
    return picture.getvalue()


def records_of(requests: pd.DataFrame) -> Any:
    """The requests of `sim.run` as plots read records: by column."""
    return SimpleNamespace(column=lambda name: requests[name].to_numpy())


def _results(frame: pd.DataFrame, name: str) -> Results:
    """What to_frame (sim/sweeps/frame.py) made the frame of; each path is an axis of its own."""
    columns = [str(name) for name in frame]
    seed = columns.index("seed")
    paths, rest = columns[1:seed], columns[seed + 1 : -1]
    plain = frame.astype(object).where(frame.notna(), None)
    rows: list[dict[str, Any]] = [dict(zip(columns, row, strict=True)) for row in plain.to_numpy().tolist()]
    axes = [
        Axis((path,), [(Value(label_of(one), one),) for one in dict.fromkeys(row[path] for row in rows)])
        for path in paths
    ]
    runs = [
        Run(
            row["point"],
            tuple(label_of(row[path]) for path in paths),
            row["seed"],
            {metric: row[metric] for metric in rest},
            row["error"],
        )
        for row in rows
    ]
    return Results(name, axes, [metric for metric in rest if metric not in ALWAYS], runs)
