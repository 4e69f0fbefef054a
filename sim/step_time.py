"""Where the time of an engine step comes from: numbers in the scenario, a calibration, tables, a roofline,
or a recording."""

from __future__ import annotations

from typing import NamedTuple

from sim.calibration import Calibration, FitError, find_calibration, has_calibration, load_calibration
from sim.cost import StepCost, compile_cost, linear_cost
from sim.hardware import DTYPE_BYTES, Dtype, GpuSpec, ModelSpec, is_known, load_gpu
from sim.recorded_server import RECORDED
from sim.roofline import has_rates, roofline
from sim.scenario import ROOFLINE, TABLE, Scenario, WholeStep


class StepTime(NamedTuple):
    """A step's cost, and what a report says of it."""

    cost: StepCost
    name: str  # the calibration's, or that it is given in the scenario
    kv_dtype: Dtype
    assumed: list[str]  # what of it is not measured
    errors: dict[str, FitError]  # on points that its fits did not see, by component
    warnings: list[str]


def needs_model(scenario: Scenario) -> bool:
    """Whether the step time depends on the scenario's model and GPU by name."""
    return scenario.cost in (None, ROOFLINE, TABLE)


def step_time(scenario: Scenario, model: ModelSpec | None, weights: Dtype) -> StepTime:
    """The step time that the scenario gives, names or implies.

    Raises InputError for a calibration, GPU or table that is not there.
    """
    engine = scenario.engine
    kv_dtype: Dtype = "fp8" if engine.kv_cache_dtype == "fp8" else "bf16"
    if isinstance(scenario.cost, WholeStep):
        given = scenario.cost
        cost = linear_cost(
            given.base_us * 1e-6,
            given.token_us * 1e-6,
            decode_context_s=given.decode_context_us * 1e-6,
            seq_s=given.seq_us * 1e-6,
            max_num_batched_tokens=engine.max_num_batched_tokens,
        )
        return StepTime(cost, "whole_step, given in the scenario", kv_dtype, [], {}, [])
    warnings: list[str] = []
    if scenario.cost == TABLE:
        assert model is not None
        calibration, cost = _tables(scenario, load_gpu(scenario.gpu), model, weights, kv_dtype)
        name, timed_kv = f"{TABLE}:{calibration.name}", kv_dtype
    else:
        calibration, name, warnings = _calibration(scenario, model, weights)
        timed = calibration.kv_dtypes
        timed_kv = kv_dtype if kv_dtype in timed else timed[0]
        cost = compile_cost(
            calibration,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            block_size=engine.block_size,
            kv_dtype=timed_kv,
            hash_algo=engine.prefix_caching_hash_algo,
        )
    assumed = list(calibration.assumed)
    if timed_kv != kv_dtype:
        warnings.append(f"{name} did not time {kv_dtype} KV: a step takes as long as with {timed_kv} KV")
    if not scenario.cache.hashes:
        cost = cost._replace(hash_us_per_block=0.0)
    elif engine.enable_prefix_caching and calibration.front_end.hash_us_per_block is None:
        assumed.append("hashing takes as long as on the core where sim/hash_times.yaml was measured")
    errors = {component: error for component, error in calibration.errors.items() if _of(component, timed_kv)}
    return StepTime(cost, name, kv_dtype, assumed, errors, warnings)


def _of(component: str, kv_dtype: Dtype) -> bool:
    """Whether a component is used with this KV: it is named after it, or after none."""
    return component.endswith(kv_dtype) or not component.endswith(tuple(DTYPE_BYTES))


def _tables(
    scenario: Scenario, gpu: GpuSpec, model: ModelSpec, weights: Dtype, kv_dtype: Dtype
) -> tuple[Calibration, StepCost]:
    from sim.calibrate import require_scipy

    require_scipy(f"cost: {TABLE}")
    from sim.calibrate.sources import table_mode

    engine = scenario.engine
    return table_mode(
        gpu,
        model,
        tp=engine.tensor_parallel_size,
        weights=weights,
        kv_dtype=kv_dtype,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        hash_algo=engine.prefix_caching_hash_algo,
    )


def _calibration(
    scenario: Scenario, model: ModelSpec | None, weights: Dtype
) -> tuple[Calibration, str, list[str]]:
    """The calibration that the scenario names or implies, the name to report, and warnings."""
    if scenario.cost == RECORDED:
        from sim.recorded_cost import fit_of

        return fit_of(scenario)
    tp = scenario.engine.tensor_parallel_size
    gpu = load_gpu(scenario.gpu) if needs_model(scenario) or is_known("gpus", scenario.gpu) else None
    asked = (gpu.name if gpu else scenario.gpu, model.name if model else scenario.model, tp, weights)
    asked_for = f"{asked[0]}, {asked[1]}, tp {tp}, {weights}"
    if not needs_model(scenario):
        calibration = load_calibration(str(scenario.cost))
        fits = asked == (calibration.gpu, calibration.model, calibration.tp, calibration.weights)
        warnings = [] if fits else [f"step time is that of {calibration.name}, not of {asked_for}"]
        own = calibration.name != scenario.cost
        return calibration, f"{calibration.name}, from {scenario.cost}" if own else calibration.name, warnings
    assert model is not None and gpu is not None
    measured = has_calibration(gpu.name, model.name, tp=tp, weights=weights)
    if scenario.cost is None and (measured or not has_rates(gpu)):
        calibration = find_calibration(gpu.name, model.name, tp=tp, weights=weights)
        return calibration, calibration.name, []
    estimate = roofline(model, gpu, tp=tp, weights=weights)
    why = f"cost is {ROOFLINE}" if measured else f"no measured calibration for {asked_for}"
    warning = f"{why}: step times are a roofline from the data sheet; expect errors of tens of percent"
    return estimate, f"{ROOFLINE}:{estimate.name}", [warning]
