"""The shapes that routing must have: who wins, who loses, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Run, engine, linear, prompts, run

from sim import router
from sim.core import EngineConfig
from sim.replicas import Cluster
from sim.validate import routing
from workloads import SharedPrefix

REPLICAS = 4
SEED = np.random.SeedSequence(0)


def shared(config: EngineConfig, cluster: Cluster, **load: Any) -> Run:
    """Groups of prompts that share a prefix, on a cluster whose steps take a token 20 us."""
    source = SharedPrefix(**load).batches(SEED, config.block_size)
    return run(source, config, linear(config, token_s=2e-5), cluster=cluster)


def mean_ttft(result: Run) -> float:
    return float(result.ttft.mean())


def share_of_most(result: Run) -> float:
    """The share of requests that the replica with most has."""
    return float(np.bincount(result.records["replica"]).max() / len(result.records["replica"]))


class TestOneHotGroup:
    """A prefix that all share, and suffixes that keep more than one replica busy."""

    LOAD: dict[str, Any] = {
        "num_requests": 2000, "num_groups": 1, "prefix_len": 1024, "suffix_len": 512, "output_len": 1,
        "request_rate": 160.0,
    }  # fmt: skip

    def routed(self, name: str) -> Run:
        return shared(engine(), Cluster(REPLICAS, name), **self.LOAD)

    def test_without_a_bound_affinity_pins_one_and_loses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        even = self.routed("round_robin")
        monkeypatch.setattr(router, "LOAD_BOUND", 1e9)
        pinned = self.routed("prefix_affinity")
        assert share_of_most(even) == 0.25 and share_of_most(pinned) == 1.0
        assert pinned.hit_rate > even.hit_rate  # and yet
        assert mean_ttft(pinned) > 20 * mean_ttft(even)

    def test_bounded_load_does_not(self) -> None:
        even, bounded = self.routed("round_robin"), self.routed("prefix_affinity")
        assert 0.25 < share_of_most(bounded) < 0.75
        assert mean_ttft(bounded) < 1.5 * mean_ttft(even)

    def test_nor_does_weighing_overlap_against_load(self) -> None:
        even, aware = self.routed("round_robin"), self.routed("kv_aware")
        assert share_of_most(aware) < 0.5
        assert mean_ttft(aware) < 1.5 * mean_ttft(even)


class TestManyGroups:
    """Prefixes of which a replica's pool holds its share, not all."""

    BLOCKS = 1001  # of 16 tokens: 15 prefixes fit beside what runs, and a share is 8 of 32
    LOAD: dict[str, Any] = {
        "num_requests": 2000, "num_groups": 32, "prefix_len": 1024, "suffix_len": 128, "output_len": 1,
        "request_rate": 140.0,
    }  # fmt: skip

    def routed(self, name: str) -> Run:
        config = engine(num_gpu_blocks=self.BLOCKS)
        return shared(config, Cluster(REPLICAS, name, 0.0, SEED), **self.LOAD)

    @pytest.mark.parametrize("affine", ["prefix_affinity", "kv_aware"])
    def test_affinity_wins_on_hit_rate_and_ttft(self, affine: str) -> None:
        kept = self.routed(affine)
        for blind in ("round_robin", "random"):
            scattered = self.routed(blind)
            assert kept.hit_rate > scattered.hit_rate + 0.3
            assert mean_ttft(kept) < 0.5 * mean_ttft(scattered)

    def test_where_every_pool_holds_all_affinity_gains_little(self) -> None:
        even = shared(engine(), Cluster(REPLICAS, "round_robin"), **self.LOAD)
        kept = shared(engine(), Cluster(REPLICAS, "prefix_affinity"), **self.LOAD)
        assert even.hit_rate > 0.8 and kept.hit_rate - even.hit_rate < 0.1


class TestOldViews:
    """Replicas without a cache, whose load the router sees late (Mitzenmacher, 2000)."""

    LOAD: dict[str, Any] = {
        "num_requests": 2000, "num_groups": 1, "prefix_len": 0, "suffix_len": 512, "output_len": 1,
        "request_rate": 500.0,
    }  # fmt: skip

    def ttft(self, name: str, view_delay: float) -> float:
        return mean_ttft(shared(engine(), Cluster(8, name, view_delay, SEED), **self.LOAD))

    def test_fresh_views_make_the_least_loaded_best(self) -> None:
        least, two, blind = (
            self.ttft(name, 0.0) for name in ("least_outstanding", "power_of_two", "random")
        )
        assert 1.1 * least < two < 0.8 * blind

    def test_old_views_herd(self) -> None:
        least, two, blind = (
            self.ttft(name, 1.0) for name in ("least_outstanding", "power_of_two", "random")
        )
        assert least > 10 * two > 10 * blind


def test_session_affinity_pins_a_session_that_is_alone() -> None:
    """One session's requests all go to one of two replicas, which then has all the work."""
    config = engine()
    times = prompts([[(i, 512)] for i in range(200)], gap=0.006, session_id=np.zeros(200, np.int64))
    pinned = run(times, config, linear(config, token_s=2e-5), cluster=Cluster(2, "session_affinity"))
    spread = run(times, config, linear(config, token_s=2e-5), cluster=Cluster(2, "round_robin"))
    assert share_of_most(pinned) == 1.0 and share_of_most(spread) == 0.5
    assert mean_ttft(pinned) > 10 * mean_ttft(spread)


@pytest.mark.slow
def test_llm_ds_measurement() -> None:
    """Who wins, by how much in throughput, and that TTFT differs by far more."""
    if not routing.SCENARIO.is_file():
        pytest.skip("no scenarios/routing.yaml beside the package")
    blind, aware = routing.route("random"), routing.route("kv_aware")
    for one, measured in zip((blind, aware), routing.MEASURED.values(), strict=True):
        assert one.figures.output_throughput == pytest.approx(measured.output_throughput, rel=0.1)
    assert 0.5 < blind.figures.mean_ttft / routing.MEASURED["random-scheduling"].mean_ttft < 1.0
    assert blind.stage_ttft[3] > 5 * blind.stage_ttft[2]  # from 15 to 20 a second it breaks down
    assert aware.stage_ttft.max() < 2.5 * aware.stage_ttft.min()  # and this one holds
    assert blind.figures.mean_ttft > 100 * aware.figures.mean_ttft
