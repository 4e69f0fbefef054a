"""What a sweep's file may say, and how it is read. Errors name the file, the line and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, ValidationError

from sim.errors import InputError, Location, describe
from sim.scenario import Count
from sim.scenario_file import Draft, anchor, override, put, read, read_text
from sim.section import Section
from sim.sweeps.axes import Axis, Value, Values, label_of, values_of
from sim.yaml_lines import Lines, dump, parse

Seed = Annotated[int, Field(ge=0)]
Where = Callable[[Location], str]  # the line of the sweep's file that says what is there
METRICS = ["prefix_cache_hit_rate", "mean_ttft_ms", "p95_ttft_ms"]
MOST_RUNS = 100_000  # without asking


def _folder_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w .+=-]{0,99}", name):
        raise ValueError(
            f"{name!r} is no name for a folder; set name to at most 100 letters, digits, spaces or any of "
            "_ . + = -, the first a letter or digit"
        )
    return name


Name = Annotated[str, AfterValidator(_folder_name)]


class Sweep(Section):
    """A grid over fields of one scenario."""

    name: Name
    base: str | dict[str, Any]  # a scenario's file, beside the sweep's or from here; or a scenario
    axes: dict[str, Values]  # by path, as in engine.block_size
    zip: list[Annotated[list[str], Field(min_length=2)]] = []  # paths that change together
    seeds: Count | Annotated[list[Seed], Field(min_length=1)] = 5  # a number: from the base's seed on
    metrics: Annotated[list[str], Field(min_length=1)] = METRICS  # of the summary


class Plan(NamedTuple):
    """A sweep that is ready to be laid out."""

    name: str
    base: Draft
    axes: list[Axis]  # crossed
    seeds: list[int]
    metrics: list[str]
    where: Where

    @property
    def paths(self) -> list[str]:
        """The fields that axes set, one after the other."""
        return [path for axis in self.axes for path in axis.paths]

    @property
    def num_points(self) -> int:
        return math.prod(len(axis.steps) for axis in self.axes)

    def to_yaml(self) -> str:
        """The sweep with its base inside, as it is run: what its result folder is known by."""
        axes = {}
        for axis in self.axes:
            for path, values in zip(axis.paths, zip(*axis.steps, strict=True), strict=True):
                axes[path] = [_written(value) for value in values]
        together = [list(axis.paths) for axis in self.axes if len(axis.paths) > 1]
        settings = {"zip": together, "seeds": self.seeds, "metrics": self.metrics}
        return dump({"name": self.name, "base": self.base.data, "axes": axes, **settings})


def load_sweep(path: Path, overrides: Sequence[str] = (), *, large: bool = False) -> Plan:
    """Read a sweep; `overrides` ("workload.num_requests=100") change its base scenario.

    Raises InputError with one line, also for more than MOST_RUNS runs unless `large`.
    """
    lines: Lines = {}
    data = parse(read_text(path, "the sweep"), str(path), lines, "the sweep")
    if "workload" in data and "axes" not in data:
        raise InputError(
            f"{path}: is a scenario, not a sweep; try prefixsim run, or give it as base of a sweep"
        )
    data.setdefault("name", path.stem)
    return plan_of(data, path, lines, overrides, large=large)


def plan_of(
    data: dict[str, Any],
    path: Path,
    lines: Lines | None = None,
    overrides: Sequence[str] = (),
    *,
    large: bool = False,
) -> Plan:
    """The sweep that `data` says; `lines` has where each field of it is written, else it is in `path`.

    Raises InputError as `load_sweep` does.
    """
    lines = lines or {}

    def where(location: Location) -> str:
        while location and location not in lines:
            location = location[:-1]
        return lines.get(location, str(path))

    try:
        sweep = Sweep.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error, Sweep, data, where)) from None
    base = _base(sweep, path, lines, where)
    for text in overrides:
        _refuse_idle(text, sweep)
        override(base, text)
    anchor(base.data, base.folder)
    _refuse_size(sweep, where, large)
    if twice := next((name for name in sweep.metrics if sweep.metrics.count(name) > 1), None):
        raise InputError(f"{where(('metrics',))}: metrics: {twice} is given twice; keep one of the two")
    axes = _together(_values(sweep, base.folder, where), sweep.zip, where)
    return Plan(sweep.name, base, axes, _seeds(sweep, base, where), sweep.metrics, where)


def _base(sweep: Sweep, path: Path, lines: Lines, where: Where) -> Draft:
    if isinstance(sweep.base, str):
        beside = path.parent / sweep.base
        found = beside if beside.is_file() else Path(sweep.base)
        if not found.is_file():
            place = where(("base",))
            raise InputError(f"{place}: base: no file {sweep.base} here or in {path.parent}; name a scenario")
        return read(found)
    own = {location[1:]: line for location, line in lines.items() if location[0] == "base" and location[1:]}
    data = deepcopy(sweep.base)
    data.setdefault("name", sweep.name)
    return Draft(data, own, where(("base",)), path.parent)


def _refuse_idle(text: str, sweep: Sweep) -> None:
    """Raise InputError for an override that the sweep itself would undo."""
    field = text.partition("=")[0].strip()
    axis = next((path for path in sweep.axes if f"{field}.".startswith(f"{path}.")), None)
    if axis is not None:
        raise InputError(f"--set {text}: {axis} is an axis of the sweep; change it in the file")
    if field == "seed" and isinstance(sweep.seeds, list):
        raise InputError(f"--set {text}: the sweep lists its seeds; change them in the file")


def _seeds(sweep: Sweep, base: Draft, where: Where) -> list[int]:
    if isinstance(sweep.seeds, int):
        first = base.data.get("seed", 0)
        if not isinstance(first, int):
            place = base.lines.get(("seed",), base.source)
            raise InputError(f"{place}: seed: should be a whole number, not {first!r}")
        return [first + i for i in range(sweep.seeds)]
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise InputError(f"{where(('seeds',))}: seeds: one is given twice; give different ones")
    return sweep.seeds


def _refuse_size(sweep: Sweep, where: Where, large: bool) -> None:
    """Before the values are laid out: a range can stand for more than memory holds."""
    if not sweep.axes:
        raise InputError(f"{where(('axes',))}: axes: the grid is empty; name a field and its values")
    runs = sweep.seeds if isinstance(sweep.seeds, int) else len(sweep.seeds)
    followers = {path for together in sweep.zip for path in together[1:]}
    for path, values in sweep.axes.items():
        size = len(values) if isinstance(values, list) else values.size
        if size == 0:
            raise InputError(f"{where(('axes', path))}: axes.{path}: has no values, so the grid is empty")
        runs *= 1 if path in followers else size
    if runs > MOST_RUNS and not large:
        raise InputError(
            f"{where(('axes',))}: axes: {runs:,} runs are more than {MOST_RUNS:,}; narrow them, or add --yes"
        )


def _values(sweep: Sweep, folder: Path, where: Where) -> dict[str, list[Value]]:
    """The values of each path, files in them named by absolute paths."""
    values = {}
    for path, written in sweep.axes.items():
        place = f"{where(('axes', path))}: axes.{path}"
        keys = tuple(path.split("."))
        if path in ("seed", "name") or not all(keys):
            remedy = "say which under seeds" if path == "seed" else "name a field, as in engine.block_size"
            raise InputError(f"{place}: cannot be an axis; {remedy}")
        try:
            plain = values_of(written)
        except ValueError as error:
            raise InputError(f"{place}: {error}") from None
        values[path] = [
            Value(label, _anchored(keys, value, folder), where(("axes", path, i)))
            for i, (label, value, _) in enumerate(plain)
        ]
    return values


def _anchored(keys: tuple[str, ...], value: Any, folder: Path) -> Any:
    alone = Draft({}, {}, "", folder)
    put(alone, keys, deepcopy(value), "")
    anchor(alone.data, folder)
    found = alone.data
    for key in keys:
        found = found[key]
    return found


def _together(values: dict[str, list[Value]], zipped: list[list[str]], where: Where) -> list[Axis]:
    """The axes in the order of the file; of those zipped, the first one's place counts."""
    groups: dict[str, tuple[str, ...]] = {path: (path,) for path in values}
    for number, paths in enumerate(zipped):
        place = f"{where(('zip', number))}: zip"
        if unknown := next((path for path in paths if path not in values), None):
            raise InputError(f"{place}: {unknown} is no axis; name axes")
        if len(set(paths)) < len(paths) or any(groups.get(path) != (path,) for path in paths):
            raise InputError(f"{place}: an axis is named twice; name each once")
        if len({len(values[path]) for path in paths}) > 1:
            counts = ", ".join(f"{path} {len(values[path])}" for path in paths)
            raise InputError(f"{place}: axes that go together need as many values each; they have: {counts}")
        for path in paths[1:]:
            del groups[path]
        groups[paths[0]] = tuple(paths)
    return [
        Axis(paths, list(zip(*(values[path] for path in paths), strict=True))) for paths in groups.values()
    ]


def _written(value: Value) -> Any:
    """A value as an axis of a file says it."""
    if value.label == label_of(value.value):
        return value.value
    return {"label": value.label, "value": value.value}
