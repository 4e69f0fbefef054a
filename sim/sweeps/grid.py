"""The points of a sweep: its base with the values of one place in the grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from typing import NamedTuple

from sim.scenario import Scenario
from sim.scenario_file import check, copied, put
from sim.sweeps.axes import Value
from sim.sweeps.schema import Plan


class Point(NamedTuple):
    """One place in the grid."""

    labels: tuple[str, ...]  # of the values, in the order of Plan.paths
    scenario: Scenario  # with the first seed


def points(plan: Plan) -> Iterator[Point]:
    """Yield the points of a sweep, the last axis changing fastest.

    Raises InputError, one line, for an axis that is no field and for a value that it cannot have.
    """
    for steps in itertools.product(*(axis.steps for axis in plan.axes)):
        values = [value for step in steps for value in step]
        labels = tuple(value.label for value in values)
        yield Point(labels, _scenario(plan, dict(zip(plan.paths, values, strict=True))))


def _scenario(plan: Plan, settings: dict[str, Value]) -> Scenario:
    draft = copied(plan.base)
    draft.data["seed"] = plan.seeds[0]
    # A whole part comes before a field of it, in whatever order they are written.
    for path in sorted(settings, key=lambda path: path.count(".")):
        put(draft, tuple(path.split(".")), deepcopy(settings[path].value), settings[path].line)
    return check(draft)
