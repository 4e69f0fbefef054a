"""The values along an axis: a list, even steps, or equal ratios; and the axes that go together."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator

from sim.section import Section

Number = int | float
Three = Annotated[
    list[Annotated[Number, Field(ge=-1e18, le=1e18)]], Field(min_length=3, max_length=3)
]  # with room to reckon
SLACK = 1e-9  # of a step: an end that rounding misses is still reached


class Range(Section):
    """`range: [first, last, step]`: from first by step up to last, which is a value if a step meets it."""

    range: Three

    @model_validator(mode="after")
    def _steps_lead_there(self) -> Range:
        first, last, step = self.range
        if step == 0 or (last - first) * step < 0:
            raise ValueError(f"no step of {step} leads from {first} to {last}; give [first, last, step]")
        if math.isinf((last - first) / step):
            raise ValueError(f"steps of {step} from {first} to {last} cannot be counted; give a larger step")
        return self

    @property
    def size(self) -> int:
        first, last, step = self.range
        return math.floor((last - first) / step + SLACK) + 1

    def numbers(self) -> list[Number]:
        first, _, step = self.range
        return [_tidy(first + i * step, 12) for i in range(self.size)]


class LogRange(Section):
    """`log_range: [first, last, number]`: values in equal ratios; whole numbers if both ends are."""

    log_range: Three

    @model_validator(mode="after")
    def _has_ratios(self) -> LogRange:
        first, last, number = self.log_range
        if not isinstance(number, int) or number < 2:
            raise ValueError(f"the number of values is {number}; give [first, last, number], 2 or more")
        if min(first, last) <= 0:
            raise ValueError(f"{min(first, last)} has no ratios; give ends above 0")
        if not 0 < last / first < math.inf:
            raise ValueError(f"{first} and {last} are too far apart for equal ratios; give nearer ends")
        return self

    @property
    def size(self) -> int:
        return int(self.log_range[2])

    def numbers(self) -> list[Number]:
        first, last, _ = self.log_range
        exponents = (i / (self.size - 1) for i in range(self.size))
        found = [first * (last / first) ** exponent for exponent in exponents]
        if isinstance(first, int) and isinstance(last, int):
            return [round(value) for value in found]
        return [_tidy(value, 6) for value in found]


def _form(written: Any) -> str:
    """Which form is meant, so that what is wrong with it is told, and not what it would be as another."""
    if isinstance(written, LogRange) or (isinstance(written, dict) and "log_range" in written):
        return "LogRange"
    return "Range" if isinstance(written, dict | Range) else "List"


Values = Annotated[
    Annotated[list[Any], Tag("List")] | Annotated[Range, Tag("Range")] | Annotated[LogRange, Tag("LogRange")],
    Discriminator(_form),
]  # of an axis, as its file says them


class Value(NamedTuple):
    """What an axis sets at one of its points, how tables and figures call it, and where it is written."""

    label: str
    value: Any
    line: str = ""


class Axis(NamedTuple):
    """Fields that change together: `steps` has a value of each path for every point along the axis."""

    paths: tuple[str, ...]
    steps: list[tuple[Value, ...]]

    @property
    def name(self) -> str:
        """The path that stands for all in a figure."""
        return self.paths[0]

    @property
    def numbers(self) -> list[Number] | None:
        """The values of the first path if they are finite numbers and called so, else None."""
        first = [step[0] for step in self.steps]
        plain = all(_is_number(one.value) and one.label == label_of(one.value) for one in first)
        return [one.value for one in first] if plain else None


def values_of(written: Values) -> list[Value]:
    """The values of an axis. Raises ValueError where two are called the same."""
    found = written.numbers() if isinstance(written, Range | LogRange) else written
    values = [_labelled(one) for one in found]
    seen: set[str] = set()
    for label, *_ in values:
        if label in seen:
            raise ValueError(f"has {label} twice; give different values, or labels that differ")
        seen.add(label)
    return values


def label_of(value: Any) -> str:
    """A value in one line, as YAML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {label_of(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(label_of, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return {None: "null", True: "true", False: "false"}[value] if _is_word(value) else str(value)


def _labelled(one: Any) -> Value:
    if not (isinstance(one, dict) and set(one) == {"label", "value"}):
        return Value(label_of(one), one)
    if not isinstance(one["label"], str) or not one["label"].strip():
        raise ValueError(f"the label {one['label']!r} is no word; write it as text, in quotes if need be")
    return Value(one["label"], one["value"])


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _tidy(value: Number, digits: int) -> Number:
    """A sum or product without the dust of binary fractions; a whole number stays one."""
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")
