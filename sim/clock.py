"""Simulated time: SimPy's environment with absolute instants, and what the engines may run up to."""

from __future__ import annotations

import math
from collections.abc import Generator
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.core import SimTime
from simpy.events import NORMAL, Event, EventPriority

Process = Generator[Event, Any, None]

ENGINE = EventPriority(NORMAL + 1)  # at one instant, outside events come before engine wake-ups


class Instant(Event):
    """An event at an absolute time. A Timeout's now + delay would differ from it in the last bit."""

    def __init__(self, clock: Clock, time: float, priority: EventPriority) -> None:
        self.env = clock
        self.callbacks = []
        self._ok = True
        self._value = None
        heappush(clock._queue, (time, priority, next(clock._eid), self))


class Clock(simpy.Environment):
    """The environment. It knows the next outside event, so that an engine can run ahead to it."""

    def __init__(self) -> None:
        super().__init__(initial_time=0.0)
        self._outside: list[float] = []  # times of coming events that are not engine wake-ups

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: SimTime = 0) -> None:
        """Schedule an event, as Environment.schedule; one in the future is an outside event."""
        if delay > 0:
            heappush(self._outside, self._now + delay)
        super().schedule(event, priority, delay)

    def at(self, time: float) -> Event:
        """An outside event at `time`, not before now."""
        heappush(self._outside, time)
        return Instant(self, time, NORMAL)

    def wake_at(self, time: float, replica: int) -> Event:
        """An engine's wake-up at `time`, after all outside events of that instant.

        Of several engines the one with the smaller number is first, whatever has gone before.
        """
        return Instant(self, time, EventPriority(ENGINE + replica))

    def wake_now(self, event: Event, replica: int) -> None:
        """Let an engine's event happen now, after all outside events of this instant."""
        event._ok = True
        event._value = None
        self.schedule(event, EventPriority(ENGINE + replica))

    def horizon(self) -> float:
        """The time of the next outside event after now, infinity if there is none."""
        outside = self._outside
        now = self._now
        while outside and outside[0] <= now:
            heappop(outside)
        return outside[0] if outside else math.inf
