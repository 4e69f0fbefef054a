"""Synthetic workloads: what they contain, and that their random streams stand apart."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from batches import SEED, make, peak_memory, rows, same, whole
from pydantic import TypeAdapter, ValidationError

from sim.request import Batch
from workloads import AnyWorkload, FourteenTokens, SharedPrefix
from workloads.base import Workload

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.yaml"))
DRAWN = {
    "num_groups": 20,
    "group_popularity": "zipf",
    "zipf_alpha": 0.8,
    "prefix_len": {"distribution": "uniform", "low": 0, "high": 90},
    "suffix_len": {"distribution": "lognormal", "mean": 200.0, "sigma": 1.0},
    "output_len": {"distribution": "uniform", "low": 1, "high": 40},
    "arrival": "gamma",
    "burstiness": 0.25,
    "request_rate": 8.0,
}


def shared(**fields: Any) -> Workload:
    return make({"kind": "shared_prefix", "num_requests": 300, **DRAWN, **fields})


def test_fourteen_tokens_share_ten() -> None:
    batch = whole(FourteenTokens())
    assert batch.prompt_len.tolist() == [14, 14]
    (first, own_0), (second, own_1) = rows(batch)
    assert first == second == (0, 10)
    assert own_0[0] != own_1[0]
    assert own_0[1] == own_1[1] == 5  # 4 of the prompt and the output


def test_fourteen_tokens_at_scale() -> None:
    batch = whole(FourteenTokens(num_requests=5000, prompt_len=1400, shared_len=1000, request_rate=8.0))
    assert len(set(batch.segment_id.tolist())) == 5001
    assert batch.segment_len.reshape(-1, 2)[:, 0].tolist() == [1000] * 5000


def test_everything_shared_and_nothing_shared() -> None:
    same = rows(whole(FourteenTokens(shared_len=14)))
    assert [row[0] for row in same] == [(0, 14)] * 2
    apart = rows(whole(FourteenTokens(shared_len=0)))
    assert [len(row) for row in apart] == [1, 1]
    assert apart[0] != apart[1]


def test_work_s() -> None:
    text = next(path for path in SCENARIOS if path.stem == "work_s").read_text()
    batch = whole(make(yaml.safe_load(text)["workload"]))
    assert len(batch.prompt_len) == 10_000
    assert set(batch.prompt_len.tolist()) == {1280}
    assert set(batch.output_len.tolist()) == {128}
    assert batch.segment_id[::2].tolist() == [0] * 10_000
    assert len(np.unique(batch.segment_id)) == 10_001
    assert batch.arrival_time[-1] == pytest.approx(10_000 / 8, rel=0.03)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_workloads_are_valid_and_round_trip(path: Path) -> None:
    scenario = yaml.safe_load(path.read_text())
    for load in (scenario[name] for name in ("workload", "prime", "measure") if name in scenario):
        workload = make(load)
        assert make(workload.model_dump()) == workload
        assert TypeAdapter[Any](AnyWorkload).validate_json(workload.model_dump_json()) == workload


def test_prefix_lengths_belong_to_groups() -> None:
    batch = whole(shared(num_requests=3000))
    of_group: dict[int, int] = {}
    for group, row in zip(batch.prefix_group.tolist(), rows(batch), strict=True):
        prefix = row[0][1] if row[0][0] == group else 0
        assert of_group.setdefault(group, prefix) == prefix
    assert len(of_group) == 20
    assert (batch.segment_len > 0).all()


def test_popularity() -> None:
    zipf = np.bincount(whole(shared(num_requests=20_000)).prefix_group)
    expected = np.arange(1, 21) ** -0.8
    assert zipf / 20_000 == pytest.approx(expected / expected.sum(), abs=0.01)
    uniform = whole(shared(num_requests=20_000, group_popularity="uniform", zipf_alpha=1.0))
    assert np.bincount(uniform.prefix_group) / 20_000 == pytest.approx(1 / 20, abs=0.01)


@pytest.mark.parametrize(
    ("length", "mean"),
    [
        (64, 64),
        ({"distribution": "constant", "value": 64}, 64),
        ({"distribution": "uniform", "low": 10, "high": 30}, 20),
        ({"distribution": "lognormal", "mean": 500, "sigma": 0.8}, 500),
    ],
)
def test_length_means(length: Any, mean: float) -> None:
    drawn = whole(shared(num_requests=50_000, output_len=length)).output_len
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.min() >= 1


@pytest.mark.parametrize(
    ("fields", "mean", "cv"),
    [
        ({"arrival": "poisson", "burstiness": 1.0}, 1 / 8, 1.0),
        ({"arrival": "gamma", "burstiness": 0.25}, 1 / 8, 2.0),
        ({"arrival": "constant", "burstiness": 1.0}, 1 / 8, 0.0),
    ],
)
def test_arrivals(fields: dict[str, Any], mean: float, cv: float) -> None:
    gaps = np.diff(whole(shared(num_requests=50_000, **fields)).arrival_time)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(mean, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.05)


def test_all_at_once_and_closed_loop() -> None:
    plain = {"arrival": "poisson", "burstiness": 1.0, "request_rate": "inf"}
    assert not whole(shared(**plain)).arrival_time.any()
    closed: Any = shared(**plain, concurrency=4, think_time=2.0, think_time_distribution="exponential")
    assert not whole(closed).arrival_time.any()
    times = list(islice(closed.think_times(SEED), 5000))
    assert np.mean(times) == pytest.approx(2.0, rel=0.05)
    assert times == list(islice(closed.think_times(SEED), 5000))
    constant: Any = shared(**plain, concurrency=4, think_time=2.0)
    assert list(islice(constant.think_times(SEED), 3)) == [2.0] * 3


def test_streams_stand_apart() -> None:
    base = whole(shared())
    assert same(base, whole(shared()))
    but = ("output_len", "max_tokens", "segment_len")
    assert same(base, whole(shared(output_len=9)), but)
    assert not same(base, whole(shared(output_len=9)))
    assert same(base, whole(shared(arrival="constant", burstiness=1.0)), ("arrival_time",))
    longer = whole(shared(suffix_len={"distribution": "uniform", "low": 5, "high": 50}))
    assert same(base, longer, ("prompt_len", "segment_len"))


def test_a_rate_rescales_the_same_arrivals() -> None:
    slow, fast = whole(shared(request_rate=4.0)), whole(shared(request_rate=8.0))
    assert slow.arrival_time == pytest.approx(2 * fast.arrival_time)


def test_another_seed_is_another_load() -> None:
    (batch,) = shared().batches(np.random.SeedSequence(8), 16)
    assert not np.array_equal(batch.arrival_time, whole(shared()).arrival_time)


def test_iterating_leaves_the_seed_alone() -> None:
    seed = np.random.SeedSequence(3)
    first, second = (list(shared().batches(seed, 16)) for _ in range(2))
    assert all(same(a, b) for a, b in zip(first, second, strict=True))
    assert seed.n_children_spawned == 0


@pytest.mark.parametrize("arrival", ["poisson", "gamma", "constant"])
@pytest.mark.parametrize("popularity", ["zipf", "uniform"])
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, arrival: str, popularity: str) -> None:
    spec = {
        "arrival": arrival,
        "burstiness": 0.25 if arrival == "gamma" else 1.0,
        "group_popularity": popularity,
        "zipf_alpha": 0.8 if popularity == "zipf" else 1.0,
    }
    base = whole(shared(**spec))
    for size in (1, 7, 299):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert same(base, whole(shared(**spec)))


def test_more_requests_leave_the_earlier_ones() -> None:
    few, many = whole(shared(num_requests=2500)), whole(shared(num_requests=5000))
    segments = len(few.segment_id)
    for name in Batch._fields:
        column = getattr(few, name)
        assert np.array_equal(column, getattr(many, name)[: len(column)])
    assert many.segment_start[2500] == segments


def test_memory_does_not_grow() -> None:
    peak_memory(shared(num_requests=10_000))
    few, many = shared(num_requests=20_000), shared(num_requests=200_000)
    assert peak_memory(many) < 1.1 * peak_memory(few)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"output_len": 0}, "at least 1 token"),
        ({"output_len": 1.5}, "1.5 is no length"),
        ({"output_len": True}, "True is no length"),
        ({"prefix_len": -1}, "greater than or equal to 0"),
        ({"prefix_len": {"distribution": "uniform", "low": 5, "high": 2}}, "exchange them"),
        ({"prefix_len": {"distribution": "lognormal", "mean": float("nan"), "sigma": 1.0}}, "finite"),
        ({"prefix_len": {"distribution": "lognormal", "mean": 5.0, "sigma": float("nan")}}, "finite"),
        ({"prefix_len": 0, "suffix_len": 0}, "may both be 0"),
        ({"request_rate": float("nan")}, "greater than 0"),
        ({"request_rate": 0.0}, "greater than 0"),
        ({"burstiness": float("inf")}, "finite"),
        ({"arrival": "poisson"}, "set arrival: gamma"),
        ({"group_popularity": "uniform"}, "set group_popularity: zipf"),
        ({"concurrency": 4}, "request_rate to inf"),
        ({"think_time": 1.0}, "without concurrency"),
        ({"num_requests": "many"}, "valid integer"),
        ({"sufix_len": 3}, "not permitted"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        shared(**fields)


def test_shared_len_above_prompt_len() -> None:
    with pytest.raises(ValidationError, match="above prompt_len"):
        FourteenTokens(prompt_len=8)


def test_length_is_written_as_it_was_read() -> None:
    workload = SharedPrefix.model_validate({"num_requests": 1, **DRAWN, "output_len": 5})
    assert workload.model_dump()["output_len"] == 5


def test_prompts_of_a_group_come_again() -> None:
    """Each is one of so many, all of a group equally likely, of one length; all else is as without."""
    some = whole(shared(num_requests=4000, prompts_per_group=3))
    all_different = whole(shared(num_requests=4000))
    prompts = [tuple(row[:-1]) for row in rows(some)]  # the last is the answer, which nobody shares
    groups = some.prefix_group.tolist()
    assert len({(group, prompt) for group, prompt in zip(groups, prompts, strict=True)}) == 20 * 3
    assert len({row[-1][0] for row in rows(some)}) == 4000
    often = np.unique([hash(prompts[i]) for i in range(4000) if groups[i] == 0], return_counts=True)[1]
    assert len(often) == 3 and (abs(often - often.mean()) < 5 * np.sqrt(often.mean())).all()
    assert same(some, all_different, but=("segment_id", "segment_len", "segment_start", "prompt_len"))


def test_prompts_that_come_again_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_at_once = whole(shared(prompts_per_group=7))
    monkeypatch.setattr(Workload, "chunk_size", 13)
    assert same(whole(shared(prompts_per_group=7)), whole_at_once)


def test_too_many_prompts_to_remember() -> None:
    with pytest.raises(ValidationError, match="num_groups \\* prompts_per_group is 20,000,000, above"):
        shared(prompts_per_group=1_000_000)
