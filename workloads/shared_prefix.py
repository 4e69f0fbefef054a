"""Groups of requests that share a prefix: system prompts, few-shot examples, documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from sim.request import Batch, Ints
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, prefixed_batch
from workloads.lengths import Length, LengthOrZero
from workloads.streams import Stream, generator


class SharedPrefix(Workload, Arrivals):
    """Each request draws a group, whose prefix it shares, and a suffix of its own.

    Prefix lengths are drawn once for each group, suffix and output lengths for each request.
    """

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    num_groups: PositiveInt = 1
    prefix_len: LengthOrZero
    suffix_len: LengthOrZero
    output_len: Length
    group_popularity: Literal["uniform", "zipf"] = "uniform"
    zipf_alpha: float = Field(1.0, ge=0, allow_inf_nan=False, description="group i: weight (i + 1)**-alpha")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.prefix_len.lowest + self.suffix_len.lowest < 1:
            raise ValueError("prefix_len and suffix_len may both be 0: a prompt needs at least 1 token")
        if self.zipf_alpha != 1 and self.group_popularity != "zipf":
            raise ValueError("zipf_alpha has no effect on uniform groups: set group_popularity: zipf")
        return self

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        draw_groups = self._groups(generator(seed, Stream.GROUPS))
        prefixes = self.prefix_len.draw(generator(seed, Stream.PREFIX_LEN), self.num_groups)
        suffixes, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        own = self.num_groups  # the ids below it are the groups' prefixes
        for times in self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)):
            n = len(times)
            group = draw_groups(n)
            yield prefixed_batch(
                times,
                group=group,
                prefix_len=prefixes[group],
                suffix_len=self.suffix_len.draw(suffixes, n),
                output_len=self.output_len.draw(outputs, n),
                own_id=np.arange(own, own + n),
            )
            own += n

    def _groups(self, rng: np.random.Generator) -> Callable[[int], Ints]:
        """Return the function that draws n group numbers."""
        if self.group_popularity == "uniform":
            return lambda n: rng.integers(0, self.num_groups, n)
        weights = np.arange(1, self.num_groups + 1, dtype=np.float64) ** -self.zipf_alpha
        upper = np.cumsum(weights)
        upper /= upper[-1]  # the last bound is 1, above every draw
        return lambda n: np.searchsorted(upper, rng.random(n), side="right").astype(np.int64)
