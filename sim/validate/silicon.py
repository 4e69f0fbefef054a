"""End-to-end measurements of Llama-3.1-70B on real H100s, H200s and B200s, each simulated.

The 165 rows of aiconfigurator-core's silicon_sample.csv for vLLM, fp8, all roles on the same GPUs. The
rows do not say how they were run. By their date and parameters they are a public benchmark's: vLLM
0.10.2, a closed loop of as many users as the row's batch size, ten requests a user, lengths uniform
in [0.8, 1.0] of the row's, at most as many sequences as users, 8,192 tokens a step, asynchronous
scheduling, no prefix caching, 0.9 of the memory. That is an inference, and the type of the KV cache
(fp8) with it: on H100 the saturated rows speak for bf16, see silicon_page.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import track

from sim.calibrate.aiconfigurator import package_folder
from sim.errors import InputError
from sim.hardware import Dtype, load_gpu, load_model
from sim.memory import num_gpu_blocks
from sim.scenario import Scenario
from sim.simulation import run

TABLE = Path("systems", "silicon_sample.csv")
MODEL = "llama-3.1-70b"
KEPT = {"backend": "vllm", "mode": "agg", "model_path": "meta-llama/Llama-3.1-70B", "precision": "fp8"}
COLUMNS = {
    "system": "gpu",
    "tp_size": "tp",
    "isl": "isl",
    "osl": "osl",
    "batch_size": "concurrency",
    "silicon_ttft_ms": "ttft_ms",
    "silicon_tpot_ms": "tpot_ms",
}

REQUESTS_A_USER = 10
SHORTEST = 0.8  # of the row's length
MAX_NUM_BATCHED_TOKENS = 8192
BLOCK_SIZE = 16
GPU_MEMORY_UTILIZATION = 0.9
MAX_MODEL_LEN = 10_240  # tokens
SAMPLER_BYTES = 38  # of vLLM before 0.19, see pool_sizes.py
SEED = 0


def read_rows() -> pd.DataFrame:
    """The measured rows: gpu, tp, isl, osl, concurrency, and mean ttft_ms and tpot_ms.

    Raises InputError if the package is not installed or its table has changed.
    """
    path = package_folder() / TABLE
    frame = pd.read_csv(path)
    missing = [name for name in (*KEPT, *COLUMNS) if name not in frame]
    if missing:
        raise InputError(f"{path}: no column {missing[0]}; install the version that pyproject.toml names")
    for column, value in KEPT.items():
        frame = frame[frame[column] == value]
    rows = frame[list(COLUMNS)].rename(columns=COLUMNS)
    counts = ["tp", "isl", "osl", "concurrency"]
    rows[counts] = rows[counts].astype("int64")
    rows["gpu"] = rows.gpu.str.replace("_", "-")
    return rows.sort_values(["gpu", *counts], ignore_index=True)


def simulated(rows: pd.DataFrame, kv_dtype: Dtype) -> pd.DataFrame:
    """The rows with the simulator's mean latencies beside, as sim_ttft_ms and sim_tpot_ms.

    Does not modify `rows`. A bar on stderr shows progress if that is a terminal.
    """
    found = []
    console = Console(stderr=True)
    for gpu, tp, isl, osl, concurrency in track(
        rows[["gpu", "tp", "isl", "osl", "concurrency"]].itertuples(index=False, name=None),
        "measured engines",
        total=len(rows),
        console=console,
        transient=True,
        disable=not sys.stderr.isatty(),
    ):
        result = run(scenario(gpu, tp, isl, osl, concurrency, kv_dtype))
        found.append((result.summary["mean_ttft_ms"], result.summary["mean_tpot_ms"]))
        result.records.discard()
    return rows.assign(
        sim_ttft_ms=[ttft for ttft, _ in found],
        sim_tpot_ms=[tpot for _, tpot in found],
    )


def scenario(gpu: str, tp: int, isl: int, osl: int, concurrency: int, kv_dtype: Dtype) -> Scenario:
    """One row's run as a scenario; step times are the shipped calibration's."""
    size = num_gpu_blocks(
        load_model(MODEL),
        load_gpu(gpu),
        tp=tp,
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
        weights="fp8",
        kv_dtype=kv_dtype,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=concurrency,
        max_model_len=MAX_MODEL_LEN,
        cuda_graph_estimate=False,  # vLLM 0.10 makes none
        sampler_bytes=SAMPLER_BYTES,
    )
    return Scenario.model_validate(
        {
            "name": f"silicon_{gpu}_tp{tp}_{isl}_{osl}_c{concurrency}",
            "model": MODEL,
            "gpu": gpu,
            "seed": SEED,
            "engine": {
                "block_size": BLOCK_SIZE,
                "num_gpu_blocks": size.num_gpu_blocks,
                "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
                "tensor_parallel_size": tp,
                "quantization": "fp8",
                "kv_cache_dtype": "fp8" if kv_dtype == "fp8" else "bfloat16",
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "max_num_seqs": concurrency,
                "max_model_len": MAX_MODEL_LEN,
                "enable_prefix_caching": False,
            },
            "workload": {
                "kind": "shared_prefix",
                "concurrency": concurrency,
                "num_requests": REQUESTS_A_USER * concurrency,
                "prefix_len": 0,
                "suffix_len": _up_to(isl),
                "output_len": _up_to(osl),
            },
        }
    )


def _up_to(length: int) -> dict[str, object]:
    return {"distribution": "uniform", "low": int(SHORTEST * length), "high": length}
