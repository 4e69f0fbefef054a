"""How fast a workload's requests come, and the same workload faster or slower.

It stays the same requests in the same order, f times as fast: rates are multiplied by f; timestamps,
the seconds of a schedule, sojourns and periods are divided by it, and so are the times of the
scenario (`measure_from`, `reset_prefix_cache`), so that the same requests stay left out. Users still
think as long. The number of requests stays: a run at twice the pace is half as long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from sim.errors import InputError
from sim.scenario import Scenario
from workloads import AnyWorkload, Mix, Recording, SessionWorkload, Trace

MOST_USERS = 1 << 20


class Pace(NamedTuple):
    """The pace of a scenario: what it is called, and what it is now."""

    name: str  # request_rate, session_rate, concurrency or speed
    unit: str
    now: float

    @property
    def whole(self) -> bool:
        """Whether it is a number of users."""
        return self.name == "concurrency"


def pace_of(scenario: Scenario) -> Pace:
    """The pace of a scenario. Raises InputError, one line, where everything comes at once."""
    workload = scenario.workload
    if workload.concurrency is not None:
        return Pace("concurrency", "users", workload.concurrency)
    fastest = _without_pace(workload)
    if fastest is not None:
        part, missing = fastest
        users = "" if isinstance(workload, Mix) else f", or {part}.concurrency"
        raise InputError(
            f"{scenario.name}: {part}: has no pace, all comes at once; set {part}.{missing}{users}"
        )
    field = _rate_field(workload)
    if field is not None:
        unit = "sessions/s" if field == "session_rate" else "req/s"
        return Pace(field, unit, getattr(workload, field))
    return Pace("speed", "x its own pace", 1.0)


def paced(scenario: Scenario, pace: Pace, value: float) -> list[str]:
    """The overrides ("path=value") that give a scenario the pace `value`."""
    if pace.whole:
        return [f"workload.concurrency={value:g}"]
    factor = value / pace.now
    overrides = [f"{path}={_text(new)}" for path, new in _faster(scenario.workload, "workload", factor)]
    if pace.name != "speed":  # as it is called, not a product that rounds
        overrides = [f"workload.{pace.name}={_text(value)}", *overrides[1:]]
    if factor != 1.0 and scenario.measure_from is not None:
        overrides.append(f"measure_from={_text(scenario.measure_from / factor)}")
    if factor != 1.0 and scenario.reset_prefix_cache:
        overrides.append(f"reset_prefix_cache={_text([at / factor for at in scenario.reset_prefix_cache])}")
    return overrides


def _rate_field(workload: AnyWorkload) -> str | None:
    """The field that is the workload's rate by itself; None where several numbers make its pace."""
    if isinstance(workload, SessionWorkload):
        return "session_rate"
    if isinstance(workload, Mix | Recording):
        return None
    if isinstance(workload, Trace):
        if math.isfinite(workload.session_rate):
            return "session_rate"
        return "request_rate" if workload.arrival == "constant" else None
    return None if workload.arrival in ("mmpp", "step") else "request_rate"


def _without_pace(workload: AnyWorkload, path: str = "workload") -> tuple[str, str] | None:
    """The part of a workload that comes all at once, and the field that would change that."""
    if isinstance(workload, Mix):
        parts = (
            _without_pace(tenant.workload, f"{path}.tenants.{name}.workload")
            for name, tenant in workload.tenants.items()
        )
        return next((part for part in parts if part is not None), None)
    field = _rate_field(workload)
    return (path, field) if field is not None and math.isinf(getattr(workload, field)) else None


def _faster(workload: AnyWorkload, path: str, factor: float) -> Iterator[tuple[str, Any]]:
    """Yield the fields, by path, that change when a workload comes `factor` times as fast; its rate first."""
    if isinstance(workload, Mix):
        for name, tenant in workload.tenants.items():
            if "." in name or "=" in name:
                raise InputError(
                    f"{path}.tenants: {name!r} holds a dot or =, so no path leads to it; rename it"
                )
            yield from _faster(tenant.workload, f"{path}.tenants.{name}.workload", factor)
        return
    field = _rate_field(workload)
    if field is not None:
        yield f"{path}.{field}", getattr(workload, field) * factor
    if isinstance(workload, SessionWorkload):
        return
    if isinstance(workload, Trace | Recording):
        if field is None:
            yield f"{path}.time_scale", workload.time_scale / factor
    elif workload.states is not None:
        states = [
            {"rate": state.rate * factor, "mean_sojourn": state.mean_sojourn / factor}
            for state in workload.states
        ]
        yield f"{path}.states", states
    elif workload.schedule is not None:
        yield f"{path}.schedule", [[second / factor, rate * factor] for second, rate in workload.schedule]
    elif workload.amplitude is not None:
        yield f"{path}.period", workload.period / factor


def _text(value: Any) -> str:
    """A value as `--set` reads it."""
    return json.dumps(value)
