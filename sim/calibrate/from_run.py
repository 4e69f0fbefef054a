"""A calibration from one run of a real engine: the step time with which the simulator retells it.

Only the first fifth of the requests, in order of arrival, are fitted to: their first and last
tokens. Lengths and arrivals of all requests are given; when the others ended is not looked at, but
to state the errors. The fit starts at the GPU's data sheet and is drawn to it, gently: a pool that
is always full does not tell what a step costs from what its KV costs, and there the data sheet
decides.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.calibrate.held_out import fit_error
from sim.calibrate.measured_run import MeasuredRun, meta_file, read_run
from sim.calibration import Domain, FitError, Provenance, Table, WholeStepCalibration
from sim.core import EngineConfig
from sim.cost import StepCost, linear_cost
from sim.engine import Records
from sim.errors import InputError
from sim.front_end import FrontEnd
from sim.hardware import DTYPE_BYTES, GpuSpec, ModelSpec
from sim.memory import kv_bytes_per_token
from sim.request import Batch, Ints
from sim.simulate import simulate
from sim.totals import Totals
from workloads import Trace

Floats = npt.NDArray[np.float64]

SEEN = 0.2  # part of the requests that is fitted to
FEWEST = 50  # requests: of fewer, that part is too small
DRAW = 0.02  # seconds of lateness that a coefficient e times its start weighs as much as
REACH = 1.5  # natural logarithm of how far a coefficient may lie from the data sheet
NEARBY = (-0.003, -0.001, 0.001, 0.003)  # relative changes of the step time, to average over
POPULATION, GENERATIONS = 6, 25  # of differential evolution, by coefficient


class Fit(NamedTuple):
    """The coefficients, in microseconds, and how well they retell the requests that were seen."""

    base_us: float
    token_us: float
    decode_context_us: float
    seq_us: float
    lateness: float  # seconds, the mean of absolute values
    start_up: float  # seconds that the real engine lost at its start


def fit_run(load: Path, run: Path, gpu: GpuSpec, model: ModelSpec, *, date: str) -> WholeStepCalibration:
    """Fit a whole step's coefficients to a run, and state their errors on the requests not seen.

    `load` is the JSONL of segments that was sent, `run` the requests file of a run (see
    sim/calibrate/measured_run.py). Takes a minute. Raises InputError, one line, for files that
    are wrong or do not belong together, and for a GPU without rates.
    """
    measured = read_run(run)
    if len(measured.prompt_len) < FEWEST:
        raise InputError(f"{run}: has {len(measured.prompt_len)} requests; a fit takes {FEWEST} at least")
    if model.num_attention_heads % measured.tp:
        raise InputError(
            f"{meta_file(run)}: engine_kwargs.tensor_parallel_size: {measured.tp} does not divide the "
            f"{model.num_attention_heads} heads of {model.name}"
        )
    batches = read_load(load, measured)
    fit = fit_requests(batches, measured, data_sheet(gpu, model, measured))
    totals, records = retell(batches, measured.config, step_cost(np.array(fit[:4]), measured.config))
    return WholeStepCalibration(
        form="whole_step",
        gpu=gpu.name,
        model=model.name,
        tp=measured.tp,
        weights=measured.weights,
        kv_dtype=measured.kv_dtype,
        base_us=fit.base_us,
        token_us=fit.token_us,
        decode_context_us=fit.decode_context_us,
        seq_us=fit.seq_us,
        front_end=FrontEnd(hash_us_per_block={}),
        domain=_domain(measured, totals),
        errors=unseen_errors(measured, records),
        assumed=[
            "whole-step fit to one measured run; GPU, CPU and front-end time are not told apart",
            "prefill over cached context costs nothing beyond its new tokens",
            "the same step time at every KV block size",
        ],
        provenance=_provenance(run, measured, fit, date),
    )


def read_load(load: Path, measured: MeasuredRun) -> list[Batch]:
    """The load as requests that arrive when the run's client sent them.

    Raises InputError if its lengths are not the run's, WorkloadError for a bad file.
    """
    trace = Trace(path=str(load), format="segments")
    batches, start = [], 0
    for batch in trace.batches(np.random.SeedSequence(0), measured.config.block_size):
        rows = slice(start, start + len(batch.prompt_len))
        for name in ("prompt_len", "output_len"):
            if getattr(batch, name).tolist() != getattr(measured, name)[rows].tolist():
                raise InputError(f"{load}: {name} is not that of the run: it is another load")
        batches.append(batch._replace(arrival_time=measured.arrival_time[rows]))
        start = rows.stop
    if start != len(measured.prompt_len):
        raise InputError(f"{load}: has {start} requests, the run {len(measured.prompt_len)}")
    return batches


def data_sheet(gpu: GpuSpec, model: ModelSpec, measured: MeasuredRun) -> Floats:
    """base, token, context and seq in microseconds, if the GPU did what its data sheet says.

    A step reads all weights, a token takes two operations a weight, a token of context is read, and
    a sequence needs the LM head. Raises InputError for a GPU without rates and a model with experts.
    """
    if gpu.memory_bandwidth is None:
        raise InputError(f"{gpu.name}: memory_bandwidth, peak_flops: the fit starts from them; add them")
    if model.num_experts is not None:
        raise InputError(f"{model.name}: has experts, whose time no whole-step form follows")
    lm_head = model.vocab_size * model.hidden_size
    operations = gpu.peak_flops[measured.weights] * measured.tp
    reading = gpu.memory_bandwidth * measured.tp
    context = kv_bytes_per_token(model, tp=measured.tp, kv_dtype=measured.kv_dtype)
    return 1e6 * np.array(
        [
            model.num_parameters * DTYPE_BYTES[measured.weights] / reading,
            2 * (model.num_parameters - lm_head) / operations,
            context / gpu.memory_bandwidth,
            2 * lm_head / operations,
        ]
    )


def fit_requests(batches: list[Batch], measured: MeasuredRun, start: Floats) -> Fit:
    """The coefficients of least lateness of the first and last tokens that are seen.

    Lateness is against its median: a real engine is slow once, at its first step, which delays all
    that follows. It counts by absolute value, so a request preempted once too often weighs little,
    and in the mean over nearby step times, because the least change flips some preemption.
    """
    from scipy.optimize import differential_evolution

    seen = int(SEEN * len(measured.prompt_len))
    config = measured.config

    def lateness(coefficients: Floats) -> Floats:
        records = retell(batches, config, step_cost(coefficients, config))[1]
        return np.concatenate(
            [
                records["first_token_time"][:seen] - measured.first_token_time[:seen],
                records["finish_time"][:seen] - measured.last_token_time[:seen],
            ]
        )

    def spread(late: Floats) -> float:
        return float(np.abs(late - np.median(late)).mean())

    def loss(x: Floats) -> float:
        nearby = [spread(lateness(start * np.exp(x) * (1.0 + change))) for change in NEARBY]
        return float(np.mean(nearby)) + DRAW * float((x * x).mean())

    found = differential_evolution(
        loss,
        [(-REACH, REACH)] * len(start),
        x0=np.zeros(len(start)),
        popsize=POPULATION,
        maxiter=GENERATIONS,
        tol=0.0,
        polish=False,  # there is no gradient
        seed=0,
    )
    coefficients = start * np.exp(found.x)
    late = lateness(coefficients)
    base, token, context, seq = coefficients.tolist()
    return Fit(base, token, context, seq, spread(late), float(-np.median(late)))


def unseen_errors(measured: MeasuredRun, records: Records) -> dict[str, FitError]:
    """Relative errors of each latency, as `records` retell it, over the requests that were not seen."""
    unseen = slice(int(SEEN * len(measured.prompt_len)), None)
    simulated = latencies(
        records["ready_time"], records["first_token_time"], records["finish_time"], measured.output_len
    )
    real = latencies(
        measured.queued_time, measured.first_token_time, measured.last_token_time, measured.output_len
    )
    errors = {name: (simulated[name] / real[name] - 1.0)[unseen] for name in real}
    return {name: fit_error(values[np.isfinite(values)]) for name, values in errors.items()}


def latencies(queued: Floats, first: Floats, last: Floats, output_len: Ints) -> dict[str, Floats]:
    """Seconds: TTFT and end-to-end latency since the scheduler has the request, and TPOT.

    TPOT is NaN where the answer is one token.
    """
    gaps = np.where(output_len > 1, output_len - 1.0, np.nan)
    return {"ttft": first - queued, "tpot": (last - first) / gaps, "e2el": last - queued}


def step_cost(coefficients_us: Floats, config: EngineConfig) -> StepCost:
    """base, token, context and seq as a cost of steps."""
    base, token, context, seq = (coefficients_us * 1e-6).tolist()
    return linear_cost(
        base, token, decode_context_s=context, seq_s=seq, max_num_batched_tokens=config.max_num_batched_tokens
    )


def retell(batches: list[Batch], config: EngineConfig, cost: StepCost) -> tuple[Totals, Records]:
    """Simulate; the totals, and the records in order of request."""
    chunks: list[Records] = []
    totals = simulate(iter(batches), config, cost, on_records=chunks.append)
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = np.argsort(columns["request_id"])
    return totals, {name: column[order] for name, column in columns.items()}


def _domain(measured: MeasuredRun, totals: Totals) -> Domain:
    """What the run can have met: its engine's and its requests' limits, and the most that ran, retold."""
    config = measured.config
    return Domain(
        max_tokens=config.max_num_batched_tokens,
        max_decodes=totals.max_num_running,
        min_kv_len=int(measured.prompt_len.min()),
        max_kv_len=int((measured.prompt_len + measured.output_len).max()),
        max_decode_kv=(config.num_gpu_blocks - 1) * config.block_size,
        max_query_len=min(config.max_num_batched_tokens, int(measured.prompt_len.max())),
        max_context_len=int(measured.prompt_len.max()),
    )


def _provenance(run: Path, measured: MeasuredRun, fit: Fit, date: str) -> Provenance:
    return Provenance(
        source=f"run of vLLM {measured.vllm}, {len(measured.prompt_len)} requests, {run.name}",
        licence="that of the run",
        date=date,
        tables=[
            Table(
                path=run.name,
                sha256=hashlib.sha256(run.read_bytes()).hexdigest(),
                framework=f"vllm {measured.vllm}",
                kernel="whole steps",
            )
        ],
        note=(
            f"fitted to the first {100 * SEEN:.0f} % of the requests, whose tokens it retells within "
            f"{fit.lateness:.2f} s in the mean, less a delay of {fit.start_up:.2f} s at the start; errors "
            "are over the other requests"
        ),
    )
