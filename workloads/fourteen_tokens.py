"""The classic example: prompts of 14 tokens of which the first 10 are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Batch
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, prefixed_batch
from workloads.lengths import MAX_LEN, Length
from workloads.sampling import Sampling
from workloads.streams import Stream, generator


class FourteenTokens(Workload, Arrivals, Sampling):
    """`num_requests` prompts of `prompt_len` tokens, the first `shared_len` of which are the same.

    With blocks of 4, the second of two such requests hits 8 tokens: the blocks 0 and 1; tokens 8
    and 9 are the same too, but share their block with tokens that are not.
    """

    kind: Literal["fourteen_tokens"] = "fourteen_tokens"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)] = 2
    prompt_len: Annotated[int, Field(ge=1, le=MAX_LEN)] = 14
    shared_len: Annotated[int, Field(ge=0)] = 10
    output_len: Length = Field(1, validate_default=True)

    @model_validator(mode="after")
    def _shared_is_a_part(self) -> Self:
        if self.shared_len > self.prompt_len:
            raise ValueError(f"shared_len {self.shared_len} is above prompt_len {self.prompt_len}: lower it")
        return self

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        outputs = generator(seed, Stream.OUTPUT_LEN)
        done = 0
        for times in self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)):
            n = len(times)
            yield prefixed_batch(
                times,
                shared_id=np.zeros((n, 1), np.int64),
                shared_len=np.full((n, 1), self.shared_len),
                suffix_len=np.full(n, self.prompt_len - self.shared_len),
                output_len=self.output_len.draw(outputs, n),
                prefix_group=0,
                first=done,
                **self.sequences,
            )
            done += n
