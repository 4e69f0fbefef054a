"""Replay a recorded run of a whole vLLM engine, call by call (formats: docs/recordings.md).

The core is called as the engine's scheduler was, in the order of the recording, which also says which
steps were in flight together. It must then schedule, hit, resume, preempt, take and evict exactly what the
engine did. What is kept follows the requests that live at one time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.blocks import FREE
from sim.columns import K, R
from sim.core import EngineConfig
from sim.errors import InputError
from sim.recording import Add, Call, End, Header, Reset, Schedule, Update, calls, read_header
from sim.recording.lines import Abort, Pause
from sim.recording.source import read_names
from sim.request import Batch, make_batch
from sim.verify.compare import Mismatch, compare, free_queue
from sim.verify.contents import crc
from sim.verify.scheduler import SchedulerReplay

SELF_PREEMPTION = (
    "this may be why: under the priority policy vLLM 0.32 ends a step at a request that preempts itself, "
    "and the core goes on to the next one, as 0.33 does"
)


def engine_config(header: Header) -> EngineConfig:
    """The configuration that the recorded scheduler really used."""
    effective = header.effective
    return EngineConfig(
        block_size=effective.block_size,
        num_gpu_blocks=effective.num_gpu_blocks,
        max_num_batched_tokens=effective.max_num_scheduled_tokens or effective.max_num_batched_tokens,
        max_num_seqs=effective.max_num_active_seqs or effective.max_num_seqs,
        max_model_len=effective.max_model_len,
        long_prefill_token_threshold=effective.long_prefill_token_threshold,
        watermark=effective.watermark,
        max_loras=effective.max_loras or 0,
        priority_policy=effective.policy == "priority",
        reserve_full_isl=effective.reserve_full_isl,
        enable_chunked_prefill=effective.chunked,
        enable_prefix_caching=effective.enable_prefix_caching,
        async_scheduling=header.is_async,
    )


def replay_recording(path: Path, progress: Callable[[int], None] | None = None) -> int:
    """Replay a recording; returns its number of steps, and tells `progress` of each.

    Raises Mismatch at the first difference, InputError if it is none or asks for what the core cannot do.
    """
    header = read_header(path)
    replay = RecordedEngine(path, header)
    try:
        for call in calls(path):
            replay.follow(call)
            if progress is not None and isinstance(call, Schedule):
                progress(replay.step)
    except Mismatch as mismatch:
        if header.effective.policy == "priority" and str(header.versions.get("vllm")).startswith("0.32."):
            mismatch.note = SELF_PREEMPTION
        raise
    return replay.step


class RecordedEngine:
    """The core behind the calls of a recorded scheduler, and where it stands."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        config = engine_config(header)
        self.engine = SchedulerReplay(
            config, config.max_num_seqs + 1, table_len=config.max_model_len // config.block_size
        )
        self.adapters: dict[str, int] = {}
        self.namespaces: dict[tuple[str | None, str | None], int] = {(None, None): 0}
        names = read_names(path) if config.priority_policy else []
        self.ranks = {name: rank for rank, name in enumerate(sorted(names))}  # the last tie-break
        self.block_ids = header.block_ids()  # the engine's free queue may have begun permuted
        self.step = 0  # scheduled so far

    def not_modelled(self, what: str) -> InputError:
        """The recording cannot be replayed beyond this point."""
        return InputError(
            f"{self.path}: {what}, which is not modelled: {self.step} steps until then, 0 differences"
        )

    def follow(self, call: Call) -> None:
        """What the engine did next."""
        match call:
            case Add():
                self.add(call)
            case Schedule():
                self.schedule(call)
            case Update():
                self.update(call)
            case Abort():
                for row in call.rows:
                    self.engine.abort(row)
            case Reset():
                self.reset(call)
            case Pause():
                raise self.not_modelled(f"the server was paused ({call.state})")
            case End():
                self.end(call)

    def add(self, call: Add) -> None:
        """A request arrives."""
        if call.line.uses:
            raise self.not_modelled(f"request {call.row} ({call.name}) uses {', '.join(call.line.uses)}")
        self.engine.load(call.row, self.ranks.get(call.name, call.row), self.batch(call))

    def batch(self, call: Add) -> Batch:
        """The request as the core has it; one that was aborted or did not end goes on to its limit."""
        line, segments = call.line, call.segments
        longest = self.header.effective.max_model_len
        num_tokens = call.num_tokens
        if num_tokens is None or call.aborted:
            num_tokens = min(line.prompt_len + line.max_tokens, longest)
        num_tokens = max(num_tokens, line.prompt_len + 1)
        rest = num_tokens - sum(length for _, length in segments)
        if rest > 0:
            segments = [*segments, (-1 - call.row, rest)]
        namespace = (line.lora, line.salt or None)
        return make_batch(
            [line.arr * 1e-6],
            [line.prompt_len],
            [num_tokens - line.prompt_len],
            [0, len(segments)],
            [segment for segment, _ in segments],
            [length for _, length in segments],
            max_tokens=line.max_tokens,
            priority=line.priority,
            namespace=self.namespaces.setdefault(namespace, len(self.namespaces)),
            lora=self.adapters.setdefault(line.lora, len(self.adapters) + 1) if line.lora else 0,
        )

    def schedule(self, call: Schedule) -> None:
        """Schedule a step and compare what was decided."""
        if call.throttle:
            raise self.not_modelled("data parallelism held prefills back")
        engine, index = self.engine, self.step
        self.step += 1
        before = engine.state.core.requests[[R.num_computed, R.num_tokens, R.prompt_len]]
        decided = engine.schedule()
        name, hit, slot_of = engine.name, decided.hit, engine.slot_of
        taken = [self.block_ids[block] for block in decided.taken]
        evicted = [self.block_ids[block] for block in decided.evicted]
        got = {
            "s": [(row, new, hit[slot_of[row]]) for row, new in decided.scheduled],
            "new": [(name(slot), hit[slot]) for slot in decided.new],
            "res": [(name(slot), hit[slot]) for slot in decided.resumed],
            "pre": [(row, *_progress(before[:, slot_of[row]])) for row in decided.preempted],
            "nb": len(taken),
            "bcrc": crc(taken),
            "nev": len(evicted),
            "ecrc": crc(evicted),
            "fr": int(engine.state.core.pool.count[FREE]),
            "q": (engine.count(K.num_running), engine.count(K.num_waiting)),
        }
        recorded = {field: getattr(call, field) for field in got if field != "s"}
        compare(index, {"s": call.scheduled} | recorded, got)

    def update(self, call: Update) -> None:
        """Apply the oldest step in flight and compare what came of it."""
        updated = self.engine.update()
        got = {
            "fin": [row for row, _ in updated["fin"]],
            "pcs": tuple(updated["pcs"]) if self.header.effective.log_stats else (0,) * 6,
            "fr2": int(self.engine.state.core.pool.count[FREE]),
        }
        compare(call.step, {field: getattr(call, field) for field in got}, got)

    def reset(self, call: Reset) -> None:
        """Reset the prefix cache and compare whether that was possible."""
        if call.pre:
            raise self.not_modelled("a reset of the prefix cache preempted what ran")
        compare(f"{self.step}, before it", {"reset": call.done}, {"reset": bool(self.engine.reset())})

    def end(self, call: End) -> None:
        """Compare the free queue of a server that has nothing to do."""
        queue = [self.block_ids[block] for block in free_queue(self.engine.state.core)]
        got = {"end_free": crc(queue), "num_free": len(queue)}
        known = {field: getattr(call, field) for field in got if getattr(call, field) is not None}
        compare(f"{self.step}, before it", known, {field: got[field] for field in known})


def _progress(columns: Any) -> tuple[int, int]:
    """Tokens computed and outputs so far, from num_computed, num_tokens and prompt_len."""
    computed, tokens, prompt = columns.tolist()
    return computed, tokens - prompt
