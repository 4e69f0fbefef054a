"""How long each request is as steps are scheduled: which of them sample a token."""

from __future__ import annotations

from sim.recording.calls import Add
from sim.recording.lines import Schedule


class Lengths:
    """Tokens of the live requests, those in flight included."""

    def __init__(self) -> None:
        self.length: dict[int, int] = {}

    def add(self, add: Add) -> None:
        """A request arrives with its prompt."""
        self.length[add.row] = add.line.prompt_len

    def sampled(self, schedule: Schedule) -> list[int]:
        """The requests that this step gives a token: those which it computes to their end."""
        rows = [row for row, num_new, before in schedule.scheduled if before + num_new >= self.length[row]]
        for row in rows:
            self.length[row] += 1
        return rows
