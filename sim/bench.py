"""The speed works S and M under apc and radix, each in its own process, and SimPy's bare timeouts.

S: 10,000 requests, Poisson 8/s, 1024 shared + 256 own prompt tokens, 128 output. M: the Mooncake
conversation trace. One engine: pool of 480,000 tokens, 8192 batched tokens, 256 sequences,
synchronous scheduling, the H100 Llama-3.1-8B calibration. A run is timed from opening its input
file to its summary; compilation is over by then.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.errors import InputError

POOL_TOKENS = 480_000
BLOCK_SIZES = (16, 64)
CACHES = ("apc", "radix")
REPEATS = 3
TIMEOUTS = 200_000
CALIBRATION = "h100-sxm/llama-3.1-8b_tp1_bf16"
COLUMNS = (
    "requests_per_s", "engine_requests_per_s", "steps_per_s", "peak_rss_mb", "makespan_s", "num_steps",
    "mean_num_running", "prefix_cache_hit_rate", "mean_ttft_ms",
)  # fmt: skip


def write_work_s(path: Path) -> None:
    """Write work S as a Mooncake trace: ids of 512 tokens, the last one partial."""
    rng = random.Random(0)
    now = 0.0
    with path.open("w") as out:
        for i in range(10_000):
            now += rng.expovariate(8.0)
            row = {"timestamp": round(now * 1000, 3), "input_length": 1280, "output_length": 128}
            out.write(json.dumps(row | {"hash_ids": [0, 1, 2 + i]}) + "\n")


def time_work(path: Path, block_size: int, cache: str) -> dict[str, Any]:
    """Run a trace REPEATS times, after one run that is not counted; the best run's figures."""
    import numpy as np

    from sim.cache_kinds import KINDS
    from sim.calibration import load_calibration
    from sim.core import EngineConfig
    from sim.cost import compile_cost
    from sim.metrics import summarize
    from sim.records import Records
    from sim.simulate import simulate
    from workloads import Trace

    config = EngineConfig(block_size, POOL_TOKENS // block_size, 8192, 256, 131_072)
    cost = compile_cost(
        load_calibration(CALIBRATION), max_num_batched_tokens=8192, block_size=block_size, kv_dtype="bf16"
    )
    (kind,) = (kind() for kind in KINDS if kind().kind == cache)
    trace = Trace(path=str(path))

    def whole() -> dict[str, Any]:
        start = time.perf_counter()
        records = Records()
        batches = trace.batches(np.random.SeedSequence(0), block_size)
        totals = simulate(batches, config, cost, kind=kind, on_records=records.append)
        records.close()
        summary = summarize(records, totals, config, None)
        wall = time.perf_counter() - start
        records.discard()
        return {
            "wall": wall,
            "requests_per_s": round(summary["completed"] / wall),
            "steps_per_s": round(totals.num_steps / wall),
            "makespan_s": round(totals.last_time, 3),
            "num_steps": totals.num_steps,
            "mean_num_running": round(totals.num_running_sum / totals.num_steps, 2),
            "prefix_cache_hit_rate": round(summary["prefix_cache_hit_rate"], 4),
            "mean_ttft_ms": round(summary["mean_ttft_ms"], 2),
            "completed": summary["completed"],
        }

    def engine_alone() -> float:
        batches = list(trace.batches(np.random.SeedSequence(0), block_size))
        start = time.perf_counter()
        simulate(iter(batches), config, cost, kind=kind, on_records=lambda chunk: None)
        return time.perf_counter() - start

    whole()
    best = min((whole() for _ in range(REPEATS)), key=lambda figures: figures["wall"])
    best["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    best["engine_requests_per_s"] = round(best["completed"] / min(engine_alone() for _ in range(REPEATS)))
    return {name: best[name] for name in COLUMNS}


def simpy_timeouts_per_s() -> int:
    """How many timeouts of one process SimPy alone passes in a second here; the best of REPEATS."""
    import simpy

    def ticking(env: simpy.Environment) -> Any:
        for _ in range(TIMEOUTS):
            yield env.timeout(1.0)

    def once() -> float:
        env = simpy.Environment()
        env.process(ticking(env))
        start = time.perf_counter()
        env.run()
        return time.perf_counter() - start

    return round(TIMEOUTS / min(once() for _ in range(REPEATS)))


def in_own_process(path: Path, block_size: int, cache: str) -> dict[str, Any]:
    """`time_work` in a fresh process, so that its peak memory is its own."""
    command = [sys.executable, "-m", "sim.bench", str(path), str(block_size), cache]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise InputError(lines[-1].removeprefix("prefixsim: ") if lines else f"{path}: the run was ended")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(trace: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """All works: S, and M where the conversation trace is given."""
    if trace is not None and not trace.is_file():
        raise InputError(f"{trace}: no such file; give the Mooncake conversation trace with --trace")
    works = []
    with tempfile.TemporaryDirectory() as folder:
        work_s = Path(folder) / "work_s.jsonl"
        write_work_s(work_s)
        progress("compiling, where needed")
        for cache in CACHES:
            in_own_process(work_s, 64, cache)  # in a process not measured: compilers need memory too
        paths = {"S": work_s} | ({"M": trace} if trace is not None else {})
        for name, path in paths.items():
            for cache, block_size in itertools.product(CACHES, BLOCK_SIZES):
                progress(f"work {name}, {cache}, block size {block_size}")
                of = {"work": name, "cache": cache, "block_size": block_size}
                works.append(of | in_own_process(path, block_size, cache))
    progress("SimPy and the step time alone")
    from sim.bench_step import step_time_ns

    alone = {"simpy_timeouts_per_s": simpy_timeouts_per_s(), "step_time_ns": step_time_ns(CALIBRATION)}
    return {"works": works, **alone}


def bench(trace: Path | None, output: str) -> None:
    """Measure and print, as a table or as one JSON object; what is being measured goes to stderr."""
    figures = measure(trace, lambda what: print(f"prefixsim: {what}", file=sys.stderr))
    if output == "json":
        print(json.dumps(figures, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in ("work", "cache", "block", "req/s", "engine only", "steps/s", "MB", "makespan s", "steps",
                 "running", "hit rate", "TTFT ms"):  # fmt: skip
        table.add_column(name, justify="right")
    for work in figures["works"]:
        what = work["work"], work["cache"], str(work["block_size"])
        table.add_row(*what, *(f"{work[name]:,}" for name in COLUMNS))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(f"SimPy alone: {figures['simpy_timeouts_per_s']:,} timeouts/s")
    console.print(f"Time of one step: evaluated in {figures['step_time_ns']:.1f} ns")


if __name__ == "__main__":
    from workloads.errors import WorkloadError

    try:
        print(json.dumps(time_work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
    except WorkloadError as problem:
        sys.exit(f"prefixsim: {problem}")
