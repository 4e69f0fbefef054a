"""Tree of thoughts: each thought is continued in several ways, all with the path to it as prefix."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from workloads.lengths import Length
from workloads.session import Request, SessionWorkload

MOST_THOUGHTS = 4096  # of one tree


class Tree(SessionWorkload):
    """A session is a tree: a question, `branch` thoughts about it, `branch` about each, `depth` levels.

    A thought is asked for as soon as the answer it continues has ended. Its prompt is that
    prompt and answer, and `step_len` tokens of its own.
    """

    kind: Literal["tree"] = "tree"
    branch: Annotated[int, Field(ge=1, le=MOST_THOUGHTS)]
    depth: Annotated[int, Field(ge=1, le=MOST_THOUGHTS)]
    question_len: Length
    step_len: Length = Field(description="tokens that each thought's prompt adds")
    output_len: Length

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        level = 1
        total = 0
        for _ in range(self.depth):
            level *= self.branch
            total += level
            if total > MOST_THOUGHTS:
                shape = f"branch {self.branch} and depth {self.depth}"
                raise ValueError(f"{shape} make over {MOST_THOUGHTS} thoughts: lower one")
        return self

    @property
    def pool_end(self) -> int:
        return 0

    def requests(self, rng: np.random.Generator, session: int) -> list[Request]:
        first = session * (MOST_THOUGHTS + 1)  # of the session's segments
        question = (first, int(self.question_len.draw(rng, 1)[0]))
        found: list[Request] = []
        level: list[int | None] = [None]  # the requests to continue; None: the question
        for _ in range(self.depth):
            children: list[int | None] = []
            for parent in level:
                path = [question] if parent is None else list(found[parent].segments)
                for _ in range(self.branch):
                    step, output = int(self.step_len.draw(rng, 1)[0]), int(self.output_len.draw(rng, 1)[0])
                    own = (first + 1 + len(found), step + output)
                    children.append(len(found))
                    after = () if parent is None else (parent,)
                    found.append(Request((*path, own), output, after))
            level = children
        return found
