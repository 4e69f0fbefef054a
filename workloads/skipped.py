"""Bad lines: refused, or left out and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from workloads.errors import WorkloadError

L = TypeVar("L")
T = TypeVar("T")


class Skipped:
    """What was left out of a file; nothing ever is where bad lines are not `allowed`."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.count = 0
        self.first: str | None = None  # what was wrong with the first of them

    def add(self, error: WorkloadError) -> None:
        """Count a bad line, or raise its error."""
        if not self.allowed:
            raise error
        self.count += 1
        self.first = self.first or str(error)


def good_parts(
    read: Callable[[int, Sequence[L]], T], before: int, lines: Sequence[L], skipped: Skipped
) -> Iterator[T]:
    """Yield read(number of lines before, lines) of the pieces of `lines` that can be read, in order.

    A piece with a bad line is halved until the line stands alone. Modifies `skipped`.
    """
    try:
        found = read(before, lines)
    except WorkloadError as error:
        if len(lines) == 1 or not skipped.allowed:
            skipped.add(error)
            return
    else:
        yield found
        return
    half = len(lines) // 2
    yield from good_parts(read, before, lines[:half], skipped)
    yield from good_parts(read, before + half, lines[half:], skipped)
