"""A study as JSON, CSV and lines for the console."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv

from sim.memory import GIB
from sim.mrc.curve import KNEE, Curve
from sim.mrc.study import Study
from workloads import SessionWorkload

WIDTH = 76
CHUNK = 1 << 14  # points that are text at once
SHOWN = 12  # capacities on the console, where none were asked for


class Scale(NamedTuple):
    """How capacities are written: whether the null block is one of them, and what a block weighs."""

    null_block: bool = False
    kv_bytes_per_token: int | None = None  # on one GPU; None: the model is not known
    pool: tuple[int, int] | None = None  # a scenario's block size and usable blocks

    def blocks(self, usable: int) -> int:
        return usable + self.null_block

    def gib(self, usable: int, block_size: int) -> float | None:
        if self.kv_bytes_per_token is None:
            return None
        return self.blocks(usable) * block_size * self.kv_bytes_per_token / GIB


def to_json(studies: Sequence[Study], scale: Scale) -> Iterator[str]:
    """What `--format json` prints, in pieces: the object of one block size, or {"curves": […]} of several.

    A curve may have millions of points, so they are never all text at once.
    """
    if len(studies) > 1:
        yield '{"curves": ['
    for number, study in enumerate(studies):
        if number > 0:
            yield ", "
        yield json.dumps(_figures(study, scale), indent=2, allow_nan=False).removesuffix("\n}")
        yield ',\n  "curve": ['
        points = (_asked_for if study.capacities else table)(study, scale).drop(
            columns="block_size", errors="ignore"
        )
        for begin in range(0, len(points), CHUNK):
            rows = json.dumps(_records(points[begin : begin + CHUNK]), allow_nan=False)[1:-1]
            yield (",\n    " if begin > 0 else "\n    ") + rows.replace("}, {", "},\n    {")
        yield "\n  ]\n}"
    yield "]}\n" if len(studies) > 1 else "\n"


def table(study: Study, scale: Scale) -> pd.DataFrame:
    """The whole curve, a row wherever it changes, from 0 hits on."""
    curve = study.curve
    usable = np.flatnonzero(np.diff(curve.hits, prepend=-1))
    rows = _points(curve, usable, scale)
    rows.insert(0, "block_size", curve.block_size)
    return rows


def timed_table(study: Study, scale: Scale) -> pd.DataFrame:
    """The timed runs, a row each."""
    rows = pd.DataFrame(_timed_rows(study, scale))
    rows.insert(0, "block_size", study.curve.block_size)
    return rows


def write_csv(tables: Iterable[pd.DataFrame], path: Path) -> None:
    """Write tables of the same columns as one CSV."""
    options = pyarrow.csv.WriteOptions(quoting_style="none")
    with contextlib.ExitStack() as files:
        writer = None
        for rows in tables:
            arrow = pyarrow.Table.from_pandas(rows, preserve_index=False)
            if writer is None:
                writer = files.enter_context(pyarrow.csv.CSVWriter(path, arrow.schema, write_options=options))
            writer.write_table(arrow)


def assumptions(study: Study, scale: Scale) -> list[str]:
    """What a curve takes for granted, in the order in which a reader would ask."""
    load, curve = study.load, study.curve
    order = (
        "in order of arrival, each ending before the next; the first block of a request is its most recent"
    )
    if isinstance(load.workload, SessionWorkload):
        order += "; a turn of a session arrives as if answers took no time"
    kept = (
        "prompts and answers stay, less the last token"
        if load.outputs
        else "prompts only: answers leave nothing"
    )
    rule = (
        "an id is a block, also where it stands for a part of one, and all of a prompt can hit"
        if load.whole_ids
        else "full blocks only, and never the last token of a prompt"
    )
    null = (
        "blocks are num_gpu_blocks, the null block among them"
        if scale.null_block
        else "blocks are usable ones: a pool of N is num_gpu_blocks N + 1, for the null block"
    )
    long = f"a request of more blocks than the pool (the largest has {curve.longest:,})"
    refuses = study.asked.refuse_long
    long += " is refused, as in vLLM" if refuses else " keeps its first blocks, where vLLM would refuse it"
    window = "working sets are means over the time of the load, of all its requests"
    return [f"one request after the other, {order}", kept, rule, null, long, window, *study.notes]


def lines(study: Study, scale: Scale) -> Iterator[tuple[str, str]]:
    """The console block as (style, text) lines."""
    curve = study.curve
    yield "bold", " Hit Rate at Every Capacity ".center(WIDTH, "=")
    yield "", f"{study.load.name}: blocks of {curve.block_size:,} tokens"
    refused = f"; {curve.num_refused:,} refused by max_model_len" if curve.num_refused else ""
    yield _line("Requests:", f"{curve.num_requests:,} with {curve.prompt_tokens:,} prompt tokens{refused}")
    yield _line("Ceiling:", f"{100 * curve.hit_rate(curve.ceiling):.2f} %, {curve.ceiling:,} tokens hit")
    if curve.knee is not None:
        yield _line(f"Knee ({KNEE} % of it):", _size(curve, curve.knee, scale))
    for seconds, blocks in curve.working_set.items():
        yield _line(f"Working set of {seconds // 60} min:", _size(curve, blocks, scale))
    yield _line("All different blocks:", _size(curve, curve.distinct_blocks, scale))
    if (pool := _pool(study, scale)) is not None:
        rate = curve.hit_rate(int(curve.hit_tokens(np.array([pool]))[0]))
        yield _line("The scenario's pool:", f"{_size(curve, pool, scale)}: {100 * rate:.2f} %")
    yield from _rows(_shown(study, scale))
    if study.timed:
        rows = pd.DataFrame(_timed_rows(study, scale))
        yield "cyan", " Timed runs ".center(WIDTH, "-")
        shown = rows[
            ["blocks", "curve_hit_rate", "hit_rate", "gap", "num_preemptions", "failed", "saturation"]
        ]
        yield from _rows(shown)
        yield _line("Gap, mean and max (points):", f"{rows['gap'].mean():.2f}, {rows['gap'].max():.2f}")
    yield "bold", "=" * WIDTH
    for text in assumptions(study, scale):
        yield "dim", f"assumed: {text}"


def _figures(study: Study, scale: Scale) -> dict[str, Any]:
    """All of a study but the curve's points."""
    curve, load = study.curve, study.load
    knee = curve.knee
    figures = {
        "name": load.name,
        "block_size": curve.block_size,
        "count": "whole-ids" if load.whole_ids else "vllm",
        "outputs": load.outputs,
        "null_block": scale.null_block,
        "long_requests": "refuse" if study.asked.refuse_long else "keep-head",
        "requests": curve.num_requests,
        "refused": curve.num_refused,
        "prompt_tokens": curve.prompt_tokens,
        "ceiling": curve.hit_rate(curve.ceiling),
        "ceiling_hit_tokens": curve.ceiling,
        "knee": None if knee is None else scale.blocks(knee),
        "knee_tokens": None if knee is None else knee * curve.block_size,
        "knee_gib": None if knee is None else scale.gib(knee, curve.block_size),
        "longest_request": curve.longest,
        "distinct_blocks": curve.distinct_blocks,
        "working_set": {str(seconds): blocks for seconds, blocks in curve.working_set.items()},
        "pool": None,
        "assumed": assumptions(study, scale),
    }
    if (pool := _pool(study, scale)) is not None:
        figures["pool"] = _records(_points(curve, np.array([pool]), scale))[0]
    if study.timed:
        rows = _timed_rows(study, scale)
        gaps = [row["gap"] for row in rows]
        lost = [row["curve_hit_tokens"] - row["hit_tokens"] for row in rows]
        figures["timed"] = {
            "mean_gap": float(np.mean(gaps)),
            "max_gap": float(np.max(gaps)),
            "mean_gap_tokens": float(np.mean(lost)),
            "points": rows,
        }
    return figures


def _points(curve: Curve, usable: Any, scale: Scale) -> pd.DataFrame:
    """The curve at usable capacities."""
    hits = curve.hit_tokens(usable)
    columns = {"blocks": usable + scale.null_block, "tokens": usable * curve.block_size}
    if scale.kv_bytes_per_token is not None:
        columns["gib"] = columns["blocks"] * curve.block_size * scale.kv_bytes_per_token / GIB
    rate = hits / curve.prompt_tokens
    return pd.DataFrame(columns | {"hit_tokens": hits, "hit_rate": rate})


def _asked_for(study: Study, scale: Scale) -> pd.DataFrame:
    """The capacities of --at, with FIFO and Belady beside LRU."""
    usable = np.array([one.blocks for one in study.capacities])
    rows = _points(study.curve, usable, scale)
    for policy in ("", "fifo_", "belady_"):
        hits = np.array([getattr(one, f"{policy}hit_tokens") for one in study.capacities])
        rows[f"{policy}hit_tokens"] = hits
        rows[f"{policy}hit_rate"] = hits / np.array([max(one.prompt_tokens, 1) for one in study.capacities])
    if study.asked.refuse_long:
        rows["refused"] = [one.num_refused for one in study.capacities]
    return rows


def _shown(study: Study, scale: Scale) -> pd.DataFrame:
    """What the console shows: what was asked for, or some capacities over the curve."""
    if study.capacities:
        return _asked_for(study, scale).drop(columns=["fifo_hit_tokens", "belady_hit_tokens"])
    last = len(study.curve.hits) - 1
    some = np.unique(np.geomspace(max(last / 1024, 1), max(last, 1), SHOWN).round().astype(np.int64))
    return _points(study.curve, some, scale)


def _timed_rows(study: Study, scale: Scale) -> list[dict[str, Any]]:
    return [
        point._asdict()
        | {
            "blocks": scale.blocks(point.blocks),
            "tokens": point.blocks * study.curve.block_size,
            "gap": point.gap,
        }
        for point in study.timed
    ]


def _pool(study: Study, scale: Scale) -> int | None:
    """The usable blocks of the scenario's own pool, where the study is of its block size."""
    if scale.pool is None or scale.pool[0] != study.curve.block_size:
        return None
    return scale.pool[1]


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    columns = [rows[name].tolist() for name in rows]
    return [dict(zip(rows.columns, row, strict=True)) for row in zip(*columns, strict=True)]


def _size(curve: Curve, usable: int, scale: Scale) -> str:
    gib = scale.gib(usable, curve.block_size)
    weight = "" if gib is None else f", {gib:,.1f} GiB"
    return f"{scale.blocks(usable):,} blocks, {usable * curve.block_size:,} tokens{weight}"


def _line(label: str, text: str) -> tuple[str, str]:
    return "", f"{label:<28}{text}"


def _rows(rows: pd.DataFrame) -> Iterator[tuple[str, str]]:
    """A table of columns, each as wide as it needs."""
    cells = [
        [str(name).replace("_", " "), *(_cell(str(name), value) for value in rows[name].tolist())]
        for name in rows
    ]
    widths = [max(map(len, column)) for column in cells]
    for number, row in enumerate(zip(*cells, strict=True)):
        text = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "cyan" if number == 0 else "", text


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if name.endswith("rate") else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
