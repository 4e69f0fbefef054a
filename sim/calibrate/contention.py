"""Whether something else used the recorded machine: signs that step times are not the engine's alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim.calibrate.step_fit import TERMS, spread
from sim.calibration import WholeStepCalibration
from sim.recording import Steps

Floats = npt.NDArray[np.float64]

MOST_WAITING = 0.05  # part of a step's time in which a runnable process had no core
MOST_HELD_UP = 0.005  # part of all time beyond what fit and spread explain, in steps and between them
LATE = 6.0  # standard deviations


def contention(
    steps: Steps, duration_us: Floats, between_us: Floats, calibration: WholeStepCalibration
) -> list[str]:
    """Warnings, one line each; none for a quiet machine.

    Where the kernel's run-queue waits were recorded they are the judge: of worker or engine, more
    than MOST_WAITING of the steps' time. Else the shape of the times is: more than MOST_HELD_UP
    of it lies beyond LATE standard deviations of the fit, or of the usual time between two steps.
    """
    total = float(duration_us.sum())
    waits = {
        name: 1e6 * float(np.nansum(column)) / total
        for name, column in (("worker", steps.worker_wait), ("engine", steps.engine_wait))
        if not np.isnan(column).all()
    }
    if waits:
        name, share = max(waits.items(), key=lambda item: item[1])
        if share <= MOST_WAITING:
            return []
        return [
            f"the machine was not quiet: during {100 * share:.0f} % of the steps' time the {name} process "
            "could run and had no core; record again on a quiet one, or expect steps as slow as these"
        ]
    held_up = held_up_time(steps, duration_us, between_us, calibration) / total
    if held_up <= MOST_HELD_UP:
        return []
    return [
        f"the machine may not have been quiet: {100 * held_up:.1f} % of the time went by in steps, and "
        "between steps, beyond what others like them take; record again on a quiet one, or expect the same"
    ]


def held_up_time(
    steps: Steps, duration_us: Floats, between_us: Floats, calibration: WholeStepCalibration
) -> float:
    """Microseconds beyond LATE standard deviations of what steps like these take."""
    fitted = np.zeros(len(duration_us))
    for name, column in TERMS.items():
        fitted += getattr(calibration, name) * np.asarray(column(steps), np.float64)
    between = between_us[~np.isnan(between_us)]
    return beyond(duration_us - fitted) + beyond(between - np.median(between) if len(between) else between)


def beyond(residuals: Floats) -> float:
    """The sum of what is above LATE standard deviations."""
    if not len(residuals):
        return 0.0
    return float(np.maximum(residuals - LATE * spread(residuals), 0.0).sum())
