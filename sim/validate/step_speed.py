"""What evaluating one step's time costs: the page says on which side of the bar, as clocks differ."""

from __future__ import annotations

from sim._jit import jit_disabled
from sim.bench_step import step_time_ns
from sim.validate.section import Check, Section

TITLE = "Speed of the cost model"
BAR_US = 1.0
CALIBRATION = "h100-sxm/llama-3.1-8b_tp1_bf16"
_WHAT = "evaluating a step, compiled"


def section() -> Section:
    """Not checked with NUMBA_DISABLE_JIT=1."""
    bar = f"< {BAR_US:g} us"
    if jit_disabled():
        return Section(TITLE, [Check(_WHAT, "", bar, None)], ["skipped: NUMBA_DISABLE_JIT is set"])
    fast = 1e-3 * step_time_ns(CALIBRATION) < BAR_US
    reached = f"under {BAR_US:g} us" if fast else f"{BAR_US:g} us or more"
    said = "Mixed steps, one after the other; `prefixsim bench` prints the figure of this machine."
    return Section(TITLE, [Check(_WHAT, reached, bar, fast)], [said])
