"""Models and GPUs in files: those that ship, those a user writes, and what is wrong with some."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.errors import InputError
from sim.hardware import GpuSpec, ModelSpec, load_gpu, load_model, shipped

GPU = """\
name: mine
memory_bytes: 51539607552
memory_source: data sheet
memory_bandwidth: 1e12
peak_flops: {bf16: 300e12, fp8: 6.0e+14}
interconnect_bandwidth: 50e9
rates_source: data sheet
"""
MODEL = """\
name: small-moe
layers: 2
hidden_size: 256
intermediate_size: 512
num_attention_heads: 4
num_kv_heads: 2
head_dim: 64
vocab_size: 1000
tied_embeddings: true
num_experts: 8
num_experts_per_tok: 2
moe_intermediate_size: 128
num_parameters: 2228992
max_model_len: 4096
"""


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_by_its_path(tmp_path: Path) -> None:
    gpu = load_gpu(written(tmp_path, GPU))
    assert (gpu.name, gpu.memory_bandwidth, gpu.peak_flops) == ("mine", 1e12, {"bf16": 3e14, "fp8": 6e14})
    model = load_model(written(tmp_path, MODEL))
    assert (model.num_experts, model.num_experts_per_tok, model.moe_intermediate_size) == (8, 2, 128)


def test_shipped_files_are_named_as_they_say() -> None:
    for name in shipped("models"):
        assert load_model(name).name == name
    for name in shipped("gpus"):
        assert load_gpu(name).name == name


def test_shipped_rates_are_plausible() -> None:
    """Reading for as long as it takes to multiply: 100 to 700 bf16 operations a byte on all of them."""
    rated = [gpu for gpu in map(load_gpu, shipped("gpus")) if gpu.memory_bandwidth]
    assert len(rated) >= 9
    for gpu in rated:
        assert gpu.memory_bandwidth is not None and gpu.interconnect_bandwidth is not None
        assert 100 < gpu.peak_flops["bf16"] / gpu.memory_bandwidth < 700, gpu.name
        assert gpu.peak_flops.get("fp8", 2e99) >= 1.9 * gpu.peak_flops["bf16"], gpu.name
        assert gpu.interconnect_bandwidth < gpu.memory_bandwidth, gpu.name
    assert "fp8" not in load_gpu("a100-sxm").peak_flops


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes: 51539607552\n", "", "mine.yaml: memory_bytes: this field is required"),
        ("memory_bytes: 51539607552", "memory_bytes: 48 GB", "mine.yaml:2: memory_bytes: .*integer.*'48 GB'"),
        ("1e12", ".nan", "mine.yaml:4: memory_bandwidth: .*finite"),
        ("1e12", "0", "mine.yaml:4: memory_bandwidth: .*greater than 0"),
        ("1e12", "-1e12", "mine.yaml:4: memory_bandwidth: .*greater than 0"),
        ("1e12", "fast", "mine.yaml:4: memory_bandwidth: .*number"),
        ("memory_bandwidth: 1e12\n", "", "mine.yaml: memory_bandwidth, peak_flops and rates_source belong"),
        ("rates_source: data sheet\n", "", "mine.yaml: memory_bandwidth, peak_flops and rates_source belong"),
        ("bf16: 300e12, ", "", "mine.yaml: peak_flops: bf16 is missing"),
        ("fp8: 6.0e+14", "fp8: .inf", "mine.yaml:5: peak_flops.fp8: .*finite"),
        ("fp8:", "int8:", "mine.yaml:5: peak_flops.*bf16"),
        ("rates_source", "rate_source", "mine.yaml:7: rate_source: unknown field; did you mean rates_source"),
        ("name: mine", "name: [", "mine.yaml:[0-9]+: not valid YAML"),
        ("name: mine", "- name", "mine.yaml:[0-9]+: not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_gpu(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GPU
    with pytest.raises(InputError, match=message) as caught:
        load_gpu(written(tmp_path, GPU.replace(old, new, 1)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers: 2\n", "", "mine.yaml: layers: this field is required"),
        ("layers: 2", "layers: 2.5", "mine.yaml:2: layers: .*integer"),
        ("num_experts: 8\n", "", "mine.yaml: num_experts, .* belong together: give all three or none"),
        ("num_experts_per_tok: 2\n", "", "mine.yaml: num_experts, .* belong together"),
        ("moe_intermediate_size: 128\n", "", "mine.yaml: num_experts, .* belong together"),
        ("per_tok: 2", "per_tok: 9", r"mine.yaml: num_experts_per_tok \(9\) is above num_experts \(8\)"),
        ("num_experts: 8", "num_experts: 0", "mine.yaml:10: num_experts: .*greater than 0"),
        ("tied_embeddings: true", "tied_embeddings: yes", "mine.yaml:9: tied_embeddings: .*boolean"),
    ],
)
def test_what_is_wrong_with_a_model(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in MODEL
    with pytest.raises(InputError, match=message) as caught:
        load_model(written(tmp_path, MODEL.replace(old, new, 1)))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.yaml: cannot be read"):
        load_gpu(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="mine.yaml:1: the GPU should be a mapping of fields"):
        load_gpu(written(tmp_path, "3\n"))


def test_none_of_the_experts_and_none_of_the_rates_is_fine() -> None:
    assert ModelSpec.model_validate({**load_model("llama-3.1-8b").model_dump()}).num_experts is None
    bare = GpuSpec(name="bare", memory_bytes=1, memory_source="data sheet")
    assert (bare.memory_bandwidth, bare.peak_flops, bare.rates_source) == (None, {}, None)
