"""The 14-token example at the size of a service: what each block size hits."""

from __future__ import annotations

from sim.scenario import Scenario
from sim.simulation import run

PROMPT_LEN, SHARED_LEN = 1400, 1000  # tokens
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # tokens


def hit_rates(num_requests: int) -> dict[int, float]:
    """The hit rate of so many requests by block size; each is a whole run, eight requests a second."""
    return {size: _hit_rate(num_requests, size) for size in BLOCK_SIZES}


def _hit_rate(num_requests: int, block_size: int) -> float:
    scenario = Scenario.model_validate(
        {
            "name": "fourteen tokens at scale",
            "engine": {"block_size": block_size, "num_gpu_blocks": 524_288 // block_size + 1},
            "workload": {
                "kind": "fourteen_tokens",
                "num_requests": num_requests,
                "prompt_len": PROMPT_LEN,
                "shared_len": SHARED_LEN,
                "output_len": 128,
                "request_rate": 8,
            },
        }
    )
    result = run(scenario)
    result.records.discard()
    return float(result.summary["prefix_cache_hit_rate"])
