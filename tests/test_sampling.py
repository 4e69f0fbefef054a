"""`n` and `beam_width` as a user writes them, and what the commands say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from batches import make
from simulation import engine
from typer.testing import CliRunner

from sim.cli import app
from sim.errors import InputError
from sim.request import Batch
from sim.scenario_file import load
from sim.simulation import Result, Tally
from sim.simulation import run as run_scenario
from workloads import AnyWorkload

SPECS: list[dict[str, Any]] = [
    {"kind": "shared_prefix", "num_requests": 9, "prefix_len": 40, "suffix_len": 9, "output_len": 3},
    {"kind": "scan", "num_requests": 9, "prompt_len": 40, "output_len": 3},
    {"kind": "fourteen_tokens"},
    {"kind": "documents", "num_requests": 9, "num_documents": 2, "document_len": 40, "question_len": 9,
     "output_len": 3},
    {"kind": "few_shot", "num_requests": 9, "num_examples": 2, "examples_per_request": 1, "example_len": 40,
     "question_len": 9, "output_len": 3},
    {"kind": "multi_turn", "num_sessions": 2, "num_turns": 2, "user_len": 9, "output_len": 3},
    {"kind": "agent", "num_sessions": 2, "num_turns": 2, "task_len": 9, "tool_len": 9, "output_len": 3},
    {"kind": "tree", "num_sessions": 2, "branch": 2, "depth": 2, "question_len": 9, "step_len": 9,
     "output_len": 3},
]  # fmt: skip


def all_requests(workload: Any) -> list[Batch]:
    seed = np.random.SeedSequence(0)
    if workload.has_sessions:
        return [session.requests for session in workload.sessions(seed)]
    return list(workload.batches(seed, 16))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_every_workload_has_n_and_beam_width(spec: dict[str, Any]) -> None:
    for n, beam_width in ((1, 1), (3, 1), (1, 6)):
        for batch in all_requests(make({**spec, "n": n, "beam_width": beam_width})):
            assert set(batch.n.tolist()) == {n} and set(batch.beam_width.tolist()) == {beam_width}
    plain = all_requests(make(spec))
    several = all_requests(make({**spec, "n": 3}))
    for one, other in zip(plain, several, strict=True):
        for name in Batch._fields:
            assert name == "n" or np.array_equal(getattr(one, name), getattr(other, name)), name


def test_no_workload_is_left_out() -> None:
    union, _ = get_args(AnyWorkload)
    kinds = {one.model_fields["kind"].default for one in get_args(union)}
    assert kinds == {spec["kind"] for spec in SPECS} | {"mix", "recording", "trace"}


ENGINE = """\
gpu: none
model: none
cost: {form: whole_step, base_us: 2000, token_us: 20}
engine: {block_size: 16, num_gpu_blocks: 400, max_model_len: 400}
"""
LOAD = """\
workload: {kind: shared_prefix, num_requests: 40, num_groups: 2, prefix_len: 64, suffix_len: 20,
           output_len: 6, request_rate: 50}
"""


def result_of(folder: Path, *overrides: str, text: str = ENGINE + LOAD) -> Result:
    path = folder / "s.yaml"
    path.write_text(text)
    return run_scenario(load(path, overrides))


def test_figures_are_of_requests_and_output_tokens_of_all_samples(tmp_path: Path) -> None:
    one = result_of(tmp_path)
    result = result_of(tmp_path, "workload.n=3")
    summary = result.summary
    assert "num_sequences" not in one.summary
    assert summary["num_sequences"] == 120 and summary["completed"] == 40
    assert summary["total_output_tokens"] == 40 * 3 * 6 == 3 * one.summary["total_output_tokens"]
    assert summary["total_input_tokens"] == one.summary["total_input_tokens"] == 40 * 84
    assert summary["prefix_cache_queries"] == 3 * 40 * 84
    assert sum(summary["token_fates"].values()) == 40 * 84
    fates = one.summary["token_fates"]
    ceiling = fates["hit"] + fates["evicted"] + 2 * 40 * 80  # of each other sample all but the last 4 tokens
    assert summary["prefix_cache_ceiling"] == pytest.approx(ceiling / (3 * 40 * 84))
    assert one.summary["prefix_cache_ceiling"] < summary["prefix_cache_hit_rate"]
    assert summary["prefix_cache_hit_rate"] <= summary["prefix_cache_ceiling"]
    assert set(result.records.column("num_sequences").tolist()) == {3}
    assert summary["by_prefix_group"][0]["prefix_cache_queries"] > 84 * 40
    hits = sum(row["prefix_cache_hits"] for row in summary["by_prefix_group"])
    assert hits == summary["prefix_cache_hits"], "the sums of a breakdown are the engine's"


def test_a_hit_of_any_sample_is_prefill_over_context() -> None:
    tally = Tally(engine(max_num_batched_tokens=100), 0.0)
    whole = {"request_id": 0, "refused": 0, "prompt_len": 50, "num_cached_tokens": 0}
    whole |= {"output_len": 1, "n": 2, "arrival_time": 0.0}
    for hits in (0, 48):
        tally.add({name: np.array([value]) for name, value in {**whole, "prefix_cache_hits": hits}.items()})
    assert tally.over_context == 1


def test_a_warm_up_leaves_out_all_samples_of_its_requests(tmp_path: Path) -> None:
    summary = result_of(tmp_path, "workload.n=3", "measure_from=0.4").summary
    measured = 40 - summary["num_requests_left_out"]
    assert 0 < measured < 40
    assert summary["prefix_cache_queries"] == 3 * measured * 84


def test_a_mix_has_them_by_tenant(tmp_path: Path) -> None:
    parts = {"a": {**SPECS[0], "n": 2}, "b": SPECS[1], "c": {**SPECS[5], "n": 4}}
    tenants = {name: {"workload": {**spec}} for name, spec in parts.items()}
    text = ENGINE + "workload: " + json.dumps({"kind": "mix", "tenants": tenants}) + "\n"
    records = result_of(tmp_path, text=text).records
    tenant, width = records.column("tenant"), records.column("num_sequences")
    assert [set(width[tenant == number].tolist()) for number in range(3)] == [{2}, {1}, {4}]


def test_a_second_run_finds_the_prompts_again_whatever_n_is(tmp_path: Path) -> None:
    primed = "prime" + LOAD.removeprefix("workload") + "measure" + LOAD.removeprefix("workload")
    warm = result_of(tmp_path, "measure.n=2", "prime.n=3", text=ENGINE + primed).summary
    assert warm["warm_start"]["requests"] == 40 and warm["warm_start"]["output_tokens"] == 40 * 3 * 6
    assert warm["warm_start"]["in_common"] == "the same prompts again"
    assert warm["token_fates"]["cold"] == 0


def trace_row(**fields: Any) -> dict[str, Any]:
    return {"arrival_time": 0, "input_length": 40, "output_length": 5, "segments": [[1, 40], [2, 5]]} | fields


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.yaml").write_text(ENGINE + f"workload: {{kind: trace, path: {path}}}\n")
    return path


def prefixsim(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_trace_says_them_row_by_row(tmp_path: Path) -> None:
    path = written(tmp_path, trace_row(), trace_row(n=3), trace_row(n=None, beam_width=1))
    result = run_scenario(load(tmp_path / "t.yaml"))
    assert sorted(result.records.column("num_sequences").tolist()) == [1, 1, 3]
    told = prefixsim("trace", "describe", path, "--format", "json")
    described = json.loads(told.stdout)
    assert described["requests"] == 3 and described["sequences"] == 5
    assert described["total_output_tokens"] == 25
    assert any("several answers" in note for note in described["notes"])
    for target in ("segments", "mooncake"):
        out = tmp_path / f"{target}.jsonl"
        assert prefixsim("trace", "convert", path, out, "--to", target).exit_code == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(row.get("n"), row.get("beam_width")) for row in rows] == [(None, None), (3, None), (None, 1)]


@pytest.mark.parametrize("change", ["cache=radix", "engine.long_prefill_token_threshold=16"])
def test_the_ceiling_of_samples_is_what_an_ample_pool_hits(tmp_path: Path, change: str) -> None:
    """Here samples come before the prompt of the first is computed, and no pool finds it all then."""
    summary = result_of(tmp_path, "workload.n=3", "engine.num_gpu_blocks=8000", change).summary
    assert summary["num_evictions"] == 0
    assert summary["prefix_cache_hit_rate"] == summary["prefix_cache_ceiling"]
    assert summary["prefix_cache_ceiling"] < 80 / 84 - 0.01


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cache=paged", "workload.n=300"], ["all sequences of a request", "allow 256"]),
        (["cache=paged", "engine.watermark=0.99"], ["engine.watermark keeps 0.99 of the pool free"]),
        (["cache={kind: contiguous, reservation: max}", "engine.num_gpu_blocks=20"], ["reservation: max"]),
        (["cache=apc", "engine.num_gpu_blocks=2"], ["raise the smaller"]),
    ],
)
def test_why_no_request_can_run_is_told(tmp_path: Path, overrides: list[str], said: list[str]) -> None:
    with pytest.raises(InputError, match="none of the 40 requests can run") as refused:
        result_of(tmp_path, "engine.async_scheduling=false", *overrides)
    assert all(words in str(refused.value) for words in said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 0}, "n is 0: it must be a whole number from 1 to 16384"),
        ({"n": -1}, "n is -1: it must be"),
        ({"beam_width": 0}, "beam_width is 0: it must be"),
        ({"n": "2"}, "n is '2': it must be a whole number"),
        ({"n": 2, "beam_width": 2}, "n is 2 and beam_width 2: a request samples or searches"),
        ({"beam_width": 4}, "request 1 has beam_width 4: beam search needs cache: paged"),
    ],
)
def test_bad_rows_are_told(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    written(tmp_path, trace_row(), trace_row(**fields))
    result = prefixsim("run", tmp_path / "t.yaml")
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prefixsim: compiling")]
    assert len(lines) == 1 and said in lines[0], result.stderr
    if "beam_width 4" not in said:
        assert "line 2" in lines[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["workload.n=0"], "workload.n"),
        (["workload.n=-1"], "workload.n"),
        (["workload.n='2'"], "workload.n"),
        (["workload.n=1.5"], "workload.n"),
        (["workload.n=20000"], "workload.n"),
        (["workload.beam_width=0"], "workload.beam_width"),
        (["workload.n=2", "workload.beam_width=2"], "n is 2 and beam_width 2: a request samples or searches"),
        (["workload.beam_width=2"], "request 0 has beam_width 2: beam search needs cache: paged"),
    ],
)
def test_bad_values_are_told(tmp_path: Path, overrides: list[str], said: str) -> None:
    (tmp_path / "s.yaml").write_text(ENGINE + LOAD)
    result = prefixsim("run", tmp_path / "s.yaml", *(part for one in overrides for part in ("--set", one)))
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("prefixsim: compiling")]
    assert len(lines) == 1 and said in lines[0], result.stderr


def test_a_curve_counts_each_sample_as_the_engine_does(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(ENGINE + LOAD)
    rates = []
    for n in (1, 3):
        result = prefixsim("mrc", tmp_path / "s.yaml", "--set", f"workload.n={n}", "--block-size", 16,
                           "--format", "json")  # fmt: skip
        assert result.exit_code == 0, result.stderr
        rates.append(json.loads(result.stdout))
        assert any("several answers" in text for text in rates[-1]["assumed"]) == (n > 1)
    one, several = rates
    assert several["prompt_tokens"] == 3 * one["prompt_tokens"]
    # with room for all: two samples of each request find its full blocks
    assert several["ceiling_hit_tokens"] == one["ceiling_hit_tokens"] + 2 * 40 * 80


def test_explain_draws_each_sample(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "engine: {block_size: 4, num_gpu_blocks: 30}\n"
        "workload: {kind: fourteen_tokens, num_requests: 1, n: 3}\n"
    )
    result = prefixsim("explain", tmp_path / "s.yaml")
    assert result.exit_code == 0, result.stderr
    assert "In all: 24 of 42 prompt tokens hit" in result.stdout
    told = prefixsim("explain", tmp_path / "s.yaml", "--set", "workload.concurrency=1")
    assert told.exit_code == 2 and "no closed loop" in told.stderr
