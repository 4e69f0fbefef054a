"""The front-end thread: first come, first served, what it charges for, and its part of TTFT."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import engine, linear, prompts
from simulation import run as run_engine

from sim import front_end
from sim.errors import InputError
from sim.front_end import FrontEnd, HashTimes, hash_time_us, shipped_times
from sim.hashing import ALGORITHMS, Algorithm
from sim.report import lines
from sim.saturation import front_end_work
from sim.scenario_file import load
from sim.simulate import simulate
from sim.simulation import run

ROOT = Path(__file__).parent.parent
H100 = ROOT / "sim" / "calibrations" / "h100-sxm" / "llama-3.1-8b_tp1_bf16.yaml"

FIGURES = [  # microseconds a block, vLLM's own functions on one core
    ("sha256", 16, 1.75),
    ("sha256", 64, 2.45),
    ("sha256_cbor", 16, 2.95),
    ("sha256_cbor", 64, 4.5),
]
ONE_PROMPT = """\
engine: {block_size: 16, num_gpu_blocks: 2000}
workload: {kind: shared_prefix, num_requests: 1, prefix_len: 2048, suffix_len: 130, output_len: 2}
"""
PRESSED = """\
engine: {block_size: 16, num_gpu_blocks: 60, max_num_batched_tokens: 256, max_num_seqs: 8, max_model_len: 400}
workload:
  kind: shared_prefix
  num_requests: 300
  num_groups: 3
  request_rate: 40
  prefix_len: {distribution: uniform, low: 0, high: 300}
  suffix_len: {distribution: lognormal, mean: 60, sigma: 1.2}
  output_len: {distribution: uniform, low: 1, high: 40}
"""
COLUMNS = ("refused", "front_end_time_ms", "queue_time_ms", "prefill_time_ms", "ttft_ms")


def simulated(folder: Path, text: str, *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summary and record columns of a scenario."""
    path = folder / "scenario.yaml"
    path.write_text(text)
    result = run(load(path, overrides))
    columns = {name: result.records.column(name) for name in COLUMNS}
    result.records.discard()
    return result.summary, columns


def h100_with(folder: Path, front_end: str) -> str:
    """The override that runs on the shipped H100 calibration with another front end."""
    text, changed = re.subn(r"(?ms)^front_end:.*?^(?=\w)", f"front_end: {front_end}\n", H100.read_text())
    assert changed == 1
    (folder / "mine.yaml").write_text(text)
    return f"cost={folder / 'mine.yaml'}"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_first_come_first_served(asynchronous: bool) -> None:
    """Lindley's recursion, request by request, whatever the engine is doing meanwhile."""
    rng = np.random.default_rng(3)
    n = 400
    lengths = rng.integers(1, 3000, n)
    arrival = np.cumsum(rng.exponential(400e-6, n))
    batch = prompts([[(i, int(length))] for i, length in enumerate(lengths)], output_len=3)
    batch = batch._replace(arrival_time=arrival)
    config = engine(async_scheduling=asynchronous)
    cost = linear(config)._replace(front_end_us=120.0, hash_us_per_block=1.75)
    result = run_engine(batch, config, cost)
    ready, free = [], 0.0
    for time, length in zip(arrival.tolist(), lengths.tolist(), strict=True):
        free = max(time, free) + (120.0 + 1.75 * (length // 16)) * 1e-6
        ready.append(free)
    np.testing.assert_allclose(result.records["ready_time"], ready, rtol=0, atol=1e-9)
    waited = np.array(ready[:-1]) > arrival[1:]
    assert 0.2 < waited.mean() < 0.8


def test_a_long_prompt_delays_the_one_behind_it() -> None:
    batch = prompts([[(0, 64_000)], [(1, 16)], [(2, 15)]], gap=1e-3)
    config = engine()
    cost = linear(config)._replace(front_end_us=100.0, hash_us_per_block=1.75)
    result = run_engine(batch, config, cost)
    # 4000 blocks, one block, no full block
    assert result.records["ready_time"] == pytest.approx([7.1e-3, 7.1e-3 + 101.75e-6, 7.1e-3 + 201.75e-6])
    assert result.records["scheduled_time"][0] == result.records["ready_time"][0]  # an idle engine starts


@pytest.mark.parametrize(("algo", "block_size", "us"), FIGURES)
def test_the_hash_time_of_algorithm_and_block_size(
    tmp_path: Path, algo: Algorithm, block_size: int, us: float
) -> None:
    assert hash_time_us(FrontEnd(), algo, block_size, "any") == us
    summary, records = simulated(
        tmp_path, ONE_PROMPT, f"engine.prefix_caching_hash_algo={algo}", f"engine.block_size={block_size}"
    )
    work_ms = (2178 // block_size) * us * 1e-3
    assert records["front_end_time_ms"] == pytest.approx([work_ms], rel=1e-9)
    assert summary["mean_front_end_time_ms"] == pytest.approx(work_ms, rel=1e-9)
    assert (summary["prefix_caching_hash_algo"], summary["hash_us_per_block"]) == (algo, us)
    assert any("hash_times.yaml" in text for text in summary["assumed"])


def test_sha256_is_the_default() -> None:
    assert load(ROOT / "scenarios" / "shared_prefix.yaml").engine.prefix_caching_hash_algo == "sha256"


def test_every_algorithm_of_vllms_has_a_time_and_its_source() -> None:
    assert tuple(HashTimes.model_fields) == ALGORITHMS
    for algo in ALGORITHMS:
        times = shipped_times(algo)
        assert times.source
        by_size = [times.us_per_block[size] for size in sorted(times.us_per_block)]
        assert {16, 64} <= set(times.us_per_block)
        assert by_size == sorted(by_size) and by_size[0] > 0
    for block_size in (8, 16, 32, 64, 128):
        sha256, sha256_cbor, xxhash, xxhash_cbor = (
            hash_time_us(FrontEnd(), algo, block_size, "any") for algo in ALGORITHMS
        )
        assert xxhash < sha256 < sha256_cbor and xxhash < xxhash_cbor < sha256_cbor


def test_the_time_is_linear_in_the_block_size_and_never_negative() -> None:
    def time(block_size: int, points: dict[int, float]) -> float:
        return hash_time_us(FrontEnd(hash_us_per_block={"xxhash": points}), "xxhash", block_size, "any")

    points = {16: 1.0, 32: 2.0, 64: 6.0}
    assert [time(size, points) for size in (8, 16, 24, 48, 128)] == [0.5, 1.0, 1.5, 4.0, 14.0]
    assert time(1, {16: 1.0, 32: 3.0}) == 0.0
    assert time(512, {16: 1.5}) == 1.5
    both = FrontEnd(hash_us_per_block={"sha256": {16: 1.0}, "xxhash": {16: 3.0}})
    assert [hash_time_us(both, algo, 16, "any") for algo in ("sha256", "xxhash")] == [1.0, 3.0]


def test_without_caching_nothing_is_hashed(tmp_path: Path) -> None:
    off = "engine.enable_prefix_caching=false"
    summary, records = simulated(tmp_path, ONE_PROMPT, off)
    assert records["front_end_time_ms"].tolist() == [0.0]
    assert not any("hash_times.yaml" in text for text in summary["assumed"])
    _, records = simulated(tmp_path, ONE_PROMPT, off, h100_with(tmp_path, "{alpha_us: 1500}"))
    assert records["front_end_time_ms"] == pytest.approx([1.5], rel=1e-9)


def test_a_request_has_its_own_cost_beside_hashing(tmp_path: Path) -> None:
    _, records = simulated(tmp_path, ONE_PROMPT, h100_with(tmp_path, "{alpha_us: 1500}"))
    assert records["front_end_time_ms"] == pytest.approx([1.5 + 136 * 1.75e-3], rel=1e-9)


def test_a_calibrations_own_times_come_first(tmp_path: Path) -> None:
    cost = h100_with(tmp_path, "{hash_us_per_block: {xxhash: {16: 10, 64: 30}}}")
    summary, records = simulated(tmp_path, ONE_PROMPT, cost, "engine.prefix_caching_hash_algo=xxhash")
    assert records["front_end_time_ms"] == pytest.approx([1.36], rel=1e-9)
    assert not any("hash_times.yaml" in text for text in summary["assumed"])
    with pytest.raises(InputError, match="hash_us_per_block: no times of sha256, only of xxhash") as caught:
        simulated(tmp_path, ONE_PROMPT, cost)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("front_end", "message"),
    [
        ("{hash_us_per_block: {md5: {16: 1}}}", "front_end.hash_us_per_block.md5: should be .sha256., "),
        ("{hash_us_per_block: {sha256: {}}}", "hash_us_per_block.sha256: .*at least 1"),
        ("{hash_us_per_block: {sha256: {16: -1}}}", "front_end.hash_us_per_block.sha256.16: .*greater than"),
        ("{hash_us_per_block: {sha256: {16: .nan}}}", "front_end.hash_us_per_block.sha256.16: .*finite"),
        ("{hash_us_per_block: {sha256: {0: 1}}}", "hash_us_per_block.sha256.0: should be greater than 0"),
        ("{alpha_us: fast}", "front_end.alpha_us: .*number"),
        ("{alpha: 1}", "unknown field; did you mean alpha_us"),
    ],
)
def test_a_bad_front_end_is_told_in_one_line(tmp_path: Path, front_end: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        simulated(tmp_path, ONE_PROMPT, h100_with(tmp_path, front_end))
    assert "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_algorithm_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="engine.prefix_caching_hash_algo.*sha256_cbor") as caught:
        simulated(tmp_path, ONE_PROMPT, "engine.prefix_caching_hash_algo=sha256-cbor")
    assert "\n" not in str(caught.value)


def test_a_whole_step_fit_already_contains_the_front_end(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text("gpu: rtx-4090\n" + ONE_PROMPT)
    result = run(load(path))
    assert result.records.column("front_end_time_ms").tolist() == [0.0]
    assert result.summary["hash_us_per_block"] == 0.0
    assert any("no hashing charged" in text for _, text in lines(result))
    assert not any("hash_times.yaml" in text for text in result.summary["assumed"])
    result.records.discard()


def test_the_parts_of_ttft_add_up(tmp_path: Path) -> None:
    summary, records = simulated(tmp_path, PRESSED, h100_with(tmp_path, "{alpha_us: 9000}"))
    assert summary["num_preemptions"] > 0 and summary["failed"] > 0 and summary["prefix_cache_hits"] > 0
    ran = records["refused"] == 0
    parts = [records[f"{name}_ms"] for name in ("front_end_time", "queue_time", "prefill_time")]
    assert all((part[ran] >= 0).all() and part[ran].max() > 5 for part in parts)
    np.testing.assert_allclose(sum(part[ran] for part in parts), records["ttft_ms"][ran], rtol=1e-9)
    assert all(np.isnan(part[~ran]).all() for part in parts)
    means = [summary[f"mean_{name}_ms"] for name in ("front_end_time", "queue_time", "prefill_time")]
    assert sum(means) == pytest.approx(summary["mean_ttft_ms"], rel=1e-9)


def test_a_token_reaches_the_client_later_than_the_engine_has_it() -> None:
    config = engine()
    batch = prompts([[(1, 40)], [(2, 70)]], output_len=[3, 1], gap=0.01)
    there, seen = [], []  # type: ignore[var-annotated]
    for reply, chunks in ((0.0, there), (2500.0, seen)):
        simulate(iter([batch]), config, linear(config)._replace(reply_us=reply), on_records=chunks.append)
    (there,), (seen,) = there, seen
    for name in there:
        later = 0.0025 if name in ("first_token_time", "finish_time") else 0.0
        assert seen[name].tolist() == (there[name] + later).tolist(), name


def test_the_report_shows_the_parts(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(ONE_PROMPT)
    result = run(load(path))
    shown = [text for _, text in lines(result)]
    result.records.discard()
    start = next(i for i, text in enumerate(shown) if "Parts of TTFT" in text)
    names = [text.split(",")[0] for text in shown[start + 1 : start + 4]]
    assert names == ["Front end", "Queueing", "Prefill"]
    assert shown[start + 1].endswith("0.24 / 0.24 / 0.24")
    assert shown[start + 4].endswith("sha256 1.75 us a block")


LOAD = """\
engine: {block_size: 16, num_gpu_blocks: 8000}
workload: {kind: shared_prefix, num_requests: 300, prefix_len: 160, suffix_len: 16, output_len: 2}
"""


@pytest.mark.parametrize(
    ("rate", "verdict", "low", "high"),
    [
        (2, "STABLE", 0.0, 0.4),  # 0.1 s of its own for a TTFT of little more is not a queue
        (40, "OVERLOADED", 0.9, 1.0),  # the thread does 10 a second
        ("inf", "BACKLOGGED", 0.9, 1.0),
    ],
)
def test_a_thread_that_cannot_keep_up_is_told(
    tmp_path: Path, rate: object, verdict: str, low: float, high: float
) -> None:
    cost = h100_with(tmp_path, "{alpha_us: 45000, hash_us_per_block: {sha256: {16: 5000}}}")
    summary, records = simulated(tmp_path, LOAD, cost, f"workload.request_rate={rate}")
    assert records["front_end_time_ms"].min() >= 100.0 * (1 - 1e-9)
    assert summary["mean_queue_time_ms"] < 10  # the engine itself is all but idle
    assert summary["saturation"] == verdict
    assert low <= summary["queueing_share"] <= high


@pytest.mark.parametrize("caching", [True, False])
def test_what_the_verdict_takes_for_work_is_what_the_thread_does(caching: bool) -> None:
    """Requests apart from each other wait for nobody, so their front-end time is all work."""
    lengths = [1, 15, 16, 17, 1000, 1024]
    config = engine(enable_prefix_caching=caching)
    cost = linear(config)._replace(front_end_us=120.0, hash_us_per_block=1.75)
    batch = prompts([[(i, length)] for i, length in enumerate(lengths)], gap=1.0)
    records = run_engine(batch, config, cost).records
    work = front_end_work(cost, config, records["prompt_len"])
    np.testing.assert_allclose(records["ready_time"] - records["arrival_time"], work, rtol=0, atol=1e-12)
    assert work[-1] == pytest.approx((120.0 + 1.75 * 64 * caching) * 1e-6)


def test_no_queue_no_share(tmp_path: Path) -> None:
    """The thread's own work is no waiting: one request, hashed for 0.1 s, waits for nobody."""
    cost = h100_with(tmp_path, "{alpha_us: 45000, hash_us_per_block: {sha256: {16: 5000}}}")
    summary, _ = simulated(tmp_path, LOAD, cost, "workload.num_requests=1")
    assert summary["mean_front_end_time_ms"] == pytest.approx(100.0, rel=1e-9)
    assert summary["queueing_share"] == pytest.approx(0.0, abs=1e-9)


def test_the_shipped_file_is_packaged() -> None:
    """What sim/front_end.py reads is in the wheel."""
    import tomllib

    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sim"]
    assert front_end._FILE.name in data
