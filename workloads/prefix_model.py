"""What a trace without prefix identity shares: a model laid over it, not a fact of the trace."""

from __future__ import annotations

from typing import Annotated, Self

import numpy as np
from pydantic import Field, model_validator

from sim.request import Ints
from workloads.base import Spec
from workloads.lengths import MAX_LEN
from workloads.popularity import PoolSize, draw_ranks, zipf_bounds


class PrefixModel(Spec):
    """Each request begins with text of its group, and goes on with its own.

    The group is drawn by Zipf's law, or is a column of the file. Of the prompt, `prefix_len`
    tokens (at most all) or the share `shared_fraction` (rounded down) are the group's.
    """

    num_groups: PoolSize | None = Field(None, description="none: the file's prefix_group column")
    zipf_alpha: float = Field(1.0, ge=0, allow_inf_nan=False, description="group i: weight (i + 1)**-alpha")
    shared_fraction: float | None = Field(None, gt=0, le=1, description="of each prompt")
    prefix_len: Annotated[int, Field(ge=1, le=MAX_LEN)] | None = Field(None, description="tokens")

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if (self.shared_fraction is None) == (self.prefix_len is None):
            raise ValueError("how much is shared needs one of shared_fraction and prefix_len")
        if self.num_groups is None and self.zipf_alpha != 1:
            raise ValueError("zipf_alpha has no effect without num_groups: set num_groups, or drop it")
        return self

    def shared_len(self, prompt_len: Ints) -> Ints:
        """Return the tokens of each prompt that are its group's."""
        if self.prefix_len is not None:
            return np.minimum(prompt_len, self.prefix_len)
        assert self.shared_fraction is not None
        return np.asarray(np.floor(prompt_len * self.shared_fraction), np.int64)

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """Draw the groups of n requests. Modifies `rng`."""
        assert self.num_groups is not None
        return draw_ranks(rng, zipf_bounds(self.num_groups, self.zipf_alpha), n)
