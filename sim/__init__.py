"""prefixsim: what hit rate and what time to first token will traffic get from vLLM's prefix cache?

A discrete-event simulator: every allocation, hit, eviction and preemption is the one that vLLM V1
would make, and steps take as long as measured GPU kernels say. In Python it is one noun and four functions:

    Scenario    a load, an engine, the machine under it: from a YAML file, or built here
    run         simulate one: figures, a row a request, samples over time     -> Run
    sweep       one at every point of a grid, with several seeds              -> DataFrame
    mrc         its hit rate at every pool capacity, from one pass            -> DataFrame
    plan        the highest rate, fewest replicas, smallest pool that keep a promise -> DataFrame

The 14-token example: with blocks of 4, a prompt that shares 10 of its 14 tokens hits 8, because only
full blocks are shared.

    >>> from sim import Scenario, mrc, plan, run, sweep
    >>> example = Scenario(workload={"kind": "fourteen_tokens"}, engine={"block_size": 4})
    >>> run(example).fates[["hit", "partial_block", "cold"]].to_dict()
    {'hit': 8, 'partial_block': 2, 'cold': 18}

A server under load. Lengths are in tokens, rates in requests a second, names in `_ms` in milliseconds:

    >>> load = {"kind": "shared_prefix", "num_groups": 8, "prefix_len": 1000, "suffix_len": 100}
    >>> load |= {"output_len": 20, "request_rate": 4.0, "num_requests": 200}
    >>> server = Scenario(model="llama-3.1-8b", gpu="h100-sxm", workload=load)
    >>> for size in (64, 512):
    ...     found = run(server.changed(f"engine.block_size={size}"))
    ...     print(size, round(found.summary["prefix_cache_hit_rate"], 3), found.summary["saturation"])
    64 0.838 STABLE
    512 0.447 STABLE

What a call takes and gives, with shapes, units and errors, is in the help of each: help(sim.run). The
command does the same with files: `prefixsim run`, `sweep`, `mrc`, `plan`. docs/ has the definitions.

Names are loaded at first use (PEP 562), so that `import sim` is instant and needs neither numba nor
SimPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.api import Run, mrc, plan, run, sweep
    from sim.errors import InputError
    from sim.scenario import Scenario

__version__ = "0.1.0"

_HOMES = {
    "Scenario": "sim.scenario",
    "Run": "sim.api",
    "run": "sim.api",
    "sweep": "sim.api",
    "mrc": "sim.api",
    "plan": "sim.api",
    "InputError": "sim.errors",
}

__all__ = ["InputError", "Run", "Scenario", "__version__", "mrc", "plan", "run", "sweep"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
