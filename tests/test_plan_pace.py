"""The pace of each kind of workload, and the same requests played faster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sim.errors import InputError
from sim.planning.pace import Pace, pace_of, paced
from sim.scenario import Scenario
from sim.scenario_file import load

SHARED = "kind: shared_prefix, num_requests: 50, prefix_len: 64, suffix_len: 8, output_len: 4"
ITS_OWN = Pace("speed", "x its own pace", 1.0)
CHAT = "kind: multi_turn, num_sessions: 5, num_turns: 3, user_len: 20, output_len: 4, think_time: 7"
TRACE = '{"timestamp": 0, "input_length": 64, "output_length": 2, "hash_ids": [1]}\n' \
        '{"timestamp": 4000, "input_length": 64, "output_length": 2, "hash_ids": [1]}\n'  # fmt: skip


def write(tmp_path: Path, workload: str, more: str = "") -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(f"engine: {{num_gpu_blocks: 100}}\n{more}workload: {{{workload}}}\n")
    (tmp_path / "t.jsonl").write_text(TRACE)
    return path


def faster(path: Path, factor: float) -> tuple[Scenario, Scenario]:
    """A scenario, and itself `factor` times as fast by its overrides."""
    scenario = load(path)
    pace = pace_of(scenario)
    return scenario, load(path, paced(scenario, pace, pace.now * factor))


def arrivals(scenario: Scenario) -> np.ndarray:
    batches = scenario.workload.batches(np.random.SeedSequence(3), 64)
    return np.concatenate([batch.arrival_time for batch in batches])


@pytest.mark.parametrize(
    ("workload", "pace"),
    [
        (f"{SHARED}, request_rate: 8", Pace("request_rate", "req/s", 8.0)),
        (f"{SHARED}, request_rate: 8, arrival: constant", Pace("request_rate", "req/s", 8.0)),
        (f"{SHARED}, request_rate: 8, arrival: gamma, burstiness: 0.5", Pace("request_rate", "req/s", 8.0)),
        (f"{SHARED}, request_rate: 8, arrival: diurnal, amplitude: 0.9, period: 30",
         Pace("request_rate", "req/s", 8.0)),
        (f"{SHARED}, arrival: step, schedule: [[0, 0], [5, 2], [20, 9]]", ITS_OWN),
        (f"{SHARED}, arrival: mmpp, states: [{{rate: 1, mean_sojourn: 9}}, {{rate: 30, mean_sojourn: 2}}]",
         ITS_OWN),
        ("kind: trace, path: t.jsonl", ITS_OWN),
        ("kind: trace, path: t.jsonl, time_scale: 2", ITS_OWN),
        ("kind: trace, path: t.jsonl, arrival: constant, request_rate: 5",
         Pace("request_rate", "req/s", 5.0)),
        (f"kind: mix, tenants: {{a: {{workload: {{{SHARED}, request_rate: 8}}}}, "
         f"b: {{workload: {{{SHARED}, arrival: step, schedule: [[0, 0], [5, 2]]}}}}, "
         "c: {workload: {kind: trace, path: t.jsonl}}}", ITS_OWN),
    ],
)  # fmt: skip
def test_the_same_requests_come_so_many_times_as_fast(tmp_path: Path, workload: str, pace: Pace) -> None:
    path = write(tmp_path, workload)
    assert pace_of(load(path)) == pace
    slow, fast = faster(path, 4.0)
    np.testing.assert_allclose(arrivals(fast), arrivals(slow) / 4.0, rtol=1e-12)
    slow, same = faster(path, 1.0)
    assert same == slow


def test_sessions_begin_faster_and_think_as_long(tmp_path: Path) -> None:
    path = write(tmp_path, f"{CHAT}, session_rate: 2")
    assert pace_of(load(path)) == Pace("session_rate", "sessions/s", 2.0)
    slow, fast = faster(path, 3.0)
    assert fast.workload.session_rate == 6.0 and fast.workload.think_time == slow.workload.think_time == 7


def test_users_are_the_pace_of_a_closed_loop(tmp_path: Path) -> None:
    path = write(tmp_path, f"{SHARED}, concurrency: 4, think_time: 1", "measure_from: 3\n")
    pace = pace_of(load(path))
    assert pace == Pace("concurrency", "users", 4) and pace.whole
    more = load(path, paced(load(path), pace, 12))
    assert (more.workload.concurrency, more.measure_from) == (12, 3.0)


def test_the_times_of_the_scenario_follow_the_pace(tmp_path: Path) -> None:
    more = "measure_from: 6\nreset_prefix_cache: [1, 2]\n"
    _, fast = faster(write(tmp_path, f"{SHARED}, request_rate: 8", more), 4.0)
    assert (fast.measure_from, fast.reset_prefix_cache) == (1.5, [0.25, 0.5])


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (SHARED, ["workload: has no pace", "set workload.request_rate, or workload.concurrency"]),
        (CHAT, ["set workload.session_rate, or workload.concurrency"]),
        ("kind: trace, path: t.jsonl, arrival: constant", ["set workload.request_rate"]),
        (f"kind: mix, tenants: {{b: {{workload: {{{SHARED}}}}}}}",
         ["workload.tenants.b.workload: has no pace", "set workload.tenants.b.workload.request_rate"]),
    ],
)  # fmt: skip
def test_what_comes_all_at_once_has_no_pace(tmp_path: Path, workload: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        pace_of(load(write(tmp_path, workload)))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_tenant_with_a_dot_in_its_name_has_no_path(tmp_path: Path) -> None:
    workload = f"kind: mix, tenants: {{a.b: {{workload: {{{SHARED}, request_rate: 8}}}}}}"
    scenario = load(write(tmp_path, workload))
    with pytest.raises(InputError, match=r"'a\.b' holds a dot"):
        paced(scenario, pace_of(scenario), 2.0)
