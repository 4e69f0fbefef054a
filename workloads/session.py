"""What workloads of sessions have in common: when they begin, and how their requests are written."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from sim.request import Batch, Session, make_batch
from workloads.arrivals import Rate
from workloads.base import MOST_REQUESTS, Workload
from workloads.errors import WorkloadError
from workloads.merge import cut
from workloads.sampling import Sampling
from workloads.streams import Stream, generator


class Request(NamedTuple):
    """One request of a session; a row of it, by number, is earlier."""

    segments: Sequence[tuple[int, int]]  # (id, tokens) of prompt and output
    output_len: int
    after: tuple[int, ...] = ()  # rows whose ends it waits for; (): the session's start
    delay: float = 0.0  # seconds from then


class SessionWorkload(Workload, Sampling):
    """Sessions in an open loop (`session_rate`) or a closed one (`concurrency` users, one each at a time).

    Of a request's samples, the first is the answer that its session goes on with, once all have ended.
    """

    num_sessions: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    session_rate: Rate = Field(math.inf, description="Poisson, sessions a second; inf: all at once")
    concurrency: PositiveInt | None = Field(
        None, le=1 << 20, description="users, each with one session at a time; none: open loop"
    )

    @model_validator(mode="after")
    def _one_pace(self) -> Self:
        if self.concurrency is not None and math.isfinite(self.session_rate):
            raise ValueError("users set the pace with concurrency: drop it, or set session_rate to inf")
        return self

    @property
    def has_sessions(self) -> bool:
        return True

    @property
    def expected_requests(self) -> int | None:
        return None

    @abstractmethod
    def requests(self, rng: np.random.Generator, session: int) -> list[Request]:
        """The requests of one session, each after those it waits for. Modifies `rng`, its own."""

    def sessions(self, seed: np.random.SeedSequence, block_size: int = 1) -> Iterator[Session]:
        """Yield the sessions in order of their start, lazily. Does not modify `seed`.

        Each draws from a generator of its own: no session changes another. All content is named, so
        no block size changes it.
        """
        starts = generator(seed, Stream.SESSIONS)
        start = 0.0
        for session in range(self.num_sessions):
            if math.isfinite(self.session_rate):
                start += float(starts.standard_exponential()) / self.session_rate
            key = (*seed.spawn_key, int(Stream.TURNS), session)
            own = np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)
            requests = self.requests(np.random.default_rng(own), session)
            delay = np.array([request.delay for request in requests])
            after = tuple(request.after for request in requests)
            yield Session(start, _batch(requests, session, self.sequences), after, delay)

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        name = type(self).__name__
        raise WorkloadError(f"{name}: when a request arrives depends on answers; this needs fixed times")


def _batch(requests: list[Request], session: int, sequences: Mapping[str, int]) -> Batch:
    """The requests as columns; their arrival is up to the session."""
    segments = [[(name, tokens) for name, tokens in request.segments if tokens] for request in requests]
    lens = [[tokens for _, tokens in row] for row in segments]
    outputs = [request.output_len for request in requests]
    return make_batch(
        np.zeros(len(requests)),
        [sum(row) - output for row, output in zip(lens, outputs, strict=True)],
        outputs,
        np.cumsum([0] + [len(row) for row in segments]),
        [name for row in segments for name, _ in row],
        [tokens for row in lens for tokens in row],
        session_id=session,
        **sequences,
    )


def lone_requests(batches: Iterator[Batch]) -> Iterator[Session]:
    """Yield each request of batches as a session of its own, which waits for nobody."""
    for batch in batches:
        for i, time in enumerate(batch.arrival_time.tolist()):
            yield Session(time, cut(batch, i, i + 1), ((),), np.zeros(1))
