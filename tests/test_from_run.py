"""A calibration from a run: known step times are found again, and nothing but the first fifth is seen."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.calibrate import from_run
from sim.calibrate.from_run import data_sheet, fit_requests, fit_run, read_load, retell, step_cost
from sim.calibrate.measured_run import read_run, read_ticks
from sim.calibration import WholeStepCalibration, load_calibration
from sim.core import EngineConfig
from sim.errors import InputError
from sim.hardware import load_gpu, load_model

pytest.importorskip("scipy")

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
GPU, MODEL = load_gpu("rtx-4090"), load_model("llama-3.1-8b")
CONFIG = EngineConfig(
    block_size=16, num_gpu_blocks=400, max_num_batched_tokens=1024, max_num_seqs=32, max_model_len=8192,
    async_scheduling=True,
)  # fmt: skip
TRUE = np.array([24_000.0, 70.0, 0.3, 30.0])  # microseconds: base, token, context, seq
START_UP = 0.25  # seconds

META: dict[str, Any] = {
    "vllm_version": "0.19.0",
    "started_at": "2026-08-20T23:19:39.5Z",
    "engine_kwargs": {
        "tensor_parallel_size": 1, "max_num_seqs": CONFIG.max_num_seqs, "dtype": "bfloat16",
        "max_num_batched_tokens": CONFIG.max_num_batched_tokens, "kv_cache_dtype": "auto",
        "max_model_len": CONFIG.max_model_len, "seed": 42,
    },
    "kv_cache": {"num_gpu_blocks": 400, "block_size": 16, "enable_prefix_caching": True},
    "resolved_config": {
        "scheduler_config": {
            "async_scheduling": True, "enable_chunked_prefill": True, "scheduler_reserve_full_isl": True,
            "long_prefill_token_threshold": 0, "policy": "fcfs",
        }
    },
}  # fmt: skip
EPOCH = 1787267980.0  # half a second after started_at
ENGINE_CLOCK = 5000.0


def write_run(folder: Path, n: int = 150) -> tuple[Path, Path]:
    """A load, and the run that an engine with TRUE step times makes of it."""
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(0.4, n))
    arrivals -= arrivals[0]
    prompts, outputs = rng.integers(20, 1500, n), rng.integers(2, 200, n)
    load, run = folder / "load.jsonl", folder / "a-requests.jsonl"
    load.write_text(
        "".join(
            json.dumps(
                {
                    "arrival_time": float(arrival) + 0.01 * i,  # as planned: the client is never on time
                    "input_length": int(prompt),
                    "output_length": int(output),
                    "segments": [[i % 7, 16], [100 + i, int(prompt + output) - 16]],
                }
            )
            + "\n"
            for i, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs, strict=True))
        )
    )
    rows = [
        {
            "request_id": f"bench-{i}",
            "input_toks": int(prompts[i]),
            "output_toks": int(outputs[i]),
            "arrival_time": EPOCH + float(arrivals[i]),
            **dict.fromkeys(
                ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
                ENGINE_CLOCK + float(arrivals[i]),
            ),
        }
        for i in range(n)
    ]
    write_rows(run, rows)
    (folder / "a-meta.json").write_text(json.dumps(META))
    measured = read_run(run)
    _, records = retell(read_load(load, measured), measured.config, step_cost(TRUE, measured.config))
    for i, row in enumerate(rows):
        late = ENGINE_CLOCK + (START_UP if i else 0.0)
        row["queued_ts"] = late + records["ready_time"][i]
        row["scheduled_ts"] = late + records["scheduled_time"][i]
        row["first_token_ts"] = ENGINE_CLOCK + START_UP + records["first_token_time"][i]
        row["last_token_ts"] = ENGINE_CLOCK + START_UP + records["finish_time"][i]
    write_rows(run, rows)
    (folder / "a-timeseries.csv").write_text("t,gen_throughput,running,waiting,kv_cache_pct\n1.0,9,3,2,50\n")
    return load, run


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_run(tmp_path_factory.mktemp("run"))


def test_known_step_times_are_found_again(files: tuple[Path, Path]) -> None:
    load, run = files
    measured = read_run(run)
    assert measured.config == CONFIG
    batches = read_load(load, measured)
    fit = fit_requests(batches, measured, data_sheet(GPU, MODEL, measured))
    assert fit.start_up == pytest.approx(START_UP, abs=0.05)
    assert fit.lateness < 0.05
    found = np.array(fit[:4])
    # what a full prefill and a batch of decodes take: single coefficients lean on the data sheet
    for shape in ((1.0, 1024.0, 0.0, 2.0), (1.0, 12.0, 8000.0, 12.0)):
        assert found @ shape == pytest.approx(TRUE @ shape, rel=0.03)
    cost = from_run.step_cost(np.array(fit[:4]), measured.config)
    errors = from_run.unseen_errors(measured, from_run.retell(batches, measured.config, cost)[1])
    assert all(errors[name].points == 120 for name in ("ttft", "tpot", "e2el"))
    assert errors["tpot"].mape < 5.0 and errors["e2el"].mape < 10.0


def test_only_the_first_fifth_is_looked_at(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_run, "GENERATIONS", 1)
    load, run = files
    rows = [json.loads(line) for line in run.read_text().splitlines()]

    def fitted(first: int, last: int) -> WholeStepCalibration:
        """With the outcomes of requests `first` up to `last` changed."""
        changed = [dict(row) for row in rows]
        for row in changed[first:last]:
            for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"):
                row[name] = ENGINE_CLOCK + 2.0 * (row[name] - ENGINE_CLOCK) + 3.0
        path = tmp_path / "b-requests.jsonl"
        write_rows(path, changed)
        (tmp_path / "b-meta.json").write_text(json.dumps(META))
        return fit_run(load, path, GPU, MODEL, date="2026-11-29")

    plain, later, earlier = fitted(0, 0), fitted(30, 150), fitted(1, 30)
    names = ("base_us", "token_us", "decode_context_us", "seq_us")
    assert [getattr(later, name) for name in names] == [getattr(plain, name) for name in names]
    assert later.provenance.note == plain.provenance.note
    assert later.errors != plain.errors, "the errors are those of the others"
    assert [getattr(earlier, name) for name in names] != [getattr(plain, name) for name in names]


def test_compressed_files_are_the_same_run(files: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = files
    for name in ("requests.jsonl", "meta.json", "timeseries.csv"):
        packed = gzip.compress(run.with_name(f"a-{name}").read_bytes())
        (tmp_path / f"a-{name}.gz").write_bytes(packed)
    plain, packed_run = read_run(run), read_run(tmp_path / "a-requests.jsonl.gz")
    for one, other in zip(plain, packed_run, strict=True):
        np.testing.assert_array_equal(one, other)  # type: ignore[arg-type]
    ticks = read_ticks(tmp_path / "a-requests.jsonl.gz", packed_run)
    assert [column.tolist() for column in ticks] == [[0.5], [3.0], [2.0], [0.5]]


def test_the_data_sheet() -> None:
    measured = read_run_of(TRACES)
    base, token, context, seq = data_sheet(GPU, MODEL, measured)
    assert base == pytest.approx(1e6 * 2 * 8_030_261_248 / 1.008e12)
    assert token + seq == pytest.approx(1e6 * 2 * 8_030_261_248 / 165.2e12)
    assert seq == pytest.approx(1e6 * 2 * 128_256 * 4096 / 165.2e12)
    assert context == pytest.approx(1e6 * 131_072 / 1.008e12)


def read_run_of(traces: Path) -> Any:
    path = traces / "vllm-RTX4090-llama8b-requests.jsonl.gz"
    if not path.exists():
        pytest.skip(f"needs the measured run of an RTX 4090: no {path}")
    return read_run(path)


def edited(run: Path, folder: Path, ending: str, old: str, new: str) -> Path:
    """A copy of the run in which one text stands for another."""
    for name in ("requests.jsonl", "meta.json", "timeseries.csv"):
        text = run.with_name(f"a-{name}").read_text()
        assert name != ending or old in text
        (folder / f"a-{name}").write_text(text.replace(old, new, 1) if name == ending else text)
    return folder / "a-requests.jsonl"


@pytest.mark.parametrize(
    ("ending", "old", "new", "said"),
    [
        ("requests.jsonl", "{", "{{", r"a-requests\.jsonl:1: not valid JSON"),
        ("requests.jsonl", '"output_toks"', '"output"', r"a-requests\.jsonl:1: output_toks: .*required"),
        ("requests.jsonl", '"input_toks": ', '"input_toks": -', r"requests\.jsonl:1: input_toks: should be"),
        ("requests.jsonl", '"queued_ts": 5000.0', '"queued_ts": NaN', r":1: queued_ts: should be .*finite"),
        ("meta.json", "{", "", r"a-meta\.json: not valid JSON"),
        ("meta.json", "bfloat16", "float16", r"a-meta\.json: engine_kwargs\.dtype: should be"),
        ("meta.json", '"num_gpu_blocks": 400', '"num_gpu_blocks": 1', r"kv_cache\.num_gpu_blocks: should be"),
        ("meta.json", "2026-08-20T", "", r"a-meta\.json: started_at: "),
        ("requests.jsonl", '"queued_ts": 5000.0', '"queued_ts": -1', r":1: queued_ts: should be greater"),
        ("requests.jsonl", '"queued_ts": 5000.0', '"queued_ts": 1e11', r":1: queued_ts: should be less"),
        ("requests.jsonl", '"queued_ts": 5000.0', '"queued_ts": 6e3', r":1: scheduled_ts: .* before queued"),
        ("requests.jsonl", '"scheduled_ts": ', '"scheduled_ts": 9', r":1: first_token_ts: .* before sched"),
        ("requests.jsonl", '"first_token_ts": ', '"first_token_ts": 9', r":1: last_token_ts: .* before fir"),
        ("requests.jsonl", '"input_toks": ', '"input_toks": 9999999', r":1: input_toks: should be less"),
        ("requests.jsonl", '"output_toks": ', '"output_toks": 9999', r":1: input_toks, output_toks: .* 8192"),
        ("requests.jsonl", "{", "[" * 100_000 + "{", r"a-requests\.jsonl:1: not valid JSON"),
        ("meta.json", '"num_gpu_blocks": 400', '"num_gpu_blocks": 9e9', r"num_gpu_blocks: should be"),
        ("meta.json", '_blocks": 400', '_blocks": 2147483649', r"kv_cache\.num_gpu_blocks: should be less"),
        ("meta.json", '"max_num_seqs": 32', '"max_num_seqs": 1048577', r"\.max_num_seqs: should be less"),
        ("meta.json", '_tokens": 1024', '_tokens": 1048577', r"max_num_batched_tokens: should be less"),
        ("meta.json", '"block_size": 16', '"block_size": 1048577', r"\.block_size: should be less"),
        ("meta.json", '_threshold": 0', '_threshold": -1', r"token_threshold: should be greater"),
        ("timeseries.csv", "3,2,50", "3,x,50", r"a-timeseries\.csv:2: waiting: should be"),
        ("timeseries.csv", "gen_throughput", "waiting", r"timeseries\.csv:1: two columns are named waiting"),
        ("timeseries.csv", "waiting", "wait", r"a-timeseries\.csv:2: waiting: .*required"),
    ],
)
def test_bad_files_are_told_in_one_line(
    files: tuple[Path, Path], tmp_path: Path, ending: str, old: str, new: str, said: str
) -> None:
    run = edited(files[1], tmp_path, ending, old, new)
    with pytest.raises(InputError, match=said) as caught:
        read_ticks(run, read_run(run))
    assert "\n" not in str(caught.value)


def test_a_request_is_queued_after_it_arrived(files: tuple[Path, Path], tmp_path: Path) -> None:
    """By clocks that the first request sets against each other, and that may drift by a second."""
    rows = [json.loads(line) for line in files[1].read_text().splitlines()]
    (tmp_path / "a-meta.json").write_text(json.dumps(META))
    late = rows[7]["arrival_time"] + (rows[7]["queued_ts"] - rows[0]["queued_ts"])
    late -= rows[7]["arrival_time"] - rows[0]["arrival_time"]
    for jitter, refused in ((0.9, False), (1.1, True)):
        rows[7]["arrival_time"] = late + jitter
        write_rows(tmp_path / "a-requests.jsonl", rows)
        if refused:
            with pytest.raises(InputError, match=r"a-requests\.jsonl:8: queued_ts: is 1\.1 s before"):
                read_run(tmp_path / "a-requests.jsonl")
        else:
            assert len(read_run(tmp_path / "a-requests.jsonl").prompt_len) == len(rows)


def test_tp_divides_the_heads(files: tuple[Path, Path], tmp_path: Path) -> None:
    run = edited(files[1], tmp_path, "meta.json", '"tensor_parallel_size": 1', '"tensor_parallel_size": 3')
    said = r"a-meta\.json: engine_kwargs\.tensor_parallel_size: 3 does not divide the 32 heads"
    with pytest.raises(InputError, match=said):
        fit_run(files[0], run, GPU, MODEL, date="2026-11-29")


def test_files_that_are_not_there(files: tuple[Path, Path], tmp_path: Path) -> None:
    load, run = files
    with pytest.raises(InputError, match=r"none-meta\.json: no such file, nor with \.gz"):
        read_run(tmp_path / "none-requests.jsonl")
    alone = tmp_path / "b-requests.jsonl"
    alone.write_bytes(run.read_bytes())
    with pytest.raises(InputError, match=r"b-meta\.json: no such file, nor with \.gz"):
        read_run(alone)
    with pytest.raises(InputError, match=r"a run is named by its file NAME-requests\.jsonl"):
        read_run(load)
    (tmp_path / "c-meta.json").write_text(json.dumps(META))
    damaged = bytearray(gzip.compress(run.read_bytes()))
    damaged[40:60] = bytes(20)
    for content in (b"\x1f\x8b\x08", bytes(damaged)):
        (tmp_path / "c-requests.jsonl.gz").write_bytes(content)
        with pytest.raises(InputError, match=r"c-requests\.jsonl\.gz: cannot be read: not a whole gzip file"):
            read_run(tmp_path / "c-requests.jsonl.gz")


def test_what_does_not_go_together(files: tuple[Path, Path], tmp_path: Path) -> None:
    load, run = files
    measured = read_run(run)
    lines = load.read_text().splitlines(keepends=True)
    other = tmp_path / "load.jsonl"
    longer = json.loads(lines[0]) | {"input_length": 99, "segments": [[0, 99], [1, 7]], "output_length": 7}
    other.write_text("".join([json.dumps(longer) + "\n", *lines[1:]]))
    with pytest.raises(InputError, match="prompt_len is not that of the run"):
        read_load(other, measured)
    other.write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match="has 149 requests, the run 150"):
        read_load(other, measured)
    (tmp_path / "few").mkdir()
    few = tmp_path / "few" / "a-requests.jsonl"
    few.write_text("".join(run.read_text().splitlines(keepends=True)[:49]))
    (tmp_path / "few" / "a-meta.json").write_text(json.dumps(META))
    with pytest.raises(InputError, match="has 49 requests; a fit takes 50 at least"):
        fit_run(load, few, GPU, MODEL, date="2026-11-29")
    bare = GPU.model_copy(update={"memory_bandwidth": None, "peak_flops": {}})
    with pytest.raises(InputError, match="rtx-4090: memory_bandwidth, peak_flops"):
        fit_run(load, run, bare, MODEL, date="2026-11-29")
    experts = MODEL.model_copy(update={"num_experts": 8})
    with pytest.raises(InputError, match="has experts"):
        fit_run(load, run, GPU, experts, date="2026-11-29")


@pytest.mark.slow
def test_the_shipped_calibration_is_what_the_fit_gives() -> None:
    read_run_of(TRACES)
    fitted = fit_run(
        TRACES / "sharegpt_llama31_8b_segments.jsonl.gz",
        TRACES / "vllm-RTX4090-llama8b-requests.jsonl.gz",
        GPU,
        MODEL,
        date="2026-11-29",
    )
    shipped = load_calibration(fitted.name)
    assert isinstance(shipped, WholeStepCalibration)
    for name in ("base_us", "token_us", "decode_context_us", "seq_us"):
        assert getattr(fitted, name) == pytest.approx(getattr(shipped, name), rel=1e-6), name
    assert fitted.errors == shipped.errors
    assert fitted.domain == shipped.domain
    assert fitted.provenance.tables == shipped.provenance.tables
