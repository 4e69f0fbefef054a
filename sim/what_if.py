"""What if the pool were twice as large, the block half as long, caching off: each of them a whole run.

All have the scenario's seed, so what the change does not touch, arrivals above all, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pydantic import ValidationError

from sim.cache_kinds import APC, CacheKind
from sim.core import EngineConfig
from sim.errors import InputError, describe
from sim.report import LABEL
from sim.scenario import Scenario
from sim.simulation import Result, run
from sim.warm_start import SavedCache
from workloads import WorkloadError

Progress = Callable[[int, float], None]
FIGURES = (
    "prefix_cache_hit_rate", "mean_ttft_ms", "median_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "saturation",
)  # fmt: skip
AS_IT_IS = "as it is"
WIDTH = 16


class Change(NamedTuple):
    """Other values of engine fields, or why the question has no answer here."""

    name: str
    engine: dict[str, Any] = {}
    excluded: str = ""


def answers(
    result: Result,
    bar: Callable[[Scenario], AbstractContextManager[Progress | None]],
    cache: SavedCache | None = None,
) -> list[dict[str, Any]]:
    """Run each change of a finished run, and return its `what_if` for the summary.

    The first entry is the run as it is. An entry has `change`, `set` (what --set would say), FIGURES,
    and `warnings`, those that the run itself does not have; or `change` and `excluded`, the reason why
    it could not be run. `bar` shows a run's progress, `cache` is what each begins with. Modifies nothing.
    """
    scenario = result.resolved.scenario
    known = set(result.summary["warnings"])
    entries = [_entry(Change(AS_IT_IS), result.summary, known)]
    reserved = result.summary["prefix_cache_hits"] > 0
    for change in changes(result.resolved.config, scenario.cache, reserved=reserved):
        if change.excluded:
            entries.append({"change": change.name, "excluded": change.excluded})
            continue
        try:
            changed = changed_scenario(scenario, change)
            with bar(changed) as progress:
                other = run(changed, progress=progress, cache=cache)
        except (InputError, WorkloadError) as error:
            entries.append({"change": change.name, "excluded": " ".join(str(error).split())})
            continue
        except MemoryError:
            entries.append({"change": change.name, "excluded": "not enough memory"})
            continue
        other.records.discard()
        entries.append(_entry(change, other.summary, known))
    return entries


def changes(config: EngineConfig, cache: CacheKind = APC, *, reserved: bool = False) -> Iterator[Change]:
    """The questions about an engine, whose pool is resolved, and its way to share KV.

    `reserved`: whether it has hits without lookups, of prefixes known ahead.
    """
    blocks, size = config.num_gpu_blocks, config.block_size
    yield Change(f"pool 2x: {2 * blocks:,} blocks", {"num_gpu_blocks": 2 * blocks})
    half = size // 2
    if half == 0:
        yield Change("block halved", excluded="a block of 1 token has no half")
    else:
        # The same tokens, to less than a block. Half of an odd block is rounded down.
        same = blocks * size // half
        name = f"block {half}, {same:,} of them: the same tokens"
        yield Change(name, {"block_size": half, "num_gpu_blocks": same})
    if config.enable_prefix_caching or reserved:
        yield Change("caching off", {"enable_prefix_caching": False})
    elif not cache.looks_up:
        yield Change("caching off", excluded=f"cache: {cache.kind} looks nothing up")
    else:
        yield Change("caching off", excluded="engine.enable_prefix_caching is false already")


def changed_scenario(scenario: Scenario, change: Change) -> Scenario:
    """The scenario with the change. Raises InputError where it could not be written in YAML."""
    engine = type(scenario.engine)
    data = scenario.engine.model_dump() | change.engine
    try:
        return scenario.model_copy(update={"engine": engine.model_validate(data)})
    except ValidationError as error:
        raise InputError(describe(error, engine, data, lambda _: "engine")) from None


def lines(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The console table as (style, text) lines."""
    total = LABEL + 4 * WIDTH
    yield "bold", " What If: Each a Run with the Same Seed ".center(total, "=")
    yield "cyan", _row("", "Hit rate (%)", "Mean TTFT (ms)", "P95 TTFT (ms)", "Load")
    for entry in entries:
        if "excluded" in entry:
            yield "yellow", f"{entry['change']:<{LABEL}}not run: {entry['excluded']}"
            continue
        rate = entry["prefix_cache_hit_rate"]
        percent = None if rate is None else 100.0 * rate
        figures = percent, entry["mean_ttft_ms"], entry["p95_ttft_ms"]
        cells = ["-" if value is None else f"{value:.2f}" for value in figures]
        yield "", _row(entry["change"], *cells, entry["saturation"])
    yield "bold", "=" * total
    for entry in entries:
        for text in entry.get("warnings", ()):
            yield "yellow", f"warning ({entry['change']}): {text}"


def _entry(change: Change, summary: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """What the summary says of a run; warnings only where they are not `known`."""
    settings = [f"engine.{field}={_yaml(value)}" for field, value in change.engine.items()]
    new = [text for text in summary["warnings"] if text not in known]
    figures = {name: summary[name] for name in FIGURES}
    return {"change": change.name, "set": settings} | figures | {"warnings": new}


def _row(label: str, *cells: str) -> str:
    return f"{label:<{LABEL}}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
