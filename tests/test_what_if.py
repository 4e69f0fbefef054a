"""`run --what-if`: each answer is a run of its own, in the table, the JSON and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim import what_if
from sim.cache_kinds import CacheKind, ContiguousKind, PagedKind
from sim.cli import app
from sim.core import EngineConfig
from sim.errors import InputError
from sim.scenario_file import load
from sim.what_if import FIGURES, changes

SCENARIO = """\
seed: 3
cost: {base_us: 5000, token_us: 50}
engine: {block_size: 16, num_gpu_blocks: 40, max_model_len: 600}
workload:
  {kind: shared_prefix, num_groups: 5, prefix_len: 104, suffix_len: 40, output_len: 10, request_rate: 12,
   num_requests: 60}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def prefixsim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def asked(*arguments: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run, and its answers without their names."""
    result = prefixsim("run", *arguments, "--what-if", "--format", "json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    return summary, summary.pop("what_if")


def test_each_answer_is_the_run_that_it_names(scenario: Path) -> None:
    summary, entries = asked(scenario)
    assert summary == json.loads(prefixsim("run", scenario, "--format", "json").stdout)
    assert [entry["set"] for entry in entries] == [
        [],
        ["engine.num_gpu_blocks=80"],
        ["engine.block_size=8", "engine.num_gpu_blocks=80"],
        ["engine.enable_prefix_caching=false"],
    ]
    for entry in entries:
        options = [word for one in entry["set"] for word in ("--set", one)]
        alone = json.loads(prefixsim("run", scenario, *options, "--format", "json").stdout)
        assert {name: entry[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}
    rates = [entry["prefix_cache_hit_rate"] for entry in entries]
    assert rates[3] == 0 < rates[0] < rates[1] and rates[2] > rates[0]


def test_table_and_files(scenario: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    result = prefixsim("run", scenario, "--what-if", "--out", out, "--report", page)
    assert result.exit_code == 0, result.output
    entries = json.loads((out / "summary.json").read_text())["what_if"]
    assert entries == asked(scenario)[1]
    shown = [line.split() for line in result.stdout.splitlines()]
    for entry in entries:
        figures = 100 * entry["prefix_cache_hit_rate"], entry["mean_ttft_ms"], entry["p95_ttft_ms"]
        assert [*entry["change"].split(), *(f"{x:.2f}" for x in figures), entry["saturation"]] in shown
        assert f">{entry['change']}<" in page.read_text()
    names = {path.name for path in out.iterdir()}
    assert names == {"summary.json", "requests.parquet", "timeseries.parquet", "scenario.yaml", "run.png"}
    assert "what_if" not in json.loads(prefixsim("run", scenario, "--format", "json").stdout)


def of_config(**fields: Any) -> list[what_if.Change]:
    """The changes of a run with such a configuration."""
    config = EngineConfig(
        block_size=16, num_gpu_blocks=100, max_num_batched_tokens=8, max_num_seqs=1, max_model_len=9
    )
    return list(changes(config._replace(**fields)))


@pytest.mark.parametrize(("size", "half", "same"), [(16, 8, 200), (33, 16, 206), (3, 1, 300), (2, 1, 200)])
def test_half_the_block_keeps_the_tokens(size: int, half: int, same: int) -> None:
    """To less than a block: half of an odd one is rounded down."""
    change = of_config(block_size=size)[1]
    assert change.engine == {"block_size": half, "num_gpu_blocks": same}
    assert 0 <= 100 * size - half * same < half
    assert change.name == f"block {half}, {same:,} of them: the same tokens"


def test_what_has_no_answer_says_why(scenario: Path) -> None:
    fields = ("engine.block_size=1", "engine.num_gpu_blocks=500", "engine.enable_prefix_caching=false")
    _, entries = asked(scenario, *[word for one in fields for word in ("--set", one)])
    assert "excluded" not in entries[1]
    assert [entry["excluded"] for entry in entries[2:]] == [
        "a block of 1 token has no half",
        "engine.enable_prefix_caching is false already",
    ]
    result = prefixsim("run", scenario, "--set", fields[0], "--set", fields[1], "--what-if")
    (line,) = [line for line in result.stdout.splitlines() if "no half" in line]
    assert line.startswith("block halved") and line.endswith("not run: a block of 1 token has no half")


def of_none() -> EngineConfig:
    """The configuration of an engine whose cache looks nothing up."""
    return EngineConfig(
        block_size=16, num_gpu_blocks=100, max_num_batched_tokens=8, max_num_seqs=1, max_model_len=9,
        enable_prefix_caching=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [PagedKind(), ContiguousKind()])
def test_a_cache_that_looks_nothing_up_has_no_lookup_to_turn_off(kind: CacheKind) -> None:
    assert list(changes(of_none(), kind))[2].excluded == f"cache: {kind.kind} looks nothing up"


def test_reserved_prefixes_can_be_done_without() -> None:
    """paged looks nothing up, and has hits where prefixes were reserved: `caching off` is a question."""
    assert list(changes(of_none(), PagedKind(), reserved=True))[2].engine == {"enable_prefix_caching": False}


def test_a_pool_beyond_what_yaml_may_say(scenario: Path) -> None:
    change = of_config(num_gpu_blocks=2**30)[0]
    with pytest.raises(InputError, match=r"engine: num_gpu_blocks: .*2147483647"):
        what_if.changed_scenario(load(scenario), change)


def test_a_block_that_the_trace_does_not_have(tmp_path: Path) -> None:
    """Blocks of 5 are parts of the trace's 25 tokens, blocks of 2 are not: one line, and the rest runs."""
    row = {"timestamp": 0, "input_length": 50, "output_length": 3, "hash_ids": [1, 2]}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        "cost: {base_us: 5000}\nengine: {block_size: 5, num_gpu_blocks: 50, max_model_len: 90}\n"
        "workload: {kind: trace, path: t.jsonl, trace_block_size: 25}\n"
    )
    _, entries = asked(scenario)
    assert "its ids name blocks of 25 tokens" in entries[2]["excluded"]
    assert "\n" not in entries[2]["excluded"]
    assert ["excluded" in entry for entry in entries] == [False, False, True, False]


def test_an_auto_pool_is_doubled_as_resolved(scenario: Path) -> None:
    """And what is wrong with the larger one is told of it alone."""
    options = ("--set", "engine.num_gpu_blocks=auto", "--set", "engine.block_size=64")
    summary, entries = asked(scenario, *options)
    blocks = summary["num_gpu_blocks"]
    assert entries[1]["set"] == [f"engine.num_gpu_blocks={2 * blocks}"]
    assert entries[2]["set"] == ["engine.block_size=32", f"engine.num_gpu_blocks={2 * blocks}"]
    assert [any("no such server" in text for text in entry["warnings"]) for entry in entries] == [
        False,
        True,
        False,
        False,
    ]


def test_not_with_compare(scenario: Path) -> None:
    result = prefixsim("run", scenario, "--what-if", "--compare", "engine.block_size=8,16")
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "--what-if" in line and "leave out --compare" in line
