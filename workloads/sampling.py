"""How many sequences a request asks for: parallel samples of one prompt, or a beam search."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from sim.samples import MOST_SEQUENCES
from workloads.base import Spec

Sequences = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]
ONE_OF_BOTH = "a request samples or searches: set one of them to 1"


class Sampling(Spec):
    """The sequences of each request; a workload hands `sequences` on to its requests' columns."""

    n: Sequences = Field(1, description="answers to each prompt, sampled apart (parallel sampling)")
    beam_width: Sequences = Field(1, description="candidates of a beam search; 1: none")

    @model_validator(mode="after")
    def _samples_or_searches(self) -> Self:
        if self.n > 1 and self.beam_width > 1:
            raise ValueError(f"n is {self.n} and beam_width {self.beam_width}: {ONE_OF_BOTH}")
        return self

    @property
    def sequences(self) -> dict[str, int]:
        """The columns of a Batch that say it."""
        return {"n": self.n, "beam_width": self.beam_width}
