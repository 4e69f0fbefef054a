"""A server under load: 2,000 requests, simulated as `prefixsim run` does, and the one-pass curve."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.curves.load import Load
from sim.curves.study import Asked, Study, study
from sim.explore.address import POOLS, Controls
from sim.scenario import Scenario
from sim.simulation import run

REQUESTS = 2000
TURNS = 10  # of a session
answered: set[str] = set()  # caches whose machine code is there: a first run waits for it


class Answer(NamedTuple):
    """What a run said. Times are milliseconds."""

    scenario: Scenario
    summary: dict[str, Any]
    ttft: npt.NDArray[np.float64]
    queueing: npt.NDArray[np.float64]
    usual_hit: int  # tokens: the median of the requests that hit something; 0 where none did
    study: Study  # the hit rate at every capacity; of vLLM's blocks, whatever the cache

    @property
    def hit_rate(self) -> float | None:
        """Hits over prompt tokens; None where nothing is looked up and no prefix is reserved."""
        s = self.summary
        hits: float | None = s["prefix_cache_hit_rate"]
        return hits if s["token_fates"] or s["prefix_cache_hits"] else None

    @property
    def fates(self) -> dict[str, int]:
        """Prompt tokens by fate; `hit` and `computed` where no more is told of them."""
        s = self.summary
        hits, total = s["prefix_cache_hits"], s["total_input_tokens"]
        return s["token_fates"] or {"hit": hits, "computed": total - hits}


def workload_of(controls: Controls) -> dict[str, Any]:
    """The workload section of the scenario: REQUESTS requests that share `prefix` tokens, in its way."""
    kind, shared = controls.workload, controls.prefix
    paced: dict[str, Any] = {"num_requests": REQUESTS, "request_rate": controls.rate}
    match kind:
        case "shared_prefix":
            own: dict[str, Any] = {
                "num_groups": 32,
                "prefix_len": shared,
                "suffix_len": 128,
                "output_len": 128,
            }
        case "documents":
            own = {"num_documents": 100, "document_popularity": "zipf", "document_len": shared}
            own |= {"question_len": 64, "output_len": 64}
        case "scan":
            own = {"prompt_len": shared + 128, "output_len": 128}
        case _:
            paced = {"num_sessions": REQUESTS // TURNS, "session_rate": controls.rate / TURNS}
            own = {"num_turns": TURNS, "num_system_prompts": 8, "system_prompt_len": shared}
            own |= {"user_len": 64, "output_len": 96, "think_time": 10}
    return {"kind": kind, **paced, **own}


def scenario_of(controls: Controls) -> Scenario:
    """The scenario that the controls stand for: one H100 with Llama 3.1 8B.

    Steps are scheduled one after the other, which every cache can do.
    """
    cache: dict[str, Any] = {"kind": controls.cache}
    if controls.cache == "paged" and not controls.caching:
        cache["reserve_prefixes"] = False
    return Scenario.model_validate(
        {
            "name": "explore",
            "model": "llama-3.1-8b",
            "gpu": "h100-sxm",
            "cache": cache,
            "engine": {
                "block_size": controls.block_size,
                "num_gpu_blocks": controls.pool // controls.block_size + 1,
                "max_num_batched_tokens": 8192,
                "max_num_seqs": 256,
                "async_scheduling": False,
                "enable_prefix_caching": controls.caching,
            },
            "workload": workload_of(controls),
        }
    )


@lru_cache(maxsize=64)
def answer(controls: Controls) -> Answer:
    """Simulate. The same controls are answered from memory. Raises InputError where they cannot run.

    The controls of the two prompts have no meaning here; leave them at their defaults.
    """
    scenario = scenario_of(controls)
    result = run(scenario)
    ttft, queueing = (result.records.column(name) for name in ("ttft_ms", "queue_time_ms"))
    hits = result.records.column("num_cached_tokens")
    usual = int(np.median(hits[hits > 0])) if hits.any() else 0
    result.records.discard()
    answered.add(controls.cache)
    curve = _study(controls._replace(pool=POOLS[-1], cache="apc", caching=True))
    return Answer(scenario, result.summary, ttft, queueing, usual, curve)


@lru_cache(maxsize=64)
def _study(controls: Controls) -> Study:
    """The curve; of the controls it knows the workload and the block size."""
    load = Load("explore", scenario_of(controls).workload, outputs=True)
    return study(load, Asked([controls.block_size]))[0]
