"""The paper's experiments: scenarios in, rows of tables out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sim.paper.lineages import saved
from sim.paper.published import BEST_BLOCK_SIZES, SAVED_BEAM, SAVED_PARALLEL
from sim.paper.rates import DURATION, at_rate, highest_rates
from sim.scenario import Scenario
from sim.scenario_file import load
from sim.simulation import run

Row = dict[str, Any]
Progress = Callable[[str], None]

FOLDER = Path("scenarios/paper")
SHOTS = {"one_shot": 80, "five_shot": 341}  # scenario, and its prefix's tokens
SYSTEMS = {  # options as of --set
    "paged": ["cache={kind: paged, reserve_prefixes: true}"],
    "oracle": ["cache={kind: contiguous, reservation: oracle}"],
    "apc": ["cache=apc"],
    "radix": ["cache=radix", "engine.watermark=0"],
}
ROOFLINE = "cost=roofline"  # GPU time alone
WIDTHS = (2, 4, 6)
OWN = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)  # see sim/paper/lineages.py
LOADS = {"sharegpt": 1.0, "alpaca": 15.0}  # requests a second times sequences, of section 6.3
NEAR_THE_KNEE = {"sharegpt": 2.0, "alpaca": 30.0}  # requests a second, of section 7.2: figure 13's
BLOCK_SIZES = tuple(2**k for k in range(9))
NUM_SLOTS = 983 * 16


def scenario(name: str, *options: str) -> Scenario:
    """One of scenarios/paper, with options as of --set."""
    return load(FOLDER / f"{name}.yaml", list(options))


def prefixes(progress: Progress, duration: float = DURATION) -> tuple[list[Row], list[Row]]:
    """Section 6.4: highest rates by bound, and the latency at every rate tried."""
    rates, curves = [], []
    for shot, prefix_len in SHOTS.items():
        for system, cost, options in _prefix_runs(prefix_len):
            found, points = highest_rates(scenario(shot, *options), duration=duration, progress=progress)
            head = {"prefix_len": prefix_len, "system": system, "step_time": cost}
            rates += [{**head, "bound_s_per_token": b, "highest_rate": rate} for b, rate in found.items()]
            curves += [
                {
                    **head,
                    "rate": point.rate,
                    "normalized_latency_s": point.latency,
                    "mean_num_requests_running": point.summary["mean_num_requests_running"],
                }
                for point in points
            ]
    return rates, curves


def _prefix_runs(prefix_len: int) -> list[tuple[str, str, list[str]]]:
    """System, step time, and the options that make them."""
    runs = [(system, "engine of 2023", options) for system, options in SYSTEMS.items()]
    runs += [(system, "GPU alone", [*SYSTEMS[system], ROOFLINE]) for system in ("paged", "oracle")]
    # what would be if reading the shared blocks cost nothing: their tokens gone, their place kept
    full = prefix_len // 16
    gone = [f"workload.prefix_len={prefix_len - 16 * full}", f"engine.num_gpu_blocks={984 - full}"]
    return [*runs, ("paged, prefix read at no cost", "engine of 2023", [*SYSTEMS["paged"], *gone])]


def sharing(progress: Progress) -> list[Row]:
    """Section 6.3: blocks saved by sharing, of parallel samples and of beam search, in %."""
    rows = []
    for name, load_ in LOADS.items():
        for way, field, published in (
            ("parallel", "n", SAVED_PARALLEL[name]),
            ("beam", "beam_width", SAVED_BEAM[name]),
        ):
            for width, printed in zip(WIDTHS, published, strict=True):
                requests = 3000 if name == "alpaca" else 600
                options = [f"workload.{field}={width}", f"workload.request_rate={load_ / width}"]
                result = run(scenario(name, *options, f"workload.num_requests={requests}"))
                result.records.discard()
                percent = 100 * result.summary["blocks_saved_by_sharing"]
                progress(f"{name}, {way} {width}: {percent:.1f} % saved")
                rows.append(
                    {"data": name, "way": way, "sequences": width, "saved": percent, "published": printed}
                )
    return rows


def lineages(progress: Progress) -> list[Row]:
    """Section 6.3: what beam search saves if candidates mostly go on from their own text, in %."""
    rows = []
    for name, requests in (("alpaca", 300), ("sharegpt", 100)):
        load_ = scenario(name, f"workload.num_requests={requests}")
        (batch,) = load_.workload.batches(np.random.SeedSequence(load_.seed), 16)
        output_len = np.minimum(batch.output_len, 2048 - batch.prompt_len)
        for width in WIDTHS:
            for own in OWN:
                percent = saved(batch.prompt_len, output_len, width, own, 16, load_.seed)
                progress(f"{name}, {width} candidates, own text {own:g}: {percent:.1f} % saved")
                rows.append({"data": name, "sequences": width, "own": own, "saved": percent})
    return rows


def memory(progress: Progress) -> list[Row]:
    """Figures 2 and 13: what the memory holds, and how many requests run, by system."""
    systems = {name: f"cache={{kind: contiguous, reservation: {name}}}" for name in ("max", "pow2", "oracle")}
    systems |= {"paged": "cache=paged", "apc": "cache=apc"}
    rows = []
    for name, requests in (("sharegpt", 3600), ("alpaca", 18000)):
        for system, option in systems.items():
            result = run(scenario(name, option, f"workload.num_requests={requests}"))
            result.records.discard()
            summary = result.summary
            progress(f"{name}, {system}: {summary['mean_num_requests_running']:.1f} requests batched")
            rows.append(
                {
                    "data": name,
                    "system": system,
                    "mean_num_requests_running": summary["mean_num_requests_running"],
                    **summary["kv_memory_shares"],
                }
            )
    return rows


def block_sizes(progress: Progress) -> list[Row]:
    """Section 7.2: normalised latency by block size, and how much slower decode attention would have to be.

    `factor_needed` is the least factor on decode attention, to 5 %, that makes a block size worse than
    16 by a tenth; empty above 16, and where the size is worse anyway.
    """
    rows = []
    for name, rate in NEAR_THE_KNEE.items():
        best = _latency(name, rate, 16)
        for size in BLOCK_SIZES:
            latency = _latency(name, rate, size)
            progress(f"{name}, blocks of {size}: {latency:.3f} s a token")
            needed = _factor(name, rate, size, 1.1 * best) if size < 16 and latency < 1.1 * best else math.nan
            low, high = BEST_BLOCK_SIZES[name]
            rows.append(
                {
                    "data": name,
                    "block_size": size,
                    "normalized_latency_s": latency,
                    "published_best": low <= size <= high,
                    "factor_needed": needed,
                }
            )
    return rows


def _latency(name: str, rate: float, block_size: int, cost: str | None = None) -> float:
    options = [f"engine.block_size={block_size}", f"engine.num_gpu_blocks={NUM_SLOTS // block_size + 1}"]
    options += [f"cost={cost}"] if cost else []
    return at_rate(scenario(name, *options), rate, 600.0).latency


def _factor(name: str, rate: float, block_size: int, goal: float) -> float:
    import tempfile

    from sim.calibrate.write import write
    from sim.paper.engine_2023 import engine_2023

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slower.yaml"

        def latency(factor: float) -> float:
            slower = engine_2023().model_dump()
            slower["attention"]["bf16"]["decode"]["block_size_factor"] = {block_size: factor}
            write(engine_2023().model_validate(slower), path)
            return _latency(name, rate, block_size, str(path))

        low, high = 1.0, 2.0
        while latency(high) < goal:
            low, high = high, 2 * high
        while high > 1.05 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if latency(middle) < goal else (low, middle)
    return high
