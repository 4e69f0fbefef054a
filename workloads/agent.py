"""Agents: a loop of tool calls over a growing context, helpers that fork from it, and compaction."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from workloads.lengths import Length
from workloads.session import Request, SessionWorkload

MOST_TURNS = 10_000
SEGMENTS = 1 << 24  # of one session


class Agent(SessionWorkload):
    """A session calls a tool after each answer, and its next prompt adds what the tool returned.

    Every `fork_every` turns, `subagents` helpers start from the parent's context with a task of
    their own, loop for `subagent_turns`, and the parent goes on with what they found once all have
    ended. Every `compact_every` turns the context is cut to the system prompt and a summary: all
    behind the system prompt is new then.
    """

    kind: Literal["agent"] = "agent"
    num_turns: Annotated[int, Field(ge=1, le=MOST_TURNS)]
    system_prompt_len: int = Field(0, ge=0, le=2**31 - 1, description="shared by all sessions")
    task_len: Length = Field(description="the first prompt, and each helper's")
    tool_len: Length = Field(description="tokens that a tool returns")
    output_len: Length
    tool_time: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds, mean, exponential")
    fork_every: PositiveInt | None = None
    subagents: Annotated[int, Field(ge=1, le=256)] = 1
    subagent_turns: Annotated[int, Field(ge=1, le=MOST_TURNS)] = 1
    compact_every: PositiveInt | None = None
    summary_len: Length | None = Field(None, description="what stays of a context that is cut")

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if (self.compact_every is None) != (self.summary_len is None):
            raise ValueError("compact_every and summary_len belong together: give both or none")
        if self.fork_every is None and (self.subagents, self.subagent_turns) != (1, 1):
            raise ValueError("subagents and subagent_turns have no effect without fork_every: set it")
        return self

    @property
    def pool_end(self) -> int:
        return 1  # the system prompt

    def requests(self, rng: np.random.Generator, session: int) -> list[Request]:
        found: list[Request] = []
        first = 1 + session * SEGMENTS  # 0 is the system prompt
        segment = first

        def draw(length: Length) -> int:
            return int(length.draw(rng, 1)[0])

        def pause() -> float:
            return float(rng.standard_exponential()) * self.tool_time

        def ask(context: tuple[tuple[int, int], ...], after: tuple[int, ...], delay: float) -> int:
            """Add a request whose answer continues the last segment; returns its row."""
            output = draw(self.output_len)
            (name, tokens), before = context[-1], context[:-1]
            found.append(Request((*before, (name, tokens + output)), output, after, delay))
            return len(found) - 1

        system = (0, self.system_prompt_len)
        row = ask((system, (segment, draw(self.task_len))), (), 0.0)
        for turn in range(1, self.num_turns):
            context = tuple(found[row].segments)
            after: tuple[int, ...] = (row,)
            if self.fork_every is not None and turn % self.fork_every == 0:
                ends = []
                for _ in range(self.subagents):
                    segment += 1
                    helper = ask((*context, (segment, draw(self.task_len))), (row,), 0.0)
                    for _ in range(1, self.subagent_turns):
                        grown = _grown(tuple(found[helper].segments), draw(self.tool_len))
                        helper = ask(grown, (helper,), pause())
                    ends.append(helper)
                after = tuple(ends)
            if self.compact_every is not None and turn % self.compact_every == 0:
                assert self.summary_len is not None
                segment += 1
                context = (system, (segment, draw(self.summary_len)))
            row = ask(_grown(context, draw(self.tool_len)), after, pause())
        return found


def _grown(context: tuple[tuple[int, int], ...], tokens: int) -> tuple[tuple[int, int], ...]:
    """The context with more tokens in its last segment."""
    name, length = context[-1]
    return (*context[:-1], (name, length + tokens))
