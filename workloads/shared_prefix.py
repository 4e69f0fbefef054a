"""Groups of requests that share a prefix: system prompts, few-shot examples, documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Batch, Ints
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, prefixed_batch
from workloads.lengths import Length, LengthOrZero
from workloads.popularity import GroupPopularity, PoolSize
from workloads.sampling import Sampling
from workloads.streams import Stream, generator, pool_generator

MOST_PROMPTS = 2**24  # that come again: a table of them lies in memory


class SharedPrefix(Workload, Arrivals, Sampling, GroupPopularity):
    """Each request draws a group, whose prefix it shares, and has a suffix of its own.

    Prefix lengths are drawn once for each group, suffix and output lengths for each request. With
    `prompts_per_group` a group has only so many suffixes, one length each, and a request draws one.
    """

    kind: Literal["shared_prefix"] = "shared_prefix"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    num_groups: PoolSize = 1
    prompts_per_group: PoolSize | None = Field(
        None, description="different prompts of a group, which come again; none: all are different"
    )
    prefix_len: LengthOrZero
    suffix_len: LengthOrZero
    output_len: Length

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.prefix_len.lowest + self.suffix_len.lowest < 1:
            raise ValueError("prefix_len and suffix_len may both be 0: a prompt needs at least 1 token")
        if self.num_prompts > MOST_PROMPTS:
            raise ValueError(
                f"num_groups * prompts_per_group is {self.num_prompts:,}, above {MOST_PROMPTS:,}: lower one, "
                "or drop prompts_per_group for prompts that are all different"
            )
        return self

    @property
    def num_prompts(self) -> int:
        """Different prompts of all groups; 0: no two requests have the same."""
        return self.num_groups * (self.prompts_per_group or 0)

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def group_prefixes(self, seed: np.random.SeedSequence) -> Ints:
        return self.prefix_len.draw(pool_generator(seed, Stream.PREFIX_LEN), self.num_groups)

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        draw_groups = self.groups(generator(seed, Stream.GROUPS), self.num_groups)
        prefixes = self.group_prefixes(seed)
        suffixes, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        prompts = generator(seed, Stream.PROMPTS)
        questions = self.suffix_len.draw(suffixes, self.num_prompts)
        done = 0
        for times in self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)):
            n = len(times)
            group = draw_groups(n)
            ids, lens = group[:, None], prefixes[group][:, None]
            if self.prompts_per_group is None:
                own = self.suffix_len.draw(suffixes, n)
            else:
                prompt = group * self.prompts_per_group + prompts.integers(self.prompts_per_group, size=n)
                ids = np.stack([group, self.num_groups + prompt], axis=1)
                lens = np.stack([prefixes[group], questions[prompt]], axis=1)
                own = np.zeros(n, np.int64)
            yield prefixed_batch(
                times,
                shared_id=ids,
                shared_len=lens,
                suffix_len=own,
                output_len=self.output_len.draw(outputs, n),
                prefix_group=group,
                first=done,
                **self.sequences,
            )
            done += n
