"""Print events and whiteboards, at most 100 columns wide, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from sim.explain.events import (
    Admission,
    Arrival,
    Blocked,
    Board,
    Event,
    Finish,
    Looked,
    Output,
    Running,
    Verdict,
)
from sim.explain.tokens import Tokens

WIDTH = 100
LABEL = 12
INDENT = "    "
_LONG = 8  # so many blocks of one verdict are listed, not more

_SAID = {
    Verdict.HIT: ("HIT", "green"),
    Verdict.AFTER_MISS: ("-", "dim"),
    Verdict.NOT_FULL: ("-", "dim"),
    Verdict.CACHING_OFF: ("-", "dim"),
}


def short(block_hash: bytes) -> str:
    """A hash's name on the whiteboard."""
    return block_hash.hex()[:6]


def ids(blocks: Iterable[int]) -> str:
    """Block ids as text."""
    return " ".join(map(str, blocks))


def count(number: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def packed(label: str, cells: Sequence[str], width: int) -> Iterator[str]:
    """Lines of at most `width` columns with a label and cells, none of which is broken."""
    line = label.ljust(LABEL)
    empty = True
    for cell in cells:
        if not empty and len(line) + 1 + len(cell.rstrip()) > width:
            yield line.rstrip()
            line, empty = " " * LABEL, True
        line += cell if empty else " " + cell
        empty = False
    yield line.rstrip()


class Painter:
    """Prints one run's events, numbered, each with what it changed on the whiteboard."""

    def __init__(self, console: Console, tokens: Tokens, *, logical_time: bool) -> None:
        self.console = console
        self.tokens = tokens
        self.logical_time = logical_time
        self.width = min(console.width, WIDTH)
        self.number = 0

    def event(self, event: Event) -> None:
        """Print an event; those that change nothing but a table's last block leave out the board."""
        match event:
            case Arrival():
                self._arrival(event)
            case Running():
                self._running(event)
            case Admission():
                self._admission(event)
            case Blocked():
                self._headline(event, f"{event.request} has to wait: {event.reason}")
                self.console.print()
            case Output():
                self._output(event)
            case Finish():
                self._finish(event)

    def board(self, board: Board) -> None:
        """Print the whiteboard."""
        rows = [(name, [self._box(board, block) for block in table]) for name, table in board.tables.items()]
        if board.waiting:
            rows.append(("waiting", list(board.waiting)))
        queue = [self._free_block(board, block) for block in board.free]
        rows.append(("free queue", ["head >", *queue, "< tail"] if queue else ["empty"]))
        entries = [
            f"{short(name)} {self.tokens.draw(board.contents[blocks[0]].tokens)}: {ids(blocks)}"
            for name, blocks in board.hashes.items()
        ]
        wide = max(map(len, entries), default=0) + 2
        rows.append(("hash table", [entry.ljust(wide) for entry in entries] or ["empty"]))
        lines = [line for label, cells in rows for line in packed(label, cells, self.width - 8)]
        panel = Panel(Text("\n".join(lines)), box=box.SQUARE, width=self.width - 4, border_style="dim")
        self.console.print(Padding(panel, (0, 0, 0, 4)), soft_wrap=True)
        self.console.print()

    def _headline(self, event: Event, text: str) -> None:
        self.number += 1
        when = f"time {event.time:g}" if self.logical_time else f"{event.time * 1e3:.3f} ms"
        if not isinstance(event, Arrival):
            when = f"step {event.step}, {when}"
        head = f"{self.number:>3} {text} "
        line = head.ljust(self.width - len(when) - 1, "-") + " " + when
        text = line if len(line) <= self.width else f"{head}({when})"
        self.console.print(Text(text, "bold"), soft_wrap=True)

    def _line(self, text: str, style: str = "", hang: int = 0) -> None:
        """Print an indented line; where it is too long, it goes on `hang` columns further in."""
        room = max(self.width - len(INDENT) - hang, 20)
        first, rest = text[:hang], text[hang:]
        for part in Text(rest).wrap(self.console, room) or [Text()]:
            self.console.print(Text(f"{INDENT}{first}{part.plain.rstrip()}", style), soft_wrap=True)
            first = " " * hang

    def _box(self, board: Board, block: int) -> str:
        content = self.tokens.draw(board.contents[block].tokens, self.tokens.block_size)
        return f"[{block} {content} x{board.refs[block]}]"

    def _free_block(self, board: Board, block: int) -> str:
        content = board.contents.get(block)
        return f"({block} {self.tokens.draw(content.tokens)})" if content else str(block)

    def _arrival(self, event: Arrival) -> None:
        self._headline(event, f"{event.request} arrives: a prompt of {count(len(event.prompt), 'token')}")
        if event.refused:
            self._line("It can never fit, in max_model_len or in the pool, and is refused.")
        else:
            size = self.tokens.block_size
            pieces = [self.tokens.draw(event.prompt[i : i + size]) for i in range(0, len(event.prompt), size)]
            names = [short(name) for name in event.hashes]
            if len(names) < len(pieces):
                names.append("not full: no hash")
            wide = max(6, *map(len, pieces)) + 1
            if LABEL + (wide + 1) * len(pieces) < self.width - len(names[-1]):  # else see the lookup
                for label, cells in (("tokens", pieces), ("hashes", names)):
                    self._line(next(packed(label, [cell.ljust(wide) for cell in cells], self.width)))
        self.console.print()

    def _running(self, event: Running) -> None:
        if not (event.taken or event.registered or event.preempted):
            return
        parts = [f"{name} grows by {ids(taken)}" for name, taken in event.taken.items()]
        parts += [f"{name} is preempted" for name in event.preempted]
        self._headline(event, "; ".join(parts) or f"block {ids(event.registered)} is full")
        work = ", ".join(f"{name} {count(n, 'token')}" for name, n in event.scheduled.items())
        self._line(f"To compute in this step: {work or 'nothing'}.")
        if event.preempted:
            self._line("A preempted request gives back all its blocks and will be computed again.")
        self._changes(event.evicted, event.registered)
        self.board(event.board)

    def _admission(self, event: Admission) -> None:
        again = " again" if event.resumed else ""
        total = event.hit_tokens + event.scheduled + event.left
        self._headline(event, f"{event.request} is looked up and admitted{again}")
        self._lookup(event.looked)
        later = f", {event.left} in later steps" if event.left else ""
        self._line(
            f"Hit {event.hit_tokens} of {count(total, 'token')}; {event.scheduled} to compute now{later}.",
            "bold",
        )
        hits = [looked.block for looked in event.looked if looked.verdict is Verdict.HIT]
        if hits:
            left = f"; {ids(event.touched)} left the free queue" if event.touched else ""
            self._line(f"One more reference for {ids(hits)}{left}.")
        if event.taken:
            self._line(f"From the head of the free queue: {ids(event.taken)}.")
        self._changes(event.evicted, event.registered, at_once=True)
        self.board(event.board)

    def _lookup(self, looked: Sequence[Looked]) -> None:
        """One line for each block of the prompt; the middle of a long run of like ones is left out."""
        drawn = [self.tokens.draw(one.tokens) for one in looked]
        wide = max(map(len, drawn))
        place = 0
        for verdict, group in groupby(looked, key=lambda one: one.verdict):
            word, style = _SAID.get(verdict, ("MISS", "red"))
            run = list(group)
            for i, one in enumerate(run):
                if len(run) <= _LONG or i < _LONG // 2 or i >= len(run) - _LONG // 2:
                    name = short(one.hash) if one.hash else ""
                    head = f"{place:>3}  {drawn[place]:{wide}}  {name:6}  {word:4}  "
                    self._line(head + self._reason(one), style, hang=len(head))
                elif i == _LONG // 2:
                    self._line(f"     and {len(run) - _LONG} more like these", style)
                place += 1

    def _reason(self, looked: Looked) -> str:
        return {
            Verdict.HIT: f"in block {looked.block}",
            Verdict.DIFFERS: f"differs: only the first {count(looked.common, 'token')} as in block "
            f"{looked.block}; a part never hits",
            Verdict.UNFINISHED: f"block {looked.block} begins the same, but it is not full, so has no hash",
            Verdict.EVICTED: "it was cached, and has been evicted",
            Verdict.UNKNOWN: "not in the hash table",
            Verdict.LAST_TOKEN: f"it is in block {looked.block}, but the last token must be computed",
            Verdict.NOT_FULL: "not full: no hash, so it can neither hit nor be shared",
            Verdict.AFTER_MISS: "not looked up: the first miss ends the search",
            Verdict.CACHING_OFF: "prefix caching is off",
        }[looked.verdict]

    def _changes(self, evicted: Sequence[int], registered: Sequence[int], at_once: bool = False) -> None:
        if evicted:
            self._line(f"Evicted, so what they cached is lost: {ids(evicted)}.")
        if registered:
            before = " at once, before the step has computed them" if at_once else ""
            self._line(f"Full, so in the hash table{before}: {ids(registered)}.")

    def _output(self, event: Output) -> None:
        sampled = ", ".join(f"{name} samples {self.tokens.draw([t])}" for name, t in event.tokens.items())
        self._headline(event, sampled)
        if event.registered:
            self._changes((), event.registered)
            self.board(event.board)
        else:
            self.console.print()

    def _finish(self, event: Finish) -> None:
        back = f"gives back {ids(reversed(event.table))}" if event.table else "holds no blocks"
        self._headline(event, f"{event.request} ends and {back}")
        if event.kept:
            self._line(f"Still used by others: {ids(event.kept)}.")
        if event.to_head:
            self._line(f"Without a hash, so to the head, to be taken first: {ids(event.to_head)}.")
        if event.to_tail:
            self._line(f"To the tail, in this order: {ids(event.to_tail)}.")
        self.board(event.board)
