"""Contiguous regions: how long they are, who waits for one, and what lies in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Run, engine, prompts, run
from test_buddy import chunks
from test_determinism import Case, at_every_step, cases, in_plain_python, outcome

from sim.cache_figures import memory_shares
from sim.cache_kinds import ContiguousKind
from sim.caches.contiguous import audit
from sim.caches.contiguous.buddy import Buddy, new_buddy
from sim.clock import Clock
from sim.columns import K
from sim.core import Core
from sim.cost import linear_cost
from sim.memory_states import STATES
from sim.simulation import run as run_scenario

KINDS = [ContiguousKind(reservation=name) for name in ("oracle", "pow2", "max")]
ORACLE, POW2, MAX = KINDS


def tokens(prompt_len: int, output_len: int, kind: ContiguousKind, **changes: Any) -> int:
    """The tokens of the region that one request holds."""
    config = engine(block_size=1, num_gpu_blocks=4097, max_model_len=2048, **changes)
    found = run(prompts([[(0, prompt_len)]], output_len=output_len), config, kind=kind)
    return found.totals.max_blocks_used


@pytest.mark.parametrize(
    ("kind", "lengths", "expected"),
    [
        (ORACLE, (103, 25), 128),
        (ORACLE, (104, 25), 256),
        (POW2, (96, 25), 128),  # the paper's example: 32 places for 25 outputs
        (POW2, (97, 25), 256),
        (POW2, (96, 32), 128),
        (POW2, (96, 33), 256),
        (POW2, (2000, 33), 2048),  # never more than max_model_len
        (MAX, (1, 1), 2048),
    ],
)
def test_a_region_is_a_power_of_two_that_holds_prompt_and_reservation(
    kind: ContiguousKind, lengths: tuple[int, int], expected: int
) -> None:
    assert tokens(*lengths, kind) == expected


def test_regions_are_of_whole_blocks() -> None:
    """100 + 25 tokens are 8 blocks of 16, 125 + 4 are 9, so 16."""
    config = engine(num_gpu_blocks=65)
    assert run(prompts([[(0, 100)]], output_len=25), config, kind=ORACLE).totals.max_blocks_used == 8
    assert run(prompts([[(0, 125)]], output_len=4), config, kind=ORACLE).totals.max_blocks_used == 16


def test_seven_requests_at_most_with_max_in_the_papers_memory() -> None:
    """Figure 13: Orca (Max) batches 7.00 requests on both data sets; 12 GiB hold 15,728 tokens."""
    config = engine(block_size=1, num_gpu_blocks=15_729, max_model_len=2048)
    found = run(prompts([[(0, 50)]] * 20, output_len=30, gap=0.0), config, kind=MAX)
    assert found.totals.max_num_running == 7


def test_nothing_is_shared() -> None:
    found = run(prompts([[(0, 320)]] * 3, output_len=4, gap=0.0), engine(num_gpu_blocks=97), kind=ORACLE)
    assert found.hits == [0, 0, 0]
    assert found.totals.max_blocks_used == 96
    assert found.totals.num_scheduled_tokens == 3 * 323


def test_nobody_overtakes_a_refused_head() -> None:
    """Of 32 blocks a first request takes 16; the second needs 32 and waits, and so does the third."""
    batch = prompts([[(0, 200)], [(1, 500)], [(2, 20)]], output_len=[40, 4, 2], gap=1e-6)
    found = run(batch, engine(num_gpu_blocks=33), kind=ORACLE)
    first, second, third = found.records["scheduled_time"]
    assert second >= found.records["finish_time"][0]
    assert third >= found.records["finish_time"][1]
    alone = run(prompts([[(0, 200)], [(2, 20)]], output_len=[40, 2], gap=1e-6), engine(num_gpu_blocks=33),
                kind=ORACLE)  # fmt: skip
    assert alone.records["scheduled_time"][1] < alone.records["finish_time"][0]
    assert first < second


def test_a_region_that_no_pool_of_that_size_has_is_refused() -> None:
    """40 blocks are 32 + 8: a request of 33 blocks would wait for ever."""
    batch = prompts([[(0, 513)], [(1, 500)]], output_len=1)
    found = run(batch, engine(num_gpu_blocks=41), kind=ORACLE)
    assert found.records["refused"].tolist() == [1, 0]
    assert run(batch, engine(num_gpu_blocks=65), kind=ORACLE).records["refused"].tolist() == [0, 0]


def check(core: Core) -> None:
    """What the cache's own audit asserts; and free memory is merged again once nobody runs."""
    audit(core)
    if core.count[K.num_running] == 0:
        memory = Buddy(core.cache.chunks, core.cache.sizes)
        assert chunks(memory) == chunks(new_buddy(core.config.num_gpu_blocks - 1))


@given(cases(), st.sampled_from(KINDS))
@settings(max_examples=100, deadline=None)
def test_regions_at_every_step(case: Case, kind: ContiguousKind) -> None:
    observed = outcome(case, at_every_step(), kind=kind, observe=check)
    assert b"num_preemptions=0" in observed
    assert outcome(case, Clock.peek, kind=kind) == observed, "cut at every event"
    assert outcome(case, kind=kind) == observed, "cut at the next outside event"


def sample() -> str:
    """What two loads give under each reservation."""
    from hashlib import sha256

    batch = prompts([[(0, 30 + 7 * i)] for i in range(40)], output_len=range(1, 41), gap=0.01)
    config = engine(num_gpu_blocks=50, max_model_len=500, memory_states=True)
    found = [run(batch, config, kind=kind) for kind in KINDS]
    text = repr([(r.totals.state_times.tolist(), r.records["finish_time"].tolist()) for r in found])
    return sha256(text.encode()).hexdigest()


def test_compiled_or_not() -> None:
    assert in_plain_python("from test_contiguous import sample; print(sample())").strip() == sample()


def test_each_sample_has_a_region_with_the_prompt() -> None:
    """Three samples of 60 + 4 tokens: three regions of 4 blocks; the prompt is computed once."""
    batch = prompts([[(0, 60)]], output_len=4, n=[3])
    found = run(batch, engine(num_gpu_blocks=13), kind=ORACLE)
    assert found.totals.max_blocks_used == 12
    assert found.totals.num_scheduled_tokens == 60 + 3 * 3
    assert run(batch, engine(num_gpu_blocks=12), kind=ORACLE).records["refused"].tolist() == [1]
    assert run(batch, engine(max_num_seqs=2), kind=ORACLE).records["refused"].tolist() == [1]


def test_samples_take_places_of_sequences() -> None:
    """Of four places two samples of a first request take two, and three of a second wait for three."""
    batch = prompts([[(0, 60)], [(1, 60)]], output_len=4, gap=1e-6, n=[2, 3])
    found = run(batch, engine(max_num_seqs=4), kind=ORACLE)
    assert found.records["scheduled_time"][1] >= found.records["finish_time"][0]
    roomy = run(batch, engine(max_num_seqs=5), kind=ORACLE)
    assert roomy.records["scheduled_time"][1] < roomy.records["finish_time"][0]


def test_samples_by_state() -> None:
    """Two samples of 10 + 4 in two regions of 16: the second is empty until the prompt is computed."""
    config = engine(block_size=1, num_gpu_blocks=33, memory_states=True)
    cost = linear_cost(1.0, 0.0, max_num_batched_tokens=config.max_num_batched_tokens)
    found = run(prompts([[(0, 10)]], output_len=4, n=[2]), config, cost, kind=ORACLE)
    # of 2 * 14 slots that were asked for, those with a token, step by step
    tokens = (10 + 22 + 24 + 26) / 4
    assert shares(found, config) == [tokens, 28 - tokens, 0.0, 4.0, 0.0]


# what the memory holds


def shares(found: Run, config: Any, key: str = "kv_memory_shares") -> list[float]:
    """Slots by state, of the pool's, by hand comparable."""
    slots = (config.num_gpu_blocks - 1) * config.block_size
    summary = memory_shares(found.totals, config, 1)[key]
    return [round(slots * summary[name], 9) for name in STATES]


def states(kind: Any, prompt_len: int, output_len: int, **changes: Any) -> tuple[list[float], list[float]]:
    """Slots by state of one request alone, whose steps all take a second: mean and fullest."""
    config = engine(memory_states=True, **changes)
    cost = linear_cost(1.0, 0.0, max_num_batched_tokens=config.max_num_batched_tokens)
    found = run(prompts([[(0, prompt_len)]], output_len=output_len), config, cost, kind=kind)
    return shares(found, config), shares(found, config, "kv_memory_shares_when_fullest")


def test_a_region_by_state() -> None:
    """10 + 4 tokens in 16: computed 10, 11, 12, 13, and two slots are the allocator's rounding."""
    mean, fullest = states(ORACLE, 10, 4, block_size=1, num_gpu_blocks=33)
    assert mean == [11.5, 2.5, 0.0, 2.0, 16.0]
    assert fullest == [13.0, 1.0, 0.0, 2.0, 16.0]


def test_what_is_reserved_and_never_filled_is_internal() -> None:
    """pow2 gives 10 + 5 tokens 10 + 8 places, in a region of 32; max all 20 of max_model_len."""
    assert states(POW2, 10, 5, block_size=1, num_gpu_blocks=65)[0] == [12.0, 3.0, 3.0, 14.0, 32.0]
    changes = {"block_size": 1, "num_gpu_blocks": 65, "max_model_len": 20}
    assert states(MAX, 10, 5, **changes)[0] == [12.0, 3.0, 5.0, 12.0, 32.0]


def test_blocks_by_state() -> None:
    """Blocks of 4 under apc, 10 + 4 tokens: 12, 12, 12 and 16 slots held; two of the last never filled."""
    from sim.cache_kinds import APC

    mean, fullest = states(APC, 10, 4, block_size=4, num_gpu_blocks=9)
    assert mean == [11.5, (2 + 1 + 0 + 1) / 4, 2 / 4, 0.0, 19.0]
    assert fullest == [13.0, 1.0, 2.0, 0.0, 16.0]


def test_free_memory_that_does_not_do_is_fragmented() -> None:
    """Of 32 blocks of one token a request has 16: one of 17 waits, and 16 free slots are of no use."""
    config = engine(block_size=1, num_gpu_blocks=33, memory_states=True)
    cost = linear_cost(1.0, 0.0, max_num_batched_tokens=config.max_num_batched_tokens)
    batch = prompts([[(0, 12)], [(1, 15)]], output_len=[4, 2], gap=0.5)
    found = run(batch, config, cost, kind=ORACLE)
    # steps of the first: 12, 13, 14, 15 tokens of 16; in all but the first step the second waits
    # then the second: 15, 16 tokens of 17 in 32
    sums = [12 + 13 + 14 + 15 + 15 + 16, 4 + 3 + 2 + 1 + 2 + 1, 0, 0 + 3 * 16 + 2 * 15, 16]
    assert shares(found, config) == [round(total / 6, 9) for total in sums]


def test_a_shared_block_counts_once() -> None:
    """Three requests with the same two full blocks, and a block each."""
    from sim.cache_kinds import APC

    config = engine(block_size=4, num_gpu_blocks=33, memory_states=True)
    batch = prompts([[(0, 8), (i + 1, 4)] for i in range(3)], output_len=1, gap=0.0)
    cost = linear_cost(1.0, 0.0, max_num_batched_tokens=config.max_num_batched_tokens)
    assert shares(run(batch, config, cost, kind=APC), config)[0] == 8 + 3 * 4


def test_figure_2_and_13_of_the_paper_are_met_on_sharegpt() -> None:
    """The memory of Orca's three reservations, by state, and the requests in it: published, and ours."""
    from pathlib import Path

    from sim.scenario_file import load

    published = {
        "oracle": (38.2, 25.2, 0.0, 36.6, 13.62),
        "pow2": (26.8, 17.9, 13.6, 41.6, 9.81),
        "max": (20.4, 13.3, 57.3, 8.9, 7.00),
    }
    path = Path(__file__).parent.parent / "scenarios/paper/sharegpt.yaml"
    for name, expected in published.items():
        options = [f"cache={{kind: contiguous, reservation: {name}}}", "workload.num_requests=1200"]
        summary = run_scenario(load(path, options)).summary
        found = summary["kv_memory_shares"]
        ours = [100 * found[state] for state in STATES[:4]]
        np.testing.assert_allclose(ours, expected[:4], atol=4.0)
        assert summary["mean_num_requests_running"] == pytest.approx(expected[4], rel=0.05)
