"""Element-wise kernels (norms, rotary embedding, activation): what measured whole steps leave for them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibrate.held_out import fit_error
from sim.calibration import Attention, Elementwise, KernelCalibration
from sim.cost import layers_us, saturating

Floats = npt.NDArray[np.float64]

def with_elementwise(calibration: KernelCalibration, steps: pd.DataFrame) -> KernelCalibration:
    """The calibration with e0 and e1 fitted to what measured steps take beyond its other kernels.

    A step of one model with few layers cannot tell the time between steps (O) from that between
    kernels: e0 holds both. Negative rests count as none. Errors are of the whole steps, fitted.
    """
    from scipy.optimize import nnls

    attention = next(iter(calibration.attention.values()))
    tokens = (steps.batch * steps.q + steps.num_decodes).to_numpy(np.int64)
    layers, times = steps.num_layers.to_numpy(np.float64), steps.latency_us.to_numpy(np.float64)
    without = calibration.model_copy(update={"elementwise": Elementwise(e0=0.0, e1=0.0), "layers": 1})
    known = layers * (
        layers_us(without, tokens, saturating(calibration.gemm, tokens)) + _attention_us(attention, steps)
    ) + saturating(calibration.lm_head, (steps.batch + steps.num_decodes).to_numpy(np.int64))
    terms = np.stack([layers, layers * tokens], axis=1)
    rest = np.maximum(times - known, 0.0)
    e0, e1 = nnls(terms / times[:, None], rest / times)[0]
    error = fit_error((known + terms @ np.array([e0, e1])) / times - 1.0)
    return calibration.model_copy(
        update={
            "elementwise": Elementwise(e0=float(e0), e1=float(e1)),
            "errors": {**calibration.errors, "step_fitted": error},
        }
    )


def _attention_us(attention: Attention, steps: pd.DataFrame) -> Floats:
    """One layer's attention in each step: `batch` prefills of q over c, num_decodes over decode_kv."""
    decode, prefill = attention.decode, attention.prefill
    batch, q, c, decodes, kv = (
        steps[name].to_numpy(np.float64) for name in ("batch", "q", "c", "num_decodes", "decode_kv")
    )
    pairs = q * q / 2 + q * c / prefill.kappa
    of_prefills = prefill.a0 + batch * (prefill.a1 * q + prefill.a2 * pairs + prefill.a3 * c)
    of_decodes = decode.d0 + decode.d1 * decodes + decode.d2 * kv
    result: Floats = np.where(batch > 0, of_prefills, 0.0) + np.where(decodes > 0, of_decodes, 0.0)
    return result
