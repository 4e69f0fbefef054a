"""Figures by replica: they add up to the run's, and say what several caches mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_cli import refused

from sim.by_replica import _imbalance
from sim.errors import InputError
from sim.fates import FATES
from sim.html_report import to_html
from sim.report import lines
from sim.scenario_file import load
from sim.simulation import Result, run

SCENARIO = """\
gpu: none
model: none
cost: {form: whole_step, base_us: 2000, token_us: 20}
engine: {block_size: 16, num_gpu_blocks: 40, max_model_len: 400}
cluster: {replicas: 3, router: random}
workload: {kind: shared_prefix, num_requests: 300, num_groups: 9, prefix_len: 100,
           suffix_len: {distribution: uniform, low: 1, high: 310}, output_len: 5, request_rate: 40}
"""


def ran(tmp_path: Path, *overrides: str) -> Result:
    path = tmp_path / "several.yaml"
    path.write_text(SCENARIO)
    return run(load(path, overrides))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return ran(tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("begin", [None, 3.0])
def test_replicas_add_up_to_the_run(tmp_path: Path, begin: float | None) -> None:
    s = ran(tmp_path, f"measure_from={begin if begin is not None else 'null'}").summary
    rows = s["by_replica"]
    assert [row["replica"] for row in rows] == [0, 1, 2] and s["num_replicas"] == 3
    assert sum(row["requests"] for row in rows) == s["completed"] + s["failed"]
    for key in (
        "prefix_cache_queries", "prefix_cache_hits", "failed", "num_computed_tokens", "num_evictions",
        "num_preemptions", "busy_time",
    ):  # fmt: skip
        assert sum(row[key] for row in rows) == pytest.approx(s[key]), key
    assert s["num_evictions"] > 0 and s["failed"] > 0
    for name in FATES:
        assert sum(row["token_fates"][name] for row in rows) == s["token_fates"][name]
    used = [row["mean_kv_cache_usage_perc"] for row in rows]
    assert min(used) < s["mean_kv_cache_usage_perc"] < max(used) <= 1.0
    assert max(row["max_kv_cache_usage_perc"] for row in rows) == s["max_kv_cache_usage_perc"]


def test_imbalance_is_the_most_over_the_mean(result: Result) -> None:
    assert _imbalance([3, 3, 3]) == 1.0 and _imbalance([6, 0, 0]) == 3.0
    assert _imbalance([1, 2, 3]) == 1.5 and _imbalance([0.0, 0.0]) is None
    s = result.summary
    ran_there = [row["requests"] - row["failed"] for row in s["by_replica"]]
    assert s["imbalance"] == {
        "requests": max(ran_there) * 3 / sum(ran_there),
        "num_computed_tokens": _imbalance([row["num_computed_tokens"] for row in s["by_replica"]]),
        "busy_time": _imbalance([row["busy_time"] for row in s["by_replica"]]),
    }


def test_one_engine_has_no_rows(tmp_path: Path) -> None:
    alone = ran(tmp_path, "cluster.replicas=1")
    assert (alone.summary["num_replicas"], alone.summary["by_replica"]) == (1, [])
    assert alone.summary["imbalance"] is None
    text = [line for _, line in lines(alone)]
    assert not any("Replicas" in line or "1 replicas" in line for line in text)
    assert "a pool that never evicts" in "".join(text)


def test_a_fate_is_that_at_the_replica_that_a_request_went_to(tmp_path: Path) -> None:
    """One prompt in turn at three replicas: cold at each once, though others have it; then a hit.

    The ceiling, too, is of pools that do not know of each other.
    """
    load_of_one = (
        "workload={kind: shared_prefix, num_requests: 6, num_groups: 1, prompts_per_group: 1, prefix_len: 65,"
        " suffix_len: 0, output_len: 1, request_rate: 1, arrival: constant}"
    )
    s = ran(tmp_path, "cluster.router=round_robin", load_of_one).summary
    assert s["token_fates"]["cold"] == 3 * 65
    assert s["token_fates"]["hit"] == 3 * 64
    assert s["prefix_cache_ceiling"] == pytest.approx(3 * 64 / (6 * 65))
    for row in s["by_replica"]:
        assert (row["token_fates"]["cold"], row["token_fates"]["hit"]) == (65, 64)
    alone = ran(tmp_path, "cluster.replicas=1", load_of_one).summary
    assert (alone["token_fates"]["cold"], alone["token_fates"]["hit"]) == (65, 5 * 64)


def test_console_and_page_say_what_several_caches_mean(result: Result) -> None:
    text = "\n".join(line for _, line in lines(result))
    page = to_html(result)
    assert "3 replicas, random;" in text and "on none, 3 replicas, tp 1" in text
    for said in ("what only others hold is cold", "one a replica, requests where they went"):
        assert said in text and said in page
    assert "pools that never evict" in text and "pools that never evict" in page
    assert "of 16 tokens at each of 3 replicas" in page


def test_a_table_of_many_replicas_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    many = ran(tmp_path, "cluster.replicas=105")
    assert "  and 85 more: by_replica in the summary" in [line for _, line in lines(many)]
    assert "And 5 more: by_replica in the summary." in to_html(many)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("cluster.router=kvaware", "did you mean kv_aware?"),
        ("cluster.router=5", "cluster.router: should be 'round_robin'"),
        ("cluster.replicas=0", "cluster.replicas: should be greater than or equal to 1, not 0"),
        ("cluster.replicas=1025", "cluster.replicas: should be less than or equal to 1024"),
        ("cluster.view_delay=-1", "cluster.view_delay: should be greater than or equal to 0, not -1"),
        ("cluster.view_delay=1e-9", "write 0 to look at each arrival, or at least 0.001"),
        ("cluster.view_delai=1", "did you mean view_delay?"),
        ("cluster=3", "cluster: should be a mapping of fields, not 3"),
    ],
)
def test_a_cluster_that_cannot_be(tmp_path: Path, field: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        ran(tmp_path, field)
    text = str(error.value)
    assert text.startswith(f"--set {field}: ") and told in text and "\n" not in text


@pytest.mark.parametrize("arguments", [["run", "--timeline", "t.json.gz"], ["explain"]])
def test_what_shows_one_engine_refuses_several(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "several.yaml"
    path.write_text(SCENARIO)
    told = refused(arguments[0], str(path), *arguments[1:])
    assert "cluster.replicas is 3" in told and "1" in told


def test_the_shortest_view_delay_is_allowed(tmp_path: Path) -> None:
    looked: Any = ran(tmp_path, "cluster.view_delay=0.001", "cluster.router=least_outstanding").summary
    assert looked["completed"] + looked["failed"] == 300
