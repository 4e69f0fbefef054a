"""The two examples of vLLM's documentation (docs/design/prefix_caching.md), in logical time.

Each step takes one unit of time, so a request that arrives at time 3 first runs in step 4.
"""

from __future__ import annotations

from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.explain.walk import Walk
from sim.request import Batch, make_batch

BUDGET = 64  # tokens a step
R0_TEXT, R1_TAIL, R2_TAIL = 1, 2, 3  # segments


def fourteen_tokens() -> Walk:
    """Two prompts of 14 tokens, of which the first 10 are the same; the second comes while R0 runs."""
    return _walk(
        make_batch(
            [0.0, 1.0],
            prompt_len=[14, 14],
            output_len=[2, 3],
            segment_start=[0, 1, 3],
            segment_id=[R0_TEXT, R0_TEXT, R1_TAIL],
            segment_len=[16, 10, 7],
        )
    )


def timeline(*, free_all_last: bool) -> Walk:
    """R0 and R1 share 10 tokens and end one after the other; R2 shares 12 tokens with R0."""
    return _walk(
        make_batch(
            [0.0, 3.0, 5.0],
            prompt_len=[15, 14, 29],
            output_len=[4, 2, 1],
            segment_start=[0, 1, 3, 5],
            segment_id=[R0_TEXT, R0_TEXT, R1_TAIL, R0_TEXT, R2_TAIL],
            segment_len=[19, 10, 6, 12, 18],
        ),
        free_all_last=free_all_last,
    )


def _walk(batch: Batch, *, free_all_last: bool = False) -> Walk:
    config = EngineConfig(
        block_size=4,
        num_gpu_blocks=11,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=4,
        max_model_len=BUDGET,
        free_all_last=free_all_last,
    )
    return Walk(config, linear_cost(1.0, 0.0, max_num_batched_tokens=BUDGET), [batch])
