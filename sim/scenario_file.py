"""Scenarios as files: read, changed by options, checked, written out.

Errors name the file, the line, the field and the remedy. A scenario written out by `to_yaml`, with
all its defaults, runs again to the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sim.errors import InputError, Location, describe
from sim.scenario import LOADS, Scenario, misfit
from sim.yaml_lines import Lines, dump, parse

FILE_FIELDS = ("model", "gpu", "cost")  # that may name a file of YAML instead
YAML = (".yaml", ".yml")


class Draft(NamedTuple):
    """A scenario as it is written: of what it says, nothing is checked yet."""

    data: dict[str, Any]
    lines: Lines  # where each field is written
    source: str
    folder: Path  # of the file: relative paths are looked for here too


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario and lay `overrides` ("engine.block_size=16", values in YAML) over it.

    Without a path the overrides are all there is, and have to name a workload. Raises InputError with
    one line. A relative `path` anywhere in the workload is looked for in the current directory first,
    then beside the scenario file.
    """
    draft = read(path) if path is not None else Draft({}, {}, "--set", Path())
    for text in overrides:
        override(draft, text)
    return check(draft)


def read(path: str | Path) -> Draft:
    """Read a scenario's file. Raises InputError for one that cannot be read or is not YAML."""
    lines: Lines = {}
    data = parse(read_text(path, "the scenario"), str(path), lines)
    data.setdefault("name", Path(path).stem)
    return Draft(data, lines, str(path), Path(path).parent)


def copied(draft: Draft) -> Draft:
    """A draft to write in without a trace in `draft`."""
    return draft._replace(data=deepcopy(draft.data), lines=dict(draft.lines))


def draft_of(scenario: Scenario) -> Draft:
    """A scenario as its file would say it, with all defaults. Errors in it name the scenario."""
    return Draft(scenario.model_dump(mode="python"), {}, scenario.name, Path())


def read_text(path: str | Path, what: str) -> str:
    """The text of a file. Raises InputError, one line, that calls it `what`."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read {what}: {_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: {what} is not UTF-8 text ({error.reason})") from None


def to_yaml(scenario: Scenario) -> str:
    """The scenario with all defaults printed; reading it back gives an equal scenario."""
    data = scenario.model_dump(mode="python")
    for phase in LOADS:
        if phase in data:
            data[phase] = {"kind": data[phase]["kind"], **data[phase]}
    return dump(data)


def override(draft: Draft, text: str) -> None:
    """Set one "path=value" in `draft`; later findings under it are blamed on `--set`."""
    where = f"--set {text}"
    field, equals, written = text.partition("=")
    keys = tuple(field.strip().split("."))
    if not equals or not all(keys):
        raise InputError(f"{where}: should read path=value, as in engine.block_size=16")
    try:
        value = parse(f"value: {written}", where, {})["value"]
    except InputError as error:
        raise InputError(re.sub(r"^(--set .*):1: ", r"\1: ", str(error))) from None
    put(draft, keys, value, where)


def put(draft: Draft, keys: tuple[str, ...], value: Any, where: str) -> None:
    """Set a field in `draft`, making the sections it lies in; later findings there are blamed on `where`."""
    target: Any = draft.data
    for depth, key in enumerate(keys[:-1]):
        if target.get(key) is None:  # absent, or the null of a scenario written out
            target[key] = {}
        if key == "cache" and isinstance(target[key], str):
            target[key] = {"kind": target[key]}  # it has options where it is written out
        target = target[key]
        if not isinstance(target, dict):
            owner = ".".join(keys[: depth + 1])
            raise InputError(f"{where}: {owner} is {target!r}, which has no fields")
    target[keys[-1]] = value
    lines = draft.lines
    for location in [one for one in lines if one[: len(keys)] == keys]:
        del lines[location]
    for depth in range(1, len(keys)):
        lines.setdefault(keys[:depth], where)  # a section that only the option speaks of
    lines[keys] = where


def check(draft: Draft) -> Scenario:
    """The scenario that `draft` says. Modifies its data: files are named where they were found.

    Raises InputError, one line, for the first thing that is wrong with it.
    """
    lines = draft.lines

    def where(location: Location) -> str:
        while location and location not in lines:
            location = location[:-1]
        place = lines.get(location, draft.source)
        if place.startswith("--set "):
            return place
        # What is wrong with a whole section may be what an option laid over it.
        within = (text for at, text in lines.items() if location and at[: len(location)] == location)
        return " with ".join([place, *dict.fromkeys(text for text in within if text.startswith("--set "))])

    if "axes" in draft.data:
        raise InputError(f"{draft.source}: is a sweep, not a scenario; try prefixsim sweep")
    if (why := misfit(draft.data)) is not None:
        raise InputError(f"{where(why[:1])}: {': '.join(why)}")
    _find_files(draft.data, draft.folder, where)
    try:
        return Scenario.model_validate(draft.data)
    except ValidationError as error:
        raise InputError(describe(error, Scenario, draft.data, where)) from None


def _find_files(data: dict[str, Any], folder: Path, where: Callable[[Location], str]) -> None:
    """Replace relative paths by ones that exist, from here or from the scenario's folder."""
    parts = [found for name in LOADS for found in _with_path(data.get(name), (name,))]
    for location, owner in parts:
        name = owner["path"]
        found = _found(name, folder)
        if found is None:
            looked = "" if Path(name).is_absolute() else f" here or in {folder}"
            field = ".".join(map(str, location))
            raise InputError(
                f"{where(location)}: {field}: no file {name}{looked}; say where it is with --set {field}=…"
            )
        owner["path"] = found
    for field in FILE_FIELDS:
        if isinstance(data.get(field), str) and data[field].endswith(YAML):
            data[field] = _found(data[field], folder) or data[field]


def anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the names of files that are there, from here or from `folder`, absolute. Modifies `data`.

    For a scenario that other processes run, or that is written elsewhere.
    """
    for owner, field in _naming(data):
        if (found := _found(owner[field], folder)) is not None:
            owner[field] = str(Path(found).resolve())


def named_files(scenario: Scenario) -> list[Path]:
    """The files that a scenario reads: of its workload, and its own model, GPU and cost."""
    found = [Path(owner[field]) for owner, field in _naming(scenario.model_dump(mode="python"))]
    return [path for path in found if path.is_file()]


def _naming(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the mappings that name a file, and the field that does."""
    for name in LOADS:
        for _, owner in _with_path(data.get(name), ()):
            yield owner, "path"
    for field in FILE_FIELDS:
        if isinstance(data.get(field), str) and data[field].endswith(YAML):
            yield data, field


def _with_path(part: Any, location: Location) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Yield the mappings in a part of the scenario that name a file, and where they name it."""
    if isinstance(part, dict):
        if isinstance(part.get("path"), str):
            yield (*location, "path"), part
        for key, value in part.items():
            yield from _with_path(value, (*location, key))


def _found(name: str, folder: Path) -> str | None:
    if Path(name).is_file():
        return name
    beside = folder / name
    return str(beside) if beside.is_file() else None


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)
