"""The measured tables themselves as step time, read off between their points: the compact form's oracle.

What the tables do not hold (element-wise kernels, CPU, prefill over cached context) is as assumed as
in the compact form, and the same.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from sim.calibrate.curve import layer_curve, products_of_layer
from sim.calibrate.timings import Timings
from sim.calibration import KernelCalibration
from sim.cost import Counts, Floats, StepCost, compile_cost, layers_us, measured, or_zero, pad_decodes
from sim.grid import make_grid
from sim.hardware import Dtype
from sim.hashing import Algorithm
from sim.kernels import Kernels


def table_cost(
    calibration: KernelCalibration,
    timings: Timings,
    kernels: Kernels,
    *,
    max_num_batched_tokens: int,
    block_size: int,
    kv_dtype: Dtype,
    hash_algo: Algorithm = "sha256",
) -> StepCost:
    """The step cost of `compile_cost` with interpolated tables in the place of fits.

    calibration: the one built from the same timings.
    """
    compact = compile_cost(
        calibration,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        kv_dtype=kv_dtype,
        hash_algo=hash_algo,
    )
    num_tokens = np.arange(max_num_batched_tokens + 1, dtype=np.int64)
    padded = pad_decodes(num_tokens)
    layer = products_of_layer(timings, kernels)
    lm_head = layer_curve(timings.gemm_bf16, [kernels.lm_head])
    decode, prefill = timings.decode[kv_dtype], timings.prefill[kv_dtype]
    prefill = prefill[prefill.c == 0]
    layers = float(calibration.layers)
    return compact._replace(
        token_us=layers_us(calibration, num_tokens, _interpolated(layer, num_tokens)),
        decode_us=layers_us(calibration, padded, _interpolated(layer, padded)),
        output_us=or_zero(num_tokens, _interpolated(lm_head, num_tokens)),
        decode_grid=make_grid(_by_place(decode, "kv"), layers),
        prefill_grid=make_grid(_by_place(prefill, "q"), layers),
    )


def _interpolated(curve: pd.Series[float], rows: Counts) -> Floats:
    return measured(dict(zip(curve.index.tolist(), curve.tolist(), strict=True)), rows)


def _by_place(frame: pd.DataFrame, length: str) -> dict[tuple[int, int], float]:
    places = zip(frame.batch.tolist(), frame[length].tolist(), strict=True)
    return dict(zip(places, frame.latency_us.tolist(), strict=True))
