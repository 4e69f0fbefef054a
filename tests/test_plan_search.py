"""Bisection over known answers: it finds the edge, in few questions, and tells where it was deceived."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sim.planning.search import SCANNED, Found, Search, highest, smallest, together

TWO_PERCENT = 1.02


def drive(search: Search, kept: Callable[[float], bool]) -> tuple[Found, list[float]]:
    """The answer of a search over `kept`, and the values it asked for."""
    asked: list[float] = []
    values = next(search)
    while True:
        asked += values
        try:
            values = search.send([kept(value) for value in values])
        except StopIteration as end:
            return end.value, asked


@pytest.mark.parametrize("edge", [0.0123, 0.5, 7.99, 8.0, 8.01, 26.1, 333.0, 9999.0])
def test_the_highest_rate_is_within_two_percent_below_the_edge(edge: float) -> None:
    found, asked = drive(highest(8.0, whole=False), lambda rate: rate <= edge)
    assert found.best is not None and found.broken is not None
    assert found.best <= edge < found.broken <= found.best * TWO_PERCENT * 1.0005  # four digits
    assert found.surprises == []
    assert len(asked) <= 18
    assert min(asked) < found.best < found.broken < max(asked)  # a look on either side


@pytest.mark.parametrize("edge", [1, 2, 3, 4, 17, 105, 5000])
def test_users_are_whole_and_exact_where_two_percent_is_less_than_one(edge: int) -> None:
    found, asked = drive(highest(4, whole=True, most=1 << 20), lambda users: users <= edge)
    assert all(value == int(value) >= 1 for value in asked)
    assert found.best is not None and found.broken is not None
    assert found.best <= edge < found.broken <= max(found.best + 1, found.best * TWO_PERCENT)
    if edge <= 50:
        assert found.best == edge


def test_nothing_keeps_it_at_any_pace_and_nothing_breaks_it_at_any_pace() -> None:
    found, asked = drive(highest(8.0, whole=False), lambda rate: False)
    assert found.best is None and found.broken == min(asked) < 1e-3
    found, asked = drive(highest(8.0, whole=False), lambda rate: True)
    assert (found.best, found.broken) == (max(asked), None) and max(asked) > 1e5
    assert drive(highest(1, whole=True), lambda users: False)[0] == Found(None, 1)
    assert drive(highest(3, whole=True, most=4), lambda users: True)[0] == Found(4, None)


@pytest.mark.parametrize("edge", [1, 2, 3, 7, 15, 16])
def test_the_fewest_replicas_are_exact(edge: int) -> None:
    found, asked = drive(smallest(1, 16), lambda replicas: replicas >= edge)
    assert found.best == edge
    assert found.broken == (edge - 1 if edge > 1 else None)
    assert found.surprises == [] and len(asked) <= 8


@pytest.mark.parametrize("edge", [1000, 1001, 1234, 7777, 19999, 20000])
def test_the_smallest_pool_is_within_two_percent_above_the_edge(edge: int) -> None:
    found, asked = drive(smallest(1000, 20000), lambda blocks: blocks >= edge)
    assert found.best is not None and edge <= found.best <= edge * TWO_PERCENT + 1
    assert all(1000 <= value <= 20000 and value == int(value) for value in asked)
    assert len(asked) <= 13 and found.surprises == []


def test_no_value_of_a_range_is_said_only_after_several() -> None:
    found, asked = drive(smallest(10, 1000), lambda value: False)
    assert found == Found(None, 1000)
    assert len(set(asked)) == SCANNED + 1 and {10.0, 1000.0} <= set(asked)
    assert drive(smallest(5, 5), lambda value: False)[0] == Found(None, 5)
    assert drive(smallest(5, 5), lambda value: True)[0] == Found(5, None)


def test_a_window_below_a_top_that_breaks_is_found_and_told() -> None:
    found, _ = drive(smallest(10, 1000), lambda value: 50 <= value <= 80)
    assert found.best is not None and 50 <= found.best <= 50 * TWO_PERCENT + 1
    assert found.broken == found.best - 1
    assert (1000, False) in found.surprises


def test_an_answer_that_is_not_the_only_edge_is_told() -> None:
    found, _ = drive(highest(16.0, whole=False), lambda rate: rate <= 20.0 or 20.8 <= rate <= 21.5)
    assert found.best is not None and found.broken is not None and found.broken < 20.8
    assert found.surprises == [(float(f"{found.broken * 1.05:.4g}"), True)]

    found, _ = drive(highest(16.0, whole=False), lambda rate: rate <= 20.0 and not 18.8 <= rate <= 19.0)
    assert found.surprises == [(float(f"{found.best / 1.05:.4g}"), False)]  # type: ignore[operator]

    found, _ = drive(smallest(1, 40), lambda value: value >= 20 and value != 21)
    assert found == Found(20, 19, [(21, False)])
    found, _ = drive(smallest(1, 40), lambda value: value >= 20 or value == 18)
    assert found == Found(18, 17, [(19, False)])
    found, _ = drive(smallest(4, 40), lambda value: value != 13)
    assert found == Found(4, None, [(13, False)])  # the low end keeps it: one look between


def test_searches_go_on_side_by_side_and_are_answered_together() -> None:
    calls: list[int] = []

    def answer(values: list[float]) -> list[bool]:
        calls.append(len(values))
        return [value >= 5 for value in values]

    one = drive(smallest(1, 16), lambda value: value >= 5)
    two = drive(smallest(1, 300), lambda value: value >= 5)
    assert together([smallest(1, 16), smallest(1, 300)], answer) == [one[0], two[0]]
    assert sum(calls) == len(one[1]) + len(two[1])
    assert len(calls) <= max(len(one[1]), len(two[1]))
    assert together([], answer) == []


def test_brackets_are_halved_in_ratio() -> None:
    _, asked = drive(highest(10.0, whole=False), lambda rate: rate <= 11.0)
    assert asked[:3] == [10.0, 20.0, float(f"{math.sqrt(200.0):.4g}")]
