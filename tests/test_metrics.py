"""Records and summary, against plain NumPy and cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest

import sim.histogram
from sim import records as request_records
from sim._jit import entry
from sim.columns import X
from sim.core import EngineConfig
from sim.domain import StepsOutside
from sim.histogram import new_histogram
from sim.metrics import Slo, summarize
from sim.records import COLUMNS, ROW_GROUP, Records
from sim.residency import new_durations
from sim.saturation import Saturation, saturation
from sim.timeseries import Samples

CONFIG = EngineConfig(
    block_size=16, num_gpu_blocks=101, max_num_batched_tokens=2048, max_num_seqs=8, max_model_len=4096
)


def make_totals(**given: float) -> Any:
    """A stand-in for the engine's Totals: zeros but for what is given."""
    text = """
        num_steps num_scheduled_tokens num_scheduled_seqs num_running_sum max_num_running
        max_concurrent_requests prefix_cache_queries prefix_cache_hits preempted_queries preempted_hits
        num_admissions num_readmissions num_preemptions num_evictions num_lookups busy_time last_time
        itl_count itl_sum itl_sum_squares max_blocks_used usage_time
    """
    zeros: dict[str, Any] = dict.fromkeys(text.split(), 0)
    zeros |= {"state_times": np.zeros(4), "fullest_states": np.zeros(4, np.int64)}
    zeros |= {"metadata": np.zeros(2), "cache_sums": np.zeros(0)}
    nowhere = StepsOutside(*[0] * len(StepsOutside._fields))
    none = Samples(0.0, 1.0, np.zeros((0, X.WIDTH), np.int64), np.zeros(X.WIDTH, np.int64))
    tables = {"itl_histogram": new_histogram(), "steps_outside": nowhere, "samples": none}
    tables |= {"durations": new_durations(False), "evicted_from": {}, "replicas": ()}
    return cast(Any, SimpleNamespace(**(zeros | tables | given)))


def make_chunk(
    arrival: Any,
    scheduled: Any,
    first: Any,
    finish: Any,
    prompt: Any = 100,
    output: Any = 11,
    refused: Any = 0,
    ready: Any = None,
) -> dict[str, Any]:
    """Columns of records; `ready` (None: `arrival`) is when the front end is done."""
    n = len(arrival)
    whole = {"prompt_len": prompt, "output_len": output, "refused": refused, "num_cached_tokens": 32}
    whole |= {"session_id": -1, "tenant": -1, "prefix_group": 0, "num_preemptions": 0}
    whole |= {"num_evictions": 0, "replica": 0, "n": 1, "beam_width": 1}
    chunk: dict[str, Any] = {name: np.broadcast_to(np.int64(value), n) for name, value in whole.items()}
    times = {
        "arrival_time": arrival,
        "submitted_time": arrival,
        "ready_time": arrival if ready is None else ready,
        "scheduled_time": scheduled,
        "first_token_time": first,
        "finish_time": finish,
    }
    chunk |= {"request_id": np.arange(n)} | {name: np.array(time, float) for name, time in times.items()}
    return looked_up(chunk)


def looked_up(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk with what its requests, of one sample each, add to the cache's counters."""
    ran = chunk["refused"] == 0
    queries, hits = ran * chunk["prompt_len"], ran * chunk["num_cached_tokens"]
    return chunk | {"prefix_cache_queries": queries, "prefix_cache_hits": hits}


def random_chunk(n: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    arrival, ready, *later = np.cumsum(rng.exponential(1.0, (5, n)), axis=0)
    lengths = {"prompt": rng.integers(1, 500, n), "output": rng.integers(1, 9, n)}
    return make_chunk(arrival, *later, ready=ready, **lengths)


def closed(*chunks: dict[str, Any], path: Path | None = None) -> Records:
    records = Records(path)
    for chunk in chunks:
        records.append(looked_up(chunk))
    records.close()
    return records


def cut(chunk: dict[str, Any], sizes: int) -> list[dict[str, Any]]:
    n = len(chunk["request_id"])
    return [{k: v[i : i + sizes] for k, v in chunk.items()} for i in range(0, n, sizes)]


def test_columns_by_hand() -> None:
    records = closed(make_chunk([1.0], [1.5], [2.0], [3.0], ready=[1.2]))
    assert records.column("front_end_time_ms") == pytest.approx([200])
    assert records.column("queue_time_ms") == pytest.approx([300])
    assert records.column("prefill_time_ms") == pytest.approx([500])
    assert records.column("ttft_ms") == pytest.approx([1000])
    assert records.column("tpot_ms") == pytest.approx([100])  # 10 gaps in a second
    assert records.column("itl_mean_ms") == pytest.approx([100])
    assert records.column("e2el_ms") == pytest.approx([2000])


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2el", "front_end_time", "queue_time", "prefill_time"])
def test_distribution_is_numpys(name: str) -> None:
    records = closed(*cut(random_chunk(5000), 700))
    summary = summarize(records, make_totals(), CONFIG, None)
    values = records.column(f"{name}_ms")
    values = values[~np.isnan(values)]
    assert (name == "tpot") == (len(values) < 5000)  # one token has no time between tokens
    assert summary[f"mean_{name}_ms"] == pytest.approx(values.mean(), rel=1e-12)
    assert summary[f"std_{name}_ms"] == pytest.approx(values.std(), rel=1e-9)
    for q in (50, 90, 95, 99):
        assert summary[f"p{q}_{name}_ms"] == np.percentile(values, q)
    assert summary[f"median_{name}_ms"] == summary[f"p50_{name}_ms"]


def test_memory_or_disk_however_cut_is_the_same(tmp_path: Path) -> None:
    chunk = random_chunk(150_000)
    texts, files = set(), set()
    for i, sizes in enumerate((150_000, 65_536, 65_535, 1234)):
        path = tmp_path / f"{i}.parquet" if i else None
        records = closed(*cut(chunk, sizes), path=path)
        assert records.num_rows == 150_000
        texts.add(json.dumps(summarize(records, make_totals(), CONFIG, Slo(ttft=2000.0)), allow_nan=False))
        np.testing.assert_array_equal(records.column("request_id"), np.arange(150_000))
        records.discard()
        if path is not None:
            files.add(path.read_bytes())
            meta = pq.ParquetFile(path).metadata
            assert [meta.row_group(g).num_rows for g in range(3)] == [
                ROW_GROUP,
                ROW_GROUP,
                150_000 - 2 * ROW_GROUP,
            ]
            assert tuple(meta.schema.names) == COLUMNS
    assert len(texts) == 1 and len(files) == 1


def test_small_run_touches_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_records.tempfile, "TemporaryDirectory", None)
    records = closed(random_chunk(1000))
    assert len(records.column("ttft_ms")) == 1000


def test_temporary_file_goes_away() -> None:
    records = closed(random_chunk(ROW_GROUP + 1))
    folder = records._target().parent
    assert folder.exists()
    records.discard()
    assert not folder.exists()


def test_empty_table_with_a_path_is_a_table(tmp_path: Path) -> None:
    records = closed(path=tmp_path / "r.parquet")
    assert records.num_rows == 0
    assert pq.read_table(tmp_path / "r.parquet").num_rows == 0


def test_counts_throughput_and_goodput() -> None:
    nan = float("nan")
    records = closed(
        make_chunk([10.0, 10.0], [10.0, 11.0], [11.0, 13.0], [12.0, 15.0], prompt=[100, 50], output=[11, 1]),
        make_chunk([10.5], [nan], [nan], [nan], prompt=9999, output=0, refused=1),
    )
    s = summarize(records, make_totals(), CONFIG, Slo(ttft=2000.0, tpot=200.0))
    assert (s["completed"], s["failed"]) == (2, 1)
    assert (s["total_input_tokens"], s["total_output_tokens"]) == (150, 12)
    assert s["duration"] == 5.0
    assert s["request_throughput"] == pytest.approx(2 / 5)
    assert s["request_goodput"] == pytest.approx(1 / 5)  # the second waited 3 s for its token
    assert s["total_token_throughput"] == pytest.approx(162 / 5)
    # its one token has no TPOT, which breaks no limit
    assert summarize(records, make_totals(), CONFIG, Slo(tpot=200.0))["request_goodput"] == pytest.approx(
        2 / 5
    )
    assert "request_goodput" not in summarize(records, make_totals(), CONFIG, None)


def test_cache_and_load_figures() -> None:
    totals = make_totals(
        prefix_cache_queries=200, prefix_cache_hits=50, preempted_queries=7, preempted_hits=3,
        busy_time=10.0, usage_time=500.0, max_blocks_used=80, num_steps=4, num_running_sum=10,
    )  # fmt: skip
    s = summarize(closed(random_chunk(10)), totals, CONFIG, None)
    assert s["prefix_cache_hit_rate"] == 0.25
    assert (s["preempted_queries"], s["preempted_hits"]) == (7, 3)
    assert s["mean_kv_cache_usage_perc"] == 0.5  # 100 usable blocks: one of 101 is the null block
    assert s["max_kv_cache_usage_perc"] == 0.8
    assert s["mean_num_requests_running"] == 2.5


def test_itl_from_its_histogram() -> None:
    histogram = new_histogram()
    bin_of = entry(sim.histogram.bin_of)
    for value in (0.01, 0.01, 0.03):
        histogram[bin_of(value)] += 1
    totals = make_totals(itl_histogram=histogram, itl_count=3, itl_sum=0.05, itl_sum_squares=0.0011)
    s = summarize(closed(random_chunk(10)), totals, CONFIG, None)
    assert s["mean_itl_ms"] == pytest.approx(50 / 3)
    assert s["std_itl_ms"] == pytest.approx(np.std([10, 10, 30]))
    assert s["median_itl_ms"] == pytest.approx(10, rel=1e-3)
    assert s["p99_itl_ms"] == pytest.approx(30, rel=1e-3)


def test_undefined_figures_are_null() -> None:
    s = summarize(closed(make_chunk([0.0], [0.0], [1.0], [1.0], output=1)), make_totals(), CONFIG, None)
    assert s["mean_tpot_ms"] is None and s["p99_itl_ms"] is None and s["prefix_cache_hit_rate"] is None
    json.dumps(s, allow_nan=False)


def served(arrival: Any, service: float, servers: int = 1) -> Records:
    """First come, first served by `servers`, each `service` seconds a request, TTFT at its end."""
    free = [0.0] * servers
    scheduled = []
    for time in arrival:
        start = max(free[0], time)
        free = sorted([*free[1:], start + service])
        scheduled.append(start)
    end = np.array(scheduled) + service
    return closed(make_chunk(arrival, scheduled, end, end))


def verdict(records: Records) -> Saturation:
    arrival = records.column("arrival_time")
    return saturation(records, float(arrival.min()), float(arrival.max()))


def test_saturation_by_hand() -> None:
    arrival = np.arange(300.0)
    assert verdict(served(arrival, 0.9)).verdict == "STABLE"
    overload = verdict(served(arrival, 2.0))
    assert overload.verdict == "OVERLOADED"
    assert overload.completion_ratio == pytest.approx(0.5, abs=0.01)
    # half of what had arrived by each third waits, 100 tokens each
    assert overload.waiting_tokens == pytest.approx((5000, 10000, 15000), abs=200)
    # a burst at the start that is worked off: long queues, none of them growing
    burst = np.concatenate([np.zeros(100), np.arange(1.0, 200.0)])
    backlog = verdict(served(burst, 0.95))
    assert backlog.verdict == "BACKLOGGED"
    assert backlog.queueing_share > 0.5
    # all at once: no span in which work could grow
    assert verdict(served(np.zeros(50), 1.0)).verdict == "BACKLOGGED"
    assert verdict(served(np.zeros(1), 1.0)).verdict == "STABLE"
