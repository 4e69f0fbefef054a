"""What a curve can be of: a scenario that suits one pool, or a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.errors import InputError
from sim.scenario import Scenario
from workloads import Trace

if TYPE_CHECKING:  # the compiler: a scenario that does not suit is told without it
    from sim.curves.load import Load
    from sim.curves.report import Scale
    from sim.curves.study import Asked


def check(scenario: Scenario, source: str) -> None:
    """Raise InputError, one line that begins with `source`, for a scenario that cannot be counted."""
    if scenario.cache.kind != "apc":
        raise InputError(
            f"{source}: cache: a curve is of apc's blocks and their LRU, not of {scenario.cache.kind}; "
            "--set cache=apc"
        )
    if not scenario.engine.enable_prefix_caching:
        raise InputError(
            f"{source}: engine.enable_prefix_caching is false, so nothing ever hits; set it true"
        )
    if scenario.cluster.replicas > 1:
        raise InputError(f"{source}: cluster.replicas: a curve is of one pool; --set cluster.replicas=1")
    if scenario.prime is not None:
        raise InputError(f"{source}: prime: a curve begins with an empty cache; give its load as workload")
    if scenario.reset_prefix_cache:
        raise InputError(
            f"{source}: reset_prefix_cache: a curve knows no resets; --set reset_prefix_cache=[]"
        )
    if scenario.measure_from is not None and scenario.workload.concurrency is not None:
        raise InputError(
            f"{source}: measure_from: when requests of a closed loop arrive, only a run knows; leave it out"
        )


def of_scenario(scenario: Scenario, sizes: Sequence[int]) -> tuple[Load, Asked, Scale]:
    """What to walk through, what to ask, and what blocks weigh; without `sizes`, of its own block size."""
    from sim.curves.load import Load
    from sim.curves.report import Scale
    from sim.curves.study import Asked
    from sim.resolve import resolve

    resolved = resolve(scenario)
    config = resolved.config
    load = Load(scenario.name, scenario.workload, scenario.seed, max_model_len=config.max_model_len)
    asked = Asked(sizes or [config.block_size], measure_from=scenario.measure_from)
    pool = (config.block_size, config.num_gpu_blocks - 1)
    return load, asked, Scale(kv_bytes_per_token=resolved.kv_bytes_per_token, pool=pool)


def of_trace(trace: Trace, name: str, sizes: Sequence[int]) -> tuple[Load, Asked, Scale]:
    """The same of a trace, whose blocks weigh nothing that is known."""
    from sim.curves.load import Load
    from sim.curves.report import Scale
    from sim.curves.study import Asked

    return Load(name, trace), Asked(sizes), Scale()
