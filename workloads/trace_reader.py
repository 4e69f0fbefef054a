"""One pass through a trace's file: checked rows and the requests they become, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, assert_never

import numpy as np

from sim.request import Batch, Floats
from workloads.csv_rows import AZURE_COLUMNS, CsvParser
from workloads.delta import read_delta
from workloads.errors import WorkloadError
from workloads.jsonl import LAYOUT, Kind, Parser
from workloads.lengths import MAX_LEN
from workloads.npz import read_npz
from workloads.sessions import DEFAULT_BLOCK, session_rows, start_times
from workloads.skipped import Skipped, good_parts
from workloads.streams import Stream, generator
from workloads.trace_batches import BatchBuilder, Contents
from workloads.trace_file import Format, find_format, no_requests, read_chunks
from workloads.trace_rows import LATEST, Layout, Rows, check, names_partial_blocks, part

if TYPE_CHECKING:
    from workloads.trace import Trace

MOONCAKE_BLOCK = 512  # tokens a hash id stands for, in the Mooncake traces


class TraceReader:
    """Reads the file of a `Trace`. What it learns on the way is known after the first rows."""

    def __init__(self, trace: Trace, seed: np.random.SeedSequence, contents: Contents | None = None) -> None:
        """Find the format. Raises: WorkloadError for a file that is no trace, or fields that do not suit."""
        self.trace = trace
        self._seed = seed
        self.skipped = Skipped(trace.skip_bad_lines)
        self.format: Format = self._format()
        self.layout: Layout
        self.block: int | None = None  # tokens an id stands for; None: segments have lengths
        self.partial: bool | None = None  # whether a partial last block has an id; None: no row told
        self.empty_outputs = 0
        self.num_items = 0  # multimodal ones
        self.contents = Contents() if contents is None else contents
        self._done = 0  # requests handed out
        self._last_time = 0.0

    def _format(self) -> Format:
        trace = self.trace
        if trace.format != "auto":
            found = trace.format
        elif trace.columns is not None:
            found = "csv"
        else:
            found = find_format(trace.path, skip_bad_lines=trace.skip_bad_lines)
        is_csv, has_sessions = found in ("csv", "azure"), found in ("delta", "npz")
        if found == "csv" and trace.columns is None:
            raise self._unsuited("a CSV needs workload.columns, which names its columns")
        if found != "csv" and trace.columns is not None:
            raise self._unsuited("workload.columns is for a CSV: drop it, or set workload.format to csv")
        if not is_csv and trace.prefix_model is not None:
            raise self._unsuited(f"the {found} format says what is shared: drop workload.prefix_model")
        if not has_sessions and np.isfinite(trace.session_rate):
            raise self._unsuited(
                f"workload.session_rate is for recorded sessions (delta, npz), and this is {found}: drop it"
            )
        if not (has_sessions or found == "mooncake") and trace.trace_block_size is not None:
            raise self._unsuited(f"the {found} format has no hash ids: drop workload.trace_block_size")
        if trace.prefix_model is not None:
            grouped = trace.columns is not None and trace.columns.prefix_group is not None
            if grouped == (trace.prefix_model.num_groups is not None):
                raise self._unsuited(
                    "the groups come from workload.columns.prefix_group or are drawn from"
                    " workload.prefix_model.num_groups: set one of them"
                )
        return found

    def _unsuited(self, text: str) -> WorkloadError:
        return WorkloadError(f"{self.trace.path}: {text}")

    def __iter__(self) -> Iterator[tuple[Rows, Batch]]:
        """Yield the rows in order of arrival, with the requests they become. To be used once.

        Raises: WorkloadError that names the line of a bad row, unless bad lines are skipped.
        """
        trace = self.trace
        builder: BatchBuilder | None = None
        for found in self._rows():
            if len(found.line) and builder is None:
                self.block = self._block(found)
                builder = BatchBuilder(self.block, trace.output_len, self.contents)
            for rows in self._good(found):
                done = self._done
                n = len(rows.line) if trace.limit is None else min(len(rows.line), trace.limit - done)
                if n == 0:  # blank lines
                    continue
                assert builder is not None
                rows = part(rows, 0, n)
                times = np.zeros(n) if trace.concurrency is not None else self._arrivals(rows, done)
                self._done = done + n
                yield rows, builder.build(rows, times)
            if self._done == trace.limit:
                break
        if builder is None or self._done == 0:
            raise no_requests(trace.path)
        self.empty_outputs, self.num_items = builder.empty_outputs, builder.num_items

    def _arrivals(self, rows: Rows, done: int) -> Floats:
        """Seconds, for an open loop; `done` requests came before. Raises: WorkloadError."""
        trace = self.trace
        field = "request_rate" if trace.arrival == "constant" else "time_scale"
        with np.errstate(over="ignore"):
            if trace.arrival == "constant":
                times: Floats = np.arange(done, done + len(rows.line)) / trace.request_rate
            else:
                times = rows.time / self.layout.per_second * trace.time_scale
        if not times.max() <= LATEST:
            late = int(np.argmax(times))
            raise WorkloadError(
                f"{trace.path}, {self.layout.place} {rows.line[late]}: arrives after {times[late]:g} s, and"
                f" clocks end at {LATEST:g} s: check workload.{field}"
            )
        return times

    def _rows(self) -> Iterator[Rows]:
        """The rows of the file in order of arrival, not yet checked."""
        trace, chunk = self.trace, self.trace.chunk_size
        match self.format:
            case "mooncake" | "segments":
                self.layout = LAYOUT[self.format]
                yield from self._json_rows(self.format, chunk)
            case "delta" | "npz":
                is_npz = self.format == "npz"
                sessions = read_npz(trace.path) if is_npz else read_delta(trace.path, self.skipped)
                self.layout = sessions.layout
                starts = start_times(sessions, trace.session_rate, generator(self._seed, Stream.ARRIVALS))
                yield from session_rows(sessions, starts, chunk)
            case "azure" | "csv":
                columns = trace.columns or AZURE_COLUMNS
                self.layout = columns.layout
                groups = generator(self._seed, Stream.GROUPS)
                parser = CsvParser(trace.path, columns, trace.prefix_model, groups)
                yield from parser.rows(chunk, self.skipped)
            case "recording":
                from workloads.recorded_rows import LAYOUT as OF_RECORDINGS
                from workloads.recorded_rows import recorded_rows

                self.layout = OF_RECORDINGS
                yield from recorded_rows(trace.path)
            case _:
                assert_never(self.format)

    def _json_rows(self, kind: Kind, chunk: int) -> Iterator[Rows]:
        parser = Parser(self.trace.path, kind)
        limit = self.trace.limit
        for before, lines in read_chunks(self.trace.path, chunk):
            while lines:
                taken = lines if limit is None else lines[: limit - self._done]  # the rest is not read
                yield from good_parts(parser.parse, before, taken, self.skipped)
                if self._done == limit:
                    return
                before, lines = before + len(taken), lines[len(taken) :]

    def _block(self, rows: Rows) -> int | None:
        """The tokens an id stands for: as asked, as the first row says, or as is usual."""
        if rows.lens is not None:
            return None
        recorded = rows.optional.get("block_size", [None])[0]
        if self.trace.trace_block_size is not None:
            return self.trace.trace_block_size
        if recorded is not None and 1 <= recorded <= MAX_LEN:
            return int(recorded)
        return MOONCAKE_BLOCK if self.format == "mooncake" else DEFAULT_BLOCK

    def _good(self, rows: Rows) -> Iterator[Rows]:
        """The rows that pass `check`, in pieces."""

        def checked(before: int, numbers: Sequence[int]) -> Rows:
            some = part(rows, before, before + len(numbers))
            in_order = self.trace.follows_file_times and self.format not in ("delta", "npz")
            partial = self.partial
            if partial is None and self.block is not None:
                partial = names_partial_blocks(some, self.block)
            previous = self._last_time if in_order else None
            check(self.trace.path, self.layout, some, self.block, partial, previous)
            if len(numbers):
                self.partial, self._last_time = partial, float(some.time[-1])
            return some

        return good_parts(checked, 0, range(len(rows.line)), self.skipped)
