"""A study as JSON and CSV, and what it takes for granted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.csv

from sim.curves.curve import Curve
from sim.curves.study import Study
from sim.memory import GIB

CHUNK = 1 << 14  # points that are text at once


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
        yield json.dumps(figures(study, scale), indent=2, allow_nan=False).removesuffix("\n}")
        yield ',\n  "curve": ['
        rows = asked_for(study, scale) if study.capacities else whole_curve(study, scale)
        for begin in range(0, len(rows), CHUNK):
            text = json.dumps(_records(rows[begin : begin + CHUNK]), allow_nan=False)[1:-1]
            yield (",\n    " if begin > 0 else "\n    ") + text.replace("}, {", "},\n    {")
        yield "\n  ]\n}"
    yield "]}\n" if len(studies) > 1 else "\n"


def write_csv(studies: Sequence[Study], path: Path, rows_of: Callable[[Study], pd.DataFrame]) -> None:
    """Write the rows of all studies as one CSV, each with its block size."""
    options = pyarrow.csv.WriteOptions(quoting_style="none")
    with contextlib.ExitStack() as files:
        writer = None
        for study in studies:
            rows = rows_of(study)
            rows.insert(0, "block_size", study.curve.block_size)
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
    if load.workload.has_sessions:
        order += "; a turn of a session arrives as if answers took no time"
    kept = (
        "prompts and answers stay, less the last token"
        if load.outputs
        else "prompts only: answers leave nothing"
    )
    rule = (
        "an id is a block, also where it stands for a part of one, and all of a prompt can hit"
        if load.whole_ids
        else "full blocks only, and never the last token of a prompt; a partial last block takes no place"
    )
    null = (
        "blocks are num_gpu_blocks, the null block among them"
        if scale.null_block
        else "blocks are usable ones: a pool of N is num_gpu_blocks N + 1, for the null block"
    )
    fate = (
        "is refused, as in vLLM"
        if study.asked.refuse_long
        else "keeps its first blocks, where vLLM would refuse it"
    )
    long = f"a request of more blocks than the pool (the largest has {curve.longest:,}) {fate}"
    window = "working sets are means over the time of the load, of all its requests"
    return [f"one request after the other, {order}", kept, rule, null, long, window, *study.notes]


def figures(study: Study, scale: Scale) -> dict[str, Any]:
    """All of a study but the curve's points."""
    curve, load = study.curve, study.load
    knee = curve.knee
    found = {
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
    if (usable := pool(study, scale)) is not None:
        found["pool"] = _records(points(curve, np.array([usable]), scale))[0]
    if study.timed:
        rows = timed_rows(study, scale)
        lost = rows["curve_hit_tokens"] - rows["hit_tokens"]
        found["timed"] = {
            "mean_gap": float(rows["gap"].mean()),
            "max_gap": float(rows["gap"].max()),
            "mean_gap_tokens": float(lost.mean()),
            "points": _records(rows),
        }
    return found


def points(curve: Curve, usable: Any, scale: Scale) -> pd.DataFrame:
    """The curve at usable capacities."""
    hits = curve.hit_tokens(usable)
    columns = {"blocks": usable + scale.null_block, "tokens": usable * curve.block_size}
    if scale.kv_bytes_per_token is not None:
        columns["gib"] = columns["blocks"] * curve.block_size * scale.kv_bytes_per_token / GIB
    rate = hits / curve.prompt_tokens
    return pd.DataFrame(columns | {"hit_tokens": hits, "hit_rate": rate})


def whole_curve(study: Study, scale: Scale) -> pd.DataFrame:
    """A row wherever the curve changes, from 0 hits on."""
    usable = np.flatnonzero(np.diff(study.curve.hits, prepend=-1))
    return points(study.curve, usable, scale)


def asked_for(study: Study, scale: Scale) -> pd.DataFrame:
    """The capacities of --at, with FIFO and Belady beside LRU."""
    usable = np.array([one.blocks for one in study.capacities])
    rows = points(study.curve, usable, scale)
    for policy in ("", "fifo_", "belady_"):
        hits = np.array([getattr(one, f"{policy}hit_tokens") for one in study.capacities])
        rows[f"{policy}hit_tokens"] = hits
        rows[f"{policy}hit_rate"] = hits / np.array([max(one.prompt_tokens, 1) for one in study.capacities])
    if study.asked.refuse_long:
        rows["refused"] = [one.num_refused for one in study.capacities]
    return rows


def timed_rows(study: Study, scale: Scale) -> pd.DataFrame:
    """The timed runs, a row each."""
    rows = [point._asdict() | {"gap": point.gap} for point in study.timed]
    usable = np.array([point.blocks for point in study.timed])
    sizes = {"blocks": usable + scale.null_block, "tokens": usable * study.curve.block_size}
    return pd.DataFrame(sizes).join(pd.DataFrame(rows).drop(columns="blocks"))


def pool(study: Study, scale: Scale) -> int | None:
    """The usable blocks of the scenario's own pool, where the study is of its block size."""
    if scale.pool is None or scale.pool[0] != study.curve.block_size:
        return None
    return scale.pool[1]


def _records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    columns = [rows[name].tolist() for name in rows]
    return [dict(zip(rows.columns, row, strict=True)) for row in zip(*columns, strict=True)]
