"""K decode steps in closed form, beside a loop over them.

Decode attention is affine, and a running sequence's KV grows by a token a step, so the time of K steps
of n sequences is K*T(S) + L*d2*n*K*(K-1)/2, T(S) being the first. The simulator steps; the closed
form says that nothing but the affine term grows.
"""

from __future__ import annotations

import math

import numpy as np

from sim._jit import entry
from sim.calibration import load_calibration
from sim.cost import StepCost, compile_cost, gpu_time
from sim.hardware import shipped
from sim.validate.section import Check, Section

TITLE = "Decode steps in closed form"
BAR = 1e-9  # relative
MOST = (256, 8192, 100)  # sequences, KV tokens of each, steps


def section() -> Section:
    """The worst of a random case for each shipped calibration and KV type."""
    worst, cases = 0.0, 0
    rng = np.random.default_rng(0)
    for name in shipped("calibrations"):
        calibration = load_calibration(name)
        for kv_dtype in calibration.kv_dtypes:
            cost = compile_cost(
                calibration, max_num_batched_tokens=MOST[0], block_size=16, kv_dtype=kv_dtype
            )
            num_seqs, kv_len, steps = (int(rng.integers(1, most + 1)) for most in MOST)
            worst = max(worst, difference(cost, num_seqs, num_seqs * kv_len, steps))
            cases += 1
    check = Check("K decode steps in closed form", f"{worst:.0e}", f"<= {BAR:.0e}", worst <= BAR)
    said = f"The largest relative difference of {cases} random runs of up to {MOST[2]} steps."
    return Section(TITLE, [check], [said])


def difference(cost: StepCost, num_seqs: int, kv: int, steps: int) -> float:
    """Relative difference of the closed form and the loop over `steps` steps, the first over `kv` tokens."""
    time = entry(gpu_time)
    loop = math.fsum(
        time(cost, num_seqs, num_seqs, num_seqs, kv + num_seqs * k, 0, 0, 0, 0, 0) for k in range(steps)
    )
    return abs(closed_form(cost, num_seqs, kv, steps) / loop - 1.0)


def closed_form(cost: StepCost, num_seqs: int, kv: int, steps: int) -> float:
    """SECONDS of `steps` pure decode steps of `num_seqs` sequences, the first over `kv` KV tokens."""
    first = entry(gpu_time)(cost, num_seqs, num_seqs, num_seqs, kv, 0, 0, 0, 0, 0)
    return float(steps * first + 1e-6 * cost.d2 * num_seqs * (steps * (steps - 1) / 2))
