"""Bisection, told apart from what it searches in.

A search is a generator: it yields the values it wants to know of, is sent for each whether the
promise is kept there, and returns what it Found. So it can be tested without a run, and several can
go on side by side (`together`). Bisection believes that what holds at a value holds on its good side
too; each search looks at one more value on either side of its answer, and says if that was not so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")

WIDEST = 1.02  # the bracket of an answer, as a ratio
ASIDE = 1.05  # how far beside the bracket the check looks, as a ratio
DOUBLINGS = (1, 2, 4, 8, 16)  # away from the start, until the promise breaks or holds
SCANNED = 8  # values of a range that are looked at where its top breaks the promise


class Found(NamedTuple):
    """The answer of a search; None: nothing there keeps the promise."""

    best: float | None
    broken: float | None  # the next value beside `best` that breaks it; None: nothing broke it
    surprises: list[tuple[float, bool]] = []  # values where it is (not) kept, against expectation


Search = Generator[list[float], list[bool], Found]


def highest(start: float, *, whole: bool, most: float = math.inf) -> Search:
    """The highest value above 0, or from 1 if whole, that keeps the promise, within WIDEST."""
    least = 1.0 if whole else math.ulp(0.0)
    [kept] = yield [start]
    last = start
    for doublings in DOUBLINGS:
        other = start * 2.0 ** (doublings if kept else -doublings)
        other = min(max(_rounded(other, whole), least), most)
        if other == last:
            break
        [now] = yield [other]
        if now != kept:
            low, high = (last, other) if kept else (other, last)
            break
        last = other
    else:
        other = last
    if other == last:
        return Found(last, None) if kept else Found(None, last)
    low, high = yield from _narrowed(low, high, whole, low_keeps=True)
    below, above = _aside(low, high, whole)
    aside = [(value, value <= low) for value in (below, above) if least <= value <= most]
    return Found(low, high, (yield from _surprises(aside)))


def smallest(low: int, high: int) -> Search:
    """The smallest whole number in [low, high] that keeps the promise: exact below 50, else within WIDEST.

    Where `high` breaks it, SCANNED values are looked at before the answer is None.
    """
    [kept] = yield [high]
    surprises: list[tuple[float, bool]] = []
    keeps, breaks = float(high), float(low)
    if kept and low < high:
        [kept] = yield [low]
        if kept:
            return Found(low, None, (yield from _surprises([(_between(low, high), True)])))
    elif kept:
        return Found(low, None)
    else:
        values = _spread(low, high)
        if not values:
            return Found(None, high)
        held = yield values
        if not any(held):
            return Found(None, high)
        first = held.index(True)
        keeps = values[first]
        surprises = [(high, False)]
        if first == 0:
            return Found(keeps, None, surprises)
        breaks = values[first - 1]
    breaks, keeps = yield from _narrowed(breaks, keeps, True, low_keeps=False)
    below, above = _aside(breaks, keeps, True)
    aside = [(value, value >= keeps) for value in (below, above) if low <= value <= high]
    return Found(keeps, breaks, surprises + (yield from _surprises(aside)))


def together(
    searches: Sequence[Generator[list[Asked], list[Answer], Outcome]],
    answer: Callable[[list[Asked]], list[Answer]],
) -> list[Outcome]:
    """Run searches to their ends; what all of them ask at one time is answered in one call."""
    asked = {number: next(search) for number, search in enumerate(searches)}
    outcomes: dict[int, Outcome] = {}
    while asked:
        answers = iter(answer([value for values in asked.values() for value in values]))
        for number, values in list(asked.items()):
            try:
                asked[number] = searches[number].send([next(answers) for _ in values])
            except StopIteration as end:
                outcomes[number] = end.value
                del asked[number]
    return [outcomes[number] for number in range(len(searches))]


def _narrowed(
    low: float, high: float, whole: bool, *, low_keeps: bool
) -> Generator[list[float], list[bool], tuple[float, float]]:
    """Halve a bracket, in ratio, until it is within WIDEST or of neighbours.

    Where whole numbers are further apart than WIDEST, they are halved in number.
    """
    while high > low * WIDEST and not (whole and high - low <= 1):
        one_by_one = whole and high * (WIDEST - 1.0) <= 1.0
        middle = _rounded((low + high) / 2 if one_by_one else math.sqrt(low * high), whole)
        if whole:
            middle = min(max(middle, low + 1), high - 1)
        [kept] = yield [middle]
        if kept == low_keeps:
            low = middle
        else:
            high = middle
    return low, high


def _surprises(
    expected: list[tuple[float, bool]],
) -> Generator[list[float], list[bool], list[tuple[float, bool]]]:
    """Ask for values whose answers bisection takes for granted; those that are others."""
    if not expected:
        return []
    answers = yield [value for value, _ in expected]
    return [(value, now) for (value, kept), now in zip(expected, answers, strict=True) if now != kept]


def _aside(low: float, high: float, whole: bool) -> tuple[float, float]:
    """A value below the bracket and one above it."""
    below, above = _rounded(low / ASIDE, whole), _rounded(high * ASIDE, whole)
    return (min(below, low - 1), max(above, high + 1)) if whole else (below, above)


def _spread(low: int, high: int) -> list[float]:
    """Up to SCANNED whole numbers of [low, high) in equal ratios, in order."""
    ratio = (high / max(low, 1)) ** (1.0 / SCANNED)
    values = {min(max(round(max(low, 1) * ratio**i), low), high) for i in range(SCANNED)}
    return [float(value) for value in sorted(values - {high})]


def _between(low: int, high: int) -> float:
    return _rounded(math.sqrt(max(low, 1) * high), True)


def _rounded(value: float, whole: bool) -> float:
    """To a whole number, or to four digits: more would not be told apart within WIDEST."""
    return float(round(value)) if whole else float(f"{value:.4g}")
