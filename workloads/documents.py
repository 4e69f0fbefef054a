"""Questions about documents of a pool: document QA, and RAG with several documents before the question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Batch, Ints
from workloads.arrivals import Arrivals
from workloads.base import MOST_REQUESTS, Workload
from workloads.content import chunk_counts, pooled_batches
from workloads.lengths import MAX_LEN, Length, LengthOrZero
from workloads.popularity import MOST_DRAWN, PoolSize, Popularity, draw_distinct, zipf_bounds
from workloads.sampling import Sampling
from workloads.streams import Stream, generator, pool_generator


class Documents(Workload, Arrivals, Sampling):
    """A prompt is the system prompt, `documents_per_request` different documents, and a question.

    Documents are drawn by popularity, without repetition in one prompt. In `fixed` order they
    stand by their number, the most popular first, so that prompts share as much as they can; in
    `shuffled` order each permutation is equally likely. A document's length is drawn once. A
    request's prefix group is its first document.
    """

    kind: Literal["documents"] = "documents"
    num_requests: Annotated[int, Field(gt=0, le=MOST_REQUESTS)]
    num_documents: PoolSize
    documents_per_request: Annotated[int, Field(ge=1, le=MOST_DRAWN)] = 1
    document_order: Literal["fixed", "shuffled"] = "fixed"
    document_popularity: Popularity = "uniform"
    zipf_alpha: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="document i: weight (i + 1)**-alpha"
    )
    system_prompt_len: Annotated[int, Field(ge=0, le=MAX_LEN)] = 0
    document_len: Length
    question_len: LengthOrZero
    output_len: Length

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if self.documents_per_request > self.num_documents:
            raise ValueError(
                f"documents_per_request {self.documents_per_request} is above num_documents"
                f" {self.num_documents}, and a prompt has no document twice: lower it"
            )
        if self.document_order == "shuffled" and self.documents_per_request == 1:
            raise ValueError("document_order has no effect on one document: raise documents_per_request")
        if self.zipf_alpha != 1 and self.document_popularity != "zipf":
            raise ValueError("zipf_alpha has no effect on uniform documents: set document_popularity: zipf")
        return self

    @property
    def expected_requests(self) -> int:
        return self.num_requests

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        documents, order = generator(seed, Stream.DOCUMENTS), generator(seed, Stream.DOCUMENT_ORDER)
        lengths = self.document_len.draw(pool_generator(seed, Stream.DOCUMENT_LEN), self.num_documents)
        questions, outputs = generator(seed, Stream.SUFFIX_LEN), generator(seed, Stream.OUTPUT_LEN)
        bounds = zipf_bounds(self.num_documents, self.zipf_alpha if self.document_popularity == "zipf" else 0)

        def draw(n: int) -> tuple[Ints, Ints]:
            chosen = self._in_order(draw_distinct(documents, bounds, n, self.documents_per_request), order)
            return chosen[:, 0], chosen

        yield from pooled_batches(
            self.arrival_times(seed, chunk_counts(self.num_requests, self.chunk_size)),
            draw,
            item_len=lengths,
            system_prompt_len=self.system_prompt_len,
            draw_question=lambda n: self.question_len.draw(questions, n),
            draw_output=lambda n: self.output_len.draw(outputs, n),
            **self.sequences,
        )

    def _in_order(self, chosen: Ints, rng: np.random.Generator) -> Ints:
        """Return the rows of document numbers in the order of the prompt."""
        if self.document_order == "fixed":
            return np.sort(chosen, axis=1)
        return np.take_along_axis(chosen, np.argsort(rng.random(chosen.shape), axis=1), axis=1)
