"""How far off a fit is on points it did not see: four folds, each predicted from the other three."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibration import FitError

Floats = npt.NDArray[np.float64]
Fit = TypeVar("Fit")
FOLDS = 4


def held_out_errors(
    points: pd.DataFrame, fit: Callable[[pd.DataFrame], Fit], predict: Callable[[Fit, pd.DataFrame], Floats]
) -> Floats:
    """Relative error at every point, of the fit to the three folds without it.

    Folds are drawn by a generator of fixed seed, so that a table always gives the same errors.
    """
    fold = np.random.default_rng(0).permutation(len(points)) % FOLDS
    errors = np.empty(len(points))
    for i in range(FOLDS):
        unseen = points[fold == i]
        times = unseen.latency_us.to_numpy(np.float64)
        errors[fold == i] = predict(fit(points[fold != i]), unseen) / times - 1.0
    return errors


def interpolation_errors(x: Floats, times: Floats) -> Floats:
    """Relative error at each inner point of a table, interpolated between its neighbours."""
    at = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    result: Floats = (times[:-2] + at * (times[2:] - times[:-2])) / times[1:-1] - 1.0
    return result


def fit_error(errors: Floats) -> FitError:
    """Mean and 95th percentile of the absolute errors, percent."""
    percent = 100.0 * np.abs(errors)
    return FitError(
        points=len(percent),
        mape=round(float(percent.mean()), 2),
        p95=round(float(np.percentile(percent, 95)), 2),
    )
