"""Several replicas: the same bytes wherever they are cut, and what each router does."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Run, engine, in_order, linear, prompts, run
from test_determinism import at_every_step, batches, cases

from sim.clock import Clock
from sim.core import EngineConfig
from sim.replicas import Cluster
from sim.router import LOAD_BOUND, ROUTERS, Arrival, Views
from sim.simulate import simulate
from workloads import MultiTurn, SharedPrefix

EVERY_ROUTER = (*ROUTERS, "central_queue")


def served(result: Run) -> list[int]:
    """The replica of each request."""
    return result.records["replica"].tolist()  # type: ignore[no-any-return]


def outcome(case: Any, cluster: Cluster, **options: Any) -> bytes:
    """Every bit that a run on a cluster gives, its records in the order in which they came."""
    chunks: list[dict[str, Any]] = []
    totals = simulate(
        batches(case, 2048),
        case.config,
        case.cost,
        on_records=chunks.append,
        cluster=cluster,
        concurrency=case.concurrency,
        think_times=itertools.cycle(case.think),
        **options,
    )
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in sorted(chunks[0])}
    assert sorted(columns["request_id"].tolist()) == list(range(len(case.rows)))
    lines = [f"{name}: {column.tolist()}" for name, column in columns.items()]
    for one in (totals, *totals.replicas):
        for name, value in one._asdict().items():
            if name == "samples":
                lines.append(f"samples: {[np.asarray(part).tolist() for part in value]}")
            elif name != "replicas":
                lines.append(f"{name}: {value.tolist() if isinstance(value, np.ndarray) else value!r}")
    return "\n".join(lines).encode()


@given(
    cases(),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from(EVERY_ROUTER),
    st.sampled_from([0.0, 0.07, 3.0]),
)
@settings(max_examples=200)
def test_cut_anywhere(case: Any, replicas: int, router: str, view_delay: float) -> None:
    cluster = Cluster(replicas, router, view_delay, np.random.SeedSequence(1))
    reference = outcome(case, cluster, horizon=at_every_step())
    assert outcome(case, cluster, horizon=Clock.peek) == reference, "cut at every event"
    assert outcome(case, cluster) == reference, "cut at the next outside event"


@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_no_engine_passes_an_end_that_brings_an_arrival(router: str) -> None:
    """Sessions whose turns follow at once, on replicas of unequal load: the same whatever the cuts."""
    load = MultiTurn(
        num_sessions=12, session_rate=50.0, num_turns=5, system_prompt_len=40, user_len=30,
        output_len={"distribution": "uniform", "low": 1, "high": 90}, think_time=0.003,
    )  # fmt: skip
    config = engine(num_gpu_blocks=200, max_num_seqs=3)
    found = []
    for horizon in (lambda _: -math.inf, Clock.horizon):
        cluster = Cluster(3, router, 0.0, np.random.SeedSequence(1))
        result = run(load.sessions(np.random.SeedSequence(3)), config, cluster=cluster, horizon=horizon)
        found.append({name: column.tolist() for name, column in result.records.items()})
    assert found[0] == found[1]


@given(cases())
@settings(max_examples=50)
def test_one_replica_is_a_lone_engine(case: Any) -> None:
    def records(cluster: Cluster | None) -> dict[str, Any]:
        chunks: list[dict[str, Any]] = []
        think = itertools.cycle(case.think)
        simulate(
            batches(case, 2048), case.config, case.cost, on_records=chunks.append, cluster=cluster,
            concurrency=case.concurrency, think_times=think, horizon=at_every_step(),
        )  # fmt: skip
        return in_order(chunks)

    alone, clustered = records(None), records(Cluster(1, "least_outstanding"))
    assert alone.keys() == clustered.keys()
    for name, column in alone.items():
        np.testing.assert_array_equal(column, clustered[name], err_msg=name)


def test_records_come_in_the_order_of_their_ends() -> None:
    load = SharedPrefix(num_requests=9000, num_groups=5, prefix_len=40, suffix_len=9, output_len=3)
    ends: list[float] = []
    source = load.batches(np.random.SeedSequence(0), 16)
    config = engine(max_num_seqs=4)

    def note(chunk: dict[str, Any]) -> None:
        ends.extend(chunk["finish_time"].tolist())

    simulate(source, config, linear(config), on_records=note, cluster=Cluster(3, "random"))
    assert len(ends) == 9000 and ends == sorted(ends)


def test_sums_are_those_of_all_replicas() -> None:
    load = SharedPrefix(
        num_requests=400, num_groups=9, prefix_len=64, suffix_len=20, output_len=8, request_rate=200.0
    )
    config = engine(num_gpu_blocks=60, max_num_seqs=8, residency=True, token_fates=True)
    result = run(load.batches(np.random.SeedSequence(1), 16), config, cluster=Cluster(3, "round_robin"))
    parts = result.totals.replicas
    assert len(parts) == 3 and Counter(served(result)) == {0: 134, 1: 133, 2: 133}
    assert result.totals.num_evictions == sum(part.num_evictions for part in parts) > 0
    assert result.totals.prefix_cache_hits == sum(result.hits)
    assert result.totals.busy_time == pytest.approx(sum(part.busy_time for part in parts))
    samples = result.totals.samples
    assert samples.table[-1, 6] <= samples.after[6] == result.totals.prefix_cache_hits
    assert (np.diff(samples.table[:, 6]) >= 0).all()  # counters grow


def test_requests_in_the_system_at_once() -> None:
    together = prompts([[(i, 16)] for i in range(10)], gap=0.0)
    assert run(together, engine(), cluster=Cluster(4, "round_robin")).totals.max_concurrent_requests == 10


def views(outstanding: list[int], **more: list[Any]) -> Views:
    nothing = np.zeros(len(outstanding), np.int64)
    columns = {name: np.array(column) for name, column in more.items()}
    return Views(np.array(outstanding), nothing, np.zeros(len(outstanding)), nothing)._replace(**columns)


def arrival(number: int = 0, **more: Any) -> Arrival:
    return Arrival(number, -1, 7, 100, (0.0, 0.0))._replace(**more)


def test_round_robin_random_and_least_outstanding() -> None:
    level = views([3, 3, 3, 3])
    assert [ROUTERS["round_robin"](arrival(i), level) for i in range(5)] == [0, 1, 2, 3, 0]
    draws = [(0.0, 0.0), (0.2499, 0.0), (0.25, 0.0), (0.9999, 0.0)]
    assert [ROUTERS["random"](arrival(draws=two), level) for two in draws] == [0, 0, 1, 3]
    assert ROUTERS["least_outstanding"](arrival(), views([3, 1, 2, 1])) == 1


def test_power_of_two_looks_at_two_different_replicas() -> None:
    seen = set()
    for first, second in itertools.product(np.arange(0.05, 1.0, 0.1), repeat=2):
        load = [5, 5, 5, 5]
        one = ROUTERS["power_of_two"](arrival(draws=(first, second)), views(load))
        load[one] = 9
        other = ROUTERS["power_of_two"](arrival(draws=(first, second)), views(load))
        assert one != other
        seen |= {one, other}
    assert seen == {0, 1, 2, 3}
    # drawn 3 first, then 0: of equal ones the smaller number
    assert ROUTERS["power_of_two"](arrival(draws=(0.9, 0.0)), views([5, 5, 5, 5])) == 0
    assert ROUTERS["power_of_two"](arrival(draws=(0.9, 0.0)), views([6, 5, 5, 5])) == 3


def test_session_affinity_keeps_a_session_and_spreads_sessions() -> None:
    router = ROUTERS["session_affinity"]
    places = [router(arrival(session_id=i), views([0, 0, 0, 0])) for i in range(4000)]
    assert places == [router(arrival(9, session_id=i), views([9, 0, 5, 1])) for i in range(4000)]
    counts = np.bincount(places)
    assert len(counts) == 4 and (abs(counts - 1000) < 5 * math.sqrt(750)).all()
    assert [router(arrival(i), views([0, 0])) for i in range(3)] == [0, 1, 0]  # no session: in turn


def test_prefix_affinity_overflows_to_the_next_in_rank() -> None:
    router = ROUTERS["prefix_affinity"]
    ranked = []
    load = [0, 0, 0, 0]
    for _ in range(4):
        place = router(arrival(prefix_key=12345), views(load))
        ranked.append(place)
        load[place] += 100
    assert sorted(ranked) == [0, 1, 2, 3]
    # with a replica fewer, keys that were not there stay where they are
    keys = range(1000)
    four = [router(arrival(prefix_key=key), views([0] * 4)) for key in keys]
    three = [router(arrival(prefix_key=key), views([0] * 3)) for key in keys]
    assert all(a == b for a, b in zip(four, three, strict=True) if a != 3)
    # outstanding 4 + 4 and one more: at most 1.25 * 9 / 2 rounded up, 6
    assert LOAD_BOUND == 1.25
    first = router(arrival(), views([0, 0]))
    assert router(arrival(), views([5 - 2 * first, 3 + 2 * first])) == first
    assert router(arrival(), views([6 - 4 * first, 2 + 4 * first])) == 1 - first


def test_kv_aware_weighs_overlap_against_load() -> None:
    router = ROUTERS["kv_aware"]
    assert router(arrival(), views([0, 0])) == 0
    assert router(arrival(), views([0, 9], cached_tokens=[0, 64])) == 1
    # 64 of 100 tokens are worth 1.92: as much as .96 of all KV, and nearly the way from longest to shortest
    cached: dict[str, list[Any]] = {"cached_tokens": [0, 64]}
    assert router(arrival(), views([0, 0], **cached, kv_usage=[0.0, 0.95])) == 1
    assert router(arrival(), views([0, 0], **cached, kv_usage=[0.0, 0.97])) == 0
    assert router(arrival(), views([0, 0], **cached, waiting=[0, 1])) == 0
    assert router(arrival(), views([0, 0], cached_tokens=[0, 67], waiting=[0, 1])) == 1
    # queues count between the shortest and the longest, however long
    three: dict[str, list[Any]] = {"cached_tokens": [0, 64, 0], "waiting": [50, 51, 60]}
    assert router(arrival(), views([0, 0, 0], **three)) == 1
    assert router(arrival(), views([0, 0], waiting=[7, 7], kv_usage=[0.2, 0.1])) == 1


@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_kv_aware_follows_the_cache(delay: float) -> None:
    """Three texts come in turn, ten seconds apart: each stays where it was computed first.

    A view up to five seconds old is as good, since nothing moves meanwhile.
    """
    texts = [[(i % 3, 640)] for i in range(12)]
    result = run(prompts(texts, gap=10.0), engine(), cluster=Cluster(2, "kv_aware", delay))
    assert result.hits == [0] * 3 + [624] * 9
    where = served(result)
    assert all(where[i] == where[i % 3] for i in range(12))


def test_what_the_router_expects_is_what_it_gets() -> None:
    """Alone at its replica, a request hits what the index says: across cuts of segments, salts, evictions."""
    rng = np.random.default_rng(5)
    config = engine(num_gpu_blocks=40, max_num_seqs=1)
    seen: list[tuple[int, int, int]] = []
    from sim import replicas

    def noting(request: Arrival, views: Views) -> int:
        place = int(rng.integers(3))
        seen.append((request.number, place, int(views.cached_tokens[place])))
        return place

    texts = []
    for _ in range(400):
        cut = int(rng.integers(1, 60))
        texts.append([(int(rng.integers(3)), cut), (int(rng.integers(10, 13)), int(rng.integers(1, 90)))])
    load = prompts(texts, gap=100.0, namespace=rng.integers(0, 3, 400), output_len=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(replicas.ROUTERS, "kv_aware", noting)
        result = run(load, config, cluster=Cluster(3, "kv_aware"))
    assert result.totals.num_evictions > 500 and sum(result.hits) > 0
    assert [expected for _, _, expected in sorted(seen)] == result.hits
    assert [place for _, place, _ in sorted(seen)] == served(result)


def test_a_late_view_sends_a_burst_to_one_replica() -> None:
    """All of one instant see the same view; with a fresh one each sees those before it."""
    burst = prompts([[(i, 160)] for i in range(8)], gap=0.0)
    fresh = served(run(burst, engine(), cluster=Cluster(4, "least_outstanding")))
    late = served(run(burst, engine(), cluster=Cluster(4, "least_outstanding", 1.0)))
    assert Counter(fresh) == dict.fromkeys(range(4), 2)
    assert Counter(late) == {0: 8}


def test_a_view_is_renewed_at_multiples_of_its_delay() -> None:
    """Steps of 1 s: replica 0 holds a request until 2.5 s, but a look at 2 s is what 3.9 s sees."""
    config = engine()
    slow = linear(config, base_s=2.5, token_s=0.0)
    times = prompts([[(i, 16)] for i in range(3)])._replace(arrival_time=np.array([0.0, 3.9, 4.1]))
    result = run(times, config, slow, cluster=Cluster(2, "least_outstanding", 2.0))
    assert served(result) == [0, 1, 0]


def test_central_queue_serves_in_order_whoever_is_free() -> None:
    """Two servers of one request each; steps of 1 s and of .1 s a token."""
    config = engine(max_num_seqs=1)
    cost = linear(config, base_s=0.0, token_s=0.1)
    load = prompts([[(i, n)] for i, n in enumerate((50, 20, 20, 10, 10))], gap=0.0)
    result = run(load, config, cost, cluster=Cluster(2, "central_queue"))
    assert served(result) == [0, 1, 1, 1, 0]
    assert result.records["finish_time"] == pytest.approx([5.0, 2.0, 4.0, 5.0, 6.0])
    assert result.waits == pytest.approx([0.0, 0.0, 2.0, 4.0, 5.0])
    assert result.records["submitted_time"] == pytest.approx([0.0, 0.0, 2.0, 4.0, 5.0])


@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_sessions_on_replicas(router: str) -> None:
    """Every turn is served; with affinity a session's history is where its next turn goes."""
    load = MultiTurn(
        num_sessions=30, session_rate=2.0, num_turns=4, system_prompt_len=64, user_len=50, output_len=30,
        think_time=1.0,
    )  # fmt: skip
    config = engine()
    result = run(load.sessions(np.random.SeedSequence(2)), config, cluster=Cluster(3, router))
    sessions = result.records["session_id"]
    places = [set(result.records["replica"][sessions == number].tolist()) for number in range(30)]
    if router == "session_affinity":
        assert all(len(place) == 1 for place in places) and len(set.union(*places)) == 3
    if router == "round_robin":
        assert any(len(place) > 1 for place in places)


def test_refused_requests_and_resets_on_replicas() -> None:
    config: EngineConfig = engine(num_gpu_blocks=5)
    load = prompts([[(1, 33)], [(1, 33)], [(2, 200)], [(1, 33)]], gap=10.0)
    result = run(load, config, cluster=Cluster(1, "kv_aware"), reset_prefix_cache=[15.0])
    assert result.records["refused"].tolist() == [0, 0, 1, 0]
    assert result.records["num_cached_tokens"].tolist() == [0, 32, 0, 0]


@pytest.mark.parametrize("router", ["round_robin", "session_affinity"])
def test_requests_take_turns_as_they_arrive(router: str) -> None:
    """Not by their numbers, which are those of sessions: else one replica would have all first turns."""
    load = MultiTurn(
        num_sessions=40, session_rate=2.0, num_turns=4, system_prompt_len=64, user_len=500, output_len=30,
        think_time=1.0,
    )  # fmt: skip
    result = run(load.sessions(np.random.SeedSequence(2)), engine(), cluster=Cluster(4, router))
    where, arrived = result.records["replica"], np.argsort(result.records["arrival_time"])
    if router == "round_robin":
        assert where[arrived].tolist() == [i % 4 for i in range(160)]
    for replica in range(4):  # each has first and last turns
        assert {0, 3} <= set((result.records["request_id"][where == replica] % 4).tolist())


def test_a_refused_request_takes_no_turn() -> None:
    load = prompts([[(1, 33)], [(2, 200)], [(3, 33)], [(4, 33)]], gap=10.0)
    result = run(load, engine(num_gpu_blocks=5), cluster=Cluster(3, "round_robin"))
    assert result.records["refused"].tolist() == [0, 1, 0, 0]
    assert served(result) == [0, 0, 1, 2]


@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_more_replicas_than_requests(router: str) -> None:
    apart = prompts([[(i, 50)] for i in range(5)], gap=0.01)
    replicas = 1024 if router == "kv_aware" else 64
    result = run(apart, engine(num_gpu_blocks=50, max_num_seqs=4), cluster=Cluster(replicas, router))
    assert len(result.totals.replicas) == replicas
    assert sum(part.num_admissions for part in result.totals.replicas) == 5


@pytest.mark.parametrize("router", EVERY_ROUTER)
def test_what_is_measured_from_a_time_on_is_that_of_each_replica(router: str) -> None:
    """Two runs in one, so far apart that they do not meet: the second's sums alone, but for the cache."""
    load = SharedPrefix(
        num_requests=200, num_groups=200, prefix_len=0, suffix_len=100, output_len=4, request_rate=100.0
    )
    batch = next(load.batches(np.random.SeedSequence(1), 16))
    late = batch._replace(arrival_time=np.where(np.arange(200) < 80, 0.0, 1e4) + batch.arrival_time)
    result = run(late, engine(), cluster=Cluster(3, router), measure_from=5e3)
    parts = result.totals.replicas
    before = [part.warm_up for part in parts]
    assert sum(part.num_admissions for part in before if part is not None) == 80
    for replica, (part, early) in enumerate(zip(parts, before, strict=True)):
        assert early is not None
        here = result.records["replica"] == replica
        assert part.num_admissions - early.num_admissions == here[80:].sum()
    whole = result.totals.warm_up
    assert whole is not None and whole.num_admissions == 80
    assert whole.busy_time == pytest.approx(sum(part.busy_time for part in before if part is not None))


def test_a_reset_empties_every_replicas_cache_and_the_routers_index() -> None:
    """Each text is where it was until the reset; then the router starts anew, with the first replica."""
    texts = [[(i % 3, 640)] for i in range(12)]
    result = run(
        prompts(texts, gap=10.0), engine(), cluster=Cluster(3, "kv_aware"), reset_prefix_cache=[55.0]
    )
    assert result.totals.num_resets == 3
    assert result.hits == [0] * 3 + [624] * 3 + [0] * 3 + [624] * 3


@pytest.mark.parametrize("router", ["least_outstanding", "central_queue", "kv_aware"])
def test_priority_is_each_replicas_own(router: str) -> None:
    """One seat each: the urgent one passes those that wait at its replica, not those of a central queue."""
    config = engine(max_num_seqs=1, priority_policy=True)
    cost = linear(config, base_s=1.0, token_s=0.0)
    load = prompts([[(i, 16)] for i in range(6)], gap=0.01, priority=[5, 5, 5, 5, 0, 5])
    result = run(load, config, cost, cluster=Cluster(2, router))
    waits = result.waits.tolist()
    assert waits[:2] == pytest.approx([0.0, 0.0])
    assert waits[4] == pytest.approx(1.96 if router == "central_queue" else 0.96)


def test_a_router_that_looked_at_nothing_sees_the_first_arrival_alone() -> None:
    """The first look is at the first arrival, the next at a multiple of the delay, not a delay later."""
    config = engine()
    slow = linear(config, base_s=100.0, token_s=0.0)
    times = prompts([[(i, 16)] for i in range(4)])._replace(arrival_time=np.array([1.5, 1.9, 2.1, 3.9]))
    result = run(times, config, slow, cluster=Cluster(3, "least_outstanding", 2.0))
    assert served(result) == [0, 0, 1, 1]


def test_at_the_instant_of_a_look_arrivals_see_the_new_view() -> None:
    config = engine()
    slow = linear(config, base_s=100.0, token_s=0.0)
    times = prompts([[(i, 16)] for i in range(3)])._replace(arrival_time=np.array([0.5, 2.0, 2.0]))
    result = run(times, config, slow, cluster=Cluster(2, "least_outstanding", 2.0))
    assert served(result)[0] == 0 and served(result)[1] == served(result)[2]


@pytest.mark.parametrize("delay", [0.0, 0.5])
def test_a_central_queue_needs_no_view(delay: float) -> None:
    config = engine(max_num_seqs=1)
    load = prompts([[(i, 160)] for i in range(20)], gap=0.001)
    result = run(load, config, cluster=Cluster(3, "central_queue", delay))
    assert served(result) == served(run(load, config, cluster=Cluster(3, "central_queue")))


def test_what_the_router_sees_of_queue_and_kv() -> None:
    """One seat, prompts of 160 tokens in chunks of 64 a second, in a pool of 20 usable blocks."""
    from sim import replicas

    seen: list[tuple[int, float, int]] = []

    def noting(request: Arrival, views: Views) -> int:
        seen.append((int(views.waiting[0]), float(views.kv_usage[0]), int(views.outstanding[0])))
        return 0

    config = engine(
        max_num_batched_tokens=64, max_num_seqs=1, num_gpu_blocks=21, reserve_full_isl=False,
        max_model_len=200,
    )  # fmt: skip
    cost = linear(config, base_s=1.0, token_s=0.0)
    times = np.array([0.0, 0.0, 0.5, 1.5, 1.6, 19.5])
    batch = prompts([[(i, 160)] for i in range(6)])._replace(arrival_time=times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(replicas.ROUTERS, "kv_aware", noting)
        run(batch, config, cost, cluster=Cluster(1, "kv_aware"))
    assert seen == [(0, 0.0, 0), (1, 0.0, 1), (1, 0.2, 2), (2, 0.4, 3), (3, 0.4, 4), (0, 0.0, 0)]
