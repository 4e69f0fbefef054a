"""Records of requests: columns in flat memory and in Parquet.

Times are seconds, and milliseconds in names that end in `_ms`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sim.fates import FATES

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Column = npt.NDArray[Any]
Chunk = dict[str, Column]

ROW_GROUP = 65_536  # rows held in memory, and rows of a Parquet row group

COLUMNS = (
    "request_id", "session_id", "tenant", "prefix_group",
    "arrival_time", "ready_time", "scheduled_time", "first_token_time", "finish_time",
    "prompt_len", "output_len", "num_sequences", "num_cached_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "num_preemptions", "num_evictions", "refused", "replica",
    "front_end_time_ms", "queue_time_ms", "prefill_time_ms", "ttft_ms", "tpot_ms", "itl_mean_ms", "e2el_ms",
)  # fmt: skip
FATE_COLUMNS = tuple(f"fate_{name}" for name in FATES)  # behind them, where fates were decided
EVICTED_COLUMN = "prefix_cache_evicted"  # behind these: what a pool that never evicts would have hit besides


def with_latencies(chunk: Mapping[str, Column]) -> Chunk:
    """One chunk of the engine's records with what it implies: COLUMNS, and with fates the others.

    TTFT has three parts: `front_end_time_ms` until the front-end thread has hashed and queued the
    request, the wait for that thread included; `queue_time_ms` from there to the first step that
    runs it, as in vLLM, and the wait in a central queue; `prefill_time_ms` until the first token,
    preemptions included. `tpot_ms` and `itl_mean_ms` are NaN where the output is one token, all
    latencies where the request was refused. `num_sequences` is how many answers or beams, of
    `output_len` tokens each, it asked for; what a row says of several samples: sim/sample_records.py.
    Where the engine decided fates, the six fate_* add up to prompt_len, but for refused requests,
    which have none. Does not modify its argument.
    """
    arrival, submitted, ready, scheduled, first = (
        chunk[f"{name}_time"] for name in ("arrival", "submitted", "ready", "scheduled", "first_token")
    )
    gaps = chunk["output_len"].astype(np.float64) - 1.0
    gaps[gaps < 1.0] = np.nan
    tpot = (chunk["finish_time"] - first) * 1e3 / gaps
    derived = {
        "num_sequences": chunk["n"] * chunk["beam_width"],
        "front_end_time_ms": (ready - submitted) * 1e3,
        "queue_time_ms": ((submitted - arrival) + (scheduled - ready)) * 1e3,
        "prefill_time_ms": (first - scheduled) * 1e3,
        "ttft_ms": (first - arrival) * 1e3,
        "tpot_ms": tpot,
        "itl_mean_ms": tpot,  # of one request the two are the same number
        "e2el_ms": (chunk["finish_time"] - arrival) * 1e3,
    }
    names: tuple[str, ...] = COLUMNS
    if "fate_cold" in chunk:
        derived["fate_hit"] = chunk["num_cached_tokens"]
        names = (*COLUMNS, *FATE_COLUMNS, EVICTED_COLUMN)
    return {name: derived[name] if name in derived else chunk[name] for name in names}


class Records:
    """The per-request table of a run, in the order of finishing, in flat memory.

    At most ROW_GROUP rows stay in memory; the rest goes to a Parquet file: `path`, or a temporary
    file where `path` is None. Without `path`, a smaller run touches no disk. Row groups have
    ROW_GROUP rows however the rows came in, so equal runs give equal files.

    Requests that arrive before `measure_from` seconds are in the file and nowhere else: `num_rows`
    and what is read here are of the others.
    """

    def __init__(self, path: Path | None = None, measure_from: float = -math.inf) -> None:
        self.measure_from = measure_from
        self.num_rows = 0
        self.num_left_out = 0
        self._path = path
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._writer: pq.ParquetWriter | None = None
        self._file: pq.ParquetFile | None = None
        self._pending: list[Chunk] = []
        self._num_pending = 0

    def append(self, chunk: Mapping[str, Column]) -> None:
        """Add the engine's records (its columns, equal lengths); they are copied."""
        n = len(chunk["request_id"])
        if n == 0:
            return
        self._pending.append({name: np.array(c) for name, c in with_latencies(chunk).items()})
        self._num_pending += n
        num_measured = int(np.count_nonzero(chunk["arrival_time"] >= self.measure_from))
        self.num_rows += num_measured
        self.num_left_out += n - num_measured
        while self._num_pending > ROW_GROUP:
            self._flush(ROW_GROUP)

    def close(self) -> None:
        """Finish the file, if there is one; the columns can be read from now on."""
        if self._path is not None or self._writer is not None:
            self._flush(self._num_pending)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            import pyarrow.parquet as pq

            self._file = pq.ParquetFile(self._target(), pre_buffer=False)

    def discard(self) -> None:
        """Close, and remove the temporary file; does nothing to `path`."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns there are, in their order. Only after close()."""
        if self._file is not None:
            return tuple(self._file.schema_arrow.names)
        return tuple(self._pending[0]) if self._pending else COLUMNS

    def chunks(self, *names: str) -> Iterator[tuple[Column, ...]]:
        """The named columns, at most ROW_GROUP rows at a time and at least one. Only after close()."""
        if self.num_left_out == 0:
            yield from self._chunks(*names)
            return
        for arrival, *columns in self._chunks("arrival_time", *names):
            measured = arrival >= self.measure_from
            if measured.any():
                yield tuple(column[measured] for column in columns)

    def _chunks(self, *names: str) -> Iterator[tuple[Column, ...]]:
        if self._file is not None:
            for group in range(self._file.num_row_groups):
                table = self._file.read_row_group(group, columns=list(names), use_threads=False)
                yield tuple(table.column(name).to_numpy() for name in names)
        else:
            for chunk in self._pending:
                yield tuple(chunk[name] for name in names)

    def column(self, name: str) -> Column:
        """One column as a new array of num_rows values: 8 MB a million rows."""
        values: Column | None = None
        start = 0
        for (part,) in self.chunks(name):
            if values is None:
                values = np.empty(self.num_rows, part.dtype)
            values[start : start + len(part)] = part
            start += len(part)
        return np.empty(0) if values is None else values

    def _target(self) -> Path:
        if self._path is not None:
            return self._path
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="prefixsim-")
        return Path(self._temporary.name) / "requests.parquet"

    def _flush(self, rows: int) -> None:
        """Move the first `rows` pending rows to the file, as one row group."""
        import pyarrow as pa  # 0.3 s to import: only a run that writes pays for it
        import pyarrow.parquet as pq

        chunks = self._pending or [{name: np.empty(0, np.float64) for name in COLUMNS}]
        merged = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
        table = pa.table({name: column[:rows] for name, column in merged.items()})
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._target(), table.schema, compression="zstd", use_dictionary=False
            )
        self._writer.write_table(table, row_group_size=ROW_GROUP)
        self._num_pending -= rows
        rest = {name: column[rows:].copy() for name, column in merged.items()}
        self._pending = [rest] if self._num_pending else []
