"""Where nothing is evicted, preempted or kept waiting for blocks, the size of the pool is no matter.

Known answer 16. Only the pool's own use differs, as it is a share of the pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.scenario_file import load
from sim.simulation import run

SCENARIO = """\
gpu: none
model: none
cost: {form: whole_step, base_us: 2000, token_us: 20}
engine: {block_size: 16, max_model_len: 800}
prime: LOAD
measure: LOAD
"""
LOADS = {
    "shared_prefix": "{kind: shared_prefix, num_requests: 150, num_groups: 9, prefix_len: 100, "
    "suffix_len: 60, output_len: 9, request_rate: 30}",
    "multi_turn": "{kind: multi_turn, num_sessions: 40, session_rate: 6, num_turns: 3, "
    "system_prompt_len: 70, user_len: 30, output_len: 20, think_time: 0.5}",
}
CHANGE = {"shared_prefix": "measure.suffix_len=50", "multi_turn": "measure.num_turns=4"}  # from prime
OWN_USE = (
    "mean_kv_cache_usage_perc", "max_kv_cache_usage_perc", "kv_memory_shares", "kv_memory_shares_when_fullest"
)  # fmt: skip
# kv_aware is none of them: the share of free KV is a part of its score.
ROUTERS = (
    "round_robin", "random", "least_outstanding", "power_of_two", "central_queue", "session_affinity",
    "prefix_affinity",
)  # fmt: skip


def figures(tmp_path: Path, load_kind: str, num_gpu_blocks: int, *overrides: str) -> dict[str, Any]:
    """The summary of a run without the pool's size and use."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.replace("LOAD", LOADS[load_kind]))
    changes = [f"engine.num_gpu_blocks={num_gpu_blocks}", CHANGE[load_kind], *overrides]
    summary = run(load(path, changes)).summary
    assert summary["num_evictions"] == summary["num_preemptions"] == 0
    assert summary["prefix_cache_hits"] > 0
    for figure in (*OWN_USE, "num_gpu_blocks"):
        del summary[figure]
    for row in summary["by_replica"]:
        for figure in OWN_USE:
            row.pop(figure, None)  # not every one is told of a replica
    return summary


@pytest.mark.parametrize("load_kind", LOADS)
@pytest.mark.parametrize("router", [None, *ROUTERS])
def test_the_size_of_an_ample_pool_is_no_matter(tmp_path: Path, load_kind: str, router: str | None) -> None:
    cluster = [] if router is None else [f"cluster={{replicas: 3, router: {router}}}"]
    small, large = (figures(tmp_path, load_kind, blocks, *cluster) for blocks in (3000, 40_000))
    assert small == large
