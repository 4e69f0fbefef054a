"""What the notebooks share: a trace of the user's in place of a workload; figures and tables as HTML.

Figures are the commands' own, a panel each, as SVG in the page's colours: they stand beside each other
where there is room, and keep the size of their text on a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes

from sim import plots
from sim.curves.figure import draw
from sim.curves.report import Scale
from sim.curves.study import Study
from sim.explore.drawing import named
from sim.explore.tables import table
from sim.scenario import Scenario
from sim.sweeps.axes import Axis, Value, label_of
from sim.sweeps.figures import label_of_axis, name_of_curves, panels_of
from sim.sweeps.table import Results, Run, label_of_metric, scale_of
from sim.sweeps.work import ALWAYS

if TYPE_CHECKING:
    import pandas as pd

MOST_REQUESTS = 2000  # of a trace: a notebook answers at once
INCHES = (5.0, 3.3)  # of a panel: about the width of a phone


def with_trace(scenario: Scenario, path: str | None) -> Scenario:
    """The scenario with the first MOST_REQUESTS of a trace's file as its load; without a path, itself.

    Raises InputError for a path that is none.
    """
    if not path:
        return scenario
    return scenario.changed(f"workload={{kind: trace, path: {json.dumps(path)}, limit: {MOST_REQUESTS}}}")


def of_sweep(frame: pd.DataFrame, name: str) -> str:
    """The panels of what `sim.sweep` returned of crossed axes, and its table, as HTML."""
    results = results_of(frame, name)
    panels = {f"{label_of_metric(one)}, {name}": part for one, part in panels_of(results).items()}
    assert panels, "a sweep of too many axes"
    curves = name_of_curves(results.axes)
    return of_panels({said: partial(_with_legend, draw=part, name=curves) for said, part in panels.items()})


def of_runs(frame: pd.DataFrame, name: str) -> str:
    """The runs of what `sim.sweep` returned, as an HTML table: its axes and metrics by their names."""
    results = results_of(frame, name)
    labels = {axis.name: label_of_axis(axis) for axis in results.axes}
    shown = frame[[*labels, *results.metrics]].copy()
    for metric in results.metrics:
        if (scale := scale_of(metric)) != 1.0:
            shown[metric] = shown[metric].astype(float) * scale
    labels |= {metric: label_of_metric(metric) for metric in results.metrics}
    return of_table(name, shown.rename(columns=labels))


def of_curves(studies: Sequence[Study], scale: Scale) -> str:
    """The figure of `prefixsim mrc`, as HTML."""
    return of_panels({"Hit rate by pool capacity": lambda axes: draw(axes, studies, scale)}, (6.0, 4.2))


def of_panels(
    draws: Mapping[str, Callable[[Axes], object]], inches: tuple[float, float] = INCHES
) -> str:
    """Panels by what they show, beside each other where there is room, as HTML."""
    figures = (f"<figure>{named(plots.svg(one, inches, said), said)}</figure>" for said, one in draws.items())
    return f'<div class="panels">{"".join(figures)}</div>'


def of_table(title: str, frame: pd.DataFrame) -> str:
    """A table as HTML, with numbers to three digits."""
    rows = ([_cell(one) for one in row] for row in frame.astype(object).to_numpy().tolist())
    return table(title, [str(name) for name in frame], rows)


def records_of(requests: pd.DataFrame) -> Any:
    """The requests of `sim.run` as plots read records: by column."""
    return SimpleNamespace(column=lambda name: requests[name].to_numpy())


def results_of(frame: pd.DataFrame, name: str) -> Results:
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


def _with_legend(axes: Axes, draw: Callable[[Axes], None], name: str) -> None:
    """Draw, with a legend if there are curves to tell apart."""
    draw(axes)
    if name:
        axes.legend(title=name, fontsize=8, title_fontsize=8, alignment="left")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        digits = max(0, 3 - len(f"{abs(value):.0f}")) if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
