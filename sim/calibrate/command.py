"""What `prefixsim calibrate` does and prints."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from sim.calibrate import require_scipy
from sim.calibrate.bars import bar_of, meets
from sim.calibration import Calibration
from sim.hardware import Dtype, GpuSpec, ModelSpec

if TYPE_CHECKING:
    from rich.console import Console


def default_name(calibration: Calibration, source: Path | None) -> Path:
    """Where a calibration goes if nobody says: a file here, of its name and its source's."""
    suffix = f"_{source.name.split('.')[0]}" if source else ""
    return Path(calibration.name.replace("/", "_") + suffix + ".yaml")


def today() -> str:
    """The date of a fit, ISO; SOURCE_DATE_EPOCH is not heeded: a fit is dated when it is made."""
    return datetime.date.today().isoformat()


def fit(
    gpu: GpuSpec,
    model: ModelSpec,
    *,
    tp: int,
    weights: Dtype,
    kv_dtypes: list[Dtype],
    timings: Path | None,
    assume_kappa: bool,
) -> Calibration:
    """Fit the tables of aiconfigurator-core, or `timings`, a CSV. Raises InputError, one line."""
    require_scipy("calibrate")
    from sim.calibrate.sources import from_aiconfigurator, from_csv

    if timings is None:
        return from_aiconfigurator(
            gpu, model, tp=tp, weights=weights, kv_dtypes=kv_dtypes, date=today()
        )
    return from_csv(
        timings,
        gpu,
        model,
        tp=tp,
        weights=weights,
        kv_dtypes=kv_dtypes,
        assume_kappa=assume_kappa,
        date=today(),
    )


def fit_to_run(load: Path, run: Path, gpu: GpuSpec, model: ModelSpec) -> Calibration:
    """Fit whole steps to a measured run of the load. Raises InputError, one line."""
    require_scipy("calibrate")
    from sim.calibrate.from_run import fit_run

    return fit_run(load, run, gpu, model, date=today())


def show(calibration: Calibration, console: Console) -> None:
    """Print each component's held-out error beside its bar, and what is assumed."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(f"{calibration.name}: errors, %"), title_justify="left")
    for heading in ("component", "points", "MAPE", "p95", "bar", ""):
        table.add_column(heading, justify="left" if heading in ("component", "") else "right")
    for component, error in calibration.errors.items():
        bar = bar_of(component, calibration.gpu)
        limit = "none set" if bar is None else f"{bar.mape:g}" + (f" / {bar.p95:g}" if bar.p95 else "")
        verdict = "" if bar is None else "[green]met[/]" if meets(error, bar) else "[red]MISSED[/]"
        row = (str(error.points), f"{error.mape:.1f}", f"{error.p95:.1f}")
        table.add_row(component, *row, limit, verdict)
    console.print(table)
    for text in calibration.assumed:
        console.print(f"assumed: {text}", style="dim", highlight=False, markup=False)
    if calibration.provenance.note:
        console.print(f"note: {calibration.provenance.note}", style="dim", highlight=False, markup=False)
