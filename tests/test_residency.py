"""How long blocks stay and whose are evicted: timelines by hand, and a dictionary's account of a pool."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from simulation import engine, prompts, run

from sim import histogram
from sim.residency import IDLE, LIFETIME, NAMES, REUSE_GAP, block_durations

GAP = 100.0  # seconds between requests; a step takes a hundredth of one


def tight(usable: int, **changes: Any) -> Any:
    return engine(num_gpu_blocks=usable + 1, residency=True, **changes)


def seconds(totals: Any, row: int) -> list[tuple[float, int]]:
    """(middle of the bin, number) of what was counted, shortest first."""
    counts = totals.durations[row]
    edges = histogram.edges(len(counts))
    return [((edges[i] + edges[i + 1]) / 2, int(counts[i])) for i in np.flatnonzero(counts)]


def test_lifetime_idle_time_and_gaps_by_hand() -> None:
    """Two blocks of A are hit at 100 and 300 s, evicted at 700; B's two at 800, never hit."""
    a, b, c, d = [(1, 33)], [(2, 33)], [(3, 33)], [(4, 65)]
    load = [a, a, b, a, c, c, c, d, [(5, 65)]]  # at 0, 100, … s
    # 6 blocks: A and B take two cached blocks each and a tail; C evicts none yet (its blocks are the tails')
    result = run(prompts(load, gap=GAP), tight(7))
    assert result.hits == [0, 32, 0, 32, 0, 32, 32, 0, 0]
    gaps = seconds(result.totals, REUSE_GAP)
    # A's two blocks: 100 -> 300; C's two: 500 -> 600. The allocations at 0 and 400 begin no gap.
    assert [number for _, number in gaps] == [2, 2]
    assert [value for value, _ in gaps] == pytest.approx([100.0, 200.0], rel=0.04)
    assert result.totals.num_evictions == result.totals.durations[LIFETIME].sum()
    assert result.totals.num_evictions == result.totals.durations[IDLE].sum()


def test_a_block_never_hit_is_idle_since_its_allocation() -> None:
    """Two usable blocks: a prompt of 17 tokens takes both, and evicts the former's full one, 100 s old."""
    totals = run(prompts([[(i, 17)] for i in range(4)], gap=GAP), tight(2)).totals
    assert totals.num_evictions == 3
    for row in (LIFETIME, IDLE):
        ((value, number),) = seconds(totals, row)
        assert (value, number) == (pytest.approx(100.0, rel=0.04), 3)
    assert not totals.durations[REUSE_GAP].any()


def test_a_reset_evicts_nothing() -> None:
    totals = run(prompts([[(1, 33)], [(1, 33)]], gap=GAP), tight(9), reset_prefix_cache=[50.0]).totals
    assert totals.num_resets == 1 and not totals.durations.any()


def test_owners_are_those_who_used_a_block_last() -> None:
    """Group 0 caches a text, group 1 hits it: when group 2 evicts it, the loss is group 1's."""
    load = prompts([[(1, 33)], [(1, 33)], [(2, 65)]], gap=GAP, tenant=[0, 1, 1], prefix_group=[0, 1, 2])
    result = run(load, tight(5))
    assert result.hits == [0, 32, 0]
    assert result.totals.evicted_from == {(-1, -1): 0, (0, 0): 0, (1, 1): 2, (1, 2): 0}
    assert result.records["num_evictions"].tolist() == [0, 0, 2]


def test_nothing_is_kept_unless_asked() -> None:
    totals = run(prompts([[(i, 17)] for i in range(4)], gap=GAP), engine(num_gpu_blocks=3)).totals
    assert totals.durations.shape == (3, 0) and totals.evicted_from == {}
    assert totals.num_evictions == 3


@pytest.mark.parametrize("seed", range(5))
def test_against_an_account_of_every_block(seed: int) -> None:
    """A list of blocks in the free queue's order, one request at a time, with names for contents."""
    rng = random.Random(seed)
    usable = 12
    load = [(rng.randrange(4), 1 + rng.randrange(90), rng.randrange(3)) for _ in range(200)]
    groups = [group for _, _, group in load]
    batch = prompts([[(text, length)] for text, length, _ in load], gap=GAP, prefix_group=groups)
    result = run(batch, tight(usable))

    free: list[dict[str, Any]] = [{} for _ in range(usable)]
    lost, caused = Counter[int](), []
    durations: list[list[float]] = [[], [], []]
    for i, (text, length, group) in enumerate(load):
        now, evicted = GAP * i, 0
        names = [(text, k) for k in range(length // 16)]
        hit: list[dict[str, Any]] = []
        while len(hit) < (length - 1) // 16:
            found = [block for block in free if block.get("name") == names[len(hit)]]
            if not found:
                break
            hit.append(min(found, key=lambda block: block["cached"]))
        for block in hit:
            free = [other for other in free if other is not block]
            if "access" in block:
                durations[REUSE_GAP].append(now - block["access"])
            block |= {"access": now, "owner": group}
        table = list(hit)
        for k in range(len(hit), -(-length // 16)):
            block = free.pop(0)
            if "name" in block:
                evicted += 1
                lost[block["owner"]] += 1
                durations[LIFETIME].append(now - block["birth"])
                durations[IDLE].append(now - block.get("access", block["birth"]))
            block.clear()
            block |= {"birth": now, "owner": group}
            if k < len(names):
                block |= {"name": names[k], "cached": (now, k)}
            table.append(block)
        caused.append(evicted)
        table.reverse()
        free = [b for b in table if "name" not in b] + free + [b for b in table if "name" in b]
    assert result.records["num_evictions"].tolist() == caused and sum(caused) > 100
    assert {g: n for (_, g), n in result.totals.evicted_from.items() if n} == dict(lost)
    for counts, values in zip(result.totals.durations, durations, strict=True):
        bins = np.searchsorted(histogram.edges(len(counts)), values, side="right") - 1
        # a request's blocks are taken when its step is scheduled, at its arrival: to the last bit
        assert counts.tolist() == np.bincount(bins, minlength=len(counts)).tolist()


def test_the_summary_of_a_histogram() -> None:
    durations = np.zeros((3, histogram.NUM_BINS >> 6), np.int64)
    edges = histogram.edges(durations.shape[1])
    durations[LIFETIME, np.searchsorted(edges, [3.0, 3.0, 7.0, 100.0], side="right") - 1] += [2, 0, 1, 1]
    durations[LIFETIME, np.searchsorted(edges, 3.0, side="right") - 1] = 2
    summed = block_durations(durations)
    lifetime = summed[NAMES[LIFETIME]]
    assert lifetime is not None and summed[NAMES[IDLE]] is None
    assert lifetime["count"] == 4 and lifetime["buckets"] == [[4.0, 2], [8.0, 1], [128.0, 1]]
    assert [lifetime[f"p{q}"] for q in (50, 90, 99)] == pytest.approx([3.0, 100.0, 100.0], rel=0.04)
    assert block_durations(np.zeros((3, 0), np.int64)) == dict.fromkeys(NAMES)
