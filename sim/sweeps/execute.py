"""A sweep from its plan to its folder: laid out, run where it is wanted, written down as it goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from sim.errors import InputError, suggestion
from sim.out_file import replace_text
from sim.scenario_file import to_yaml
from sim.sweeps.folder import CURVES, JOURNAL, TABLE, check_folder, make_folder, prepare_folder
from sim.sweeps.grid import Point, points
from sim.sweeps.journal import Journal, Record, journal, locked
from sim.sweeps.key import code_version, run_key
from sim.sweeps.processes import Everywhere
from sim.sweeps.schema import Plan
from sim.sweeps.table import Results, Run, curves_csv, to_csv
from sim.sweeps.work import DIED, Job, failed, metric_names, work

Progress = Callable[[int, int], None]  # runs done, of all


class Layout(NamedTuple):
    """All that is to be run: points, their scenarios as text, and the key of each run, seeds fastest."""

    points: list[Point]
    texts: list[str]
    keys: list[str]


def lay_out(plan: Plan) -> Layout:
    """Make and check every point. Raises InputError, one line, for the first that no scenario can be."""
    all_points = list(points(plan))
    texts = [to_yaml(point.scenario) for point in all_points]
    keys = [
        run_key(point.scenario, text, seed)
        for point, text in zip(all_points, texts, strict=True)
        for seed in plan.seeds
    ]
    return Layout(all_points, texts, keys)


def run_sweep(
    plan: Plan, out: Path, everywhere: Everywhere, *, resume: bool = False, progress: Progress | None = None
) -> Results:
    """Run what the folder's journal lacks, and write the tables.

    Same plan, same tables, whatever runs it and however often it was stopped. Raises InputError,
    one line: before anything is written for what cannot be run at all, later if the disk is full;
    what the journal has by then stays there. A run that fails is a row with its error.
    """
    layout, text = lay_out(plan), plan.to_yaml()
    check_folder(out, text, len(set(layout.keys)), resume=resume)
    _check_metrics(plan, layout.points, everywhere)
    make_folder(out)
    with locked(out / JOURNAL) as file:
        # Again: another sweep may have come, and gone, while the metrics were looked for.
        check_folder(out, text, len(set(layout.keys)), resume=resume)
        prepare_folder(out, text, layout.texts)
        kept = journal(file, out / JOURNAL, resume=resume)
        records = _run_missing(plan, layout, kept, everywhere, progress)
        results = _results(plan, layout, records)
        replace_text(out / TABLE, to_csv(results))
        replace_text(out / CURVES, curves_csv(results))
    return results


def _check_metrics(plan: Plan, points: Sequence[Point], everywhere: Everywhere) -> None:
    """Raise InputError for a metric that no run has; the workers compile while they look.

    Each cache has figures of its own, so one point of each is looked at.
    """
    firsts = {point.scenario.cache.kind: point.scenario for point in reversed(points)}
    names: dict[str, None] = {}
    for _, found in everywhere(metric_names, list(firsts.values())):
        if found is None:
            raise InputError(f"{plan.where(())}: the first process died: too little memory, perhaps")
        names |= dict.fromkeys(found)
    for number, metric in enumerate(plan.metrics):
        if metric not in names:
            place = plan.where(("metrics", number))
            raise InputError(f"{place}: metrics: no run has {metric}{suggestion(metric, names)}")


def _run_missing(
    plan: Plan, layout: Layout, kept: Journal, everywhere: Everywhere, progress: Progress | None
) -> dict[str, Record]:
    """The records of all runs by key, those made now in the journal."""
    number_of = {key: number for number, key in enumerate(layout.keys)}  # points may be the same scenario
    records = {key: kept.records[key] for key in number_of if key in kept.records}
    missing = [key for key in number_of if key not in records]
    jobs = [_job(plan, layout, number_of[key]) for key in missing]
    if progress is not None:
        progress(len(records), len(number_of))
    for i, outcome in everywhere(work, jobs):
        figures, error, code = outcome if outcome is not None else failed(DIED)
        if code != code_version():
            raise InputError(f"{plan.name}: a worker has other sources; install this version there")
        record = Record(missing[i], figures, error)
        kept.append(record)
        records[record.key] = record
        if progress is not None:
            progress(len(records), len(number_of))
    return records


def _job(plan: Plan, layout: Layout, number: int) -> Job:
    point, seed = divmod(number, len(plan.seeds))
    scenario = layout.points[point].scenario.model_copy(update={"seed": plan.seeds[seed]})
    return Job(scenario, plan.metrics)


def _results(plan: Plan, layout: Layout, records: dict[str, Record]) -> Results:
    runs = []
    for number, key in enumerate(layout.keys):
        point, seed = divmod(number, len(plan.seeds))
        record = records[key]
        runs.append(Run(point, layout.points[point].labels, plan.seeds[seed], record.figures, record.error))
    return Results(plan.name, plan.axes, plan.metrics, runs)
