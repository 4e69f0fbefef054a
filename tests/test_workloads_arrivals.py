"""Arrivals: rates, bursts and schedules against what their definitions say, over fixed seeds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import SEED, make, peak_memory, same, whole
from pydantic import ValidationError

from sim.request import Floats
from workloads.base import Workload
from workloads.rates import piecewise
from workloads.streams import Stream, generator

SEEDS = [np.random.SeedSequence(seed) for seed in range(100, 120)]
SCHEDULE = [[0, 4], [50, 0], [80, 20.5], [100, 1]]
STATES = [{"rate": 2, "mean_sojourn": 30}, {"rate": 40.0, "mean_sojourn": 5}]
CHANGING: dict[str, dict[str, Any]] = {
    "mmpp": {"arrival": "mmpp", "states": STATES},
    "step": {"arrival": "step", "schedule": SCHEDULE},
    "diurnal": {"arrival": "diurnal", "request_rate": 5.0, "amplitude": 0.9, "period": 60},
}


def scan(num_requests: int = 1000, **fields: Any) -> Any:
    return make({"kind": "scan", "num_requests": num_requests, "prompt_len": 1, "output_len": 1, **fields})


def times(seed: np.random.SeedSequence = SEED, **fields: Any) -> Floats:
    return whole(scan(**fields), seed=seed).arrival_time


def within_three_errors(samples: npt.ArrayLike, expected: float) -> bool:
    """Whether the mean of independent samples agrees; the error is estimated from them."""
    found = np.asarray(samples)
    return bool(abs(found.mean() - expected) <= 3 * found.std(ddof=1) / math.sqrt(len(found)))


def counts(arrivals: list[Floats], begin: float, end: float) -> int:
    """Arrivals from `begin` to before `end`, in all of them together."""
    assert all(one[-1] > end for one in arrivals)
    return sum(int(((one >= begin) & (one < end)).sum()) for one in arrivals)


def test_poisson_arrivals_are_the_sums_of_their_stream() -> None:
    gaps = generator(SEED, Stream.ARRIVALS).standard_exponential(5000) / 8.0
    assert np.array_equal(times(num_requests=5000, request_rate=8.0), np.cumsum(gaps))
    gaps = generator(SEED, Stream.ARRIVALS).standard_gamma(0.25, 5000) / (0.25 * 8.0)
    found = times(num_requests=5000, request_rate=8.0, arrival="gamma", burstiness=0.25)
    assert np.array_equal(found, np.cumsum(gaps))


@pytest.mark.parametrize(
    ("fields", "cv"),
    [
        ({}, 1.0),
        ({"arrival": "gamma", "burstiness": 0.25}, 2.0),
        ({"arrival": "gamma", "burstiness": 4.0}, 0.5),
    ],
)
def test_renewal_arrivals(fields: dict[str, Any], cv: float) -> None:
    gaps = [np.diff(times(seed, num_requests=5000, request_rate=8.0, **fields)) for seed in SEEDS]
    assert within_three_errors([one.mean() for one in gaps], 1 / 8)
    assert within_three_errors([(one**2).mean() * 64 for one in gaps], 1 + cv**2)


def test_a_step_schedule_has_its_integrals() -> None:
    arrivals = [times(seed, num_requests=2000, **CHANGING["step"]) for seed in SEEDS]
    for begin, end, rate in ((0, 50, 4), (80, 100, 20.5), (100, 500, 1), (20, 30, 4)):
        expected = rate * (end - begin) * len(SEEDS)
        assert abs(counts(arrivals, begin, end) - expected) <= 3 * math.sqrt(expected)
    assert counts(arrivals, 50, 80) == 0


def test_steps_map_back_to_a_process_of_rate_one() -> None:
    units = np.cumsum(generator(SEED, Stream.ARRIVALS).standard_exponential(5000))
    found = times(num_requests=5000, **CHANGING["step"])
    second, rate = np.array(SCHEDULE).T
    mass = np.concatenate([[0], np.cumsum(np.diff(second) * rate[:-1])])
    piece = np.searchsorted(second, found, side="right") - 1
    assert mass[piece] + (found - second[piece]) * rate[piece] == pytest.approx(units, rel=1e-12)


def test_a_unit_time_on_a_border_goes_past_the_silence_behind_it() -> None:
    units, pieces = np.array([0.5, 1.0]), [(1.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    (found,) = piecewise(iter([units]), iter(pieces))
    assert found.tolist() == [0.5, 2.0]


def test_rounding_carries_no_arrival_past_the_one_on_the_border() -> None:
    pieces = [(2.4590161411622846, 0.9575136843803134), (0.949152008673377, 5.32668476571526), (1.0, 1.0)]
    border = sum(seconds * rate for seconds, rate in pieces[:2])
    (found,) = piecewise(iter([np.array([np.nextafter(border, 0), border])]), iter(pieces))
    assert found[0] <= found[1] == 2.4590161411622846 + 0.949152008673377


def test_memory_does_not_grow_with_the_states() -> None:
    def load(num_requests: int) -> Any:
        return scan(num_requests, arrival="mmpp", states=[{"rate": 1, "mean_sojourn": 1}] * 2)

    peak_memory(load(10_000))
    assert peak_memory(load(50_000)) < 1.1 * peak_memory(load(10_000))


def test_a_step_of_one_rate_is_poisson() -> None:
    found = times(arrival="step", schedule=[[0, 8]])
    assert found == pytest.approx(times(request_rate=8.0), rel=1e-12)


def test_diurnal_arrivals_follow_the_sine() -> None:
    arrivals = [times(seed, num_requests=4000, **CHANGING["diurnal"]) for seed in SEEDS]
    for begin in range(0, 60, 15):
        first, last = (math.cos(2 * math.pi * second / 60) for second in (begin, begin + 15))
        swing = 0.9 * 60 / (2 * math.pi) * (first - last)
        expected = 5 * (15 + swing) * len(SEEDS) * 10  # ten periods
        found = sum(counts(arrivals, begin + 60 * i, begin + 60 * i + 15) for i in range(10))
        assert abs(found - expected) <= 3 * math.sqrt(expected)


def test_diurnal_arrivals_map_back_to_a_process_of_rate_one() -> None:
    def mass(now: Floats) -> Floats:
        return 5 * (now + 0.9 * 60 / (2 * math.pi) * (1 - np.cos(2 * math.pi * now / 60)))

    gaps = np.concatenate(
        [np.diff(mass(times(seed, num_requests=4000, **CHANGING["diurnal"]))) for seed in SEEDS]
    )
    assert within_three_errors(gaps, 1.0)
    assert within_three_errors(gaps**2, 2.0)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) <= 3 / math.sqrt(len(gaps))


def test_mmpp_has_the_rates_of_its_states_by_their_sojourns() -> None:
    states = [
        {"rate": 1.0, "mean_sojourn": 4},
        {"rate": 30, "mean_sojourn": 0.5},
        {"rate": 6.0, "mean_sojourn": 1.5},
    ]
    arrivals = [times(seed, num_requests=20_000, arrival="mmpp", states=states) for seed in SEEDS]
    rate = (1 * 4 + 30 * 0.5 + 6 * 1.5) / 6
    assert within_three_errors([len(one) / one[-1] for one in arrivals], rate)
    starts = [times(np.random.SeedSequence(seed), arrival="mmpp", states=states) for seed in range(500)]
    early = [counts([one], 0, 3) for one in starts]
    assert within_three_errors(early, 3 * rate), "it begins in the long run's mix of states"


def test_an_interrupted_poisson_process_has_its_textbook_variation() -> None:
    states = [{"rate": 10, "mean_sojourn": 2}, {"rate": 0, "mean_sojourn": 3}]
    gaps = [np.diff(times(seed, num_requests=40_000, arrival="mmpp", states=states)) for seed in SEEDS]
    off, on = 1 / 3, 1 / 2  # rates of leaving the silent and the speaking state
    cv_squared = 1 + 2 * 10 * on / (off + on) ** 2
    mean = (off + on) / (10 * off)
    assert within_three_errors([one.mean() for one in gaps], mean)
    assert within_three_errors([(one**2).mean() / mean**2 for one in gaps], 1 + cv_squared)


@pytest.mark.parametrize("kind", CHANGING)
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    base = times(num_requests=5000, **CHANGING[kind])
    assert (np.diff(base) >= 0).all()
    for size in (7, 999, 5000):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert np.array_equal(times(num_requests=5000, **CHANGING[kind]), base)
    assert np.array_equal(times(num_requests=3000, **CHANGING[kind]), base[:3000])


@pytest.mark.parametrize("kind", CHANGING)
def test_arrivals_change_nothing_else(kind: str) -> None:
    spec = {"prompt_len": {"distribution": "uniform", "low": 1, "high": 99}}
    assert same(
        whole(scan(**spec, **CHANGING[kind])), whole(scan(**spec, request_rate=3.0)), ("arrival_time",)
    )


def test_sojourns_have_a_stream_of_their_own() -> None:
    states = [{"rate": 5, "mean_sojourn": 9}, {"rate": 5, "mean_sojourn": 2}]
    one = times(num_requests=5000, arrival="mmpp", states=states)
    assert one == pytest.approx(times(num_requests=5000, request_rate=5.0), rel=1e-12)


def test_as_written_it_reads_back() -> None:
    for fields in CHANGING.values():
        workload = scan(**fields)
        assert make(workload.model_dump()) == workload


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"arrival": "mmpp"}, "need states"),
        ({"arrival": "mmpp", "states": STATES[:1]}, "at least 2"),
        ({"arrival": "mmpp", "states": STATES, "request_rate": 3.0}, "no effect beside states"),
        ({"arrival": "mmpp", "states": [{"rate": 0, "mean_sojourn": 1}] * 2}, "too often"),
        ({"arrival": "mmpp", "states": [{"rate": 1, "mean_sojourn": 1e-9}] * 2}, "too often"),
        ({"arrival": "mmpp", "states": [{"rate": -1, "mean_sojourn": 1}] * 2}, "greater than or equal to 0"),
        ({"arrival": "mmpp", "states": [{"rate": 1, "mean_sojourn": 0}] * 2}, "greater than 0"),
        ({"states": STATES}, "states has no effect on poisson arrivals: set arrival: mmpp"),
        ({"arrival": "mmpp", "states": STATES, "concurrency": 3}, "clients set the pace"),
        ({"arrival": "step"}, "need a schedule"),
        ({"arrival": "step", "schedule": []}, "at least 1"),
        ({"arrival": "step", "schedule": [[1, 5]]}, "seconds begin at 0 and increase"),
        ({"arrival": "step", "schedule": [[0, 5], [9, 6], [9, 7]]}, r"\[9.0, 7.0\] as entry 3"),
        ({"arrival": "step", "schedule": [[0, 5], [9]]}, "write \\[second"),
        ({"arrival": "step", "schedule": [[0, -5]]}, "finite and from 0"),
        ({"arrival": "step", "schedule": [[0, math.nan]]}, "finite and from 0"),
        ({"arrival": "step", "schedule": [[0, math.inf]]}, "finite and from 0"),
        ({"arrival": "step", "schedule": [[0, 5], [9, 0]]}, "never come"),
        ({"arrival": "step", "schedule": [[0, 5]], "request_rate": 2.0}, "no effect beside schedule"),
        ({"schedule": [[0, 5]]}, "set arrival: step"),
        ({"arrival": "diurnal", "request_rate": 3.0}, "an amplitude"),
        ({"arrival": "diurnal", "amplitude": 0.5}, "a finite request_rate"),
        ({"arrival": "diurnal", "request_rate": 3.0, "amplitude": 1.5}, "less than or equal to 1"),
        ({"arrival": "diurnal", "request_rate": 3.0, "amplitude": 1, "period": 0}, "greater than 0"),
        ({"amplitude": 0.5, "request_rate": 3.0}, "set arrival: diurnal"),
        ({"period": 60.0, "request_rate": 3.0}, "set arrival: diurnal"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        scan(**fields)
