"""Random mixed engine steps: how far the compact form is from the tables it was fitted to."""

from __future__ import annotations

import numpy as np

from sim._jit import entry
from sim.calibrate.held_out import fit_error
from sim.calibrate.table_mode import table_cost
from sim.calibrate.timings import Timings
from sim.calibration import FitError, KernelCalibration
from sim.cost import compile_cost, gpu_time
from sim.hardware import Dtype
from sim.kernels import Kernels

NUM_STEPS = 400
MOST_TOKENS, MOST_SEQS = 8192, 256  # of a step, vLLM's defaults
PREFILLS, QUERY_LEN, KV_LEN = 4, (16, 4096), (64, 16_384)

Step = tuple[int, ...]  # gpu_time's arguments after the cost


def step_error(
    calibration: KernelCalibration, timings: Timings, kernels: Kernels, kv_dtype: Dtype
) -> FitError:
    """The compact form against interpolated tables, over steps within what was measured."""
    assert calibration.domain is not None
    engine = {"max_num_batched_tokens": MOST_TOKENS, "block_size": 16, "kv_dtype": kv_dtype}
    compact = compile_cost(calibration, **engine)  # type: ignore[arg-type]
    table = table_cost(calibration, timings, kernels, **engine)  # type: ignore[arg-type]
    time = entry(gpu_time)
    steps = random_steps(calibration.domain.max_decode_kv)
    return fit_error(np.array([time(compact, *step) / time(table, *step) - 1.0 for step in steps]))


def random_steps(most_kv: int) -> list[Step]:
    """NUM_STEPS of up to 4 prefills without context and 256 decodes of at most `most_kv` KV tokens in all.

    Numbers of sequences are uniform, lengths log-uniform. The same steps each time.
    """
    rng = np.random.default_rng(5)

    def lengths(bounds: tuple[int, int], count: int) -> list[int]:
        return [int(x) for x in np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]), count))]

    steps: list[Step] = []
    while len(steps) < NUM_STEPS:
        kv = lengths(KV_LEN, int(rng.integers(0, MOST_SEQS + 1)))
        query = lengths(QUERY_LEN, int(rng.integers(0, PREFILLS + 1)))
        num_tokens = len(kv) + sum(query)
        if num_tokens == 0 or num_tokens > MOST_TOKENS or sum(kv) > most_kv:
            continue
        squares = sum(q * q for q in query)
        shape = (len(kv), sum(kv), len(query), sum(query), squares, 0, 0)
        steps.append((num_tokens, len(kv) + len(query), *shape))
    return steps
