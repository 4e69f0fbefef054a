"""Which calibration's time a scenario's step takes: its KV type, what is told of another, its own numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sim import cost as step_cost
from sim._jit import entry
from sim.calibration import KernelCalibration, load_calibration
from sim.cost import compile_cost
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.step_time import StepTime

WORKLOAD = {
    "kind": "shared_prefix", "prefix_len": 0, "suffix_len": 1, "output_len": 1, "num_requests": 1,
    "request_rate": 1.0,
}  # fmt: skip


def step_time_of(**fields: Any) -> StepTime:
    engine = {"max_model_len": 4096, "num_gpu_blocks": 1000, **fields.pop("engine", {})}
    return resolve(Scenario.model_validate({"workload": WORKLOAD, "engine": engine, **fields})).step_time


def test_a_step_takes_the_time_of_its_kv_type() -> None:
    timed = load_calibration("h100-sxm/llama-3.1-8b_tp1_bf16")
    bf16, fp8 = (
        compile_cost(timed, max_num_batched_tokens=8192, block_size=64, kv_dtype=kv_dtype).d2
        for kv_dtype in ("bf16", "fp8")
    )
    assert fp8 < bf16
    for engine, d2, kv_dtype in (({}, bf16, "bf16"), ({"kv_cache_dtype": "fp8"}, fp8, "fp8")):
        found = step_time_of(engine=engine)
        assert (found.cost.d2, found.kv_dtype, found.warnings) == (d2, kv_dtype, [])
        assert f"decode_attention_{kv_dtype}" in found.errors and "gemm" in found.errors
        assert not any(name.endswith({"bf16": "fp8", "fp8": "bf16"}[kv_dtype]) for name in found.errors)


def test_a_kv_type_that_was_not_timed_is_told() -> None:
    name = "a100-sxm/llama-3.1-8b_tp1_bf16"
    fit = load_calibration(name)
    assert isinstance(fit, KernelCalibration) and fit.kv_dtypes == ["bf16"]
    found = step_time_of(gpu="a100-sxm", engine={"kv_cache_dtype": "fp8"})
    assert found.warnings == [f"{name} did not time fp8 KV: a step takes as long as with bf16 KV"]
    assert found.kv_dtype == "fp8"
    assert found.cost.d2 == 32 * fit.attention["bf16"].decode.d2
    assert step_time_of(gpu="a100-sxm").warnings == []


def test_the_numbers_of_a_scenario_are_microseconds() -> None:
    given = {"base_us": 100.0, "token_us": 2.0, "decode_context_us": 3.0, "seq_us": 5.0}
    found = step_time_of(cost=given)
    time = entry(step_cost.gpu_time)
    # two decodes over 10 KV tokens in all
    assert time(found.cost, 2, 2, 2, 10, 0, 0, 0, 0, 0) == pytest.approx(144e-6, rel=1e-12)
    assert (found.name, found.assumed, found.errors) == ("whole_step, given in the scenario", [], {})
