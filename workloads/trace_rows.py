"""The rows of a trace as columns, and what their values must be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.request import Floats, Ints
from sim.samples import MOST_SEQUENCES
from workloads.errors import WorkloadError
from workloads.lengths import MAX_LEN
from workloads.sampling import ONE_OF_BOTH

LATEST = 1e12  # seconds: later than that, a float has no more milliseconds
Bools = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """Requests as they stand in the file: types are checked, values are not yet."""

    line: Ints  # of each row in the file, from 1
    time: Floats  # in the unit of the file's Layout
    prompt_len: Ints
    output_len: Ints
    start: Ints  # n + 1 row starts into the two below
    ids: npt.NDArray[Any]  # int64, or Python ints where one does not fit
    lens: Ints | None  # tokens of each segment; None: the ids name blocks
    optional: dict[str, list[Any]]  # those that stand in any row; None where a row has none


class Layout(NamedTuple):
    """What a format calls things, for messages, and how its times count."""

    time: str
    prompt: str
    output: str
    per_second: float  # units of time in a second
    has_all_tokens: bool = False  # segments cover prompt and output to the token
    place: str = "line"  # what Rows.line counts


def part(rows: Rows, first: int, last: int) -> Rows:
    """Return rows first to last - 1, as views."""
    begin, end = int(rows.start[first]), int(rows.start[last])
    return Rows(
        line=rows.line[first:last],
        time=rows.time[first:last],
        prompt_len=rows.prompt_len[first:last],
        output_len=rows.output_len[first:last],
        start=rows.start[first : last + 1] - begin,
        ids=rows.ids[begin:end],
        lens=None if rows.lens is None else rows.lens[begin:end],
        optional={name: values[first:last] for name, values in rows.optional.items()},
    )


def names_partial_blocks(rows: Rows, block: int) -> bool | None:
    """Whether a prompt's last id stands for a part of a block too; None: no row tells.

    Mooncake's traces name it, others name full blocks only. The first row whose prompt is no
    multiple of `block` tells.
    """
    telling = np.flatnonzero(rows.prompt_len % block)
    if len(telling) == 0:
        return None
    row = telling[0]
    return bool(rows.start[row + 1] - rows.start[row] != rows.prompt_len[row] // block)


def check(
    path: str, layout: Layout, rows: Rows, block: int | None, partial: bool | None, previous: float | None
) -> None:
    """Raise WorkloadError for the first row whose values are impossible. Changes nothing.

    `block` is the tokens an id stands for, None where segments have lengths; `partial` whether a
    partial last block has an id, None where no row has told; `previous` the time of the row
    before, None where times need not be in order.
    """
    time, prompt, output, counts = rows.time, rows.prompt_len, rows.output_len, np.diff(rows.start)
    found: list[tuple[int, str]] = []

    def expect(good: Bools, problem: Callable[[int], str], remedy: str | Callable[[int], str]) -> None:
        if not good.all():
            row = int(np.argmin(good))
            advice = remedy if isinstance(remedy, str) else remedy(row)
            found.append((row, f"{problem(row)}: {advice}"))

    expect(
        (time >= 0) & (time <= LATEST * layout.per_second),
        lambda i: f"{layout.time} is {time[i]:g}",
        f"it must be a number of {'ms' if layout.per_second == 1000 else 's'}"
        f" from 0 to {LATEST * layout.per_second:g}",
    )
    if previous is not None:
        before = np.concatenate([[previous], time[:-1]])
        expect(
            ~(time < before),
            lambda i: f"{layout.time} {time[i]:.15g} comes after {before[i]:.15g}",
            "sort the file by time, or set workload.arrival to constant",
        )
    in_range = f"it must be a number of tokens from %d to {MAX_LEN}"
    expect((prompt >= 1) & (prompt <= MAX_LEN), lambda i: f"{layout.prompt} is {prompt[i]}", in_range % 1)
    expect((output >= 0) & (output <= MAX_LEN), lambda i: f"{layout.output} is {output[i]}", in_range % 0)
    if block is not None:
        needed = prompt // block if partial is False else -(-prompt // block)
        expect(
            counts == needed,
            lambda i: (
                f"hash_ids has {counts[i]} ids, but {prompt[i]} tokens at {block} an id need {needed[i]}"
            ),
            lambda i: f"mend the row, or set workload.trace_block_size{_fitting(prompt[i], counts[i])}",
        )
        sizes = rows.optional.get("block_size", [])
        expect(
            np.array([size in (None, block) for size in sizes], np.bool_),
            lambda i: f"block_size is {sizes[i]}, not {block} as before",
            "a trace has one block size: split it, or set workload.trace_block_size",
        )
    if layout.has_all_tokens:
        assert rows.lens is not None
        lens = rows.lens
        wrong = np.cumsum((lens < 1) | (lens > MAX_LEN))
        expect(
            np.diff(np.concatenate([[0], wrong])[rows.start]) == 0,
            lambda i: f"segments has lengths {lens[rows.start[i] : rows.start[i + 1]][:8].tolist()}",
            in_range % 1,
        )
        totals = np.diff(np.concatenate([[0], np.cumsum(lens)])[rows.start])
        expect(
            totals == prompt + output,
            lambda i: (
                f"segments has {totals[i]} tokens, not input_length + output_length = {prompt[i] + output[i]}"
            ),
            "mend the row",
        )
    salts = rows.optional.get("cache_salt", [])
    expect(
        np.array([salt != "" for salt in salts], np.bool_),
        lambda i: "cache_salt is empty",
        "leave it out, or write null",
    )
    n, beam_width = (rows.optional.get(name, []) for name in ("n", "beam_width"))
    for name, numbers in (("n", n), ("beam_width", beam_width)):
        expect(
            np.array([one is None or 1 <= one <= MOST_SEQUENCES for one in numbers], np.bool_),
            functools.partial(_is, name, numbers),
            f"it must be a whole number from 1 to {MOST_SEQUENCES}",
        )
    expect(
        np.array([1 in both or None in both for both in zip(n, beam_width, strict=False)], np.bool_),
        lambda i: f"n is {n[i]} and beam_width {beam_width[i]}",
        ONE_OF_BOTH,
    )
    items = rows.optional.get("mm", [])
    expect(
        np.array([names is None or len(names) == counts[i] for i, names in enumerate(items)], np.bool_),
        lambda i: f"mm has {len(items[i])} entries for {counts[i]} segments",
        "it must have a name or null for each",
    )
    expect(
        np.array([not names or "" not in names for names in items], np.bool_),
        lambda i: "mm has an empty name",
        "write null where a segment is no item",
    )
    if layout.has_all_tokens:
        expect(
            np.array([_items_end(rows, i) <= prompt[i] for i in range(len(items))], np.bool_),
            lambda i: f"mm names an item that ends {_items_end(rows, i) - prompt[i]} tokens after the prompt",
            "an item's tokens lie in the prompt",
        )
    if found:
        row, problem = min(found, key=itemgetter(0))
        raise WorkloadError(f"{path}, {layout.place} {rows.line[row]}: {problem}")


def _is(name: str, values: Sequence[Any], row: int) -> str:
    return f"{name} is {values[row]}"


def _items_end(rows: Rows, row: int) -> int:
    """The tokens up to the end of a row's last multimodal item; 0 without one."""
    names = rows.optional["mm"][row]
    last = max((i for i, name in enumerate(names or ()) if name is not None), default=-1)
    assert rows.lens is not None
    return int(rows.lens[rows.start[row] : rows.start[row] + last + 1].sum())


def _fitting(prompt: int, count: int) -> str:
    """` (16 fits)`: the power of two that gives so many ids, if there is one."""
    sizes = [1 << shift for shift in range(31)]
    fitting = [size for size in sizes if count and count in (prompt // size, -(-prompt // size))]
    return f" ({fitting[0]} fits)" if len(fitting) == 1 else ""
