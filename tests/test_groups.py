"""Figures by tenant, prefix group and turn, against cases by hand and against the run's own totals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_metrics import closed, cut, make_chunk, random_chunk

from sim.engine import FATE_FIELDS
from sim.fates import FATES
from sim.groups import MOST_GROUPS, breakdowns
from sim.records import ROW_GROUP
from sim.report import lines
from sim.scenario_file import load
from sim.simulation import Result, run

TENANTS = ("chat", "rag")
ROW_OF_TOKENS = ("requests", "failed", "prefix_cache_queries", "prefix_cache_hits")

MIX = """\
gpu: none
model: none
cost: {form: whole_step, base_us: 2000, token_us: 20}
engine: {block_size: 16, num_gpu_blocks: 60, max_model_len: 400}
workload:
  kind: mix
  tenants:
    chat:
      workload: {kind: shared_prefix, num_requests: 60, num_groups: 4, prefix_len: 100, suffix_len: 20,
                 output_len: 5, request_rate: 20}
    rag:
      cache_salt: s
      workload: {kind: documents, num_requests: 40, num_documents: 5, document_len: 150, question_len: 10,
                 output_len: 3, request_rate: 10}
    large:
      workload: {kind: scan, num_requests: 6, prompt_len: {distribution: uniform, low: 200, high: 700},
                 output_len: 2, request_rate: 2}
"""


def labelled(times: Any, **columns: Any) -> dict[str, Any]:
    """Records that arrive at `times` and have their first token 1, 2, 3 … ms later."""
    arrival = np.asarray(times, float)
    first = arrival + 1e-3 * np.arange(1, len(arrival) + 1)
    chunk = make_chunk(arrival, arrival, first, first + 1.0)
    return chunk | {name: np.asarray(column, np.int64) for name, column in columns.items()}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    path = tmp_path_factory.mktemp("mix") / "mix.yaml"
    path.write_text(MIX)
    return run(load(path))


def test_tenants_by_hand() -> None:
    chunk = labelled([0, 1, 2, 3], tenant=[0, 1, 1, -1], num_cached_tokens=[64, 32, 16, 96])
    chunk["prompt_len"] = np.array([100, 200, 300, 400])
    chunk["refused"] = np.array([0, 0, 1, 0])
    for name in ("scheduled_time", "first_token_time", "finish_time"):
        chunk[name][2] = np.nan
    rag, chat = breakdowns(closed(chunk), TENANTS, fates=False)["by_tenant"]
    assert (rag["tenant"], chat["tenant"]) == ("rag", "chat")  # the most prompt tokens first
    assert [rag[name] for name in ROW_OF_TOKENS] == [2, 1, 200, 32]  # the refused one was not looked up
    assert rag["prefix_cache_hit_rate"] == 32 / 200
    assert rag["mean_ttft_ms"] == rag["p95_ttft_ms"] == pytest.approx(2.0)
    assert chat["prefix_cache_hit_rate"] == 0.64
    assert rag["token_fates"] is None


def test_ttft_of_a_group_is_numpys() -> None:
    chunk = random_chunk(3000) | {"prefix_group": np.random.default_rng(1).integers(0, 5, 3000)}
    records = closed(*cut(chunk, 700))
    ttft = records.column("ttft_ms")
    rows = breakdowns(records, (), fates=False)["by_prefix_group"]
    assert sorted(row["prefix_group"] for row in rows) == [0, 1, 2, 3, 4]
    for row in rows:
        own = ttft[chunk["prefix_group"] == row["prefix_group"]]
        assert row["mean_ttft_ms"] == pytest.approx(own.mean(), rel=1e-12)
        assert row["p95_ttft_ms"] == np.percentile(own, 95)
    tokens = [row["prefix_cache_queries"] for row in rows]
    assert tokens == sorted(tokens, reverse=True) and sum(tokens) == chunk["prompt_len"].sum()


def test_the_largest_groups_only_and_of_equal_ones_the_first() -> None:
    chunk = labelled(np.arange(26), prefix_group=[*range(25), 20])
    rows = breakdowns(closed(chunk), (), fates=False)["by_prefix_group"]
    assert [row["prefix_group"] for row in rows] == [20, *range(MOST_GROUPS - 1)]


def test_a_group_of_a_mix_is_named_without_its_tenants_bits() -> None:
    chunk = labelled([0, 1, 2], tenant=[0, 1, 1], prefix_group=[7, (1 << 32) + 7, (1 << 32) + 7])
    rows = breakdowns(closed(chunk), TENANTS, fates=False)["by_prefix_group"]
    assert [(row["tenant"], row["prefix_group"], row["requests"]) for row in rows] == [
        ("rag", 7, 2),
        ("chat", 7, 1),
    ]


def test_turns_go_by_arrival_within_the_session() -> None:
    sessions = [9, 5, 5, -1, 9, 5, 5, 5]
    times = [1.0, 8.0, 2.0, 0.0, 3.0, 4.0, 6.0, 5.0]  # turns 1 5 1 - 2 2 4 3
    hits = [0, 80, 0, 96, 16, 32, 64, 48]
    chunk = labelled(times, session_id=sessions, num_cached_tokens=hits)
    figures = breakdowns(closed(chunk), (), fates=False)
    turns = figures["by_turn"]
    assert [row["turn"] for row in turns] == ["1", "2", "3", "4+"]
    assert [row["requests"] for row in turns] == [2, 2, 1, 2]
    assert [row["prefix_cache_hits"] for row in turns] == [0, 48, 48, 144]
    assert figures["sessions"] == {"num_sessions": 2, "mean_turns": 3.5, "max_turns": 5}


def test_nothing_where_there_is_nothing() -> None:
    chunk = labelled([0, 1], prefix_group=[-1, -1])
    nothing = {"by_tenant": [], "by_prefix_group": [], "by_turn": [], "sessions": None}
    assert breakdowns(closed(chunk), (), fates=False) == nothing


def test_the_same_from_memory_and_from_a_file(tmp_path: Path) -> None:
    n = ROW_GROUP + 1000
    rng = np.random.default_rng(2)
    zeros = {name: np.zeros(n, np.int64) for name in (*FATE_FIELDS, "prefix_cache_evicted")}
    chunk = random_chunk(n) | zeros
    chunk |= {"tenant": rng.integers(0, 2, n), "session_id": rng.integers(-1, 9000, n)}
    chunk |= {"prefix_group": rng.integers(-1, 3000, n)}
    whole = breakdowns(closed(chunk), TENANTS, fates=True)
    parts = closed(*cut(chunk, 4000), path=tmp_path / "requests.parquet")
    assert breakdowns(parts, TENANTS, fates=True) == whole
    assert sum(row["requests"] for row in whole["by_tenant"]) == n
    assert sum(row["requests"] for row in whole["by_turn"]) == np.count_nonzero(chunk["session_id"] >= 0)


def test_tenants_add_up_to_the_run(mixed: Result) -> None:
    s = mixed.summary
    rows = s["by_tenant"]
    assert {row["tenant"]: row["requests"] for row in rows} == {"chat": 60, "rag": 40, "large": 6}
    for key in ("prefix_cache_queries", "prefix_cache_hits", "failed"):
        assert sum(row[key] for row in rows) == s[key] > 0
    for name in FATES:
        assert sum(row["token_fates"][name] for row in rows) == s["token_fates"][name]
    for row in rows:
        assert sum(row["token_fates"].values()) == row["prefix_cache_queries"]
        assert row["token_fates"]["hit"] == row["prefix_cache_hits"]
    groups = s["by_prefix_group"]
    assert {row["tenant"] for row in groups} == {"chat", "rag"}  # a scan has no groups
    assert sum(row["requests"] for row in groups) == 100


def test_the_console_has_a_table_of_tenants_only_where_there_are_some(mixed: Result) -> None:
    text = [line for _, line in lines(mixed)]
    assert any(line.startswith("rag ") and " 40 " in line for line in text)
    alone = mixed._replace(summary=mixed.summary | {"by_tenant": []})
    assert not any("Tenants" in line for _, line in lines(alone))
