"""The shipped calibrations' own held-out errors, as their files state them, against the bars."""

from __future__ import annotations

from typing import NamedTuple

from sim.calibrate.bars import Bar, bar_of, meets
from sim.calibration import FitError, load_calibration
from sim.hardware import shipped
from sim.validate.section import Check, Section, table

TITLE = "Fits of kernels, points held out"
COMPONENTS = ("gemm", "decode_attention", "prefill_attention", "prefill_over_context", "step_against_tables")


class Fit(NamedTuple):
    """One component of one file, of one KV type where it has one."""

    gpu: str
    file: str
    component: str
    error: FitError
    bar: Bar | None


def section() -> Section:
    """Per GPU: worst, mean, and how many files miss; then every miss by name."""
    found = read_fits()
    lines = [
        f"{len({fit.file for fit in found})} files, each with the errors of its own fit; MAPE, percent.",
        "",
        *table(
            ["GPU", "component", "fits", "mean", "worst", "worst p95", "bar", "missed by"],
            [_row(gpu, component, fits) for (gpu, component), fits in by_gpu(found).items()],
        ),
        "",
    ]
    missed = [fit for fit in found if fit.bar is not None and not meets(fit.error, fit.bar)]
    if missed:
        lines += [
            f"The {len(missed)} that miss:",
            "",
            *table(
                ["file", "component", "MAPE", "p95", "bar"],
                [(f.file, f.component, f.error.mape, f.error.p95, _limit(f.bar)) for f in missed],
            ),
        ]
    return Section(TITLE, checks(found), lines)


def read_fits() -> list[Fit]:
    """Every stated error of every shipped file, in the files' order."""
    found = []
    for name in shipped("calibrations"):
        calibration = load_calibration(name)
        for component, error in calibration.errors.items():
            found.append(Fit(calibration.gpu, name, component, error, bar_of(component, calibration.gpu)))
    return found


def by_gpu(found: list[Fit]) -> dict[tuple[str, str], list[Fit]]:
    """The fits of the components that have names among COMPONENTS, by GPU and component."""
    groups: dict[tuple[str, str], list[Fit]] = {}
    for fit in found:
        name = next((name for name in COMPONENTS if fit.component.startswith(name)), None)
        if name is not None:
            groups.setdefault((fit.gpu, name), []).append(fit)
    return groups


def checks(found: list[Fit]) -> list[Check]:
    """One bar a GPU and component: met if every file meets it."""
    result = []
    for (gpu, component), fits in by_gpu(found).items():
        bar = fits[0].bar
        if bar is None:
            continue
        misses = sum(not meets(fit.error, bar) for fit in fits)
        worst = f"{max(fit.error.mape for fit in fits):.1f}"
        if bar.p95 is not None:
            worst += f" / {max(fit.error.p95 for fit in fits):.1f}"
        said = f"worst {worst} %" + (f", {misses} of {len(fits)} miss" if misses else "")
        result.append(Check(f"{component}, {gpu}", said, f"<= {_limit(bar)} %", misses == 0))
    return result


def _row(gpu: str, component: str, fits: list[Fit]) -> tuple[object, ...]:
    errors = [fit.error for fit in fits]
    bar = fits[0].bar
    misses = "" if bar is None else sum(not meets(error, bar) for error in errors)
    mean = sum(error.mape for error in errors) / len(errors)
    worst, worst_p95 = max(error.mape for error in errors), max(error.p95 for error in errors)
    return gpu, component, len(fits), f"{mean:.1f}", f"{worst:.1f}", f"{worst_p95:.1f}", _limit(bar), misses


def _limit(bar: Bar | None) -> str:
    if bar is None:
        return "none set"
    return f"{bar.mape:g}" + (f" / {bar.p95:g}" if bar.p95 is not None else "")
