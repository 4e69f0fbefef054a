"""A calibration from a recording: what each step took, what went by between them, and to the client.

A step lasts from the start of its schedule() to the end of its update, under async scheduling from the
end of the update before where that is later: so steps add up to the time that the engine was busy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from sim.calibrate.contention import contention
from sim.calibrate.step_fit import STALL, StepFit, fit_steps, spread
from sim.calibration import Domain, Provenance, Table, WholeStepCalibration
from sim.errors import InputError
from sim.front_end import FrontEnd
from sim.hardware import Dtype
from sim.recorded_server import device_name, model_name
from sim.recording import Header, Requests, Steps, read_header, read_requests, read_steps

Floats = npt.NDArray[np.float64]

FEWEST = 10  # steps: of fewer, halves say nothing
FEW = 200  # steps: of fewer, they say little


class Fitted(NamedTuple):
    """A calibration, and what to know of the recording that it is fitted to."""

    calibration: WholeStepCalibration
    warnings: list[str]


class StepTimes(NamedTuple):
    """Steps that ran tokens, and their times in MICROSECONDS."""

    steps: Steps
    duration: Floats
    between: Floats  # since the step before, where that had left work; else NaN


def fit_recording(
    path: Path,
    *,
    date: str,
    gpu: str | None = None,
    model: str | None = None,
    weights: Dtype = "bf16",
    until: float = np.inf,
) -> Fitted:
    """Fit a whole step's coefficients to a recording, and state their errors on steps unseen.

    gpu, model: their names, else the recording's own. until: seconds; what began later is not looked
    at. Raises InputError, one line, for a file that is no recording and for one of too few steps.
    """
    header, requests = read_header(path), read_requests(path)
    times = step_times(read_steps(path), until)
    if len(times.duration) < FEWEST:
        raise InputError(
            f"{path}: {len(times.duration)} steps ran tokens; a fit takes {FEWEST} at least; record longer"
        )
    try:
        with np.errstate(all="ignore"):  # what comes of it is no error of a fit
            fit = fit_steps(times.steps, times.duration)
    except ValidationError:
        shortest, longest = times.duration.min(), times.duration.max()
        raise InputError(
            f"{path}: no step time fits steps that took {shortest:.6g} to {longest:.6g} us; record again"
        ) from None
    front_end, assumed = client_times(requests, until)
    effective = header.effective
    calibration = WholeStepCalibration(
        form="whole_step",
        gpu=gpu or device_name(header),
        model=model or model_name(header),
        tp=effective.tensor_parallel_size,
        weights=weights,
        kv_dtype="fp8" if effective.kv_cache_dtype.startswith("fp8") else "bf16",
        front_end=front_end,
        between_us=usual_mean(times.between[~np.isnan(times.between)]),
        domain=_domain(times.steps),
        errors=fit.errors,
        assumed=[*assumed, "the same step time at every KV block size"],
        provenance=_provenance(path, header, fit, len(times.duration), date),
        **{"decode_context_us": 0.0, "seq_us": 0.0, **fit.coefficients},
    )
    told = contention(times.steps, times.duration, times.between, calibration)
    if len(times.duration) < FEW:
        told.append(f"only {len(times.duration)} steps ran tokens: the fit may be further off than it looks")
    return Fitted(calibration, told)


def step_times(steps: Steps, until: float = np.inf) -> StepTimes:
    """What the steps with tokens that began before `until` seconds took. Modifies nothing."""
    before = np.concatenate([[-np.inf], steps.update_end[:-1]])
    begin = np.maximum(steps.schedule_start, before)
    went_on = steps.running - steps.num_admitted + steps.num_preempted > 0
    went_on |= np.concatenate([[0], steps.waiting[:-1]]) > 0
    between = np.where(went_on, begin - before, np.nan)
    ran = (steps.num_tokens > 0) & (begin < until)
    kept = Steps(*(column[ran] for column in steps))
    return StepTimes(kept, 1e6 * (steps.update_end - begin)[ran], 1e6 * between[ran])


def client_times(requests: Requests, until: float = np.inf) -> tuple[FrontEnd, list[str]]:
    """What a request takes to the engine's queue, and its token to the client; and what of that is assumed.

    Where nobody recorded the client, the first is from the request's arrival at the server, in which the
    step that ran then had to end: so it is the shortest that counts, without the fastest percent.
    """
    seen = requests.queued_time < until
    to_queue = 1e6 * (requests.queued_time - requests.submitted_time)[seen]
    reply = 1e6 * (requests.client_first - requests.first_token_time)[seen]
    to_queue, reply = (times[~np.isnan(times)] for times in (to_queue, reply))
    if len(to_queue) and len(reply):
        alpha, back = usual_mean(to_queue), usual_mean(reply)
        return FrontEnd(alpha_us=alpha, reply_us=back, hash_us_per_block={}), []
    inside = 1e6 * np.maximum(requests.queued_time - requests.arrival_time, 0.0)[seen]
    alpha = float(np.percentile(inside, 1)) if len(inside) else 0.0
    assumed = ["no time from the client to the server and back: the client was not recorded"]
    return FrontEnd(alpha_us=alpha, hash_us_per_block={}), assumed


def usual_mean(values: Floats) -> float:
    """The mean, in which stalls count as the longest of the others do; 0 of none."""
    if not len(values):
        return 0.0
    middle = float(np.median(values))
    return float(np.minimum(values, middle + STALL * spread(values - middle)).mean())


def _domain(steps: Steps) -> Domain:
    """The most that a step had; lengths are means within it, as the engine counts them."""
    decodes = steps.num_decodes > 0
    prefills = steps.num_prefills > 0
    kv_len = steps.decode_kv[decodes] / steps.num_decodes[decodes]
    query_len = steps.prefill_squares[prefills] / steps.prefill_tokens[prefills]
    context_len = steps.prefill_cross[prefills] / steps.prefill_tokens[prefills]

    def most(values: npt.NDArray[np.generic]) -> int:
        return max(1, int(np.ceil(values.max(initial=0))))

    return Domain(
        max_tokens=most(steps.num_tokens),
        max_decodes=most(steps.num_decodes),
        min_kv_len=max(1, int(np.floor(kv_len.min(initial=np.inf)))) if decodes.any() else 1,
        max_kv_len=most(kv_len),
        max_decode_kv=most(steps.decode_kv),
        max_query_len=most(query_len),
        max_context_len=most(context_len),
    )


def _provenance(path: Path, header: Header, fit: StepFit, num_steps: int, date: str) -> Provenance:
    vllm = f"vllm {header.versions.get('vllm', 'of an unknown version')}"
    terms = ", ".join(name.removesuffix("_us") for name in fit.coefficients)
    return Provenance(
        source=f"recording of {vllm}, {num_steps} steps, {path.name}",
        licence="that of the recording",
        date=date,
        tables=[
            Table(
                path=path.name,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                framework=vllm,
                kernel="whole steps",
            )
        ],
        note=(
            f"terms: {terms}; errors are of steps that a fit to the other half did not see: every second one "
            "(odd_even), those before or after the middle (halves); all_steps is what such a half took in all"
        ),
    )
