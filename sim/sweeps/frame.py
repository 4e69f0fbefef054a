"""The results of a sweep as a pandas DataFrame."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sim.sweeps.axes import Value, label_of
from sim.sweeps.table import Results
from sim.sweeps.work import ALWAYS


def to_frame(results: Results) -> pd.DataFrame:
    """A row a run, as in sweep.csv, with numbers as numbers; axes of anything else have labels."""
    names = [*results.metrics, *(name for name in ALWAYS if name not in results.metrics)]
    values: dict[str, dict[str, Any]] = {path: {} for axis in results.axes for path in axis.paths}
    for axis in results.axes:
        for step in axis.steps:
            for path, one in zip(axis.paths, step, strict=True):
                values[path][one.label] = _plain(one)
    rows = [
        {
            "point": run.point,
            **{path: values[path][label] for path, label in zip(results.paths, run.labels, strict=True)},
            "seed": run.seed,
            **{name: run.figures.get(name) for name in names},
            "error": run.error,
        }
        for run in results.runs
    ]
    return pd.DataFrame(rows)


def _plain(one: Value) -> Any:
    """A value as a table has it: itself where it is called so and is no mapping or list."""
    alone = one.label == label_of(one.value) and not isinstance(one.value, dict | list)
    return one.value if alone else one.label
