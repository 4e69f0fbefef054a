"""Recordings of a real vLLM as traffic: the requests it served, again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, StringConstraints

from sim.request import Batch, Ints, Session
from workloads.base import Workload
from workloads.errors import WorkloadError
from workloads.merge import cut, picked
from workloads.trace_batches import BatchBuilder, Contents

if TYPE_CHECKING:
    from workloads.recorded_rows import Recorded


class Recording(Workload):
    """The requests of a recording (docs/recordings.md), with the contents, lengths, salts, adapters and
    priorities that they had.

    `open`: each arrives when it came into the recorded engine's queue. `closed`: one that goes on with
    the answer of another arrives as long after the end of that one as it did, engine to engine, so with
    the client's think time and the way there and back; the others as in `open`.

    A request has as many output tokens as it had got, whether it was aborted or the recording ends first.
    Scenarios that have a recording as their workload take the engine's settings from it, and `cost:
    recorded`, where they give no others.
    """

    kind: Literal["recording"] = "recording"
    path: Annotated[str, StringConstraints(min_length=1)]
    pace: Literal["open", "closed"] = Field("open", description="the recorded times, or turns after answers")
    limit: PositiveInt | None = Field(None, description="take only the first requests")
    time_scale: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="factor of the times of requests that wait for no other"
    )

    concurrency: ClassVar[None] = None  # those who ask have their own pace

    @property
    def expected_requests(self) -> None:
        """Not known before the file is read."""

    @property
    def has_sessions(self) -> bool:
        return self.pace == "closed"

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        if self.has_sessions:
            raise WorkloadError("pace: closed: when a turn arrives depends on answers; this needs pace: open")
        batch = self._requests()
        for begin in range(0, len(batch.n), self.chunk_size):
            yield cut(batch, begin, min(begin + self.chunk_size, len(batch.n)))

    def sessions(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Session]:
        """Yield the sessions of `pace: closed` in order of their start. Raises: WorkloadError."""
        batch = self._requests()
        recorded = self._read()
        place = np.empty(len(batch.n), np.int64)  # of each request in its session
        for rows in self._sessions():
            place[rows] = np.arange(len(rows))
            after = recorded.after[rows]
            waits = tuple((int(place[one]),) if one >= 0 else () for one in after.tolist())
            start = float(batch.arrival_time[rows[0]])
            yield Session(start, picked(batch, rows), waits, recorded.delay[rows])

    def order(self) -> Ints:
        """The recording's number of each request, in the order in which a run loads them."""
        if self.has_sessions:
            return np.concatenate(self._sessions())
        return np.arange(self._num_requests())

    def _read(self) -> Recorded:
        from workloads.recorded_rows import read_recorded  # for which those who have none need not wait

        return read_recorded(self.path)

    def _num_requests(self) -> int:
        num = len(self._read().max_tokens)
        return num if self.limit is None else min(num, self.limit)

    def _requests(self) -> Batch:
        """All requests, in order of arrival, each row the one of that number."""
        from workloads.recorded_rows import tell

        recorded = self._read()
        tell(recorded)
        times = recorded.rows.time * self.time_scale
        batch = BatchBuilder(None, None, Contents()).build(recorded.rows, times)
        longest = np.maximum(recorded.max_tokens, batch.output_len)
        return cut(batch._replace(max_tokens=longest), 0, self._num_requests())

    def _sessions(self) -> list[Ints]:
        """The rows of each session, in order of their first."""
        after = self._read().after[: self._num_requests()].tolist()
        sessions: list[list[int]] = []
        of: list[int] = []  # the session of each row
        for row, before in enumerate(after):
            of.append(of[before] if before >= 0 else len(sessions))
            if before < 0:
                sessions.append([])
            sessions[of[row]].append(row)
        return [np.array(rows, np.int64) for rows in sessions]
