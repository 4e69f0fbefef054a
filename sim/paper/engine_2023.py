"""The step time of the engine of 2023, as far as the paper tells it.

GPU time is the roofline of an A100 with 40 GB. What the paper's engine, a Python program that launched
each kernel by itself, needed beside it follows from figure 13 by Little's law: with N requests batched in
the mean, each of L output tokens, and X requests a second done, a step takes N / (X L) seconds. vLLM
kept up with the rates of that figure, so X is the rate. Two data sets give two equations for
o0 + o1 * sequences. They know nothing of shared prefixes, which these coefficients then predict.
"""

from __future__ import annotations

from sim._jit import entry
from sim.calibration import Cpu, KernelCalibration, Provenance
from sim.cost import compile_cost, gpu_time
from sim.hardware import load_gpu, load_model
from sim.paper.published import ALPACA, KV_GIB, MEMORY_PAGED, SHAREGPT, Dataset
from sim.roofline import roofline

MODEL, GPU = "llama-13b", "a100-sxm-40gb"
KV_BYTES = 2 * 40 * 5120 * 2  # of a token: K and V, layers, hidden size, bytes


def engine_2023() -> KernelCalibration:
    """The roofline with the CPU time that figure 13 leaves for it."""
    gpu_alone = roofline(load_model(MODEL), load_gpu(GPU), tp=1, weights="bf16")
    cpu = cpu_time(gpu_alone)
    return gpu_alone.model_copy(
        update={
            "cpu": cpu,
            "assumed": [
                *gpu_alone.assumed,
                "CPU time of a step: what figure 13 of the PagedAttention paper leaves beside that roofline,"
                " by Little's law",
            ],
            "provenance": Provenance(
                source=f"{gpu_alone.provenance.source}; figures 2, 11 and 13 of the PagedAttention paper",
                licence="facts",
                date="2026-11-30",
                note="python -m sim.paper --engine; nothing measured here",
            ),
        }
    )


def cpu_time(gpu_alone: KernelCalibration) -> Cpu:
    """o0 and o1, microseconds, to a microsecond."""
    few, many = SHAREGPT.batched["paged"], ALPACA.batched["paged"]
    least, most = _left_over(gpu_alone, SHAREGPT), _left_over(gpu_alone, ALPACA)
    o1 = (most - least) / (many - few)
    return Cpu(o0=round(least - o1 * few), o1=round(o1))


def _left_over(gpu_alone: KernelCalibration, data: Dataset) -> float:
    """Microseconds of a mean step that the GPU did not take."""
    batched = data.batched["paged"]
    step = batched / (data.rate * data.output_len)
    cost = compile_cost(
        gpu_alone, max_num_batched_tokens=2560, block_size=16, kv_dtype="bf16", hash_algo="sha256"
    )
    time_on_gpu = entry(gpu_time)
    kv = round(MEMORY_PAGED / 100 * KV_GIB * 2**30 / KV_BYTES)  # the memory was full
    n, prompt = round(batched), round(data.prompt_len)
    # so many prompts in a step, in the mean: two kinds of steps, mixed
    prompts = data.rate * step
    fewer = int(prompts)
    without, with_one_more = (
        time_on_gpu(cost, n + p * prompt, n + p, n, kv, p, p * prompt, p * prompt**2, 0, 0)
        for p in (fewer, fewer + 1)
    )
    on_gpu = without + (prompts - fewer) * (with_one_more - without)
    return float(step - on_gpu) * 1e6
