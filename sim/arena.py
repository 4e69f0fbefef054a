"""The requests of all replicas, from loading to their end, in columns that the engines share.

A request has a slot, its place in the columns. The engine that it goes to gives the slot back when
it ends, so memory follows the live requests, not the run. When a table must grow, every engine that
shares it gets the larger one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sim.cache_kinds import APC, KINDS, CacheKind
from sim.columns import K, Q, R, T
from sim.core import NO_SEAT, REFUSED, VACANT, WAITING, EngineConfig
from sim.errors import InputError
from sim.request import Batch, Floats, Ints
from sim.samples import request_ids, samples

if TYPE_CHECKING:
    from sim.state import State

Owner = tuple[int, int]  # tenant and prefix group, -1: none
NOBODY: Owner = (-1, -1)
GIVEN = (  # the columns of a batch that are the request's own, but for its segments
    "prompt_len", "output_len", "max_tokens", "priority", "namespace", "lora", "session_id", "tenant",
    "prefix_group", "n", "beam_width",
)  # fmt: skip


def grown(table: Ints, width: int) -> Ints:
    """A copy of a table with room for `width` items, the new ones 0; itself if it has that room."""
    if table.shape[1] == width:
        return table
    wider = np.zeros((len(table), width), table.dtype)
    wider[:, : table.shape[1]] = table
    return wider


class Arena:
    """Owner of the columns of requests; replaced arrays go to the cores of `states`."""

    requests: Ints  # [R, slot]
    times: Floats  # [T, slot]
    segments: Ints  # [0, i]: segment id, [1, i]: its tokens

    def __init__(self, config: EngineConfig, kind: CacheKind = APC) -> None:
        """Make columns for engines that all have `config` and a cache of `kind`."""
        self.config = config
        self.kind = kind
        self.has_samples = False  # whether any request was loaded as several
        self.states: list[State] = []
        self.owners: dict[Owner, int] = {NOBODY: 0}
        self.refused: set[int] = set()  # slots of loaded requests that can never run
        self.next_id = 0
        self.next_rank = 0
        self.requests = np.zeros((R.WIDTH, 0), np.int64)
        self.times = np.zeros((T.WIDTH, 0))
        self.segments = np.zeros((2, 4096), np.int64)
        self.segments_used = 0
        self.vacant = np.zeros(0, np.int64)  # a stack; the engines have others
        self.num_vacant = 0
        self.grow_requests(max(1024, config.max_num_seqs + 1))

    def load(self, batch: Batch) -> Ints:
        """Copy a batch into vacant slots, in order; returns the slots. The requests have not arrived yet.

        Of a request with several samples it is that of the one to arrive first; `samples_of` knows all. A
        request that can never run is REFUSED here, in one slot: its prompt leaves no room for a token
        within max_model_len, or it needs more KV than the pool holds. Raises InputError for a beam
        search where the engine has none.
        """
        ids = np.arange(self.next_id, self.next_id + len(batch.n))
        self.next_id += len(ids)
        if not self.kind.groups and (batch.beam_width > 1).any():
            raise InputError(_no_beams(batch, ids))
        config = self.config
        blocks_needed = self.kind.blocks_needed(batch, config)
        refused = (batch.prompt_len >= config.max_model_len) | (blocks_needed > config.num_gpu_blocks - 1)
        row = None  # of each sample, in the batch
        if not self.kind.groups and (batch.n > 1).any():
            batch, row, number = samples(batch, int(ids[0]), self.kind.prompt_first)
            ids, refused = request_ids(ids[row], number), refused[row]
        n = len(batch.prompt_len)
        slots = self._take_slots(n)
        first_segment = self._store_segments(batch)
        requests = self.requests
        requests[:, slots] = 0
        self.times[:, slots] = np.nan
        for name in GIVEN:
            requests[getattr(R, name), slots] = getattr(batch, name)
        self.times[T.arrival_time, slots] = batch.arrival_time
        requests[R.request_id, slots] = ids
        requests[R.rank, slots] = np.arange(self.next_rank, self.next_rank + n)
        self.next_rank += n
        requests[R.next_sample, slots] = slots
        requests[R.num_tokens, slots] = batch.prompt_len
        requests[R.first_segment, slots] = first_segment
        requests[R.num_segments, slots] = np.diff(batch.segment_start)
        requests[R.seat, slots] = NO_SEAT
        requests[R.num_cached_tokens, slots] = -1
        requests[R.edge, slots] = 1
        if config.residency:
            requests[R.owner, slots] = self._number_owners(batch)
        if self.kind.groups:
            width = (batch.n * batch.beam_width)[~refused].max(initial=1)
            for state in self.states:
                state.widen(int(width))
        requests[R.status, slots] = np.where(refused, REFUSED, WAITING)
        if row is not None:
            self.has_samples = True
            is_first = np.diff(row, prepend=-1) > 0
            for slot in slots[refused & ~is_first].tolist():
                self.vacate(slot)
            requests[R.next_sample, slots] = np.where(refused, slots, _in_rings(slots, is_first))
            slots, refused = slots[is_first], refused[is_first]
        self.refused.update(slots[refused].tolist())
        return slots

    def samples_of(self, slot: int) -> list[int]:
        """The slots of a loaded request that has not arrived, one for each sample, in order of arrival."""
        found = [slot]
        if self.has_samples:
            while (after := int(self.requests[R.next_sample, found[-1]])) != slot:
                found.append(after)
        return found

    def vacate(self, slot: int) -> None:
        """Give back the slot of a loaded request that never arrives at a scheduler."""
        self.requests[R.request_id, slot] = -1
        self.requests[R.status, slot] = VACANT
        self.vacant[self.num_vacant] = slot
        self.num_vacant += 1

    def grow_requests(self, wanted: int) -> None:
        """Make room for at least `wanted` more requests."""
        have = self.requests.shape[1]
        width = have + max(wanted, have)
        self.requests = grown(self.requests, width)
        self.times = grown(self.times, width)  # type: ignore[arg-type, assignment]
        self.requests[R.request_id, have:] = -1
        stack = np.empty(width, np.int64)
        stack[: self.num_vacant] = self.vacant[: self.num_vacant]
        added = width - have
        stack[self.num_vacant : self.num_vacant + added] = np.arange(width - 1, have - 1, -1)
        self.vacant = stack
        self.num_vacant += added
        for state in self.states:
            state.share()

    def compact_segments(self, wanted: int) -> None:
        """Move the live requests' segments together, with room for `wanted` more and as much again."""
        live = np.flatnonzero(self.requests[R.status] != VACANT)
        lengths = self.requests[R.num_segments, live]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(live) else 0
        shift = np.repeat(self.requests[R.first_segment, live] - (ends - lengths), lengths)
        kept = self.segments[:, np.arange(total) + shift]
        self.segments = grown(kept, max(self.segments.shape[1], 2 * (total + wanted)))
        self.requests[R.first_segment, live] = ends - lengths
        self.segments_used = total
        for state in self.states:
            state.share()

    def segments_of(self, slot: int) -> Ints:
        """A request's own segments, a view: [0: id, 1: tokens] of prompt and answer in order."""
        first = self.requests[R.first_segment, slot]
        return self.segments[:, first : first + self.requests[R.num_segments, slot]]

    def _take_slots(self, n: int) -> Ints:
        """Slots for n requests, those that the engines have given back among them."""
        if self.num_vacant < n:
            for state in self.states:
                count, queues = state.core.count, state.core.queues
                height = int(count[K.vacant_slots])
                self.vacant[self.num_vacant : self.num_vacant + height] = queues[Q.vacant, :height]
                self.num_vacant += height
                count[K.vacant_slots] = 0
        if self.num_vacant < n:
            self.grow_requests(n)
        self.num_vacant -= n
        return self.vacant[self.num_vacant : self.num_vacant + n][::-1].copy()

    def _store_segments(self, batch: Batch) -> Ints:
        """Append a batch's segments, dropping those of ended requests when room lacks; returns row starts."""
        k = len(batch.segment_id)
        if self.segments_used + k > self.segments.shape[1]:
            self.compact_segments(k)
        start = self.segments_used
        self.segments[0, start : start + k] = batch.segment_id
        self.segments[1, start : start + k] = batch.segment_len
        self.segments_used += k
        return batch.segment_start[:-1] + start

    def _number_owners(self, batch: Batch) -> Ints:
        """The number of each request's owner; makes room to count what new ones lose."""
        if not ((batch.tenant >= 0) | (batch.prefix_group >= 0)).any():
            return np.zeros(len(batch.tenant), np.int64)
        pairs, place = np.unique([batch.tenant, batch.prefix_group], axis=1, return_inverse=True)
        numbers = [self.owners.setdefault((t, g), len(self.owners)) for t, g in pairs.T.tolist()]
        for state in self.states:
            state.count_owners(len(self.owners))
        return np.array(numbers, np.int64)[place.ravel()]


def _in_rings(slots: Ints, is_first: npt.NDArray[np.bool_]) -> Ints:
    """The slot of each sample's next one in its request; of the last, the first."""
    following = np.append(slots[1:], 0)
    following[np.append(is_first[1:], True)] = slots[is_first]
    return following


def _no_beams(batch: Batch, ids: Ints) -> str:
    first = int(np.argmax(batch.beam_width > 1))
    caches = " or ".join(kind().kind for kind in KINDS if kind.groups)
    return f"request {ids[first]} has beam_width {batch.beam_width[first]}: beam search needs cache: {caches}"
