"""Which recorded requests go on with the answer of an earlier one: the turns of a conversation."""

from __future__ import annotations

from typing import NamedTuple

from sim.recording.contents import Segments


class _Ended(NamedTuple):
    row: int
    time: float
    num_tokens: int


class Sessions:
    """Looks for the predecessor of each request, in order of arrival.

    A request follows another if its prompt begins with all that is known of that one's prompt and answer, up
    to the last full chunk, which must hold a token of the answer, and if it arrived after the other's end.
    Of several, the longest, then the latest. A client that changes what was said (drops a model's thoughts,
    compacts the history) is not followed.
    """

    def __init__(self) -> None:
        self.by_last: dict[
            int, _Ended
        ] = {}  # by the last chunk of prompt and answer; its id covers all before

    def end(self, row: int, time: float, prompt_len: int, segments: Segments) -> None:
        """A request has ended at `time`."""
        known = [one for one in segments if one[0] >= 0]
        num_tokens = sum(length for _, length in segments)
        if known and sum(length for _, length in known) > prompt_len:
            self.by_last[known[-1][0]] = _Ended(row, time, num_tokens)

    def before(self, arrival: float, prompt_len: int, segments: Segments) -> tuple[int, float]:
        """The request that one with this prompt follows, and how long after its end; -1 and NaN if none."""
        for segment, _ in reversed(segments):
            found = self.by_last.get(segment)
            if found is not None and found.time <= arrival and found.num_tokens <= prompt_len:
                return found.row, arrival - found.time
        return -1, float("nan")
