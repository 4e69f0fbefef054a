"""Replay a recorded run of a whole vLLM engine (format vllm_cpu_truth/1), step by step.

The engine's requests arrive as recorded, before the step that first saw them; the core must then
schedule, hit, resume, preempt, take and evict exactly what the engine did.
"""

from __future__ import annotations

from typing import Any

from sim.blocks import FREE
from sim.columns import K, R
from sim.core import EngineConfig
from sim.verify.compare import compare
from sim.verify.contents import crc, known_tokens
from sim.verify.scheduler import SchedulerReplay

SCHEMA = "vllm_cpu_truth/1"
VOCABULARY = 31990


def engine_config(run: dict[str, Any]) -> EngineConfig:
    """The configuration that the recorded scheduler really used."""
    effective = run["effective"]
    return EngineConfig(
        block_size=effective["block_size"],
        num_gpu_blocks=effective["num_gpu_blocks"],
        max_num_batched_tokens=effective["max_num_batched_tokens"],
        max_num_seqs=effective["max_num_seqs"],
        max_model_len=effective["max_model_len"],
        long_prefill_token_threshold=effective["long_prefill_token_threshold"],
        watermark=effective["watermark"],
        priority_policy=effective["policy"] == "priority",
        reserve_full_isl=effective["reserve_full_isl"],
        enable_chunked_prefill=effective["chunked"],
        enable_prefix_caching=effective["enable_prefix_caching"],
    )


def all_tokens(requests: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Each request's prompt and generated tokens; a prompt may hold what another request generated."""
    generated = {request["id"]: request["o_ids"] for request in requests}
    tokens = {}
    for request in requests:
        prompt: list[int] = []
        for segment in request["segs"]:
            if segment[0] == "o":
                prompt += generated[segment[1]][: segment[2]]
            else:
                prompt += known_tokens(segment[0], segment[1], VOCABULARY)
        assert len(prompt) == request["np"], request["id"]
        tokens[request["id"]] = prompt + request["o_ids"]
    return tokens


def replay_engine_run(run: dict[str, Any]) -> None:
    """Replay a recorded engine run; raises Mismatch at the first difference."""
    replay = SchedulerReplay(engine_config(run), len(run["reqs"]))
    by_id = {request["id"]: request for request in run["reqs"]}
    tokens = all_tokens(run["reqs"])
    for index, step in enumerate(run["steps"]):
        for name in step.get("arr", []):
            replay.add(
                name,
                len(replay.name_of),
                tokens[name],
                by_id[name]["np"],
                arrival_time=by_id[name]["T"]["arr"] * 1e-6,
                priority=by_id[name].get("prio", 0),
                salt=by_id[name].get("salt"),
            )
        compare(index, {k: v for k, v in step.items() if k not in ("t", "w", "arr")}, run_step(replay, run))
    compare("after the last", {"busy": False}, {"busy": replay.count(K.num_running) > 0})


def run_step(replay: SchedulerReplay, run: dict[str, Any]) -> dict[str, Any]:
    """Schedule and update once; the decisions as the recording has them (a zero is absent)."""
    before = progress(replay)
    decided = replay.schedule()
    core = replay.state.core
    # the engine's warm-up left its free queue permuted: our block i is its free0[i - 1]
    taken = [run["free0"][block - 1] for block in decided["taken"]]
    evicted = [run["free0"][block - 1] for block in decided["ev"]]
    name, hit = replay.name, decided["hit"]
    shown: dict[str, Any] = {"s": [[r, n, hit[replay.slot_of[r]]] for r, n in decided["sched"]]}
    shown["new"] = [[name(s), hit[s]] for s in decided["new"]]
    shown["res"] = [[name(s), hit[s]] for s in decided["resumed"]]
    shown["pre"] = [[r, *before[r]] for r in decided["pre"]]
    shown["nb"], shown["nev"] = len(taken), len(evicted)
    shown["bcrc"] = crc(taken) if taken else 0
    shown["ecrc"] = crc(evicted) if evicted else 0
    shown["fr"] = int(core.pool.count[FREE])
    shown["q"] = [len(decided["run"]), len(decided["wait"])]
    updated = replay.update()
    shown["fin"] = [r for r, _ in updated["fin"]]
    shown["pcs"] = updated["pcs"] if any(updated["pcs"]) else []
    shown["fr2"] = int(core.pool.count[FREE])
    always = ("s", "fr", "q", "fr2")
    return {field: value for field, value in shown.items() if value or field in always}


def progress(replay: SchedulerReplay) -> dict[str, list[int]]:
    """Tokens computed and emitted so far by each running request."""
    requests = replay.state.core.requests
    return {
        replay.name(slot): [
            int(requests[R.num_computed, slot]),
            int(requests[R.num_tokens, slot] - requests[R.prompt_len, slot]),
        ]
        for slot in replay.running()
    }
