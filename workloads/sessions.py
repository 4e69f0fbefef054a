"""Recorded sessions: each with its own clock, laid over each other on one.

Ids name full blocks of the prompt, so a prompt has prompt_len // block of them. A session's clock
runs from 0; the recorded time of a turn is when the turn before it ended, plus the think time, so
replaying it is an open loop. The table is whole in memory, because order of arrival is not the
order of the file; the ids stay as the file has them until their requests are due.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.request import Floats, Ints
from workloads.errors import WorkloadError
from workloads.trace_rows import LATEST, Layout, Rows

DEFAULT_BLOCK = 64  # tokens an id stands for, in the traces of coding agents


class Sessions(NamedTuple):
    """The turns of sessions, in file order."""

    line: Ints
    session: Ints  # number of the session, from 0 in file order
    time: Floats  # seconds on the session's clock
    prompt_len: Ints
    output_len: Ints
    think_time: Floats  # seconds before the turn; NaN where not recorded
    service_time: Floats  # seconds the recorded server took; NaN where not recorded
    pieces: Ints  # turn i is the pieces[first_piece[i]:first_piece[i + 1], :] of `ids`: [begin, end) each
    first_piece: Ints
    ids: npt.NDArray[Any]  # a session's ids are its own where `own_ids`
    own_ids: bool
    names: list[str | int] | None  # of the sessions; None: their numbers
    layout: Layout


def start_times(sessions: Sessions, rate: float, rng: np.random.Generator) -> Floats:
    """Draw when each session starts, in seconds: Poisson with `rate` sessions a second, or all at 0.

    Modifies `rng`: one draw a session, in file order. Raises: WorkloadError for a rate so low that
    the last one would start after LATEST.
    """
    num = int(sessions.session.max(initial=-1)) + 1
    if np.isinf(rate):
        return np.zeros(num)
    with np.errstate(over="ignore"):
        starts: Floats = np.cumsum(rng.standard_exponential(num) / rate)
    if num and not starts[-1] <= LATEST:
        raise WorkloadError(
            f"session_rate is {rate:g}: the last of {num} sessions would start after {starts[-1]:g} s, and"
            f" clocks end at {LATEST:g} s: raise it"
        )
    return starts


def session_rows(sessions: Sessions, starts: Floats, chunk: int) -> Iterator[Rows]:
    """Yield the turns in order of arrival, `chunk` at a time; ties keep file order.

    The time of a row is on the common clock: the session's start plus the session's own time.
    """
    arrival = starts[sessions.session] + sessions.time
    order = np.argsort(arrival, kind="stable")
    for begin in range(0, len(order), chunk):
        turns = order[begin : begin + chunk]
        start, ids = _ids_of(sessions, turns)
        session = sessions.session[turns].tolist()
        named = sessions.names
        yield Rows(
            line=sessions.line[turns],
            time=arrival[turns],
            prompt_len=sessions.prompt_len[turns],
            output_len=sessions.output_len[turns],
            start=start,
            ids=ids,
            lens=None,
            optional={"session_id": session if named is None else [named[one] for one in session]},
        )


def _ids_of(sessions: Sessions, turns: Ints) -> tuple[Ints, Ints]:
    """The (row starts, ids) of turns, whose pieces are joined."""
    num_pieces = np.diff(sessions.first_piece)[turns]
    pieces = sessions.pieces[_ranges(sessions.first_piece[turns], num_pieces)]
    lens = pieces[:, 1] - pieces[:, 0]
    ids = sessions.ids[_ranges(pieces[:, 0], lens)].astype(np.int64, copy=False)
    before = np.concatenate([[0], np.cumsum(lens)])
    start = before[np.concatenate([[0], np.cumsum(num_pieces)])]
    if sessions.own_ids:
        ids = ids + np.repeat(sessions.session[turns] << 32, np.diff(start))
    return start, ids


def _ranges(first: Ints, count: Ints) -> Ints:
    """The numbers first[0], … first[0] + count[0] - 1, first[1], …"""
    steps = np.arange(int(count.sum()))
    return np.asarray(steps + np.repeat(first - (np.cumsum(count) - count), count))
