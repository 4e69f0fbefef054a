"""A part of the validation page: the bars it holds figures against, and what it shows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

Draw = Callable[[Path], None]  # writes a PNG


class Check(NamedTuple):
    """One bar and the figure reached, both as they are printed."""

    what: str
    reached: str
    bar: str
    met: bool | None  # None: not checked, its data is absent

    @property
    def verdict(self) -> str:
        """met, MISSED or not checked."""
        return "not checked" if self.met is None else "met" if self.met else "MISSED"


class Section(NamedTuple):
    """A title, its bars, its Markdown lines, and its figures by file name."""

    title: str
    checks: list[Check]
    lines: list[str]
    figures: Mapping[str, Draw] = {}


def at_most(what: str, reached: float, bar: float, unit: str = "%") -> Check:
    """The check of a figure that must not be above its bar."""
    return Check(what, f"{reached:.2f} {unit}", f"<= {bar:g} {unit}", reached <= bar)


def skipped(title: str, bars: Iterable[str], why: str) -> Section:
    """A section without its data: its bars are not checked, and the page says why."""
    return Section(title, [Check(what, "", "", None) for what in bars], [f"skipped: {why}"])


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a Markdown table."""
    names = list(headings)
    lines = [_row(names), _row(["---"] * len(names))]
    return [*lines, *(_row([str(cell) for cell in row]) for row in rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
