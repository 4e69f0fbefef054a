"""Promises: how they are written, what keeps them, what limits a point that does not."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import InputError
from sim.planning.cost import check_price, cost
from sim.planning.evaluate import Evaluation, Point, judge
from sim.planning.limiting import limiting
from sim.planning.objective import KEYS, parse_limits
from sim.planning.steady import too_short
from sim.planning.vary import Choices, Range, parse_vary
from sim.scenario import Engine, Scenario
from workloads import FourteenTokens

SCENARIO = Scenario(engine=Engine(num_gpu_blocks=1000, max_num_seqs=64), workload=FourteenTokens())
FIGURES: dict[str, Any] = {
    "saturation": "STABLE", "refused_by_pool": 0, "good_share": 0.97, "completed": 2000, "duration": 400.0,
    "busy_time": 400.0, "mean_num_requests_running": 30.0, "max_num_requests_running": 50,
    "max_kv_cache_usage_perc": 0.5, "num_preemptions": 0, "queueing_share": 0.2, "prefix_cache_queries": 1000,
    "prefix_cache_hits": 800, "token_fates": {"evicted": 20}, "total_input_tokens": 1000, "mean_stay": 2.0,
    "num_gpu_blocks": 1000, "block_size": 16, "output_throughput": 500.0, "total_token_throughput": 5000.0,
    "p95_ttft_ms": 1500.0, "p95_tpot_ms": 40.0,
}  # fmt: skip


def evaluation(*promise: str, seeds: int = 1, **changed: Any) -> Evaluation:
    limits = parse_limits(promise or ["ttft_p95=2s"])
    return Evaluation(Point(), tuple(judge(seed, FIGURES | changed, limits) for seed in range(seeds)))


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("2s", 2000.0), ("50ms", 50.0), ("500us", 0.5), (".5s", 500.0), ("1e-1s", 100.0)],
)
def test_a_limit_has_a_unit(text: str, milliseconds: float) -> None:
    (limit,) = parse_limits([f"ttft_p95={text}"])
    assert limit.value == pytest.approx(milliseconds) and KEYS[limit.name] == "p95_ttft_ms"
    assert str(limit) == f"ttft_p95 <= {text}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["--slo ttft_p95=2s"]),
        (["tttf_p95=2s"], ["tttf_p95 is no figure", "did you mean ttft_p95?"]),
        (["p95_ttft=2s"], ["p95_ttft is no figure", "did you mean ttft_p95?"]),
        (["mean_itl_ms=2s"], ["did you mean itl_mean?"]),
        (["speed=2s"], ["speed is no figure", "ttft, tpot, itl, e2el"]),
        (["ttft_p95=2"], ["no unit", "2s or 2ms"]),
        (["ttft_p95=2min"], ["min is no unit", "us, ms, s"]),
        (["ttft_p95"], ["should read name=limit"]),
        (["ttft_p95="], ["is no limit"]),
        (["ttft_p95=-2s"], ["'-2s' is no limit"]),
        (["ttft_p95=0s"], ["above 0"]),
        (["good=95"], ["above 0 and below 1"]),
        (["good=1"], ["above 0 and below 1"]),
        (["good=0.9s"], ["above 0 and below 1"]),
        (["ttft_p95=1s", "ttft_p95=2s"], ["ttft_p95: is given twice"]),
    ],
)
def test_a_bad_promise_is_one_line(given: list[str], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_limits(given)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("promise", "changed", "broken"),
    [
        (["ttft_p95=2s"], {}, ""),
        (["ttft_p95=1.5s"], {}, ""),
        (["ttft_p95=1.4s"], {}, "ttft_p95 1.5 s > 1.4s"),
        (["ttft_p95=1s", "tpot_p95=10ms"], {}, "tpot_p95 40 ms > 10ms"),
        (["ttft_p95=2s"], {"saturation": "BACKLOGGED"}, ""),
        (["ttft_p95=2s"], {"saturation": "OVERLOADED"}, "OVERLOADED"),
        (["ttft_p95=1s"], {"saturation": "OVERLOADED"}, "OVERLOADED, ttft_p95 1.5 s > 1s"),
        (["ttft_p95=2s"], {"refused_by_pool": 3}, "3 requests refused, larger than the pool"),
        (["tpot_p95=2s"], {"p95_tpot_ms": None}, ""),
        (["good=0.97"], {}, ""),
        (["good=0.98"], {}, "good 0.97 < 0.98"),
    ],
)
def test_a_run_keeps_a_promise_or_says_why_not(promise: list[str], changed: Any, broken: str) -> None:
    assert judge(0, FIGURES | changed, parse_limits(promise)).broken == broken


def test_a_point_keeps_it_if_each_seed_does() -> None:
    limits = parse_limits(["ttft_p95=2s"])
    ttft = [10.0, 2001.0, 10.0]
    runs = [judge(seed, FIGURES | {"p95_ttft_ms": ttft[seed]}, limits) for seed in range(3)]
    assert not Evaluation(Point(), tuple(runs)).kept  # though the mean is a third of the limit
    assert Evaluation(Point(), tuple(runs)).worst.seed == 1
    assert Evaluation(Point(), (runs[0], runs[2])).kept


@pytest.mark.parametrize(
    ("changed", "by", "words"),
    [
        ({"max_num_requests_running": 64}, "sequences", "max_num_seqs"),
        ({"num_preemptions": 1}, "kv", "full"),
        ({"max_kv_cache_usage_perc": 0.96}, "kv", "full"),
        # Prompts of 4,000 tokens in a pool of 16,000 wait with a quarter of it free.
        ({"max_kv_cache_usage_perc": 0.8, "total_input_tokens": 8_000_800}, "kv", "full"),
        ({"token_fates": {"evicted": 100}}, "kv", "50% of the missed"),
        ({"token_fates": {"evicted": 99}}, "slo", "a step for so many"),
        ({"token_fates": None}, "slo", "a step for so many"),
        ({"refused_by_pool": 2}, "kv", "refused"),
        ({"saturation": "OVERLOADED"}, "compute", "works all the time"),
        ({"saturation": "BACKLOGGED"}, "compute", "works all the time"),
        ({"saturation": "BACKLOGGED", "busy_time": 300.0}, "slo", "a step for so many"),
        ({"mean_num_requests_running": 1.2}, "slo", "alone"),
    ],
)
def test_what_limits_is_what_is_used_up(changed: Any, by: str, words: str) -> None:
    found = limiting(evaluation("ttft_p95=1s", **changed), SCENARIO)
    assert (found.by, words in found.text) == (by, True), found


def test_a_short_run_is_told_with_the_length_that_would_do() -> None:
    limits = parse_limits(["ttft_p95=2s"])
    assert too_short(evaluation(), limits) is None  # 2,000 requests in 400 s
    assert "1.2 times as long, 2500 requests" in str(too_short(evaluation(), parse_limits(["ttft_p95=5s"])))
    assert "4000 requests" in str(too_short(evaluation(mean_stay=40.0), limits))
    assert "1000 requests" in str(too_short(evaluation(completed=500), limits))
    assert too_short(evaluation(), parse_limits(["tpot_p95=60s"])) is None  # no wait is limited by a TPOT


def test_cost_is_price_by_throughput() -> None:
    found = cost(evaluation(seeds=3), price=3.6, gpus=2)  # 0.002 a second
    assert found.output == pytest.approx(0.002 / 500 * 1e6) and found.total == pytest.approx(0.4)
    for price in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="--price .* above 0"):
            check_price(price)
    check_price(None)


def test_ranges_and_lists_are_told_apart() -> None:
    given = ["engine.num_gpu_blocks=10..20", "engine.block_size=16,32", "cluster.replicas=1 .. 4"]
    varied = parse_vary(given)
    assert varied.ranges == (Range("cluster.replicas", 1, 4), Range("engine.num_gpu_blocks", 10, 20))
    assert varied.lists == (Choices("engine.block_size", ["16", "32"]),)
    crossed = parse_vary(["a=1,2", "b=x,y"]).crossed()
    assert crossed[:2] == [(("a", "1"), ("b", "x")), (("a", "1"), ("b", "y"))] and len(crossed) == 4
    assert parse_vary([]).crossed() == [()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["engine.block_size"], ["path=low..high"]),
        (["engine.block_size="], ["has no value"]),
        (["engine.block_size=16"], ["one value", "--set engine.block_size=16"]),
        (["engine.block_size=16,"], ["has no value"]),
        (["engine.block_size=16,16"], ["a value twice"]),
        (["engine.num_gpu_blocks=20..10"], ["reversed", "engine.num_gpu_blocks=10..20"]),
        (["engine.num_gpu_blocks=..10"], ["two whole numbers"]),
        (["engine.num_gpu_blocks=1.5..10"], ["two whole numbers"]),
        (["a=1..2", "a=3,4"], ["a: is varied twice"]),
        (["seed=1..3"], ["--seeds"]),
        (["workload.request_rate=1..100"], ["no range is given"]),
        ([f"{path}={','.join(map(str, range(50)))}" for path in "ab"], ["2,500 combinations"]),
    ],
)
def test_a_bad_range_or_list_is_one_line(given: list[str], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_vary(given)
    assert all(word in str(caught.value) for word in words), caught.value
