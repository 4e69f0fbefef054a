"""Llama-3.1-8B on one GPU: the pace of a single request, and eight users of long prompts.

Measured by vLLM's authors (their blog, 2026-04-22). Pace: inter-token latency is a line in the tokens
of context. Eight users: 150 requests of about 20,000 input and 2,000 output tokens. Assumed: lengths
within a tenth of these, for equal ones would keep the users in step, and prompts that share nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from sim._jit import entry
from sim.calibration import find_calibration
from sim.cost import compile_cost, gpu_time
from sim.hardware import Dtype
from sim.scenario import Scenario
from sim.simulation import run
from sim.validate.section import Section, table

TITLE = "Llama-3.1-8B: one request, and eight users of long prompts"
MODEL = "llama-3.1-8b"
CONTEXTS = (1_000, 10_000, 100_000)  # tokens


class Pace(NamedTuple):
    """itl = at_zero_ms + per_token_ms * tokens of context."""

    at_zero_ms: float
    per_token_ms: float

    def at(self, context: int) -> float:
        """Milliseconds between two tokens."""
        return self.at_zero_ms + self.per_token_ms * context


MEASURED: dict[tuple[str, Dtype], Pace] = {
    ("h100-sxm", "bf16"): Pace(6.44, 4.37e-5),
    ("h100-sxm", "fp8"): Pace(6.58, 2.37e-5),
    ("b200-sxm", "bf16"): Pace(3.93, 1.80e-5),
    ("b200-sxm", "fp8"): Pace(3.96, 9.72e-6),
}
# Median TTFT and ITL in ms, output tokens a second, of eight users on an H100.
EIGHT_USERS = {"median_ttft_ms": 763.6, "median_itl_ms": 15.18, "output_throughput": 450.3}


def section() -> Section:
    """Both, beside what the shipped calibrations give; no bar was set."""
    rows = []
    for (gpu, kv_dtype), measured in MEASURED.items():
        ours = pace(gpu, kv_dtype)
        line = f"{measured.at_zero_ms:.2f} + {measured.per_token_ms:.2e} c"
        cells = [f"{100 * (ours.at(c) / measured.at(c) - 1):+.1f} %" for c in CONTEXTS]
        rows.append((gpu, kv_dtype, line, f"{ours.at_zero_ms:.2f} + {ours.per_token_ms:.2e} c", *cells))
    heads = ["GPU", "KV", "measured ITL, ms", "simulated", *(f"at c = {c:,}" for c in CONTEXTS)]
    figures = run(eight_users()).summary
    users = [
        (name, f"{measured:g}", f"{figures[name]:.1f}", f"{100 * (figures[name] / measured - 1):+.1f} %")
        for name, measured in EIGHT_USERS.items()
    ]
    return Section(
        TITLE,
        [],
        [
            "No bar was set. One request, c tokens of context, bf16 weights:",
            "",
            *table(heads, rows),
            "",
            "Eight users on one H100, bf16 KV; assumed: lengths within a tenth, prompts that share nothing:",
            "",
            *table(["", "measured", "simulated", "difference"], users),
        ],
    )


def pace(gpu: str, kv_dtype: Dtype) -> Pace:
    """The simulator's line: a decode step of one sequence is affine in its context."""
    calibration = find_calibration(gpu, MODEL, tp=1, weights="bf16")
    cost = compile_cost(calibration, max_num_batched_tokens=8, block_size=16, kv_dtype=kv_dtype)
    step = entry(gpu_time)
    near, far = (1e3 * step(cost, 1, 1, 1, context, 0, 0, 0, 0, 0) for context in (0, CONTEXTS[-1]))
    return Pace(near, (far - near) / CONTEXTS[-1])


def eight_users() -> Scenario:
    """The measured load; what its authors do not say is vLLM's default."""
    return Scenario.model_validate(
        {
            "name": "eight_users",
            "model": MODEL,
            "gpu": "h100-sxm",
            "engine": {"preset": "vllm-0.33"},
            "workload": {
                "kind": "shared_prefix",
                "concurrency": 8,
                "num_requests": 150,
                "prefix_len": 0,
                "suffix_len": _about(20_000),
                "output_len": _about(2_000),
            },
        }
    )


def _about(length: int) -> dict[str, object]:
    return {"distribution": "uniform", "low": 9 * length // 10, "high": 11 * length // 10}
