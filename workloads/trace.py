"""Recorded traffic: Mooncake JSONL, and JSONL of segments."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, StringConstraints, model_validator

from sim.request import Batch
from workloads.arrivals import ClosedLoop, Rate
from workloads.base import Workload
from workloads.errors import WorkloadError, WorkloadWarning
from workloads.lengths import MAX_LEN

DEFAULT_TRACE_BLOCK = 512  # tokens a hash id stands for, in the Mooncake traces


class Trace(Workload, ClosedLoop):
    """The requests of a file, in file order.

    `mooncake`: one object a line with `timestamp` (ms), `input_length`, `output_length` and
    `hash_ids`, one id for each block of `trace_block_size` tokens of the prompt, the last of
    which may be partial. `segments`: `arrival_time` (s), `input_length`, `output_length` and
    `segments`, pairs [id, length] over prompt and output. Either may have `session_id`,
    `cache_salt`, `lora` (strings or whole numbers; null: none) and `priority`; Mooncake rows also
    `block_size`. Other fields are ignored. An `output_length` of 0 runs as 1, with a warning: an
    engine emits at least one token.
    """

    kind: Literal["trace"] = "trace"
    path: Annotated[str, StringConstraints(min_length=1)]
    format: Literal["auto", "mooncake", "segments"] = "auto"
    trace_block_size: Annotated[int, Field(ge=1, le=MAX_LEN)] | None = Field(
        None, description="tokens a hash id stands for; none: the rows' block_size, else 512"
    )
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
    def uses_file_times(self) -> bool:
        """Whether the file's times matter, and so must not decrease."""
        return self.arrival == "trace" and self.concurrency is None

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        # Here, so that those who only describe a workload need not wait for Arrow.
        from workloads.jsonl import Parser, read_chunks
        from workloads.trace_rows import BatchBuilder, check

        parser = Parser(self.path, None if self.format == "auto" else self.format)
        builder: BatchBuilder | None = None
        block: int | None = None
        done, last_time = 0, 0.0
        for before, lines in read_chunks(self.path, self.chunk_size):
            left = None if self.limit is None else self.limit - done
            rows = parser.parse(before, lines[:left])
            n = len(rows.line)
            if n == 0:  # blank lines
                continue
            kind = parser.kind
            assert kind is not None
            if builder is None:
                if kind == "mooncake":
                    block = self._trace_block(rows.optional.get("block_size", [None])[0], block_size)
                builder = BatchBuilder(block, self.output_len)
            check(self.path, kind, rows, block, last_time if self._follows_file_times else None)
            if self.concurrency is not None:
                times = np.zeros(n)
            elif self.arrival == "constant":
                times = np.arange(done, done + n) / self.request_rate
            else:
                times = (rows.time / 1000 if kind == "mooncake" else rows.time) * self.time_scale
            yield builder.build(rows, times)
            done, last_time = done + n, float(rows.time[-1])
            if done == self.limit:
                break
        if builder is None:
            raise WorkloadError(f"{self.path}: the trace holds no requests: check workload.path")
        if builder.empty_outputs:
            warnings.warn(
                f"{self.path}: {builder.empty_outputs} requests have output_length 0 and ran with 1 token",
                WorkloadWarning,
                stacklevel=2,
            )

    @property
    def _follows_file_times(self) -> bool:
        return self.arrival == "trace" and self.concurrency is None

    def _trace_block(self, recorded: int | None, block_size: int) -> int:
        """Return the tokens a hash id stands for; `recorded` is what the first row says."""
        block = self.trace_block_size or DEFAULT_TRACE_BLOCK
        if self.trace_block_size is None and recorded is not None and 1 <= recorded <= MAX_LEN:
            block = recorded
        if block % block_size:
            pairs = [(size, block // size) for size in range(1, math.isqrt(block) + 1) if block % size == 0]
            valid = sorted({size for pair in pairs for size in pair})
            raise WorkloadError(
                f"{self.path}: its ids name blocks of {block} tokens, which {block_size} does not divide:"
                f" set engine.block_size to one of {', '.join(map(str, valid))}"
            )
        return block
