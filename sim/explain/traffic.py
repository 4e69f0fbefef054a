"""When requests reach the scheduler: open or closed loop, then one front-end thread.

The rules are those of sim/engine.py and sim/advance.py, for a run that is not a SimPy process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush


class Traffic:
    """Requests on their way, by number; all times in seconds."""

    def __init__(
        self, arrivals: Sequence[float], concurrency: int | None, think_times: Iterator[float] | None
    ) -> None:
        """Request i arrives at `arrivals[i]`; with `concurrency`, the later ones when a user is free."""
        at_once = len(arrivals) if concurrency is None else concurrency
        self._to_come = list(arrivals[:at_once])  # a heap of times; who comes is the next unsent request
        heapify(self._to_come)
        self._closed_loop = concurrency is not None
        self._unsent = iter(range(len(arrivals)))
        self._num_unsent = len(arrivals)
        self._think_times = think_times
        self._in_front_end: list[tuple[float, float, int]] = []  # (done, arrival, number)
        self._front_end_free = 0.0

    def arrived(self, now: float) -> Iterator[tuple[float, int]]:
        """Arrivals up to `now`, each once: (time, number)."""
        while self._num_unsent and self._to_come and self._to_come[0] <= now:
            self._num_unsent -= 1
            yield heappop(self._to_come), next(self._unsent)

    def hash_prompt(self, arrival: float, number: int, work: float) -> float:
        """Queue a request for the front end, which takes `work` seconds for it; returns when it is done."""
        self._front_end_free = max(arrival, self._front_end_free) + work
        self._in_front_end.append((self._front_end_free, arrival, number))
        return self._front_end_free

    def ready(self, now: float) -> Iterator[tuple[float, int]]:
        """Requests that the front end has done by `now`, each once: (arrival, number)."""
        while self._in_front_end and self._in_front_end[0][0] <= now:
            yield self._in_front_end.pop(0)[1:]

    def ended(self, now: float) -> None:
        """A request has ended: in a closed loop its user thinks, and sends the next one."""
        if self._closed_loop:
            think = next(self._think_times) if self._think_times else 0.0
            heappush(self._to_come, now + think)

    def next_time(self) -> float | None:
        """When something is ready or arrives next; None: never."""
        times = [done for done, *_ in self._in_front_end[:1]]
        if self._num_unsent and self._to_come:
            times.append(self._to_come[0])
        return min(times, default=None)
