"""What a report warns of because the scenario says it in vain, or probably meant otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.scenario_file import load
from sim.simulation import run

SCENARIO = """\
cost: {base_us: 1000}
engine: {block_size: 16, num_gpu_blocks: 100, max_model_len: 900}
workload:
  kind: mix
  tenants:
    urgent: {priority: 0, workload: &chat {kind: scan, num_requests: 20, prompt_len: 40, output_len: 2}}
    later: {priority: 7, workload: *chat}
slo: {ttft: 20}
"""


def warnings(tmp_path: Path, *overrides: str) -> list[str]:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return list(run(load(path, overrides)).summary["warnings"])


def test_priorities_that_nobody_reads(tmp_path: Path) -> None:
    (text,) = warnings(tmp_path)
    assert text.startswith("requests have priorities, which scheduling_policy fcfs does not read: set")
    assert warnings(tmp_path, "engine.scheduling_policy=priority") == []
    assert warnings(tmp_path, "workload.tenants.later.priority=null") == []
    assert warnings(tmp_path, "workload.tenants.later.priority=0") == []
    assert len(warnings(tmp_path, "workload.tenants.urgent.priority=-1")) == 1, "once for all tenants"


def test_priorities_in_a_trace(tmp_path: Path) -> None:
    rows = [
        {"timestamp": i, "input_length": 9, "output_length": 1, "hash_ids": [1], "priority": i // 2}
        for i in range(4)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = f"workload={{kind: trace, path: {tmp_path / 't.jsonl'}, limit: %d}}"
    assert any("priorities" in text for text in warnings(tmp_path, trace % 4))
    assert not any("priorities" in text for text in warnings(tmp_path, trace % 2))


@pytest.mark.parametrize(("limit", "warned"), [("0.5", True), ("0.999", True), ("1", False), ("500", False)])
@pytest.mark.parametrize("name", ["ttft", "tpot", "e2el"])
def test_limits_that_were_meant_in_seconds(tmp_path: Path, name: str, limit: str, warned: bool) -> None:
    found = warnings(tmp_path, "engine.scheduling_policy=priority", f"slo={{{name}: {limit}}}")
    said = f"slo.{name} is {limit} milliseconds; if seconds were meant, set it to {1000 * float(limit):g}"
    assert found == ([said] if warned else [])


def test_each_warning_stands_once_beside_other_questions(tmp_path: Path) -> None:
    """--what-if tells of each run only what the run itself has not."""
    warnings(tmp_path)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "s.yaml"), "--what-if", "--format", "json"])
    summary = json.loads(result.stdout)
    assert len(summary["warnings"]) == 1
    assert [entry["warnings"] for entry in summary["what_if"]] == [[]] * 4
