"""Few-shot prompts: an instruction and some examples of a fixed pool, then the question."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Batch, Ints
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, pooled_batches
from workloads.lengths import MAX_LEN, Length, LengthOrZero
from workloads.popularity import MOST_DRAWN, GroupPopularity, PoolSize, draw_distinct, zipf_bounds
from workloads.sampling import Sampling
from workloads.streams import Stream, generator, pool_generator


class FewShot(Workload, Arrivals, Sampling, GroupPopularity):
    """A prompt is the system prompt, `examples_per_request` different examples, and a question.

    With `num_groups`, each group (a task) has its own examples, drawn once and always in the same
    order, and a request draws a group. Without, each request draws its examples, any of the pool
    equally likely, in the order drawn. An example's length is drawn once.
    """

    kind: Literal["few_shot"] = "few_shot"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    num_examples: PoolSize
    examples_per_request: Annotated[int, Field(ge=1, le=MOST_DRAWN)]
    num_groups: PoolSize | None = Field(None, description="none: examples are drawn for each request")
    system_prompt_len: Annotated[int, Field(ge=0, le=MAX_LEN)] = 0
    example_len: Length
    question_len: LengthOrZero
    output_len: Length

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.examples_per_request > self.num_examples:
            raise ValueError(
                f"examples_per_request {self.examples_per_request} is above num_examples"
                f" {self.num_examples}, and a prompt has no example twice: lower it"
            )
        if self.group_popularity != "uniform" and self.num_groups is None:
            raise ValueError("group_popularity has no effect without groups: set num_groups")
        return self

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def group_prefixes(self, seed: np.random.SeedSequence) -> Ints | None:
        if self.num_groups is None:
            return None
        examples = self._example_lengths(seed)[self._examples_of_groups(seed, self.num_groups)]
        return np.asarray(self.system_prompt_len + examples.sum(axis=1))

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        questions, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        yield from pooled_batches(
            self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)),
            self._examples(seed),
            item_len=self._example_lengths(seed),
            system_prompt_len=self.system_prompt_len,
            draw_question=lambda n: self.question_len.draw(questions, n),
            draw_output=lambda n: self.output_len.draw(outputs, n),
            **self.sequences,
        )

    def _example_lengths(self, seed: np.random.SeedSequence) -> Ints:
        return self.example_len.draw(pool_generator(seed, Stream.EXAMPLE_LEN), self.num_examples)

    def _examples_of_groups(self, seed: np.random.SeedSequence, num_groups: int) -> Ints:
        """Return each group's row of example numbers."""
        bounds, rng = zipf_bounds(self.num_examples, 0), pool_generator(seed, Stream.EXAMPLES)
        return draw_distinct(rng, bounds, num_groups, self.examples_per_request)

    def _examples(self, seed: np.random.SeedSequence) -> Callable[[int], tuple[Ints, Ints]]:
        """Return the function that draws n requests' groups (-1: none) and rows of example numbers."""
        if self.num_groups is None:
            k, bounds = self.examples_per_request, zipf_bounds(self.num_examples, 0)
            rng = generator(seed, Stream.EXAMPLES)
            return lambda n: (np.full(n, -1), draw_distinct(rng, bounds, n, k))
        of_group = self._examples_of_groups(seed, self.num_groups)
        draw_groups = self.groups(generator(seed, Stream.GROUPS), self.num_groups)

        def draw(n: int) -> tuple[Ints, Ints]:
            group = draw_groups(n)
            return group, of_group[group]

        return draw
