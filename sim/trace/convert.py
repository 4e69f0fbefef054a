"""A trace in another form: Mooncake JSONL for other tools, or JSONL of segments."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from sim.errors import InputError
from sim.out_file import check_out
from sim.request import Batch
from workloads import Trace
from workloads.content import Numbering
from workloads.jsonl import OPTIONAL
from workloads.trace_reader import TraceReader
from workloads.trace_rows import Rows

DEFAULT_BLOCK = 512  # tokens an id stands for, where the trace has no ids
Target = Literal["mooncake", "segments"]
_KEPT = [name for name in OPTIONAL["mooncake"] if name != "block_size"]  # fields that stay as they are


def convert(
    trace: Trace,
    out: Path,
    target: Target,
    *,
    block_size: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> TraceReader:
    """Write a trace's requests to `out`, gzipped if its name ends in .gz, whole or not at all.

    To mooncake, ids stay as they are, with the tokens they stand for as `block_size`; a trace of
    segments gets ids for blocks of `block_size` tokens (512) of its prompts, the last may be partial:
    what answers share with later prompts is kept only in segments. `seed` draws what the file does
    not say. Returns the reader, which knows what was skipped. Raises WorkloadError for bad data,
    InputError for a block size that the ids do not have and for an `out` that cannot become a file.
    """
    check_out(out, option="OUT", inputs=[Path(trace.path)])
    reader = trace.reader(np.random.SeedSequence(seed))
    chains = Numbering()
    done = 0
    with _written_whole(out) as file:
        for rows, batch in reader:
            if target == "segments":
                content = _segments(batch, reader.contents.items)
            elif reader.block is None:
                content = _chain_ids(batch, block_size or DEFAULT_BLOCK, chains)
            elif block_size in (None, reader.block):
                content = _ids(rows, reader.block)
            else:
                raise InputError(
                    f"{trace.path}: its ids stand for {reader.block} tokens, not {block_size}:"
                    " drop --block-size"
                )
            seconds = (rows.time / reader.layout.per_second).tolist()
            milliseconds = (rows.time * (1000 / reader.layout.per_second)).tolist()
            prompts = rows.prompt_len.tolist()
            outputs = (batch if target == "segments" else rows).output_len.tolist()
            names = [name for name in _KEPT if name in rows.optional]
            for i, fields in enumerate(content):
                row: dict[str, Any]
                if target == "mooncake":
                    row = {"timestamp": _plain(milliseconds[i])}
                else:
                    row = {"arrival_time": _plain(seconds[i])}
                row |= {"input_length": prompts[i], "output_length": outputs[i]} | fields
                row |= {name: rows.optional[name][i] for name in names if rows.optional[name][i] is not None}
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            done += len(rows.line)
            if progress is not None:
                progress(done)
    return reader


def _ids(rows: Rows, block: int) -> Iterator[dict[str, Any]]:
    for first, end in pairwise(rows.start.tolist()):
        yield {"hash_ids": rows.ids[first:end].tolist(), "block_size": block}


def _segments(batch: Batch, items: Mapping[int, tuple[int, str | int]]) -> Iterator[dict[str, Any]]:
    """Segments by their numbers, and multimodal items as they were: by id and identifier."""
    ids, lens = batch.segment_id.tolist(), batch.segment_len.tolist()
    for first, end in pairwise(batch.segment_start.tolist()):
        mm = [items[one][1] if one in items else None for one in ids[first:end]]
        pairs = [
            [items[one][0] if one in items else one, length]
            for one, length in zip(ids[first:end], lens[first:end], strict=True)
        ]
        yield {"segments": pairs} | ({"mm": mm} if any(one is not None for one in mm) else {})


def _chain_ids(batch: Batch, block: int, chains: Numbering) -> Iterator[dict[str, Any]]:
    """One id for each different content of a prompt's block and all before it. Modifies `chains`."""
    starts, ids, lens = batch.segment_start.tolist(), batch.segment_id.tolist(), batch.segment_len.tolist()
    for i, prompt in enumerate(batch.prompt_len.tolist()):
        found: list[int] = []
        parent, room, left = -1, block, prompt
        pieces: list[tuple[int, int, int]] = []
        for at in range(starts[i], starts[i + 1]):
            segment, length, begin = ids[at], lens[at], 0
            while begin < length and left > 0:
                taken = min(length - begin, room, left)
                pieces.append((segment, begin, taken))
                begin, room, left = begin + taken, room - taken, left - taken
                if room == 0 or left == 0:
                    parent = chains((parent, tuple(pieces)))
                    found.append(parent)
                    pieces, room = [], block
        yield {"hash_ids": found, "block_size": block}


def _plain(number: float) -> int | float:
    """A whole number without its point."""
    return int(number) if number.is_integer() else number


@contextlib.contextmanager
def _written_whole(out: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name only when all is written; through a link to the file it leads to."""
    out = out.resolve()
    handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as raw:
            if out.suffix == ".gz":  # without name and time: the same requests give the same bytes
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
                    yield cast("IO[bytes]", file)
            else:
                yield raw
        os.chmod(name, 0o644)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise
