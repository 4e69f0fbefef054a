"""A device of torch's, random data on it, and the time of one call there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sim.errors import InputError
from sim.measure.cpu import cpu_name
from sim.measure.timing import Timing, timing

Tensor = Any  # torch is optional, and skipped by the type checker

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

WARM_UP = 3  # calls
SECONDS = {"cuda": 0.1, "cpu": 0.02}  # of timed calls a point, within REPEATS
REPEATS = {"cuda": (10, 100), "cpu": (5, 50)}
MOST_WRITES = 200  # of the scratch buffer before one call
CPU_SCRATCH_BYTES = 16 << 20
PERIOD = 1_048_573  # random values drawn for a tensor; prime, so that no two rows of a matrix are equal


class Device(NamedTuple):
    """Where calls are timed."""

    kind: str  # cuda or cpu
    name: str
    versions: str
    memory_bytes: int  # 0: not known
    scratch: Tensor  # written between calls; larger than the L2 cache
    write_seconds: float  # of writing it once


def open_device(kind: str) -> Device:
    """The first CUDA device, or the CPU. Raises InputError, one line, where torch sees none."""
    torch.manual_seed(0)
    if kind == "cpu":
        scratch = torch.empty(CPU_SCRATCH_BYTES, dtype=torch.uint8)
        return Device("cpu", cpu_name(), f"torch {torch.__version__}", 0, scratch, 0.0)
    if not torch.cuda.is_available():
        raise InputError(
            f"torch {torch.__version__} sees no CUDA device: install torch's CUDA build, or use --device cpu"
        )
    properties = torch.cuda.get_device_properties(0)
    l2_bytes = getattr(properties, "L2_cache_size", 0)
    scratch = torch.empty(max(4 * l2_bytes, 256 << 20), dtype=torch.uint8, device="cuda")
    seconds = _seconds_of_write(scratch)
    return Device("cuda", properties.name, _cuda_versions(), properties.total_memory, scratch, seconds)


def random(device: Device, *shape: int, dtype: str = "bf16", scale: float = 1.0) -> Tensor:
    """A tensor of normal values times `scale`.

    Long ones repeat the same PERIOD values: drawing gigabytes takes longer than timing them, and a
    GPU's clock under load depends on the data being random, not on its being long.
    """
    count = math.prod(shape)
    values = (torch.randn(min(count, PERIOD), device=device.kind) * scale).to(DTYPES[dtype])
    return values.repeat(-(-count // max(len(values), 1)))[:count].view(shape)


def time_call(device: Device, call: Callable[[], Any]) -> Timing:
    """Time `call` on an otherwise idle device with cold caches: warm-up, then many repeats."""
    for _ in range(WARM_UP):
        call()
    synchronize(device)
    start = time.perf_counter()
    call()
    launched = time.perf_counter() - start
    synchronize(device)
    whole = time.perf_counter() - start
    fewest, most = REPEATS[device.kind]
    repeats = min(max(int(SECONDS[device.kind] / whole), fewest), most)
    if device.kind == "cpu":
        return timing(_cpu_times(device, call, repeats))
    return timing(_cuda_times(device, call, repeats, launched))


def synchronize(device: Device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.kind == "cuda":
        torch.cuda.synchronize()


def release(device: Device) -> None:
    """Give unused memory back, after a point that had too little."""
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def _cpu_times(device: Device, call: Callable[[], Any], repeats: int) -> list[float]:
    """Microseconds of each call."""
    times = []
    for _ in range(repeats):
        device.scratch.zero_()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _cuda_times(device: Device, call: Callable[[], Any], repeats: int, launched: float) -> list[float]:
    """Microseconds of each call between two events on the GPU.

    Writing the scratch buffer empties the L2 cache, and keeps the GPU busy until the host has
    launched the whole call: the time is the kernels', as in a CUDA graph, not their launches'.
    """
    writes = min(1 + math.ceil(2 * launched / device.write_seconds), MOST_WRITES)
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for start, end in events:
        for _ in range(writes):
            device.scratch.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def _seconds_of_write(scratch: Tensor) -> float:
    scratch.zero_()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        scratch.zero_()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 10


def _cuda_versions() -> str:
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": _driver()}
    return "; ".join(f"{name} {version}" for name, version in found.items() if version)


def _driver() -> str | None:
    """The kernel module's version, where the system shows it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
