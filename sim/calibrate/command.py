"""What `prefixsim calibrate` does and prints."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sim.calibrate import require_scipy
from sim.calibrate.bars import bar_of, meets
from sim.calibration import Calibration, WholeStepCalibration
from sim.hardware import Dtype, GpuSpec, ModelSpec

if TYPE_CHECKING:
    from rich.console import Console

    from sim.calibrate.from_recording import Fitted


def default_name(calibration: Calibration, source: Path | None) -> Path:
    """Where a calibration goes if nobody says: a file here, of its name and its source's."""
    suffix = f"_{source.name.split('.')[0]}" if source else ""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", calibration.name.replace("/", "_"))
    return Path(name + suffix + ".yaml")


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


def fit_to_recording(
    recording: Path, *, gpu: str | None, model: str | None, weights: Dtype
) -> Fitted:
    """Fit whole steps to what the vLLM recorder wrote. Raises InputError, one line."""
    from sim.calibrate.from_recording import fit_recording
    from sim.recording.told import told_by_recording

    told: list[str] = []
    with told_by_recording(told):
        fitted = fit_recording(recording, gpu=gpu, model=model, weights=weights, date=today())
    return fitted._replace(warnings=[*told, *fitted.warnings])


def formula(calibration: WholeStepCalibration) -> str:
    """What a step takes by a whole-step fit, and a request beside its steps, in a line."""
    terms = {
        "token_us": "a token",
        "kv_us": "a token of KV",
        "seq_us": "a sequence",
        "pair_us": "an attended pair",
        "prefill_us": "if it has prefill",
        "decode_context_us": "a token of decode context",
    }
    parts = [f"{getattr(calibration, name):.4g} {what}" for name, what in terms.items()]
    parts = [part for part in parts if not part.startswith("0 ")]
    front_end = calibration.front_end
    return (
        f"a step takes, in us: {' + '.join([f'{calibration.base_us:.4g}', *parts])}; "
        f"{calibration.between_us:.4g} to the next; "
        f"a request {front_end.alpha_us:.4g} to the queue, a token {front_end.reply_us:.4g} to the client"
    )


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
