"""The scenario file: strictness, and errors that name file, line, field and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sim.cache_kinds import KINDS
from sim.errors import InputError
from sim.resolve import resolve
from sim.scenario import Scenario, WholeStep
from sim.scenario_file import load, to_yaml

GOOD = """\
name: small
engine:
  block_size: 16
  num_gpu_blocks: 1000
workload:
  kind: shared_prefix
  num_requests: 10
  prefix_len: 64
  suffix_len: {distribution: uniform, low: 1, high: 9}
  output_len: 4
  request_rate: inf
cost: {form: whole_step, base_us: 5000}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_reads_and_fills_defaults(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, GOOD))
    assert scenario.engine.block_size == 16
    assert scenario.engine.max_num_batched_tokens == 8192
    assert scenario.engine.async_scheduling
    assert scenario.cost == WholeStep(base_us=5000)


def test_name_defaults_to_the_file(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD.replace("name: small\n", ""))).name == "small"


def test_preset_gives_way_to_what_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("  block_size: 16\n", "  preset: vllm-0.33\n"))
    assert load(path).engine.block_size == 16
    assert load(path, ["engine.block_size=32"]).engine.block_size == 32
    assert load(path, ["engine.preset=null"]).engine.block_size == 64


def test_written_out_it_reads_back_equal(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, GOOD), ["name='1e3'", "engine.watermark=1e-2"])
    text = to_yaml(scenario)
    again = load(write(tmp_path, text))
    assert again == scenario
    assert to_yaml(again) == text
    assert "long_prefill_token_threshold: 0" in text


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        (
            "block_size: 16",
            "block_sise: 16",
            3,
            ["engine.block_sise", "unknown field", "did you mean block_size?"],
        ),
        ("name: small", "colour: red", 1, ["colour", "unknown field"]),
        ("block_size: 16", "block_size: '16'", 3, ["engine.block_size", "valid integer", "not '16'"]),
        ("block_size: 16", "block_size: 16.0", 3, ["engine.block_size", "16.0"]),
        ("block_size: 16", "block_size: true", 3, ["engine.block_size", "integer", "True"]),
        ("block_size: 16", "block_size: -16", 3, ["engine.block_size", "greater than or equal to 1", "-16"]),
        ("block_size: 16", "watermark: .nan", 3, ["engine.watermark", "nan"]),
        ("block_size: 16", "gpu_memory_utilization: nan", 3, ["finite number", "nan"]),
        ("block_size: 16", "scheduling_policy: fcsf", 3, ["'fcfs' or 'priority'", "did you mean fcfs?"]),
        (
            "num_gpu_blocks: 1000",
            "num_gpu_blocks: atuo",
            4,
            ["'auto'", "valid integer", "did you mean auto?"],
        ),
        ("num_gpu_blocks: 1000", "num_gpu_blocks: 1", 4, ["engine.num_gpu_blocks", "2"]),
        ("num_requests: 10", "num_requests: -1", 7, ["workload.num_requests", "-1"]),
        ("num_requests: 10", "num_request: 10", 7, ["workload.num_request", "did you mean num_requests?"]),
        ("  num_requests: 10\n", "", 5, ["workload.num_requests", "required"]),
        ("low: 1", "low: -1", 9, ["workload.suffix_len.low", "-1"]),
        ("low: 1", "lowe: 1", 9, ["workload.suffix_len.lowe", "did you mean low?"]),
        ("prefix_len: 64", "prefix_len: .nan", 8, ["workload.prefix_len", "nan"]),
        ("kind: shared_prefix", "kind: shared_prefx", 6, ["workload.kind", "did you mean shared_prefix?"]),
        ("  kind: shared_prefix\n", "", 5, ["workload.kind", "required", "trace"]),
        ("form: whole_step", "form: whole", 12, ["cost"]),
        ("base_us: 5000", "base_us: -1", 12, ["cost.base_us", "-1"]),
        ("name: small", "name: small\nname: large", 2, ["name", "given twice"]),
        ("block_size: 16", "block_size: [16", 4, ["not valid YAML"]),
        ("name: small", "3: small", 1, ["field name", "3"]),
        ("request_rate: inf", "request_rate: .nan", 11, ["workload.request_rate", "nan"]),
    ],
)
def test_bad_field(tmp_path: Path, old: str, new: str, line: int, words: list[str]) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: "), message
    for word in words:
        assert word in message


def test_section_that_is_no_mapping(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, GOOD), "engine=3")
    assert "engine" in message and "mapping" in message


def test_says_how_many_more_errors(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, GOOD.replace("block_size: 16", "block_size: 0\n  nope: 1")))
    assert "and 1 more" in message


@pytest.mark.parametrize(
    ("text", "word"), [("", "empty"), ("# only this\n", "empty"), ("- a\n", "mapping"), ("a\n", "mapping")]
)
def test_no_mapping(tmp_path: Path, text: str, word: str) -> None:
    assert word in refusal(write(tmp_path, text))


def test_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "none.yaml")
    assert "directory" in refusal(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refusal(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("engine.block_size=32", 32),
        ("engine.num_gpu_blocks=auto", "auto"),
        ("engine.enable_prefix_caching=false", False),
        ("workload.prefix_len={distribution: uniform, low: 2, high: 3}", None),
        ("slo.ttft=2000", 2000.0),
    ],
)
def test_set(tmp_path: Path, override: str, value: Any) -> None:
    found: Any = load(write(tmp_path, GOOD), [override])
    for key in override.split("=")[0].split("."):
        found = getattr(found, key)
    assert value is None or found == value


def test_set_opens_a_section_that_is_null(tmp_path: Path) -> None:
    path = write(tmp_path, to_yaml(load(write(tmp_path, GOOD))))
    slo = load(path, ["slo.ttft=2000"]).slo
    assert slo is not None and slo.ttft == 2000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.block_size", ["path=value"]),
        ("engine..block_size=3", ["path=value"]),
        ("engine.block_size=x", ["engine.block_size", "valid integer"]),
        ("engine.blok_size=3", ["did you mean block_size?"]),
        ("engin.block_size=3", ["did you mean engine?"]),
        ("name.first=3", ["name is 'small'", "no fields"]),
        ("engine.block_size=[", ["not valid YAML"]),
    ],
)
def test_bad_set_names_the_option(tmp_path: Path, override: str, words: list[str]) -> None:
    message = refusal(write(tmp_path, GOOD), override)
    assert message.startswith(f"--set {override}: ")
    for word in words:
        assert word in message


MIX = """\
workload:
  kind: mix
  tenants:
    chat:
      cache_salt: x
      workload:
        kind: scan
        num_requests: 5
        prompt_len: {distribution: uniform, low: 3, high: 9}
        output_len: 1
        arrival: mmpp
        states:
          - {rate: 2, mean_sojourn: 3}
          - {rate: 1, mean_sojourn: 3}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("cache_salt", "cache_slat", 5, ["tenants.chat.cache_slat", "did you mean cache_salt?"]),
        ("num_requests", "num_request", 8, ["chat.workload.num_request", "did you mean num_requests?"]),
        ("low:", "lo:", 9, ["workload.prompt_len.lo", "did you mean low?"]),
        ("uniform", "unifrm", 9, ["prompt_len.distribution", "did you mean uniform?"]),
        ("kind: scan", "kind: scna", 7, ["chat.workload.kind", "did you mean scan?"]),
        ("{rate: 1,", "{rates: 1,", 14, ["states.1.rates", "did you mean rate?"]),
        ("          - {rate: 1, mean_sojourn: 3}\n", "", 12, ["should have at least 2 entries, not 1"]),
    ],
)
def test_names_within_mappings_and_lists_are_known(
    tmp_path: Path, old: str, new: str, line: int, words: list[str]
) -> None:
    assert old in MIX and load(write(tmp_path, MIX)).workload.kind == "mix"
    path = write(tmp_path, MIX.replace(old, new))
    message = refusal(path)
    assert message.startswith(f"{path}:{line}: "), message
    for word in words:
        assert word in message


def test_a_mapping_of_tenants_is_one_of_fields(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, MIX), "workload.tenants=3")
    assert message.endswith("workload.tenants: should be a mapping of fields, not 3")
    assert "at least 1 entries" in refusal(write(tmp_path, MIX), "workload.tenants={}")


def test_a_section_that_options_changed_names_them(tmp_path: Path) -> None:
    """The file alone is fine: what is wrong with the whole came with the options."""
    path = write(tmp_path, GOOD)
    burst, slow = "workload.burstiness=3", "engine.block_size=8"
    message = refusal(path, slow, burst)
    assert message.startswith(f"{path}:5 with --set {burst}: workload: burstiness has no effect")
    message = refusal(path, "workload.arrival=mmpp", "workload.states=[{rate: 0, mean_sojourn: 1}]")
    assert message.startswith("--set workload.states=")
    states = "workload.states=[{rate: 0, mean_sojourn: 1}, {rate: 0, mean_sojourn: 1}]"
    message = refusal(path, states, "workload.arrival=mmpp")
    assert message.startswith(f"{path}:5 with --set {states} with --set workload.arrival=mmpp: workload: ")
    message = refusal(write(tmp_path, GOOD.replace("  num_requests: 10\n", "")), "workload.num_groups=3")
    assert message.startswith(f"{path}:5 with --set workload.num_groups=3: workload.num_requests: this field")


def test_trace_is_found_from_here_or_beside_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    path = write(there, "workload: {kind: trace, path: t.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    message = refusal(path)
    assert message.startswith(f"{path}:1: workload.path: no file t.jsonl")
    (there / "t.jsonl").write_text("")
    assert load(path).workload.path == str(there / "t.jsonl")  # type: ignore[union-attr]
    (tmp_path / "t.jsonl").write_text("")
    assert load(path).workload.path == "t.jsonl"  # type: ignore[union-attr]


def test_resolves_pool_from_model_and_gpu(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("cost: {form: whole_step, base_us: 5000}\n", ""))
    resolved = resolve(load(path, ["engine.num_gpu_blocks=auto"]))
    tokens = resolved.config.num_gpu_blocks * 16
    assert 400_000 < tokens < 550_000  # an 80 GB card with 16 GB of weights, 128 KiB a token
    assert resolved.step_time.name == "h100-sxm/llama-3.1-8b_tp1_bf16"
    assert resolved.config.max_model_len == 131_072
    assert any("kappa" in text for text in resolved.assumed)


def test_without_chunking_no_longer_prompt_than_the_budget(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert resolve(load(path, ["engine.enable_chunked_prefill=false"])).config.max_model_len == 8192
    message = refusal(path, "engine.enable_chunked_prefill=false", "engine.max_model_len=9000")
    assert "9000" in message and "8192" in message


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["model=llama-3.1-8", "cost=null"], "llama-3.1-8b"),
        (["gpu=h100", "cost=null"], "h100-sxm"),
        (["cost=h100-sxm/llama-3.1-8b_tp1"], "h100-sxm/llama-3.1-8b_tp1_"),
        (["cost=none.yaml"], "none.yaml"),
        (["engine.num_gpu_blocks=auto", "engine.gpu_memory_utilization=0.1"], "gpu_memory_utilization"),
    ],
)
def test_lookups_that_fail(tmp_path: Path, overrides: list[str], word: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(load(write(tmp_path, GOOD), overrides))
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_calibration_of_another_machine_is_told(tmp_path: Path) -> None:
    scenario = load(write(tmp_path, GOOD), ["cost=h200-sxm/llama-3.1-8b_tp1_bf16"])
    assert "h200" in resolve(scenario).step_time.warnings[0]


def test_the_schema_takes_a_cache_by_name() -> None:
    """As `cache: radix`, or as a mapping with its options."""
    by_name, by_options = Scenario.model_json_schema()["properties"]["cache"]["anyOf"]
    assert by_name["enum"] == [cls().kind for cls in KINDS]
    assert by_options["discriminator"]["mapping"].keys() == set(by_name["enum"])


def test_schema_names_every_section() -> None:
    assert {"engine", "workload", "slo", "cost"} <= set(Scenario.model_json_schema()["properties"])
