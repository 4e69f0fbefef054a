"""Recorded traffic: the requests of a trace file."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, StringConstraints, model_validator

from sim.request import Batch
from workloads.arrivals import ClosedLoop, Rate
from workloads.base import Workload
from workloads.csv_rows import Columns
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.lengths import MAX_LEN
from workloads.prefix_model import PrefixModel

if TYPE_CHECKING:
    from workloads.trace_batches import Contents
    from workloads.trace_reader import TraceReader


class Trace(Workload, ClosedLoop):
    """The requests of a file, plain or gzipped, in order of arrival.

    `mooncake`: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
    `hash_ids`, one id for each block of `trace_block_size` tokens of the prompt; either every
    file's last id may stand for a partial block, or partial blocks have none (the first row that
    tells decides). `segments`: `arrival_time` (s), `input_length`, `output_length` and `segments`,
    pairs [id, length] over prompt and output; `mm` beside them has, for each segment, the identifier of
    the image (audio, video) whose placeholder tokens it is, or null: the same tokens of another image
    are other content. Either may have `session_id`, `cache_salt`, `lora`
    (strings or whole numbers; null: none), `priority`, and `n` or `beam_width` (sequences of the request);
    Mooncake rows also `block_size`. Other fields are ignored.

    `delta` (JSONL) and `npz`: recorded sessions, each with its own clock, see workloads/delta.py
    and npz.py. Sessions start at `session_rate`, or all at 0.

    `recording`: the requests that a recorded vLLM served; see workloads/recording.py, which has more of them.

    `azure` and `csv`: times and lengths only; `prefix_model` says what is shared, else nothing is.

    An output length of 0 runs as 1, with a warning: an engine emits at least one token.
    """

    kind: Literal["trace"] = "trace"
    path: Annotated[str, StringConstraints(min_length=1)]
    format: Literal["auto", "mooncake", "segments", "delta", "npz", "azure", "csv", "recording"] = "auto"
    columns: Columns | None = Field(None, description="of a CSV")
    prefix_model: PrefixModel | None = Field(None, description="laid over a CSV, which names no prefixes")
    skip_bad_lines: bool = Field(False, description="leave bad lines out and count them; false: refuse")
    trace_block_size: Annotated[int, Field(ge=1, le=MAX_LEN)] | None = Field(
        None, description="tokens an id stands for; none: the rows' block_size, else 512 (mooncake) or 64"
    )
    session_rate: Rate = Field(math.inf, description="sessions per second, Poisson; inf: all start at 0")
    limit: PositiveInt | None = Field(None, description="take only the first requests")
    time_scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="factor of the timestamps")
    arrival: Literal["trace", "constant"] = Field("trace", description="the file's times, or request_rate")
    request_rate: Rate = Field(math.inf, description="requests per second, evenly spaced from 0")
    output_len: Annotated[int, Field(ge=1, le=MAX_LEN)] | None = Field(
        None, description="tokens, instead of the trace's"
    )

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.arrival == "trace" and math.isfinite(self.request_rate):
            raise ValueError("request_rate has no effect on the trace's own times: set arrival: constant")
        if self.arrival == "constant" and self.time_scale != 1:
            raise ValueError("time_scale has no effect on arrival: constant: set request_rate alone")
        if self.concurrency is not None and (self.arrival != "trace" or self.time_scale != 1):
            raise ValueError("with concurrency the clients set the pace: drop arrival and time_scale")
        return self

    @property
    def expected_requests(self) -> None:
        """Not known before the file is read."""

    @property
    def follows_file_times(self) -> bool:
        """Whether the file's times matter, and so must not decrease."""
        return self.arrival == "trace" and self.concurrency is None

    def batches(
        self, seed: np.random.SeedSequence, block_size: int, contents: Contents | None = None
    ) -> Iterator[Batch]:
        yield from self.read(self.reader(seed, contents), [block_size])

    def read(self, reader: TraceReader, block_sizes: Sequence[int]) -> Iterator[Batch]:
        """Yield the requests of this trace's reader, for engines with any of these block sizes.

        Raises: WorkloadError, while iterating, for bad data and for a size that cuts its ids askew.
        """
        for number, (_, batch) in enumerate(reader):
            if number == 0:
                for block_size in block_sizes:
                    self._check_block(reader.block, block_size)
            yield batch
        if reader.empty_outputs:
            warnings.warn(
                f"{self.path}: {reader.empty_outputs} requests have output_length 0 and ran with 1 token",
                WorkloadWarning,
                stacklevel=2,
            )
        if reader.num_items:
            warnings.warn(
                f"{self.path}: of its {reader.num_items} multimodal items only what they share is simulated,"
                " not their encoder, its time, budget and cache",
                WorkloadWarning,
                stacklevel=2,
            )
        if reader.skipped.count:
            warnings.warn(
                f"{self.path}: {reader.skipped.count} bad {reader.layout.place}s were skipped; the first:"
                f" {reader.skipped.first}",
                WorkloadWarning,
                stacklevel=2,
            )

    def reader(self, seed: np.random.SeedSequence, contents: Contents | None = None) -> TraceReader:
        """Open the file; `contents` has the numbers that other traces gave to the same content.

        Raises: WorkloadError if it is no trace, or not as the fields say.
        """
        from workloads.trace_reader import (
            TraceReader,  # with Arrow, for which those who describe need not wait
        )

        return TraceReader(self, seed, contents)

    def _check_block(self, block: int | None, block_size: int) -> None:
        """Refuse blocks that would cut the trace's blocks askew, where nothing is known."""
        if block is None or block % block_size == 0 or block_size % block == 0:
            return
        pairs = [(size, block // size) for size in range(1, math.isqrt(block) + 1) if block % size == 0]
        valid = sorted({size for pair in pairs for size in pair})
        raise WorkloadError(
            f"{self.path}: its ids name blocks of {block} tokens, of which {block_size} is neither a part"
            f" nor a multiple: set engine.block_size to a multiple of {block}, or to one of"
            f" {', '.join(map(str, valid))}"
        )
