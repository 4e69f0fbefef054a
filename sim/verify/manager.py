"""Replay a recorded run of vLLM's KVCacheManager, operation by operation."""

from __future__ import annotations

from typing import Any

import numpy as np

from sim import blocks
from sim._jit import entry
from sim.caches import apc
from sim.columns import B, C, K, R
from sim.core import NO_SEAT, PREEMPTED, RUNNING, WAITING, EngineConfig
from sim.state import State
from sim.verify.compare import compare, drain_taken, free_queue, pool_state
from sim.verify.contents import GOLDEN_VOCABULARY, Contents, crc, known_tokens

forget = entry(blocks.forget)
reset_prefix_cache = entry(blocks.reset_prefix_cache)
take_seat = entry(apc.take_seat)
leave_seat = entry(apc.leave_seat)
get_computed_tokens = entry(apc.get_computed_tokens)
allocate = entry(apc.allocate)
free = entry(apc.free)


class ManagerReplay:
    """The core under a recorded case's operations; each `op_*` returns what the recording holds."""

    def __init__(self, case: dict[str, Any]) -> None:
        cfg = case["cfg"]
        self.full_order = cfg["num_blocks"] <= 66
        self.block_size = cfg["block_size"]
        self.state = State(
            EngineConfig(
                block_size=cfg["block_size"],
                num_gpu_blocks=cfg["num_blocks"],
                max_num_batched_tokens=1 << 20,
                max_num_seqs=len(case["reqs"]) + 1,
                max_model_len=cfg["max_model_len"],
                watermark=cfg["watermark"],
                enable_prefix_caching=cfg["enable_caching"],
                use_eagle=cfg["use_eagle"],
            ),
            taken_log=4 * cfg["num_blocks"],
            table_len=cfg["max_model_len"] // cfg["block_size"],
        )
        outputs: dict[str, list[int]] = {rid: [] for rid in case["reqs"]}
        for op, _ in case["ops"]:
            if op[0] == "extend" and len(op) > 4:
                outputs[op[1]].append(op[4])
        contents = Contents(cfg["block_size"])
        self.slots: dict[str, int] = {}
        self.evicted: list[int] = []  # by the current operation, if it evicts by id
        for rid, req in case["reqs"].items():
            prompt = [t for s, n in req["segs"] for t in known_tokens(s, n, GOLDEN_VOCABULARY)]
            # one token nobody computes keeps the output from being empty
            tokens = prompt + outputs[rid] + [0]
            batch = contents.batch(tokens, len(prompt), salt=req["salt"], lora=req["lora"])
            slot = int(self.state.arena.load(batch)[0])
            self.state.core.requests[R.status, slot] = WAITING
            self.slots[rid] = slot

    def sit(self, slot: int) -> None:
        """Seat a request beside the others (a scheduler seats only its queue's head)."""
        if self.state.core.requests[R.seat, slot] == NO_SEAT:
            while not take_seat(self.state.core, slot):
                self.state.grow_tree()
            self.state.core.count[K.seated_head] = -1

    def find(self, slot: int) -> tuple[int, dict[str, Any]]:
        """The hit in blocks, and as the recording shows it."""
        core = self.state.core
        hit = int(get_computed_tokens(core, slot)) // self.block_size
        chains = core.seat_chains[core.requests[R.seat, slot]][:hit]
        return hit, {"hit": hit * self.block_size, "hit_blocks": core.tree.chains[C.block, chains].tolist()}

    def table(self, slot: int) -> list[int]:
        """A request's block table."""
        requests = self.state.core.requests
        if requests[R.seat, slot] == NO_SEAT:
            return []
        return self.state.core.seat_blocks[requests[R.seat, slot]][: requests[R.num_blocks, slot]].tolist()  # type: ignore[no-any-return]

    def op_lookup(self, rid: str) -> dict[str, Any]:
        slot = self.slots[rid]
        seated = self.state.core.requests[R.seat, slot] != NO_SEAT
        self.sit(slot)
        found = self.find(slot)[1]
        if not seated:
            leave_seat(self.state.core, slot)
        return found

    def op_admit(
        self, rid: str, n: int, full_fit: int, reserved: int, has_sched: int, lookahead: int
    ) -> dict[str, Any]:
        slot = self.slots[rid]
        self.sit(slot)
        hit, result = self.find(slot)
        core = self.state.core
        ok = allocate(core, slot, n, hit, lookahead, bool(full_fit), reserved, bool(has_sched))
        result["ok"] = int(ok)
        if ok:
            result["blocks"] = self.table(slot)
            result["new"] = result["blocks"][hit:]
            core.requests[R.num_computed, slot] = hit * self.block_size + n
            core.requests[R.status, slot] = RUNNING
        else:
            leave_seat(core, slot)
        return result

    def op_extend(self, rid: str, n: int, lookahead: int, token: int | None = None) -> dict[str, Any]:
        slot, core = self.slots[rid], self.state.core
        core.requests[R.num_tokens, slot] += token is not None
        before = len(self.table(slot))
        ok = allocate(core, slot, n, 0, lookahead, False, 0, False)
        if not ok:
            return {"ok": 0}
        core.requests[R.num_computed, slot] += n
        return {"ok": 1, "new": self.table(slot)[before:]}

    def op_free(self, rid: str) -> dict[str, Any]:
        slot = self.slots[rid]
        freed = self.table(slot)
        free(self.state.core, slot)
        leave_seat(self.state.core, slot)
        self.state.core.requests[R.num_computed, slot] = 0
        self.state.core.requests[R.status, slot] = WAITING
        return {"freed": freed}

    def op_preempt(self, rid: str) -> dict[str, Any]:
        result = self.op_free(rid)
        self.state.core.requests[R.status, self.slots[rid]] = PREEMPTED
        return result

    def op_reset(self) -> dict[str, Any]:
        return {"ok": int(reset_prefix_cache(self.state.core.pool, self.state.core.tree))}

    def op_evict(self, ids: list[int]) -> dict[str, Any]:
        core = self.state.core
        self.evicted = sorted(block for block in ids if core.pool.blocks[B.chain, block] != 0)
        for block in self.evicted:
            forget(core.pool, core.tree, block)
        return {}

    def snapshot(self) -> dict[str, Any]:
        """The pool after an operation (the recording's "s")."""
        core = self.state.core
        keyed = np.flatnonzero(core.pool.blocks[B.chain]).tolist()
        refs = core.pool.blocks[B.ref_cnt, 1:]
        result: dict[str, Any] = pool_state(core)
        result |= {
            "rmax": int(refs.max()),
            "rpos": int(np.count_nonzero(refs)),
            "nhblk": len(keyed),
            "hcrc": crc(keyed),
        }
        evicted = drain_taken(core)[1] or self.evicted
        if evicted:
            result["ev"] = evicted
        if self.full_order:
            result["free"] = free_queue(core)
        return result

    def run(self, op: list[Any]) -> dict[str, Any]:
        """Carry out one recorded operation."""
        self.evicted = []
        result: dict[str, Any] = getattr(self, f"op_{op[0]}")(*op[1:])
        result["s"] = self.snapshot()
        return result


def replay_manager(case: dict[str, Any]) -> None:
    """Replay a recorded manager case; raises Mismatch at the first difference."""
    replay = ManagerReplay(case)
    for index, (op, expected) in enumerate(case["ops"]):
        compare(f"{index} ({' '.join(map(str, op))})", expected, replay.run(op))
