"""Groups of requests that share a prefix: system prompts, few-shot examples, documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Batch
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, prefixed_batch
from workloads.lengths import Length, LengthOrZero
from workloads.popularity import GroupPopularity, PoolSize
from workloads.streams import Stream, generator, pool_generator


class SharedPrefix(Workload, Arrivals, GroupPopularity):
    """Each request draws a group, whose prefix it shares, and a suffix of its own.

    Prefix lengths are drawn once for each group, suffix and output lengths for each request.
    """

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    num_groups: PoolSize = 1
    prefix_len: LengthOrZero
    suffix_len: LengthOrZero
    output_len: Length

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.prefix_len.lowest + self.suffix_len.lowest < 1:
            raise ValueError("prefix_len and suffix_len may both be 0: a prompt needs at least 1 token")
        return self

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        draw_groups = self.groups(generator(seed, Stream.GROUPS), self.num_groups)
        prefixes = self.prefix_len.draw(pool_generator(seed, Stream.PREFIX_LEN), self.num_groups)
        suffixes, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        done = 0
        for times in self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)):
            n = len(times)
            group = draw_groups(n)
            yield prefixed_batch(
                times,
                shared_id=group[:, None],
                shared_len=prefixes[group][:, None],
                suffix_len=self.suffix_len.draw(suffixes, n),
                output_len=self.output_len.draw(outputs, n),
                prefix_group=group,
                first=done,
            )
            done += n
