"""prefixsim: a discrete-event simulator of LLM prefix caching under load.

The names in `__all__` are loaded from their modules at first use (PEP 562), so that `import sim`
is instant and needs neither numba nor SimPy.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Batch": "sim.request",
    "Calibration": "sim.cost",
    "EngineConfig": "sim.core",
    "StepCost": "sim.cost",
    "Totals": "sim.engine",
    "block_hashes": "sim.hashing",
    "compile_cost": "sim.cost",
    "make_batch": "sim.request",
    "num_gpu_blocks": "sim.memory",
    "simulate": "sim.engine",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
