"""A scan: prompts that share nothing, and so push out of the cache what others share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sim.request import Batch
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, prefixed_batch
from workloads.lengths import Length
from workloads.sampling import Sampling
from workloads.streams import Stream, generator


class Scan(Workload, Arrivals, Sampling):
    """Each prompt is its own from the first token: a batch job over documents, each read once."""

    kind: Literal["scan"] = "scan"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    prompt_len: Length
    output_len: Length

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        prompts, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        done = 0
        for times in self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)):
            n = len(times)
            yield prefixed_batch(
                times,
                shared_id=np.empty((n, 0), np.int64),
                shared_len=np.empty((n, 0), np.int64),
                suffix_len=self.prompt_len.draw(prompts, n),
                output_len=self.output_len.draw(outputs, n),
                prefix_group=-1,
                first=done,
                **self.sequences,
            )
            done += n
