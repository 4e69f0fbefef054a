"""SimPy processes outside the engine: arrivals, users who wait for their answers, whole sessions.

And an operator, who resets the prefix cache and says from when on to measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, cast

from simpy.events import AllOf, Event

from sim.clock import Clock, Process
from sim.request import Batch, Session

if TYPE_CHECKING:
    from sim.engine import Engine


def clients(
    clock: Clock,
    engine: Engine,
    requests: Iterator[Batch] | Iterator[Session],
    concurrency: int | None,
    think_times: Iterator[float] | None,
) -> Iterator[Process]:
    """The processes that bring `requests`: see `simulate`."""
    first = next(iter(requests), None)
    if isinstance(first, Session):
        sessions: Iterator[Session] = chain([first], cast(Iterator[Session], requests))
        if concurrency is None:
            yield session_arrivals(clock, engine, sessions)
        else:
            yield from (session_user(clock, engine, sessions) for _ in range(concurrency))
    elif first is not None:
        batches: Iterator[Batch] = chain([cast(Batch, first)], cast(Iterator[Batch], requests))
        if concurrency is None:
            yield arrivals(clock, engine, batches)
        else:
            slots = loaded_slots(engine, batches)
            thinking = think_times if think_times is not None else repeat(0.0)
            yield from (client(clock, engine, slots, thinking) for _ in range(concurrency))


def arrivals(clock: Clock, engine: Engine, batches: Iterator[Batch]) -> Process:
    """Open loop: each request arrives at its time, whatever the engine does."""
    for batch in batches:
        slots = engine.load(batch)
        for slot, time in zip(slots, batch.arrival_time.tolist(), strict=True):
            if time > clock.now:
                yield clock.at(time)
            engine.submit(slot)


def loaded_slots(engine: Engine, batches: Iterator[Batch]) -> Iterator[int]:
    """The slots of all requests in order, loaded a batch at a time."""
    for batch in batches:
        yield from engine.load(batch)


def client(clock: Clock, engine: Engine, slots: Iterator[int], think_times: Iterator[float]) -> Process:
    """One user of a closed loop: send the next request, wait for its end, think, repeat."""
    for slot in slots:
        yield engine.submit_watched(slot)
        think = next(think_times)
        if think > 0:
            yield clock.at(clock.now + think)


def session_arrivals(clock: Clock, engine: Engine, sessions: Iterator[Session]) -> Process:
    """Open loop of sessions: each begins at its start, whatever the others do."""
    for session in sessions:
        if session.start > clock.now:
            yield clock.at(session.start)
        begin(clock, engine, session)


def session_user(clock: Clock, engine: Engine, sessions: Iterator[Session]) -> Process:
    """One user of a closed loop of sessions: the next begins when the former has ended."""
    for session in sessions:
        yield AllOf(clock, begin(clock, engine, session))


def begin(clock: Clock, engine: Engine, session: Session) -> list[Event]:
    """Start a session now; the events are the ends of its requests."""
    ended: list[Event] = []
    slots = engine.load(session.requests)
    for slot, after, delay in zip(slots, session.after, session.delay.tolist(), strict=True):
        ended.append(clock.process(turn(clock, engine, slot, [ended[i] for i in after], delay)))
    return ended


def turn(clock: Clock, engine: Engine, slot: int, before: list[Event], delay: float) -> Process:
    """One request of a session: wait until those before it have ended, and `delay` seconds more."""
    if before:
        yield AllOf(clock, before)
    if delay > 0:
        yield clock.at(clock.now + delay)
    yield engine.submit_watched(slot)


def resets(clock: Clock, engine: Engine, times: Sequence[float]) -> Process:
    """Ask for an empty prefix cache at each of `times`."""
    for time in sorted(times):
        if time > clock.now:
            yield clock.at(time)
        engine.reset_prefix_cache()


def measuring(clock: Clock, engine: Engine, time: float) -> Process:
    """Begin to measure at `time`."""
    if time > clock.now:
        yield clock.at(time)
    engine.begin_measuring()
