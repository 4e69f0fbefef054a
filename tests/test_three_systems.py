"""The comparison of the ways to share prefixes: its sweep, its page, and what the page says."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sim.compare import load_all
from sim.errors import InputError
from sim.scenario import Scenario
from sim.scenario_file import load
from sim.simulation import run
from sim.sweeps.grid import points
from sim.sweeps.schema import load_sweep
from sim.three_systems.__main__ import PAGE, SWEEP, make
from sim.three_systems.means import Means, read
from sim.three_systems.page import SHOWN, WIDE, rows, text

ROOT = Path(__file__).parent.parent
TABLE = ROOT / PAGE.with_suffix("") / "sweep.csv"
SCENARIO = ROOT / "scenarios/three_systems.yaml"


@pytest.fixture(scope="module")
def found() -> Means:
    return read(TABLE)


def scenario_of(load_: str, cache: str) -> Scenario:
    """The sweep's, in blocks of 16, with its first seed."""
    (found,) = [
        point.scenario
        for point in points(load_sweep(ROOT / SWEEP))
        if point.labels[:2] == (load_, cache) and "16" in point.labels
    ]
    return found


def test_the_page_is_what_its_table_gives(found: Means) -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == text(found)


@pytest.mark.parametrize("cache", ["none", "apc", "radix", "paged"])
def test_the_table_is_what_the_code_computes(found: Means, cache: str) -> None:
    """One load, blocks of 16, each of its seeds."""
    plan = load_sweep(ROOT / SWEEP)
    scenario = scenario_of("few-shot", cache)
    sums = dict.fromkeys(SHOWN, 0.0)
    for seed in plan.seeds:
        result = run(scenario.model_copy(update={"seed": seed}))
        result.records.discard()
        for metric in SHOWN:
            value = result.summary[metric]
            sums[metric] += math.nan if value is None else value
    for metric, total in sums.items():
        expected = found.at("few-shot", cache, metric)
        assert total / len(plan.seeds) == pytest.approx(expected, rel=1e-12, nan_ok=True), metric


def test_the_command_runs_on_a_tiny_version(tmp_path: Path) -> None:
    """Ten requests of each load in blocks of 1, 16 and 256: a page with all its tables and figures."""
    sweep: dict[str, Any] = yaml.safe_load((ROOT / SWEEP).read_text())
    sweep["base"] = yaml.safe_load(SCENARIO.read_text()) | {"cost": {"base_us": 1000}}  # no tables to read
    for load_ in sweep["axes"]["workload"]:
        size = "num_requests" if "num_requests" in load_["value"] else "num_sessions"
        load_["value"][size] = 10
    for axis in ("engine.block_size", "engine.num_gpu_blocks"):
        sweep["axes"][axis] = [sweep["axes"][axis][place] for place in (0, 2, 6)]
    sweep["seeds"] = 1
    file, page = tmp_path / "tiny.yaml", tmp_path / "tiny.md"
    file.write_text(yaml.safe_dump(sweep, sort_keys=False))
    make(file, page, jobs=1)
    tiny = read(tmp_path / "tiny/sweep.csv")
    assert page.read_text(encoding="utf-8") == text(tiny)
    assert {path.name for path in (tmp_path / "tiny").glob("*.png")} == {
        "hit_rate.png", "lost_tail.png", "metadata.png", "ttft.png",
    }  # fmt: skip
    assert [row[1] for row in rows(tiny, "burst")][:3] == ["none", "apc", "radix"]


def test_a_run_that_failed_makes_no_page(tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    head = "point,workload,cache,engine.block_size,seed,saturation,error"
    table.write_text(f"{head}\n4,chat,apc,16,1,,no room\n")
    with pytest.raises(InputError, match="point 4, seed 1: no room"):
        read(table)


def test_links_of_the_page_lead_to_figures() -> None:
    links = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(links) == 4 and all((ROOT / PAGE.parent / link).is_file() for link in links)


def test_the_pool_is_of_one_size_in_tokens() -> None:
    for point in points(load_sweep(ROOT / SWEEP)):
        engine = point.scenario.engine
        assert (int(engine.num_gpu_blocks) - 1) * engine.block_size == 131_072


def test_the_scenario_is_the_sweep_s_first_load() -> None:
    first = next(points(load_sweep(ROOT / SWEEP))).scenario
    assert load(SCENARIO).workload == first.workload


# What the page says of its figures


def test_apc_and_radix_hit_the_same_where_nothing_needed_is_evicted(found: Means) -> None:
    for load_ in ("system prompts", "chat", "long answers"):
        for size in found.block_sizes:
            apc, radix = (found.at(load_, cache, "prefix_cache_hits", size) for cache in ("apc", "radix"))
            # a prefix or two are first asked for by several prompts of one step
            assert apc - 1500 < radix <= apc, (load_, size)


def test_block_lru_keeps_more_than_whole_leaves(found: Means) -> None:
    for load_ in ("tight pool", "few-shot"):
        for size in found.block_sizes:
            apc, radix = (found.at(load_, cache, "prefix_cache_hits", size) for cache in ("apc", "radix"))
            assert radix < apc < 1.02 * radix, (load_, size)


def test_the_tree_hits_all_of_an_old_prefix_or_nothing() -> None:
    in_part = {}
    for cache in ("apc", "radix"):
        records = run(scenario_of("tight pool", cache)).records
        hits, evicted = records.column("prefix_cache_hits"), records.column("fate_evicted")
        in_part[cache] = int(((hits > 0) & (evicted > 0)).sum())
        records.discard()
    assert in_part["apc"] > 0 == in_part["radix"]


def test_followers_hit_where_bursts_meet() -> None:
    records = run(scenario_of("burst", "radix lpm")).records
    hits, arrival = records.column("prefix_cache_hits"), records.column("arrival_time")
    records.discard()
    bursts = np.unique(arrival)
    gaps = np.minimum(np.diff(bursts, prepend=-np.inf), np.diff(bursts, append=np.inf))
    hit = np.isin(bursts, arrival[hits > 0])
    assert hit.any() and gaps[hit].max() < 0.4


def test_half_a_block_is_lost(found: Means) -> None:
    for size in found.block_sizes:
        lost = found.at("system prompts", "apc", "lost_tail_tokens", size) / 2000
        assert lost == pytest.approx((size - 1) / 2, rel=0.2, abs=0.01)


def test_all_of_a_burst_miss_in_the_tree(found: Means) -> None:
    assert found.at("burst", "apc", "prefix_cache_hit_rate") > 0.8
    assert found.at("burst", "radix", "prefix_cache_hit_rate") == 0.0
    assert 0.0 < found.at("burst", "radix lpm", "prefix_cache_hit_rate") < 0.1


def test_without_sharing_all_compute_the_same(found: Means) -> None:
    for size in found.block_sizes:
        computed = {found.at("no sharing", cache, "num_computed_tokens", size) for cache in found.caches}
        assert len(computed) == 1


def test_paged_is_like_none_where_nothing_is_known_ahead(found: Means) -> None:
    for load_ in ("chat", "burst", "few-shot", "no sharing"):
        paged, none = (found.at(load_, cache, "mean_ttft_ms") for cache in ("paged", "none"))
        assert paged == pytest.approx(none, rel=1e-9)


def test_metadata(found: Means) -> None:
    for size in found.block_sizes:
        assert found.at("chat", "apc", "metadata_entries_per_1k_slots", size) == pytest.approx(1000 / size)
        assert found.at("chat", "radix", "metadata_entries_per_1k_slots", size) < 8
        paged = found.at("system prompts", "paged", "metadata_entries_per_1k_slots", size)
        assert paged > 1.7 * 1000 / size
        assert found.at("chat", "paged", "metadata_entries_per_1k_slots", size) == pytest.approx(1000 / size)


def test_a_group_computes_its_prompt_once(found: Means) -> None:
    paged, apc, radix = (
        found.at("four samples", cache, "num_computed_tokens") for cache in ("paged", "apc", "radix")
    )
    assert paged < apc < radix < 1.05 * apc


def test_reserved_blocks_leave_little_room(found: Means) -> None:
    at = found.at
    assert at("tight pool", "paged", "prefix_cache_hits") > 1.2 * at("tight pool", "apc", "prefix_cache_hits")
    assert at("tight pool", "paged", "num_preemptions") == 0
    assert at("tight pool", "paged", "num_preemptions", 256) > 1000
    for cache in ("apc", "radix"):
        assert at("queue", "paged", "num_computed_tokens") < at("queue", cache, "num_computed_tokens")
        assert at("queue", "paged", "output_throughput") < at("queue", cache, "output_throughput")
    assert at("queue", "radix", "num_preemptions") == 0 < at("queue", "apc", "num_preemptions")
    assert at("queue", "radix lpm", "prefix_cache_hits") > at("queue", "radix", "prefix_cache_hits")


def test_a_pool_for_everything_makes_apc_and_radix_equal() -> None:
    """The page's other command."""
    options = ["workload.num_groups=110", "engine.num_gpu_blocks=60000"]
    _, scenarios = load_all(SCENARIO, options, "cache=apc,radix")
    for scenario in scenarios.values():
        result = run(scenario)
        result.records.discard()
        assert f"{100 * result.summary['prefix_cache_hit_rate']:.2f}" == f"{WIDE:.2f}"


@pytest.mark.slow
def test_the_whole_table_is_made_again(tmp_path: Path) -> None:
    make(ROOT / SWEEP, tmp_path / "three_systems.md")
    assert (tmp_path / "three_systems/sweep.csv").read_bytes() == TABLE.read_bytes()
    assert (tmp_path / "three_systems.md").read_bytes() == (ROOT / PAGE).read_bytes()
