"""SimPy processes outside the engine: arrivals, users who wait for their answers, whole sessions.

And an operator, who resets the prefix cache and says from when on to measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, cast

import numpy as np
from simpy.events import AllOf, Event

from sim.clock import Clock, Process
from sim.columns import T
from sim.request import Batch, Session
from workloads.merge import cut

if TYPE_CHECKING:
    from sim.engine import Engine
    from sim.replicas import Replicas

    Entrance = Engine | Replicas  # where requests come in


MOST_SAMPLES = 1 << 16  # loaded at a time, or those of one request


def clients(
    clock: Clock,
    entrance: Entrance,
    requests: Iterator[Batch] | Iterator[Session],
    concurrency: int | None,
    think_times: Iterator[float] | None,
) -> Iterator[Process]:
    """The processes that bring `requests`: see `simulate`."""
    first = next(iter(requests), None)
    if isinstance(first, Session):
        sessions: Iterator[Session] = chain([first], cast(Iterator[Session], requests))
        if concurrency is None:
            yield session_arrivals(clock, entrance, sessions)
        else:
            yield from (session_user(clock, entrance, sessions) for _ in range(concurrency))
    elif first is not None:
        batches: Iterator[Batch] = chain([cast(Batch, first)], cast(Iterator[Batch], requests))
        if concurrency is None:
            yield arrivals(clock, entrance, batches)
        else:
            slots = loaded_slots(entrance, batches)
            thinking = think_times if think_times is not None else repeat(0.0)
            yield from (client(clock, entrance, slots, thinking) for _ in range(concurrency))


def arrivals(clock: Clock, entrance: Entrance, batches: Iterator[Batch]) -> Process:
    """Open loop: each request arrives at its time, whatever the engine does."""
    for batch in in_pieces(batches):
        slots = entrance.arena.load(batch).tolist()
        for slot, time in zip(slots, batch.arrival_time.tolist(), strict=True):
            if time > clock.now:
                yield clock.at(time)
            entrance.submit(slot)


def loaded_slots(entrance: Entrance, batches: Iterator[Batch]) -> Iterator[int]:
    """The slots of all requests in order, loaded a batch at a time."""
    for batch in in_pieces(batches):
        yield from entrance.arena.load(batch).tolist()


def in_pieces(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, cut where their requests have so many samples that they would fill the memory."""
    for batch in batches:
        piece = batch.n.cumsum() // MOST_SAMPLES
        bounds = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), len(piece)]
        if len(bounds) == 2:
            yield batch
        else:
            yield from (cut(batch, begin, end) for begin, end in pairwise(bounds))


def client(clock: Clock, entrance: Entrance, slots: Iterator[int], think_times: Iterator[float]) -> Process:
    """One user of a closed loop: send the next request, wait for its end, think, repeat."""
    for slot in slots:
        yield send(clock, entrance, slot)
        think = next(think_times)
        if think > 0:
            yield clock.at(clock.now + think)


def send(clock: Clock, entrance: Entrance, slot: int) -> Event:
    """A loaded request arrives now; the event happens when it ends."""
    entrance.arena.times[T.arrival_time, slot] = clock.now
    return entrance.submit_watched(slot)


def session_arrivals(clock: Clock, entrance: Entrance, sessions: Iterator[Session]) -> Process:
    """Open loop of sessions: each begins at its start, whatever the others do."""
    for session in sessions:
        if session.start > clock.now:
            yield clock.at(session.start)
        begin(clock, entrance, session)


def session_user(clock: Clock, entrance: Entrance, sessions: Iterator[Session]) -> Process:
    """One user of a closed loop of sessions: the next begins when the former has ended."""
    for session in sessions:
        yield AllOf(clock, begin(clock, entrance, session))


def begin(clock: Clock, entrance: Entrance, session: Session) -> list[Event]:
    """Start a session now; the events are the ends of its requests."""
    ended: list[Event] = []
    slots = entrance.arena.load(session.requests).tolist()
    for slot, after, delay in zip(slots, session.after, session.delay.tolist(), strict=True):
        ended.append(clock.process(turn(clock, entrance, slot, [ended[i] for i in after], delay)))
    return ended


def turn(clock: Clock, entrance: Entrance, slot: int, before: list[Event], delay: float) -> Process:
    """One request of a session: wait until those before it have ended, and `delay` seconds more."""
    if before:
        yield AllOf(clock, before)
    if delay > 0:
        yield clock.at(clock.now + delay)
    yield send(clock, entrance, slot)


def resets(clock: Clock, entrance: Entrance, times: Sequence[float]) -> Process:
    """Ask for an empty prefix cache at each of `times`."""
    for time in sorted(times):
        if time > clock.now:
            yield clock.at(time)
        entrance.reset_prefix_cache()


def measuring(clock: Clock, entrance: Entrance, time: float) -> Process:
    """Begin to measure at `time`."""
    if time > clock.now:
        yield clock.at(time)
    entrance.begin_measuring()
