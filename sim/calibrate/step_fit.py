"""A line through the times of recorded steps: which terms it has, and how far off it is on steps unseen.

The fit is a robust one, by Huber's weights: a step that was held up by something else pulls no harder
than one at the edge of the others. What it takes away from the slow steps it gives back to all: the
coefficients are scaled until the steps together take as long as they did, stalls left out. Every
coefficient is 0 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.calibrate.held_out import fit_error
from sim.calibration import FitError
from sim.recording import Steps

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TERMS: dict[str, Callable[[Steps], npt.NDArray[np.generic]]] = {  # by the calibration's field
    "base_us": lambda steps: np.ones(len(steps.num_tokens)),
    "token_us": lambda steps: steps.num_tokens,
    "kv_us": lambda steps: steps.sum_kv,
    "seq_us": lambda steps: steps.num_seqs,
    "pair_us": lambda steps: steps.pairs,
    "prefill_us": lambda steps: steps.num_prefills > 0,
    "decode_context_us": lambda steps: steps.decode_kv,
}
ALWAYS = ("base_us", "token_us")
USUAL = (*ALWAYS, "kv_us", "seq_us", "pair_us")
MORE = ("prefill_us", "decode_context_us")

PAYS = 0.01  # part of both held-out errors that a further term has to take away
EDGE = 2.0  # standard deviations beyond which a step pulls no harder
STALL = 10.0  # and beyond which it counts as held up by something else
ROUNDS = 50


class StepFit(NamedTuple):
    """Microseconds by term, and the errors of the same fit on steps that it did not see."""

    coefficients: dict[str, float]
    errors: dict[str, FitError]
    spread_us: float  # standard deviation of the residuals, by their median


def fit_steps(steps: Steps, times_us: Floats) -> StepFit:
    """Choose the terms by the held-out errors, then fit them to all steps.

    times_us: microseconds that each of `steps` took. Modifies nothing.
    """
    columns = {name: np.asarray(column(steps), np.float64) for name, column in TERMS.items()}

    def terms(names: Sequence[str]) -> Floats:
        return np.stack([columns[name] for name in names], axis=1)

    def held_out(names: Sequence[str]) -> Floats:
        return np.array([error.mape for error, _ in errors_of(terms(names), times_us).values()])

    names = list(USUAL)
    reached = held_out(names)
    for name in MORE:
        if ((further := held_out([*names, name])) < (1.0 - PAYS) * reached).all():
            names, reached = [*names, name], further
    for name in [name for name in names if name not in ALWAYS]:
        fewer = [other for other in names if other != name]
        if ((without := held_out(fewer)) <= reached).all():
            names, reached = fewer, without
    chosen = terms(names)
    coefficients = robust_fit(chosen, times_us)
    errors: dict[str, FitError] = {}
    for split, (error, whole) in errors_of(chosen, times_us).items():
        errors |= {f"step_{split}": error, f"all_steps_{split}": whole}
    by_name = dict(zip(names, coefficients.tolist(), strict=True))
    return StepFit(by_name, errors, spread(times_us - chosen @ coefficients))


def robust_fit(terms: Floats, times: Floats) -> Floats:
    """Coefficients of the terms' columns, 0 or more, that Huber's loss finds, scaled to the whole time."""
    size = terms.max(axis=0)
    size[size == 0] = 1.0
    scaled = terms / size
    weights = np.ones(len(times))
    found = np.zeros(terms.shape[1])
    for _ in range(ROUNDS):
        former = found
        found = least_squares(scaled * weights[:, None], times * weights)
        late = np.abs(times - scaled @ found)
        weights = np.sqrt(1.0 / np.maximum(1.0, late / (EDGE * spread(late))))
        if np.allclose(found, former, rtol=1e-6, atol=0.0):
            break
    fitted = scaled @ found
    most = fitted + STALL * spread(times - fitted)
    result: Floats = found / size * (np.minimum(times, most).sum() / fitted.sum())
    return result


def least_squares(terms: Floats, times: Floats) -> Floats:
    """Coefficients of 0 or more: as long as one is below, the lowest is left out."""
    found = np.zeros(terms.shape[1])
    kept = np.arange(terms.shape[1])
    products, sums = np.einsum("ij,ik->jk", terms, terms), np.einsum("ij,i->j", terms, times)
    while len(kept):
        solution = np.linalg.lstsq(products[np.ix_(kept, kept)], sums[kept])[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        kept = np.delete(kept, solution.argmin())
    return found


def errors_of(terms: Floats, times: Floats) -> dict[str, tuple[FitError, FitError]]:
    """By split of the steps: errors of each step and of each half's sum, by the fit to the other half."""
    found = {}
    for split, first in splits(len(times)):
        single, sums = np.empty(len(times)), []
        for seen in (first, ~first):
            fitted = terms[~seen] @ robust_fit(terms[seen], times[seen])
            single[~seen] = fitted / times[~seen] - 1.0
            sums.append(fitted.sum() / times[~seen].sum() - 1.0)
        found[split] = (fit_error(single), fit_error(np.array(sums)))
    return found


def splits(count: int) -> Iterator[tuple[str, Mask]]:
    """Two ways to cut steps into halves: every second one, and what comes first."""
    row = np.arange(count)
    yield "odd_even", row % 2 == 0
    yield "halves", row < count // 2


def spread(residuals: Floats) -> float:
    """Their standard deviation, by the median of absolute values; above 0."""
    return max(1.4826 * float(np.median(np.abs(residuals))), 1e-9)
