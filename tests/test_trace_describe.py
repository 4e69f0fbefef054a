"""Traces described: right answers on real ones, and each figure against a plain count on small ones."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_workloads_trace import batches, hit_tokens, mooncake, segments, shipped, write

from sim.trace import prefix_tree
from sim.trace.describe import describe
from workloads import Trace


def figures(path: str, *block_sizes: int, **fields: Any) -> dict[str, Any]:
    return describe(Trace(path=path, **fields), block_sizes or (512,))


@pytest.mark.parametrize(
    ("name", "fields", "requests", "rates"),
    [
        ("mooncake_conversation_trace.jsonl.gz", {}, 12_031, {512: 0.3734}),
        (
            "lmcache_magagent_bs16pseudo.jsonl.gz",
            {"trace_block_size": 16, "skip_bad_lines": True},  # 53 rows are of no token
            693,
            {16: 0.8379, 64: 0.8269, 128: 0.8147, 256: 0.7878, 512: 0.7313},
        ),
        ("lmcache_miniswe_bs16pseudo.jsonl.gz", {"trace_block_size": 16}, 402, {16: 0.936}),
        (
            "sharegpt_llama31_8b_segments.jsonl.gz",
            {},
            300,
            {1: 0.0780, 16: 0.0759, 64: 0.0734, 512: 0.0438},
        ),
        pytest.param(
            "claude_code_sessions_blk64.npz", {}, 48_658, {64: 0.9636}, marks=pytest.mark.slow, id="claude"
        ),
    ],
)
def test_ideal_hit_rates(name: str, fields: dict[str, Any], requests: int, rates: dict[int, float]) -> None:
    found = figures(shipped(name), *rates, **fields)
    assert found["requests"] == requests
    for size, rate in rates.items():
        assert round(found["ideal_hit_rate"][str(size)], 4) == rate


@pytest.mark.parametrize(("name", "rate"), [("conversation", 0.3736), ("synthetic", 0.6512)])
def test_whole_ids_are_what_trace_tools_count(name: str, rate: float) -> None:
    found = figures(shipped(f"mooncake_{name}_trace.jsonl.gz"))
    assert round(found["ideal_hit_rate_whole_ids"], 4) == rate
    assert found["ideal_hit_rate"]["512"] < found["ideal_hit_rate_whole_ids"]


@pytest.mark.parametrize(("name", "cv"), [("code", 13.15), ("conv", 1.09)])
def test_burstiness_of_azure(name: str, cv: float) -> None:
    found = figures(shipped(f"azure2023_{name}.csv.gz"))
    assert round(found["arrival_cv"], 2) == cv
    assert found["ideal_hit_rate"]["512"] == 0
    assert found["reuse_gap_s"] is None


def test_a_prefix_model_gives_what_it_says() -> None:
    # Every prompt but each group's first shares its half, rounded down to nothing at blocks of 1.
    model = {"num_groups": 1, "shared_fraction": 0.5}
    found = figures(shipped("azure2023_conv.csv.gz"), 1, prefix_model=model)
    assert found["ideal_hit_rate"]["1"] == pytest.approx(0.5, abs=0.01)


def test_small_trace(tmp_path: Path) -> None:
    rows = [
        mooncake(timestamp=0, session_id="a", input_length=1024, hash_ids=[1, 2], output_length=1),
        mooncake(timestamp=2000, session_id="b", input_length=512, hash_ids=[9], output_length=1),
        mooncake(timestamp=3000, session_id="a", input_length=1536, hash_ids=[1, 2, 3], output_length=1),
        mooncake(timestamp=7000, session_id="c", input_length=600, hash_ids=[1, 4], output_length=0),
        mooncake(timestamp=7000, session_id="c", input_length=600, hash_ids=[1, 4], output_length=3),
    ]
    found = figures(write(tmp_path, *rows), 512, 256)
    assert (found["requests"], found["sessions"], found["span_s"]) == (5, 3, 7.0)
    assert found["request_rate"] == 4 / 7
    assert found["arrival_cv"] == pytest.approx(np.std([2, 1, 4, 0]) / np.mean([2, 1, 4, 0]))
    assert found["prompt_len"]["p50"] == 600
    assert found["total_output_tokens"] == 1 + 1 + 1 + 1 + 3
    hits = 1024 + 512 + 512
    assert found["ideal_hit_rate"] == {"512": hits / 4272, "256": hits / 4272}
    assert found["ideal_hit_rate_whole_ids"] == (1024 + 512 + 600) / 4272
    assert found["requests_that_share"] == 3 / 5
    assert found["shared_prefix_len"]["max"] == 1024
    # Block 1 and 2 after 3 s, one request between, its 512 tokens; block 1 after 4 s, none between;
    # then all 600 at once.
    assert found["reuse_gap_s"]["max"] == 4.0
    assert found["reuse_gap_s"]["p50"] == 3.0
    assert found["reuse_gap_s"]["p10"] == 0.0
    assert found["reuse_distance_requests"]["max"] == 2
    assert found["reuse_distance_tokens"]["max"] == 512
    assert (found["reuse_distance_tokens"]["p50"], found["reuse_distance_tokens"]["p90"]) == (0, 512)
    assert found["distinct_tokens"] == 1536 + 512 + 88 + 2
    assert json.loads(json.dumps(found)) == found


def test_salts_keep_apart(tmp_path: Path) -> None:
    rows = [mooncake(input_length=1024, cache_salt=salt) for salt in ("x", "y", "x")]
    assert figures(write(tmp_path, *rows))["ideal_hit_rate"]["512"] == 512 / 3072


def test_notes(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(output_length=0), mooncake(), "{")
    found = figures(path, 16, 512, 1024, skip_bad_lines=True)
    assert found["skipped"] == 1
    assert "line 3: not JSON" in found["first_skipped"]
    lower, whole, empty = found["notes"]
    assert lower.startswith("blocks of 16: an id stands for 512 tokens")
    assert "whole_ids" in whole
    assert empty.startswith("1 requests have an output length of 0")


def test_one_request(tmp_path: Path) -> None:
    found = figures(write(tmp_path, segments()))
    assert (found["span_s"], found["request_rate"], found["arrival_cv"]) == (0.0, None, None)
    assert found["reuse_distance_tokens"] is None


contents_drawn = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=4),
        st.integers(1, 8),
        st.sampled_from([None, "x"]),
    ),
    min_size=1,
    max_size=12,
)


@given(contents_drawn, st.sampled_from([1, 2, 3, 4]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tree_finds_what_a_plain_count_finds(tmp_path: Path, drawn: Any, block: int) -> None:
    """Segments of any lengths, prompts and answers alike, at every block size."""
    rows = []
    for i, (pairs, output, salt) in enumerate(drawn):
        total = sum(length for _, length in pairs)
        output = min(output, total - 1)
        if output:
            row = segments(segments=pairs, input_length=total - output, output_length=output, arrival_time=i)
            rows.append({**row, "cache_salt": salt})
    if not rows:
        return
    path = write(tmp_path, *[{**row, "cache_salt": None} for row in rows])
    prompts = sum(row["input_length"] for row in rows)
    expected = hit_tokens(batches(path, block), block, outputs=True) / prompts
    assert figures(path, block)["ideal_hit_rate"][str(block)] == expected
    apart = [write(tmp_path, *some) for some in ([row for row in rows if row["cache_salt"] == "x"],) if some]
    salted = hit_tokens(batches(apart[0], block), block, outputs=True) if apart else 0
    plain = [{**row, "cache_salt": None} for row in rows if row["cache_salt"] is None]
    unsalted = hit_tokens(batches(write(tmp_path, *plain), block), block, outputs=True) if plain else 0
    found = figures(write(tmp_path, *rows), block)["ideal_hit_rate"][str(block)]
    assert found == (salted + unsalted) / prompts


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_distances_are_those_of_a_plain_count(tmp_path: Path, drawn: list[list[int]]) -> None:
    """Ids of a trace name what precedes them too; distinct tokens between, block by block."""
    names: dict[tuple[int, ...], int] = {}
    chains = [
        [names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))] for path in drawn
    ]
    rows = [
        mooncake(timestamp=1000 * i, input_length=16 * len(chain), output_length=1, hash_ids=chain)
        for i, chain in enumerate(chains)
    ]
    found = figures(write(tmp_path, *rows), 16, trace_block_size=16)
    distances, gaps = [], []
    for i, chain in enumerate(chains):
        for one in chain:
            before = [j for j in range(i) if one in chains[j]]
            if before:
                between = {other for chain in chains[before[-1] + 1 : i] for other in chain}
                distances.append(16 * len(between))
                gaps.append(i - before[-1])
    if not gaps:
        assert found["reuse_distance_tokens"] is None
        return
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0)):
        rank = max(int(np.ceil(share * len(gaps) - 1e-9)), 1) - 1
        assert found["reuse_distance_tokens"][name] == sorted(distances)[rank]
        assert found["reuse_distance_requests"][name] == sorted(gaps)[rank]
        assert found["reuse_gap_s"][name] == sorted(gaps)[rank]


def test_the_tree_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [
        mooncake(timestamp=i, input_length=64, hash_ids=sorted(rng.integers(0, 30, 4).tolist()))
        for i in range(500)
    ]
    path = write(tmp_path, *rows)
    base = figures(path, 16, trace_block_size=16)
    small = prefix_tree.new_tree(1)
    monkeypatch.setattr("sim.trace.describe.new_tree", lambda *_: small)
    monkeypatch.setattr(Trace, "chunk_size", 7)
    assert figures(path, 16, trace_block_size=16) == base


def test_plain_python_gives_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, *[mooncake(timestamp=i, hash_ids=[i % 3, i % 5]) for i in range(60)])
    options = ["--format", "json", "--block-size", "16"]
    plain = subprocess.run(
        [sys.executable, "-m", "sim.cli", "trace", "describe", path, *options],
        capture_output=True,
        check=True,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[1],
    ).stdout
    assert json.loads(plain) == figures(path, 16)


def test_gzip_or_not(tmp_path: Path) -> None:
    path = Path(write(tmp_path, mooncake(), mooncake()))
    plain = figures(str(path))
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert figures(str(path)) == plain
