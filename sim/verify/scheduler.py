"""Replay a recorded run of vLLM's Scheduler or AsyncScheduler, step by step.

The replay decides for itself when the engine schedules, updates and skips ahead, as vLLM's
EngineCore.step and step_with_batch_queue do, so those calls are compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sim import blocks, scheduler, update, waiting
from sim._jit import entry
from sim.chains import NO_ROOM
from sim.columns import K, Q, R, S, T
from sim.core import WAITING, EngineConfig
from sim.request import Batch
from sim.state import State
from sim.update import BY_LENGTH, BY_STOP_TOKEN
from sim.verify.compare import compare, drain_taken, pool_state
from sim.verify.contents import GOLDEN_VOCABULARY, Contents, crc, known_tokens

STOP_TOKEN = 2
STATISTICS = (K.num_admissions, K.queries, K.hits, K.num_readmissions, K.preempted_queries, K.preempted_hits)

schedule = entry(scheduler.schedule)
update_from_output = entry(update.update_from_output)
abort_request = entry(update.abort_request)
add_request = entry(waiting.add_request)
reset_prefix_cache = entry(blocks.reset_prefix_cache)


Name = str | int


class Decided(NamedTuple):
    """What a call of schedule() decided."""

    scheduled: list[tuple[Name, int]]  # request, tokens
    preempted: list[Name]
    new: list[int]  # slots, in order of admission
    resumed: list[int]
    hit: dict[int, int]  # tokens computed before, by slot
    taken: list[int]  # blocks
    evicted: list[int]


class SchedulerReplay:
    """The core, told when requests arrive and which tokens the recorded model emitted."""

    def __init__(self, config: EngineConfig, num_records: int, table_len: int = 0) -> None:
        """An empty engine; at most `num_records` requests end in a step, see State for `table_len`."""
        self.config = config
        # a request preempted within a step may take its blocks again in the same step
        self.state = State(
            config, num_records=num_records, taken_log=16 * config.num_gpu_blocks, table_len=table_len
        )
        self.contents = Contents(config.block_size)
        self.slot_of: dict[Name, int] = {}
        self.name_of: dict[int, Name] = {}  # by request id
        self.in_flight: list[int] = []  # rows of steps, oldest first
        self.statistics = [0] * len(STATISTICS)
        self.was_reset = 0  # since the last update

    def count(self, index: int) -> int:
        """One of the engine's numbers."""
        return int(self.state.core.count[index])

    def add(self, name: str, rank: int, tokens: list[int], prompt_len: int, **kwargs: Any) -> None:
        """Let a request arrive, whose tokens are known."""
        self.load(name, rank, self.contents.batch(tokens, prompt_len, **kwargs))

    def load(self, name: Name, rank: int, batch: Batch) -> None:
        """Let the one request of a batch arrive."""
        state = self.state
        slot = int(state.arena.load(batch)[0])
        core = state.core
        core.requests[R.status, slot] = WAITING
        core.requests[R.rank, slot] = rank
        self.slot_of[name] = slot
        self.name_of[int(core.requests[R.request_id, slot])] = name
        add_request(core, slot)

    def name(self, slot: int) -> Name:
        """A live slot's request name."""
        return self.name_of[int(self.state.core.requests[R.request_id, slot])]

    def names(self, slots: Sequence[int]) -> list[Name]:
        """The names of live slots."""
        return [self.name_of[i] for i in self.state.core.requests[R.request_id, slots].tolist()]

    def table(self, slot: int) -> list[int]:
        """A running request's block table."""
        core = self.state.core
        seat = core.requests[R.seat, slot]
        return core.seat_blocks[seat][: core.requests[R.num_blocks, slot]].tolist()  # type: ignore[no-any-return]

    def has_requests(self) -> bool:
        """Scheduler.has_requests: unfinished ones, or ended ones that no step has reported."""
        return self.count(K.num_running) + self.count(K.num_waiting) + self.count(K.finished_unflushed) > 0

    def running(self) -> list[int]:
        """Slots in order of admission."""
        return self.state.core.queues[Q.running, : self.count(K.num_running)].tolist()  # type: ignore[no-any-return]

    def waiting(self) -> list[int]:
        """Slots in the order they will be scheduled."""
        core = self.state.core
        slots = core.queues[Q.waiting, : self.count(K.num_waiting)]
        by_class, by_time = core.requests[R.wait_class, slots], core.times[T.wait_time, slots]
        return slots[np.lexsort((core.requests[R.rank, slots], by_time, by_class))].tolist()  # type: ignore[no-any-return]

    def schedule(self) -> Decided:
        """Schedule a step into a free row."""
        row = 1 - self.in_flight[0] if self.in_flight else 0
        assert self.count(K.admitting_budget) == -1
        while (size := int(schedule(self.state.core, row))) == NO_ROOM:
            self.state.grow_tree()
        core = self.state.core
        slots = core.steps[S.slot, row, :size].tolist()
        tokens = core.steps[S.tokens, row, :size].tolist()
        preempted = core.queues[Q.preempted, : self.count(K.num_preempted)].tolist()
        admitted = core.queues[Q.admitted, : self.count(K.num_admitted)].tolist()
        # computed has advanced by what was scheduled
        computed = core.requests[R.num_computed, slots].tolist()
        again = core.requests[R.num_preemptions, admitted].tolist()
        taken, evicted = drain_taken(core)
        self.in_flight.append(row)  # an empty step queues too
        return Decided(
            scheduled=list(zip(self.names(slots), tokens, strict=True)),
            preempted=self.names(preempted),
            new=[s for s, times in zip(admitted, again, strict=True) if not times],
            resumed=[s for s, times in zip(admitted, again, strict=True) if times],
            hit={s: c - n for s, c, n in zip(slots, computed, tokens, strict=True)},
            taken=taken,
            evicted=evicted,
        )

    def update(self) -> dict[str, Any]:
        """Apply the oldest step's outputs; returns who ended and the statistics since the last call."""
        core = self.state.core
        update_from_output(core, self.in_flight.pop(0))
        ints = core.record_ints[: self.count(K.num_records)]
        core.count[K.num_records] = 0
        reasons = {BY_LENGTH: "length", BY_STOP_TOKEN: "stop"}
        ended = [(self.name_of.pop(int(row[0])), reasons[int(row[-1])]) for row in ints]
        for name, _ in ended:
            del self.slot_of[name]
        totals = [self.count(index) for index in STATISTICS]
        since = [new - old for new, old in zip(totals, self.statistics, strict=True)]
        self.statistics = totals
        if not self.state.core.config.enable_prefix_caching:
            since = [0] * len(STATISTICS)  # vLLM keeps no statistics then
        return {"fin": ended, "pcs": since}

    def abort(self, name: Name) -> bool:
        """Abort a request if it is still known."""
        slot = self.slot_of.pop(name, None)
        if slot is None:
            return False
        del self.name_of[int(self.state.core.requests[R.request_id, slot])]
        abort_request(self.state.core, slot)
        self.state.core.count[K.num_records] -= 1
        return True

    def reset(self) -> int:
        """Reset the prefix cache if nothing is in use; whether it did."""
        done = int(reset_prefix_cache(self.state.core.pool, self.state.core.tree))
        self.was_reset |= done
        return done


def replay_scheduler(case: dict[str, Any]) -> None:
    """Replay a recorded scheduler case; raises Mismatch at the first difference."""
    cfg, full = case["cfg"], case["full"]
    replay = SchedulerReplay(
        EngineConfig(
            block_size=cfg["block_size"],
            num_gpu_blocks=cfg["num_blocks"],
            max_num_batched_tokens=cfg["max_num_batched_tokens"],
            max_num_seqs=cfg["max_num_seqs"],
            max_model_len=cfg["max_model_len"],
            long_prefill_token_threshold=cfg["long_prefill_token_threshold"],
            watermark=float(cfg["watermark"]),  # an integer would be another type to the compiler
            max_loras=cfg["max_loras"] or 0,
            priority_policy=cfg["policy"] == "priority",
            reserve_full_isl=cfg["reserve_full_isl"],
            enable_chunked_prefill=cfg["enable_chunked_prefill"],
            enable_prefix_caching=cfg["enable_prefix_caching"],
            async_scheduling=cfg["async_sched"],
        ),
        len(case["reqs"]) + 1,
    )
    rank = {name: i for i, name in enumerate(sorted(req["id"] for req in case["reqs"]))}
    pending = list(case["reqs"])
    depth = 2 if cfg["async_sched"] else 1
    recorded = iter(case["steps"])
    index = 0
    while pending or replay.has_requests() or replay.in_flight:
        if not replay.has_requests() and not replay.in_flight:
            index = max(index, pending[0]["arr"])
        got = engine_call(replay, case, index, pending, rank, depth, full)
        compare(index, next(recorded, {}), got)
        index += 1
    compare("after the last", next(recorded, {}), {})


def engine_call(
    replay: SchedulerReplay,
    case: dict[str, Any],
    index: int,
    pending: list[dict[str, Any]],
    rank: dict[str, int],
    depth: int,
    full: int,
) -> dict[str, Any]:
    """One call of the engine's loop, as a recorded step; takes arrivals from the front of `pending`."""
    got: dict[str, Any] = {"t": index}
    arrived = []
    while pending and pending[0]["arr"] <= index:
        request = pending.pop(0)
        add_recorded(replay, request, rank[request["id"]])
        arrived.append(request["id"])
    if arrived:
        got["arr"] = arrived
    if aborted := [name for name in case["aborts"].get(str(index), []) if replay.abort(name)]:
        got["abort"] = aborted
    if index in case["resets"]:
        got["reset"] = replay.reset()
    if replay.has_requests():
        show = show_full if full else show_checksums
        had = replay.state.core.requests[R.num_blocks].tolist()
        decided = replay.schedule()
        got["s"] = show(replay, decided, grown(replay, decided, had))
        # EngineCore.step_with_batch_queue: fill the queue before waiting for an output
        if decided.scheduled and len(replay.in_flight) < depth:
            return got
    if not replay.in_flight:
        return got
    updated = replay.update()
    ended = [list(pair) for pair in updated["fin"]]
    shown: dict[str, Any] = {"fin": ended, "pool": pool_state(replay.state.core)}
    if any(updated["pcs"]):
        shown["pcs"] = updated["pcs"]
    if replay.was_reset:
        shown["pcs_reset"] = replay.was_reset
        replay.was_reset = 0
    got["u"] = shown
    return got


def add_recorded(replay: SchedulerReplay, request: dict[str, Any], rank: int) -> None:
    """Let a recorded request arrive with the tokens its model emitted."""
    prompt = [t for s, n in request["segs"] for t in known_tokens(s, n, GOLDEN_VOCABULARY)]
    # a request that max_model_len ends never gets to its last outputs
    possible = replay.config.max_model_len - len(prompt) + 1
    outputs = known_tokens(request["oseg"], min(request["out"], possible), GOLDEN_VOCABULARY)
    if request["stop"] and request["out"] <= possible:
        outputs[-1] = STOP_TOKEN
    replay.add(
        request["id"],
        rank,
        prompt + outputs,
        len(prompt),
        arrival_time=request["at"],
        max_tokens=request["max_tokens"],
        priority=request["prio"],
        salt=request["salt"],
        lora=request["lora"],
    )


Grown = list[tuple[Name, list[int]]]


def grown(replay: SchedulerReplay, decided: Decided, had: list[int]) -> Grown:
    """The requests that ran on and got blocks, with these; `had` has each slot's number of blocks before."""
    have = replay.state.core.requests[R.num_blocks].tolist()
    admitted = {*decided.new, *decided.resumed}
    return [
        (replay.name(slot), replay.table(slot)[had[slot] :])
        for slot in decided.hit
        if have[slot] > had[slot] and slot not in admitted
    ]


def show_common(replay: SchedulerReplay, decided: Decided) -> dict[str, Any]:
    """The fields of a scheduled step that every recording has."""
    return {
        "n": len(decided.scheduled),
        "tot": sum(n for _, n in decided.scheduled),
        "pre": decided.preempted,
        "pool": pool_state(replay.state.core),
        "nrun": replay.count(K.num_running),
        "nwait": replay.count(K.num_waiting),
    }


def show_full(replay: SchedulerReplay, decided: Decided, blk: Grown) -> dict[str, Any]:
    """A scheduled step in full detail."""
    name, table, hit = replay.name, replay.table, decided.hit
    return show_common(replay, decided) | {
        "sched": [list(pair) for pair in decided.scheduled],
        "new": [[name(s), hit[s], table(s)] for s in decided.new],
        "resumed": [[name(s), hit[s], table(s)] for s in decided.resumed],
        "blk": [list(pair) for pair in blk],
        "ev": decided.evicted,
        "run": replay.names(replay.running()),
        "wait": replay.names(replay.waiting()),
    }


def show_checksums(replay: SchedulerReplay, decided: Decided, blk: Grown) -> dict[str, Any]:
    """A scheduled step as checksums."""
    name, table, hit = replay.name, replay.table, decided.hit

    def admitted(slots: list[int]) -> list[list[Any]]:
        return [[name(s), hit[s], len(table(s)), crc(table(s))] for s in slots]

    return show_common(replay, decided) | {
        "scrc": crc(f"{request}:{n}" for request, n in decided.scheduled),
        "new": admitted(decided.new),
        "resumed": admitted(decided.resumed),
        "bcrc": crc(f"{request}:{'/'.join(map(str, new))}" for request, new in blk),
        "nev": len(decided.evicted),
        "evcrc": crc(decided.evicted),
        "rcrc": crc(replay.names(replay.running())),
        "wcrc": crc(replay.names(replay.waiting())),
    }
