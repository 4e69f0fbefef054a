"""A real run of vLLM on an RTX 4090, retold: every figure beside the measured one.

300 ShareGPT requests, more than the card can serve, as LLMServingSim ran and recorded them. The
shipped calibration was fitted to the first fifth of the requests; decisions are not fitted.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from sim.calibrate.from_run import SEEN, latencies, read_load, retell
from sim.calibrate.measured_run import MeasuredRun, Ticks, read_run, read_ticks
from sim.calibration import load_calibration
from sim.cost import compile_cost
from sim.engine import Records
from sim.plots import BLUE, GREY, ORANGE, drawn
from sim.timeseries import Samples, time_series

Floats = npt.NDArray[np.float64]

LOAD = "sharegpt_llama31_8b_segments.jsonl.gz"
RUN = "vllm-RTX4090-llama8b-requests.jsonl.gz"
CALIBRATION = "rtx-4090/llama-3.1-8b_tp1_bf16"
LIMIT = 2.0  # percent that a latency or the makespan may differ by
KV_LIMIT = 5.0  # points of KV use, mean of absolute differences
CURVES = {
    "num_requests_running": "Requests running",
    "num_requests_waiting": "Requests waiting",
    "kv_cache_usage_perc": "KV use (%)",
}


class Retold(NamedTuple):
    """The run and its simulation; times in seconds since the first arrival."""

    run: MeasuredRun
    ticks: Ticks
    records: Records
    series: dict[str, Floats]  # the names of CURVES, at the ticks


class Row(NamedTuple):
    """One figure, measured and simulated."""

    name: str
    unit: str
    measured: float
    simulated: float

    @property
    def difference(self) -> float:
        """Simulated against measured, percent."""
        return 100.0 * (self.simulated / self.measured - 1.0)


class Curve(NamedTuple):
    """One quantity over time: how far apart the two curves are, in the mean over the ticks."""

    name: str
    measured: float  # mean
    simulated: float  # mean
    difference: float  # mean of absolute differences


def retell_run(traces: Path) -> Retold:
    """Simulate the load with the run's configuration and arrivals; `traces` is the folder of its files.

    Raises InputError, one line, where they are absent or damaged.
    """
    run = read_run(traces / RUN)
    config = run.config
    cost = compile_cost(
        load_calibration(CALIBRATION),
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        kv_dtype=run.kv_dtype,
    )
    totals, records = retell(read_load(traces / LOAD, run), config, cost)
    ticks = read_ticks(traces / RUN, run)
    series = at_instants(totals.samples, config.num_gpu_blocks, ticks.time)
    return Retold(run, ticks, records, series)


def at_instants(samples: Samples, num_gpu_blocks: int, instants: Floats) -> dict[str, Floats]:
    """The curves at any instants: a sample holds since the one before it; 0 after the last."""
    series = time_series(samples, num_gpu_blocks - 1)
    at = np.searchsorted(series["time"], instants)
    return {name: np.append(series[name], 0.0)[at] for name in CURVES}


def rows(retold: Retold) -> list[Row]:
    """Mean, median and 95th percentile of TTFT, TPOT and end-to-end latency, and the makespan."""
    run, records = retold.run, retold.records
    measured = latencies(run.queued_time, run.first_token_time, run.last_token_time, run.output_len)
    simulated = latencies(
        records["ready_time"], records["first_token_time"], records["finish_time"], run.output_len
    )
    found = []
    for name, unit, scale in (("ttft", "s", 1.0), ("tpot", "ms", 1e3), ("e2el", "s", 1.0)):
        for of, figure in (("mean", np.nanmean), ("p50", np.nanmedian), ("p95", _p95)):
            both = (scale * float(figure(latency[name])) for latency in (measured, simulated))
            found.append(Row(f"{of} {name.upper()}", unit, *both))
    ends = (run.last_token_time.max(), records["finish_time"].max())
    found.append(Row("makespan", "s", *(float(end) for end in ends)))
    return found


def curves(retold: Retold) -> list[Curve]:
    """Running, waiting and KV use (in points) at the measured ticks."""
    found = []
    for name, label in CURVES.items():
        measured, simulated = _curve(retold, name)
        apart = np.abs(simulated - measured).mean()
        found.append(Curve(label, float(measured.mean()), float(simulated.mean()), float(apart)))
    return found


def ttft_figure(retold: Retold, path: Path) -> None:
    """Each request's TTFT, simulated against measured; those fitted to in another colour."""
    run, records = retold.run, retold.records
    measured = run.first_token_time - run.queued_time
    simulated = records["first_token_time"] - records["ready_time"]
    seen = np.arange(len(measured)) < int(SEEN * len(measured))
    top = 1.05 * max(measured.max(), simulated.max())
    with drawn(path, (5.6, 5.2)) as figure:
        axes = figure.subplots()
        axes.plot([0.0, top], [0.0, top], color=GREY, lw=1.0)
        for some, colour, label in ((seen, ORANGE, "fitted to"), (~seen, BLUE, "not seen")):
            axes.plot(measured[some], simulated[some], ".", color=colour, ms=5.0, label=label)
        axes.set(xlim=(0.0, top), ylim=(0.0, top), aspect="equal")
        axes.set(title="Time to first token, each request", xlabel="measured, s", ylabel="simulated, s")
        axes.legend(loc="upper left")


def curves_figure(retold: Retold, path: Path) -> None:
    """Running, waiting and KV use over time, the simulated over the measured."""
    with drawn(path, (9.0, 6.6)) as figure:
        panels = figure.subplots(3, 1, sharex=True)
        for axes, (name, label) in zip(panels, CURVES.items(), strict=True):
            _overlay(axes, retold, name)
            axes.set(title=label)
        panels[0].legend(loc="upper right", ncols=2)
        panels[-1].set(xlabel="seconds since the first arrival")


def _overlay(axes: Axes, retold: Retold, name: str) -> None:
    measured, simulated = _curve(retold, name)
    axes.plot(retold.ticks.time, measured, color=ORANGE, lw=2.6, label="measured")
    axes.plot(retold.ticks.time, simulated, color=BLUE, lw=1.1, label="simulated")
    axes.set_xlim(0.0, retold.ticks.time[-1])
    axes.set_ylim(0.0, 1.15 * max(measured.max(), simulated.max()))


def _curve(retold: Retold, name: str) -> tuple[Floats, Floats]:
    """Measured and simulated, KV use in percent."""
    scale = 100.0 if name == "kv_cache_usage_perc" else 1.0
    measured = dict(zip(CURVES, retold.ticks[1:], strict=True))[name]
    return scale * measured, scale * retold.series[name]


def _p95(values: Floats) -> float:
    return float(np.nanpercentile(values, 95))
