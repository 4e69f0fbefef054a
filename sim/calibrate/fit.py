"""The fits: measured points in, coefficients out. Errors are relative: each point counts alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibration import DecodeAttention, PrefillAttention, Saturating

Floats = npt.NDArray[np.float64]

SOFT = 0.03  # relative error beyond which a product's point pulls no harder
# Relative error below which a point of attention counts as fitted. Decode times jump where the KV
# outgrows the L2 cache, which no affine form follows: a wide band keeps the worst points in sight.
DECODE_BAND, PREFILL_BAND = 0.2, 0.02

MOST_KAPPA = 1e3  # nor less than one by it


def fit_saturating(rows: Floats, times: Floats) -> Saturating:
    """(a^p + (b*rows)^p)^(1/p) through times by number of rows; robust least squares of log errors."""
    from scipy.optimize import least_squares

    def errors(x: Floats) -> Floats:
        result: Floats = _log_saturating(x, rows) - np.log(times)
        return result

    starts = [
        np.array([np.log(times.min()), np.log(times[-1] / rows[-1]), sharpness])
        for sharpness in (0.0, 1.0, 2.5)
    ]
    fits = [least_squares(errors, start, loss="soft_l1", f_scale=SOFT) for start in starts]
    best = min(fits, key=lambda fit: float(fit.cost)).x
    return Saturating(a=float(np.exp(best[0])), b=float(np.exp(best[1])), p=1.0 + float(np.exp(best[2])))


def _log_saturating(x: Floats, rows: Floats) -> Floats:
    p = 1.0 + np.exp(x[2])
    result: Floats = np.logaddexp(p * x[0], p * (x[1] + np.log(rows))) / p
    return result


def fit_decode(points: pd.DataFrame) -> DecodeAttention:
    """d0 + d1*n + d2*S through points of (batch, kv, latency_us)."""
    d0, d1, d2 = _fit_linear(
        _decode_terms(points), points.latency_us.to_numpy(np.float64), DECODE_BAND
    )
    return DecodeAttention(d0=d0, d1=d1, d2=d2)


def decode(fit: DecodeAttention, points: pd.DataFrame) -> Floats:
    """Microseconds of decode attention at points of (batch, kv)."""
    result: Floats = _decode_terms(points) @ np.array([fit.d0, fit.d1, fit.d2])
    return result


def fit_prefill(points: pd.DataFrame, kappa: float | None) -> PrefillAttention:
    """a0 + a1*q + a2*(q*q/2 + q*c/kappa) + a3*c through points of (batch, q, c, latency_us).

    kappa is fitted, and a3 with it, from points over cached context; without any it has to be
    given, and a3 is 0. a2 is 0, or next to it, where times do not grow with q*q or q*c.
    """
    terms, times = _prefill_terms(points), points.latency_us.to_numpy(np.float64)
    if kappa is not None:
        terms = np.stack([*terms[:, :2].T, terms[:, 2] + terms[:, 3] / kappa], axis=1)
        a0, a1, a2 = _fit_linear(terms, times, PREFILL_BAND)
        return PrefillAttention(a0=a0, a1=a1, a2=a2, a3=0.0, kappa=kappa)
    a0, a1, a2, cross, a3 = _fit_linear(terms, times, PREFILL_BAND)
    if a2 <= cross / MOST_KAPPA:  # nothing to set the cost of context against: it counts as new tokens do
        return fit_prefill(points, 1.0)
    return PrefillAttention(a0=a0, a1=a1, a2=a2, a3=a3, kappa=a2 / max(cross, a2 / MOST_KAPPA))


def prefill(fit: PrefillAttention, points: pd.DataFrame) -> Floats:
    """Microseconds of prefill attention at points of (batch, q, c)."""
    coefficients = np.array([fit.a0, fit.a1, fit.a2, fit.a2 / fit.kappa, fit.a3])
    result: Floats = _prefill_terms(points) @ coefficients
    return result


def _decode_terms(points: pd.DataFrame) -> Floats:
    n, kv = points.batch.to_numpy(np.float64), points.kv.to_numpy(np.float64)
    return np.stack([np.ones_like(n), n, n * kv], axis=1)


def _prefill_terms(points: pd.DataFrame) -> Floats:
    n, q, c = (points[name].to_numpy(np.float64) for name in ("batch", "q", "c"))
    return np.stack([np.ones_like(n), n * q, n * q * q / 2, n * q * c, n * c], axis=1)


def _fit_linear(terms: Floats, times: Floats, band: float) -> list[float]:
    """Nonnegative coefficients of least relative error, absolute beyond the band and squared in it.

    By reweighted least squares.
    """
    from scipy.optimize import nnls

    scale = terms.max(axis=0)
    scale[scale == 0] = 1.0
    scaled = terms / scale
    weights = 1.0 / times
    coefficients = np.zeros(terms.shape[1])
    for _ in range(30):
        coefficients = nnls(scaled * weights[:, None], times * weights)[0]
        errors = np.abs(scaled @ coefficients / times - 1.0)
        weights = 1.0 / times / np.sqrt(np.maximum(errors, band))
    return [float(one) for one in coefficients / scale]
