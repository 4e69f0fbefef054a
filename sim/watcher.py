"""Who looks at a run between its steps, and says how far it may run until the next look."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sim.clock import Clock
from sim.core import Core


class Watcher(Protocol):
    """What sim.simulate.simulate takes as `horizon` and `observe`."""

    def horizon(self, clock: Clock) -> float:
        """How far the engine may run ahead, at most clock.horizon()."""

    def observe(self, core: Core) -> None:
        """Look at the engine; modifies nothing of it."""


class Both(NamedTuple):
    """Two watchers of one run."""

    one: Watcher
    other: Watcher

    def horizon(self, clock: Clock) -> float:
        """The nearer of the two."""
        return min(self.one.horizon(clock), self.other.horizon(clock))

    def observe(self, core: Core) -> None:
        """Both look."""
        self.one.observe(core)
        self.other.observe(core)


def together(*watchers: Watcher | None) -> Watcher | None:
    """Those that are there, as one; None where none is."""
    found: Watcher | None = None
    for watcher in watchers:
        if watcher is not None:
            found = watcher if found is None else Both(found, watcher)
    return found
