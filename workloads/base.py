"""What every workload is: a strict specification that can hand out its requests."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from sim.request import Batch, Ints, Session

MOST_REQUESTS = 2**31 - 1  # of one workload


class Spec(BaseModel):
    """A part of a workload's YAML: unknown fields and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="strings")


class Workload(Spec):
    """Traffic as a user describes it. One subclass a file; `kind` names it in the YAML."""

    chunk_size: ClassVar[int] = 2048  # requests in a Batch, at most; never changes what they are

    @property
    @abstractmethod
    def expected_requests(self) -> int | None:
        """The number of requests, where it is known before the first is made."""

    @property
    def has_sessions(self) -> bool:
        """Whether requests wait for the ends of others: then it has sessions, and no batches."""
        return False

    @property
    def pool_end(self) -> int | None:
        """Segment ids from here on name one session's own content; None: own ids are below 0."""
        return None

    @property
    def tenant_names(self) -> tuple[str, ...]:
        """The names of the tenants by number; empty where no request has one."""
        return ()

    def group_prefixes(self, seed: np.random.SeedSequence) -> Ints | None:
        """The tokens that all requests of each prefix group begin with; None: nobody knows them ahead."""
        return None

    def sessions(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Session]:
        """Yield the sessions of a workload that has them in order of their start, lazily.

        Otherwise as `batches`.
        """
        raise NotImplementedError

    @abstractmethod
    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        """Yield the requests in arrival order, lazily: memory does not grow with their number.

        Does not modify `seed`; the same seed gives the same requests. `block_size` is the
        engine's, in tokens: only a trace whose ids name blocks depends on it.

        Raises: WorkloadError, while iterating, on data that cannot be used.
        """
