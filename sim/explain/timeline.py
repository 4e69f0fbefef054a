"""The documentation's timeline under both free rules, side by side.

Block ids are shown less 1, as the documentation counts them: it has 10 blocks and no null block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from sim.explain.events import Admission, Event, Finish, Running
from sim.explain.examples import timeline
from sim.explain.render import WIDTH, ids

RULES = {
    True: "every freed block to the tail\n(vLLM's documentation; free_order: all_last)",
    False: "blocks without a hash to the head\n(vLLM's code; free_order: hashed_last, the default)",
}


class Moment(NamedTuple):
    """A row of the timeline: the same event under both rules."""

    title: str
    by_rule: dict[bool, Event]  # by free_all_last


def moments() -> Iterator[Moment]:
    """The events that change tables or queue; the two runs go through the same ones."""
    runs = {rule: timeline(free_all_last=rule) for rule in RULES}
    for events in zip(*(walk.events() for walk in runs.values()), strict=True):
        by_rule = dict(zip(runs, events, strict=True))
        first = events[0]
        assert all(type(event) is type(first) for event in events)
        match first:
            case Admission(request=request, hit_tokens=hit):
                total = hit + first.scheduled
                yield Moment(f"{request} comes:\nhit {hit} of {total}", by_rule)
            case Running(taken=taken) if taken:
                yield Moment(f"{' '.join(taken)} grows", by_rule)
            case Finish(request=request):
                yield Moment(f"{request} ends", by_rule)


def show_timeline(console: Console) -> None:
    """Print the timeline and what the two rules make different."""
    table = Table(box=box.SQUARE, show_lines=True, width=min(console.width, WIDTH))
    table.add_column("")
    for title in RULES.values():
        table.add_column(title, ratio=1)
    last = {}
    for moment in moments():
        table.add_row(moment.title, *(_cell(event) for event in moment.by_rule.values()))
        if isinstance(moment.by_rule[False], Admission):
            last = moment.by_rule
    console.print(table)
    for rule, event in last.items():
        assert isinstance(event, Admission)
        name = "documentation's" if rule else "code's"
        lost = f"evicts {_less_one(event.evicted)}" if event.evicted else "evicts nothing"
        text = (
            f"The {name} rule gives {event.request} the blocks {_less_one(event.board.tables[event.request])}"
        )
        console.print(f"{text} and {lost}.", soft_wrap=True)
    event = last[False]
    shown = ids(event.board.tables[event.request]) if isinstance(event, Admission) else ""
    console.print(f"vLLM itself counts from its null block 0: there this last table reads {shown}.")


def _cell(event: Event) -> str:
    """The block tables, and the free queue with * at blocks that are cached."""
    board = event.board
    lines = [f"{name:4}  {_less_one(table)}" for name, table in board.tables.items()]
    queue = (f"{block - 1}{'*' if block in board.contents else ''}" for block in board.free)
    lines.append("free  " + " ".join(queue))
    if isinstance(event, Admission) and event.evicted:
        lines.append(f"evicted: {_less_one(event.evicted)}")
    return "\n".join(lines)


def _less_one(blocks: tuple[int, ...]) -> str:
    return ids(block - 1 for block in blocks)
