"""How good a fit has to be: the most that mean and 95th percentile of its held-out errors may reach."""

from __future__ import annotations

from typing import NamedTuple

from sim.calibration import FitError


class Bar(NamedTuple):
    """Percent; None: not bounded."""

    mape: float
    p95: float | None = None


_HOPPER = {"gemm": Bar(6, 15), "decode_attention": Bar(11, 30), "prefill_attention": Bar(6)}
_COMPONENTS = {
    "a100-sxm": {"gemm": Bar(9, 20), "decode_attention": Bar(13, 45), "prefill_attention": Bar(9)},
    "h100-sxm": _HOPPER,
    "h200-sxm": _HOPPER,
    "b200-sxm": {**_HOPPER, "prefill_attention": Bar(11)},
}
_ANY = {"prefill_over_context": Bar(9), "step_against_tables": Bar(4, 10)}


def bar_of(component: str, gpu: str) -> Bar | None:
    """The bar of a component, named with or without its KV type; None where none was set."""
    of_gpu = {**_ANY, **_COMPONENTS.get(gpu, {})}
    return next((bar for name, bar in of_gpu.items() if component.startswith(name)), None)


def meets(error: FitError, bar: Bar) -> bool:
    """Whether an error is within its bar."""
    return error.mape <= bar.mape and (bar.p95 is None or error.p95 <= bar.p95)
