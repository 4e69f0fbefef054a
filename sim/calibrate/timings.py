"""Measured kernel times of one model on one GPU, whatever file they come from. Microseconds.

Each table is a pandas frame with one row a measured point and the columns that are named here.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from sim.calibration import Table
from sim.hardware import Dtype
from sim.hashing import Algorithm

GEMM = ["m", "n", "k", "latency_us"]
DECODE = ["batch", "kv", "latency_us"]  # sequences, KV tokens of each
PREFILL = ["batch", "q", "c", "latency_us"]  # sequences, new tokens of each over cached ones
ALLREDUCE = ["elements", "latency_us"]
EXPERTS = ["num_tokens", "latency_us"]
STEP = ["batch", "q", "c", "num_decodes", "decode_kv", "num_layers", "latency_us"]


class Timings(NamedTuple):
    """What was timed. Attention frames by KV type, of one KV block size."""

    gemm: pd.DataFrame  # in the weights' type
    gemm_bf16: pd.DataFrame  # for the LM head and the router
    decode: dict[Dtype, pd.DataFrame]
    prefill: dict[Dtype, pd.DataFrame]
    allreduce: pd.DataFrame | None
    experts: pd.DataFrame | None
    steps: pd.DataFrame | None  # whole steps of a model with num_layers layers
    decode_factors: dict[Dtype, dict[int, float]]  # time by KV block size over that of the frame's
    prefill_factors: dict[Dtype, dict[int, float]]
    hash_us_per_block: dict[Algorithm, dict[int, float]] | None
    tables: list[Table]  # where it was read
    source: str
    licence: str
    notes: list[str]  # what a reader of the fit should know
    assumed: list[str]  # what the measurements do not say, beside what a fit assumes anyhow
