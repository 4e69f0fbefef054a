"""Run a few requests through the core one step at a time, and tell what happens.

The core decides a whole step in one call. The pictures between its decisions come from the same
verbs: the step is repeated on copies that may admit only the first few requests, or that return
only the first few outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from sim import cost as step_cost
from sim import scheduler, update, waiting
from sim._jit import entry
from sim.blocks import EVICTIONS, TAKEN_LOGGED
from sim.chains import NO_ROOM
from sim.columns import B, K, Q, R, S, T, W
from sim.core import REFUSED, Core, EngineConfig
from sim.cost import StepCost
from sim.explain.board import Request, draw_board, registered_between, table_of, taken_between
from sim.explain.events import Admission, Arrival, Blocked, Board, Event, Finish, Output, Running
from sim.explain.lookup import judge, why_waiting
from sim.explain.tokens import Tokens
from sim.explain.traffic import Traffic
from sim.request import Batch
from sim.state import State

schedule = entry(scheduler.schedule)
update_from_output = entry(update.update_from_output)
add_request = entry(waiting.add_request)
front_end_time = entry(step_cost.front_end_time)
gpu_time = entry(step_cost.gpu_time)
cpu_time = entry(step_cost.cpu_time)


class TooLong(Exception):
    """The run takes more steps than it may."""


class InFlight(NamedTuple):
    """A step that has been scheduled and not yet returned."""

    row: int
    step: int
    end: float  # seconds


class Walk:
    """One engine and its requests; `events` runs it once."""

    def __init__(
        self,
        config: EngineConfig,
        cost: StepCost,
        batches: Sequence[Batch],
        *,
        concurrency: int | None = None,
        think_times: Iterator[float] | None = None,
        max_steps: int = 1000,
    ) -> None:
        """With `concurrency`, so many users each send the next request when their former one has ended.

        `think_times` are theirs between the two, in seconds.
        """
        self.config = config
        self.cost = cost
        self.max_steps = max_steps
        self.tokens = Tokens(batches, config.block_size)
        total = sum(len(batch.prompt_len) for batch in batches)
        # a request preempted within a step may take its blocks again in the same step
        self.state = State(config, num_records=total + 1, taken_log=16 * config.num_gpu_blocks)
        self.requests: dict[int, Request] = {}  # by request id
        for batch in batches:
            self._load(batch)
        arrivals = [float(time) for batch in batches for time in batch.arrival_time]
        self.traffic = Traffic(arrivals, concurrency, think_times)
        self.in_flight: list[InFlight] = []  # oldest first
        self.now = 0.0
        self.num_steps = 0
        self.once_cached: set[bytes] = set()
        self.last_blocked: tuple[str, str] | None = None

    @property
    def core(self) -> Core:
        return self.state.core

    def events(self) -> Iterator[Event]:
        """Yield everything that happens, in order. Raises TooLong after `max_steps` steps."""
        depth = 2 if self.config.async_scheduling else 1
        while True:  # as sim/advance.py
            if self.in_flight and self.in_flight[0].end <= self.now:
                yield from self._update(self.in_flight.pop(0))
            yield from self._take_in_arrivals()
            while len(self.in_flight) < depth and self._has_requests():
                size = yield from self._schedule()
                if size == 0:
                    break
            if self.in_flight:
                self.now = self.in_flight[0].end
            elif (wake := self.traffic.next_time()) is not None:
                self.now = wake
            else:
                return

    def all_refused(self) -> bool:
        """Whether no request can ever run (to be asked before the run)."""
        slots = [request.slot for request in self.requests.values()]
        return bool((self.core.requests[R.status, slots] == REFUSED).all())

    def totals(self) -> str:
        """The run's sums, in a sentence."""
        count = self.core.count
        text = f"In all: {count[K.hits]} of {count[K.queries]} prompt tokens hit"
        if count[K.num_preemptions]:
            text += f" (preempted {count[K.num_preemptions]} times)"
        return f"{text}; cached blocks evicted: {self.core.pool.count[EVICTIONS]}; steps: {self.num_steps}."

    def _load(self, batch: Batch) -> None:
        slots = self.state.arena.load(batch).tolist()
        for i, slot in enumerate(slots):
            row = range(batch.segment_start[i], batch.segment_start[i + 1])
            tokens = self.tokens.of_pieces(
                (int(batch.segment_id[k]), 0, int(batch.segment_len[k])) for k in row
            )
            namespace = int(batch.namespace[i])
            hashes = self.tokens.hashes(tokens, namespace)
            number = len(self.requests)
            prompt_len = int(batch.prompt_len[i])
            self.requests[number] = Request(f"R{number}", slot, prompt_len, tokens, hashes)

    def _has_requests(self) -> bool:
        return bool(self.core.count[K.num_running] + self.core.count[K.num_waiting] > 0)

    def _take_in_arrivals(self) -> Iterator[Arrival]:
        for arrival, number in self.traffic.arrived(self.now):
            request = self.requests[number]
            self.core.times[T.arrival_time, request.slot] = arrival
            if self.core.requests[R.status, request.slot] == REFUSED:
                yield self._arrival(arrival, request, refused=True)
                self.traffic.ended(self.now)
                continue
            num_full = request.prompt_len // self.config.block_size
            to_hash = num_full if self.config.enable_prefix_caching else 0
            ready = self.traffic.hash_prompt(arrival, number, float(front_end_time(self.cost, to_hash)))
            self.core.times[T.ready_time, request.slot] = ready
        for arrival, number in self.traffic.ready(self.now):
            add_request(self.core, self.requests[number].slot)
            yield self._arrival(arrival, self.requests[number], refused=False)

    def _arrival(self, arrival: float, request: Request, *, refused: bool) -> Arrival:
        num_full = request.prompt_len // self.config.block_size
        prompt, hashes = request.tokens[: request.prompt_len], request.hashes[:num_full]
        return Arrival(self.now, self._board(self.core), request.name, arrival, prompt, hashes, refused)

    def _try_schedule(self, row: int, max_num_seqs: int) -> Core:
        """The engine after a schedule() that may run so many requests; ours is left as it is."""
        ours = self.core
        fewer = self.config._replace(max_num_seqs=max_num_seqs)
        self.state.core = copy.deepcopy(ours)._replace(config=fewer)
        while schedule(self.core, row) == NO_ROOM:
            self.state.grow_tree()
        after, self.state.core = self.core._replace(config=self.config), ours
        return after

    def _schedule(self) -> Generator[Event, None, int]:
        """Schedule one step and put it in flight; returns how many requests it runs."""
        row = 1 - self.in_flight[0].row if self.in_flight else 0
        before = self.core
        before.clock[W.now] = self.now
        before.pool.count[TAKEN_LOGGED] = 0
        final = self._try_schedule(row, self.config.max_num_seqs)
        size = int(final.count[K.step_size + row])
        if size:
            self.num_steps += 1
            if self.num_steps > self.max_steps:
                raise TooLong
        admitted = final.queues[Q.admitted, : final.count[K.num_admitted]].tolist()
        num_running = int(final.count[K.num_running]) - len(admitted)
        after = self._try_schedule(row, num_running)
        slots = final.steps[S.slot, row, :size].tolist()
        scheduled = dict(zip(slots, final.steps[S.tokens, row, :size].tolist(), strict=True))
        going_on = [slot for slot in scheduled if slot not in admitted]
        preempted = final.queues[Q.preempted, : final.count[K.num_preempted]].tolist()
        if going_on or preempted:
            yield Running(
                self.now,
                self._board(after),
                self.num_steps,
                {self._of(final, slot).name: scheduled[slot] for slot in going_on},
                {
                    self._of(final, slot).name: grown
                    for slot in going_on
                    if (grown := table_of(after, slot)[len(table_of(before, slot)) :])
                },
                taken_between(before, after)[1],
                registered_between(before, after),
                tuple(self._of(final, slot).name for slot in preempted),
            )
        for done, slot in enumerate(admitted, 1):
            earlier = after
            after = self._try_schedule(row, num_running + done) if done < len(admitted) else final
            yield self._admission(earlier, after, slot, scheduled[slot])
        self.state.core = final
        yield from self._blocked(final, bool(preempted), sum(scheduled.values()))
        if size:
            begin = max(self.now, self.in_flight[0].end) if self.in_flight else self.now
            end = begin + self._duration(final, sum(scheduled.values()), size)
            self.in_flight.append(InFlight(row, self.num_steps, end))
        return size

    def _admission(self, before: Core, after: Core, slot: int, scheduled: int) -> Admission:
        request = self._of(after, slot)
        known = request.tokens[: after.requests[R.num_tokens, slot]]
        hit_tokens = int(after.requests[R.num_computed, slot]) - scheduled
        block_size = self.config.block_size
        num_hits = hit_tokens // block_size
        board = self._board(before)
        looked = tuple(
            judge(
                known,
                request.hashes[: len(known) // block_size],
                num_hits,
                board,
                self.once_cached,
                block_size=block_size,
                caching=self.config.enable_prefix_caching,
            )
        )
        taken, evicted = taken_between(before, after)
        return Admission(
            self.now,
            self._board(after),
            self.num_steps,
            request.name,
            bool(after.requests[R.num_preemptions, slot]),
            looked,
            hit_tokens,
            scheduled,
            len(known) - hit_tokens - scheduled,
            tuple(block for block in table_of(after, slot)[:num_hits] if block not in board.refs),
            taken,
            evicted,
            registered_between(before, after),
        )

    def _blocked(self, core: Core, preempted: bool, num_tokens: int) -> Iterator[Blocked]:
        """Why the head of the waiting queue was not admitted, where that is news."""
        board = self._board(core)
        if not board.waiting:
            self.last_blocked = None
            return
        reason = why_waiting(core, self.config, int(board.waiting[0][1:]), num_tokens, preempted)
        if (board.waiting[0], reason) != self.last_blocked:
            self.last_blocked = (board.waiting[0], reason)
            yield Blocked(self.now, board, self.num_steps, board.waiting[0], reason)

    def _duration(self, core: Core, num_tokens: int, size: int) -> float:
        """Seconds from the start of the step just scheduled to its end."""
        shape = [int(core.count[k]) for k in range(K.shape_decodes, K.shape_context + 1)]
        gpu = float(gpu_time(self.cost, num_tokens, size, *shape))
        cpu = float(cpu_time(self.cost, size))
        return max(gpu, cpu) if self.config.async_scheduling else gpu + cpu

    def _try_update(self, row: int, num_outputs: int) -> Core:
        """The engine after the first so many outputs of a step; ours is left as it is."""
        after = copy.deepcopy(self.core)
        after.count[K.step_size + row] = num_outputs
        update_from_output(after, row)
        return after

    def _update(self, step: InFlight) -> Iterator[Event]:
        row = step.row
        before = self.core
        before.clock[W.now] = self.now
        size = int(before.count[K.step_size + row])
        final = self._try_update(row, size)
        live = [
            (i, self.requests[number])
            for i, number in enumerate(before.steps[S.request_id, row, :size].tolist())
            if number in before.requests[R.request_id] and before.steps[S.samples, row, i]
        ]
        ended = [(i, r) for i, r in live if final.requests[R.request_id, r.slot] != int(r.name[1:])]
        after = self._try_update(row, ended[0][0]) if ended else final
        if live:
            new = {r.name: r.tokens[before.requests[R.num_tokens, r.slot]] for _, r in live}
            yield Output(self.now, self._board(after), step.step, new, registered_between(before, after))
        for i, request in ended:
            earlier = self._board(after)
            after = self._try_update(row, i + 1)
            table = table_of(before, request.slot)
            board = self._board(after)
            freed = [block for block in board.free if block in table and block not in earlier.free]
            first = [b for b in freed if not (self.config.free_all_last or after.pool.blocks[B.chain, b])]
            yield Finish(
                self.now,
                board,
                step.step,
                request.name,
                table,
                tuple(first),
                tuple(block for block in freed if block not in first),
                tuple(block for block in table if block in board.refs),
            )
            self.traffic.ended(self.now)
        self.state.core = final
        final.count[K.num_records] = 0

    def _of(self, core: Core, slot: int) -> Request:
        return self.requests[int(core.requests[R.request_id, slot])]

    def _board(self, core: Core) -> Board:
        board = draw_board(core, self.tokens, self.requests)
        self.once_cached.update(board.hashes)
        return board
