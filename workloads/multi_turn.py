"""Chat: each turn's prompt is the whole dialogue so far, answers included."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from workloads.errors import WorkloadError
from workloads.lengths import Length
from workloads.popularity import PoolSize
from workloads.session import Request, SessionWorkload

MOST_TURNS = 10_000  # of a session


class MultiTurn(SessionWorkload):
    """Sessions of turns: a turn arrives a think time after the previous answer ended.

    A session draws one of `num_system_prompts`, all of `system_prompt_len` tokens, and its number
    of turns; think times are exponential or constant, with the given mean.
    """

    kind: Literal["multi_turn"] = "multi_turn"
    num_turns: Length = Field(description="of a session")
    num_system_prompts: PoolSize = 1
    system_prompt_len: int = Field(0, ge=0, le=2**31 - 1)
    user_len: Length = Field(description="tokens a turn adds before its answer")
    output_len: Length
    think_time: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds, mean")
    think_time_distribution: Literal["constant", "exponential"] = "exponential"

    @property
    def pool_end(self) -> int:
        return self.num_system_prompts

    def requests(self, rng: np.random.Generator, session: int) -> list[Request]:
        system = int(rng.integers(self.num_system_prompts))
        turns = int(self.num_turns.draw(rng, 1)[0])
        if turns > MOST_TURNS:
            raise WorkloadError(f"num_turns: a session drew {turns}, more than {MOST_TURNS}: lower it")
        user, output = self.user_len.draw(rng, turns), self.output_len.draw(rng, turns)
        pauses = np.full(turns, self.think_time)
        if self.think_time_distribution == "exponential":
            pauses = pauses * rng.standard_exponential(turns)
        told = np.cumsum(user + output)  # tokens of the dialogue after each answer
        own = self.num_system_prompts + session
        return [
            Request(
                segments=((system, self.system_prompt_len), (own, int(told[turn]))),
                output_len=int(output[turn]),
                after=(turn - 1,) if turn else (),
                delay=float(pauses[turn]) if turn else 0.0,
            )
            for turn in range(turns)
        ]
