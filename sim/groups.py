"""The figures of a run by tenant, by prefix group and by turn of a session, from its closed records.

Memory: 16 bytes a request at a time, more while sessions are sorted, and 16 for each group there is.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.fates import FATES
from sim.records import FATE_COLUMNS, Records

Ints = npt.NDArray[np.int64]
Row = dict[str, Any]

MOST_TENANTS = 1000
MOST_GROUPS = 10
LAST_TURN = 4  # and all after it
Owner = tuple[int, int]  # tenant and prefix group, see sim/residency.py
NOTHING: Mapping[Owner, int] = {}
LABEL_BITS = 32  # in a mix, group numbers carry their tenant's above these bits, see workloads/mix.py


def breakdowns(
    records: Records, tenants: tuple[str, ...], *, fates: bool, evicted_from: Mapping[Owner, int] = NOTHING
) -> Row:
    """`by_tenant`, `by_prefix_group`, `by_turn` and `sessions` of a run, for its summary.

    The first three are lists of rows, empty where no request has a tenant, group or session: the
    MOST_TENANTS tenants and the MOST_GROUPS groups with the most prompt tokens, largest first, and
    the turns 1, 2, 3 and later of all sessions. `sessions` is None without sessions.

    `tenants` are their names by number, those of a mix; `fates` is whether the records have the
    fates of tokens. A group's `tenant` is the first one with its texts. `num_evictions_caused` are
    evictions by a row's requests, whoever owned the blocks; `num_evictions_suffered` are those from
    it, whoever took them, of `evicted_from`, the evictions by the block's owner (sim/residency.py).
    """

    def rows(numbers: Ints, index: Ints) -> list[Row]:
        return rows_of(records, len(numbers), index, fates)

    by_tenant = []
    numbers, index = _largest(records, "tenant", MOST_TENANTS)
    lost = _suffered(evicted_from, 0)
    for number, row in zip(numbers.tolist(), rows(numbers, index), strict=True):
        by_tenant.append({"tenant": tenants[number]} | row | {"num_evictions_suffered": lost[number]})
    by_group = []
    numbers, index = _largest(records, "prefix_group", MOST_GROUPS)
    lost = _suffered(evicted_from, 1)
    for number, row in zip(numbers.tolist(), rows(numbers, index), strict=True):
        label: Row = {"prefix_group": number}
        if tenants:
            label = {"tenant": tenants[number >> LABEL_BITS], "prefix_group": number & (2**LABEL_BITS - 1)}
        by_group.append(label | row | {"num_evictions_suffered": lost[number]})
    by_turn = []
    turns, sessions = _turns(records)
    if sessions is not None:
        named = [str(turn) for turn in range(1, LAST_TURN)] + [f"{LAST_TURN}+"]
        every = rows_of(records, LAST_TURN, turns, fates)
        by_turn = [{"turn": turn} | row for turn, row in zip(named, every, strict=True) if row["requests"]]
    return {"by_tenant": by_tenant, "by_prefix_group": by_group, "by_turn": by_turn, "sessions": sessions}


def _suffered(evicted_from: Mapping[Owner, int], part: int) -> Counter[int]:
    """Evictions by one part of the owner: 0 its tenant, 1 its prefix group."""
    lost: Counter[int] = Counter()
    for owner, blocks in evicted_from.items():
        lost[owner[part]] += blocks
    return lost


def _largest(records: Records, name: str, most: int) -> tuple[Ints, Ints]:
    """The `most` numbers in a column with the most prompt tokens, and each request's place among them.

    Of equal ones the smaller number comes first. The place is -1 for all other requests; negative
    numbers, which say none, have no place.
    """
    numbers, tokens = np.empty(0, np.int64), np.empty(0, np.int64)
    for column, prompt in records.chunks(name, "prompt_len"):
        column, prompt = column.astype(np.int64), prompt.astype(np.int64)
        some = column >= 0
        numbers, place = np.unique(np.concatenate([numbers, column[some]]), return_inverse=True)
        sums = np.zeros(len(numbers), np.int64)
        np.add.at(sums, place, np.concatenate([tokens, prompt[some]]))
        tokens = sums
    chosen = numbers[np.lexsort((numbers, -tokens))[:most]]
    return chosen, _places(records, name, chosen)


def _places(records: Records, name: str, chosen: Ints) -> Ints:
    """Where in `chosen` each request's number is, -1 if it is not."""
    places = np.full(records.num_rows, -1, np.int64)
    if len(chosen) == 0:
        return places
    order = np.argsort(chosen)
    start = 0
    for (column,) in records.chunks(name):
        near = order[np.minimum(np.searchsorted(chosen, column, sorter=order), len(chosen) - 1)]
        places[start : start + len(column)] = np.where(chosen[near] == column, near, -1)
        start += len(column)
    return places


def _turns(records: Records) -> tuple[Ints, Row | None]:
    """Each request's place in its session, -1 if it has none, and the sessions summed up.

    The place is at most LAST_TURN - 1. A session's turns are its requests by arrival, those of its
    helpers among them, from the first that is in the records.
    """
    session = records.column("session_id").astype(np.int64)
    turns = np.full(len(session), -1, np.int64)
    order = np.lexsort((records.column("request_id"), records.column("arrival_time"), session))
    session = session[order]
    first = int(np.searchsorted(session, 0))  # those without a session are in front
    order, session = order[first:], session[first:]
    if len(session) == 0:
        return turns, None
    starts = np.flatnonzero(np.diff(session, prepend=-1))
    lengths = np.diff(starts, append=len(session))
    turns[order] = np.minimum(np.arange(len(session)) - np.repeat(starts, lengths), LAST_TURN - 1)
    mean, most = float(lengths.mean()), int(lengths.max())
    return turns, {"num_sessions": len(starts), "mean_turns": mean, "max_turns": most}


class _Sums(NamedTuple):
    """Counts by group."""

    requests: Ints
    failed: Ints
    queries: Ints
    hits: Ints
    evictions: Ints
    fates: Ints  # [fate, group]


def rows_of(records: Records, num_groups: int, index: Ints, fates: bool) -> list[Row]:
    """The figures of each group, a row each; `index` tells each request's group, -1 if none."""
    sums = _sums(records, num_groups, index, fates)
    rows: list[Row] = []
    for group, ttft in enumerate(_by_group(records.column("ttft_ms"), index, num_groups)):
        ttft = ttft[~np.isnan(ttft)]  # refused requests have none
        queries, hits = int(sums.queries[group]), int(sums.hits[group])
        row = {
            "requests": int(sums.requests[group]),
            "failed": int(sums.failed[group]),
            "prefix_cache_queries": queries,
            "prefix_cache_hits": hits,
            "prefix_cache_hit_rate": hits / queries if queries else None,
            "mean_ttft_ms": float(ttft.mean()) if len(ttft) else None,
            "p95_ttft_ms": float(np.percentile(ttft, 95)) if len(ttft) else None,
            "num_evictions_caused": int(sums.evictions[group]),
            "token_fates": dict(zip(FATES, sums.fates[:, group].tolist(), strict=True)) if fates else None,
        }
        rows.append(row)
    return rows


def _sums(records: Records, num_groups: int, index: Ints, fates: bool) -> _Sums:
    counts = np.zeros((5 + len(FATES), num_groups), np.int64)
    sums = _Sums(counts[0], counts[1], counts[2], counts[3], counts[4], fates=counts[5:])
    names = ("refused", "prefix_cache_queries", "prefix_cache_hits", "num_evictions")
    start = 0
    for refused, queries, hits, evictions, *columns in records.chunks(
        *names, *(FATE_COLUMNS if fates else ())
    ):
        group = index[start : start + len(refused)]
        start += len(refused)
        ran = (refused == 0) & (group >= 0)
        np.add.at(sums.requests, group[group >= 0], 1)
        np.add.at(sums.failed, group[(refused != 0) & (group >= 0)], 1)
        np.add.at(sums.queries, group[ran], queries[ran].astype(np.int64))
        np.add.at(sums.hits, group[ran], hits[ran].astype(np.int64))
        np.add.at(sums.evictions, group[ran], evictions[ran].astype(np.int64))
        for total, column in zip(sums.fates, columns, strict=False):  # no columns without fates
            np.add.at(total, group[ran], column[ran].astype(np.int64))
    return sums


def _by_group(values: npt.NDArray[Any], index: Ints, num_groups: int) -> Iterator[npt.NDArray[Any]]:
    """The values of each group, in the order of the records."""
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(num_groups + 1))
    for low, high in itertools.pairwise(bounds.tolist()):
        yield values[order[low:high]]
