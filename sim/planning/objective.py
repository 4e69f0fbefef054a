"""The promise: limits on latencies that every run at a point must keep.

A point keeps it if each of its seeds does: what holds in the mean only is broken on some days, and
the worst of a few seeds errs on the side of the promise. An OVERLOADED run keeps nothing, since its
latencies grow with its length. A BACKLOGGED one may: near capacity a request that hits the cache
waits for the step in flight longer than it computes, and the limits say what that may cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sim.errors import InputError, suggestion
from sim.scenario import Scenario

UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}  # in milliseconds
STATISTICS = ("mean", "median", "p50", "p90", "p95", "p99")
KEYS = {  # of the summary, by the name of the limit
    f"{latency}_{statistic}": f"{statistic}_{latency}_ms"
    for latency in ("ttft", "tpot", "itl", "e2el")
    for statistic in STATISTICS
}
GOOD = "good"
_LIMIT = re.compile(r"([0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)\s*([a-z%]*)", re.IGNORECASE)


class Limit(NamedTuple):
    """One limit of a promise: at most `value` milliseconds, or for GOOD at least that share of 1."""

    name: str  # ttft_p95
    value: float
    text: str  # as given: 2s

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.name == GOOD else '<='} {self.text}"

    def figure(self, figures: Mapping[str, Any]) -> float | None:
        """What is limited, of a run: milliseconds, or a share; None where no request has it."""
        return figures["good_share"] if self.name == GOOD else figures[KEYS[self.name]]  # type: ignore[no-any-return]

    def ratio(self, figures: Mapping[str, Any]) -> float:
        """How much of the limit a run takes up: above 1 it is broken. Of GOOD, the requests not good."""
        value = self.figure(figures)
        if value is None:
            return 0.0
        return (1.0 - value) / (1.0 - self.value) if self.name == GOOD else value / self.value

    def show(self, value: float | None) -> str:
        """A figure beside this limit, in the unit it was given in."""
        if value is None:
            return "-"
        if self.name == GOOD:
            return f"{value:.4g}"
        unit = _LIMIT.fullmatch(self.text)[2]  # type: ignore[index]
        return f"{value / UNITS[unit]:.4g} {unit}"


def parse_limits(texts: Sequence[str]) -> tuple[Limit, ...]:
    """The limits of `--slo` options such as "ttft_p95=2s". Raises InputError, one line, for bad ones."""
    if not texts:
        raise InputError("no promise to keep: give one or more of --slo, as in --slo ttft_p95=2s")
    limits = [_limit(text) for text in texts]
    names = [limit.name for limit in limits]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--slo {name}: is given twice; keep one of the two")
    return tuple(limits)


def check_good(limits: Sequence[Limit], scenario: Scenario) -> None:
    """Raise InputError where GOOD is asked of a scenario that does not say what good is."""
    has_limits = scenario.slo is not None and bool(scenario.slo.model_dump(exclude_none=True))
    if not has_limits and any(limit.name == GOOD for limit in limits):
        raise InputError(
            f"--slo {GOOD}: the scenario does not say what a good request is; give it slo.ttft, slo.tpot or "
            "slo.e2el in ms, as in --set slo.ttft=2000"
        )


def overload(figures: Mapping[str, Any]) -> str:
    """Why a run keeps no promise, whatever its latencies; empty if nothing is in the way."""
    if figures["saturation"] == "OVERLOADED":
        return "OVERLOADED"
    if figures["refused_by_pool"]:
        return f"{figures['refused_by_pool']} requests refused, larger than the pool"
    return ""


def _limit(given: str) -> Limit:
    where = f"--slo {given}"
    name, equals, text = (part.strip() for part in given.partition("="))
    if not equals or not name:
        raise InputError(f"{where}: should read name=limit, as in ttft_p95=2s")
    if name not in KEYS and name != GOOD:
        raise InputError(f"{where}: {name} is no figure of a run{_names_like(name)}")
    found = _LIMIT.fullmatch(text)
    if not found:
        example = "0.95" if name == GOOD else "2s"
        raise InputError(f"{where}: {text!r} is no limit; give one above 0, as in {name}={example}")
    value, unit = float(found[1]), found[2]
    if name == GOOD:
        if unit or not 0.0 < value < 1.0:
            raise InputError(f"{where}: should be a share of the requests above 0 and below 1, such as 0.95")
        return Limit(name, value, text)
    if not unit:
        raise InputError(f"{where}: has no unit; write {found[1]}s or {found[1]}ms")
    if unit not in UNITS:
        raise InputError(f"{where}: {unit} is no unit of time; there are: {', '.join(UNITS)}")
    if not 0.0 < value * UNITS[unit] <= 1e15:
        raise InputError(f"{where}: no time lies within that; give a limit above 0")
    return Limit(name, value * UNITS[unit], text)


def _names_like(name: str) -> str:
    by_key = {key: limit for limit, key in KEYS.items()}  # as summary.json has it: p95_ttft_ms
    if f"{name.removesuffix('_ms')}_ms" in by_key:
        return f"; did you mean {by_key[name.removesuffix('_ms') + '_ms']}?"
    near = suggestion(name, [*KEYS, GOOD])
    return (
        near
        if "did you mean" in near
        else f"; there are ttft, tpot, itl, e2el with _{', _'.join(STATISTICS)}"
    )
