"""A run and a recording, held beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.against.decisions import Decisions
from sim.against.sides import (
    Clock,
    Curves,
    Ints,
    Side,
    both_of,
    figures,
    has_client,
    measured_curves,
    measured_side,
    read_recorded,
    simulated_curves,
    simulated_side,
)
from sim.errors import InputError
from sim.recording.told import told_by_recording
from sim.scenario import Scenario
from sim.simulation import Result
from workloads import Recording

LATENCIES = ("ttft_ms", "e2el_ms")


class Comparison(NamedTuple):
    """Both sides. Where `same`, row i of both is the same request; else only distributions compare."""

    summary: dict[str, Any]  # what the run's summary says under "against"
    same: bool
    names: list[str]  # of the requests, where same
    measured: Side
    simulated: Side
    measured_curves: Curves
    simulated_curves: Curves


class Beside:
    """A recording, waiting for a run of `scenario`; give `decisions`, where there are any, to the run.

    Raises InputError, one line, for a file that is no recording and for a scenario of several engines.
    """

    def __init__(self, path: Path, scenario: Scenario) -> None:
        if scenario.cluster.replicas > 1:
            raise InputError(
                f"--against {path}: is of one engine, and cluster.replicas is {scenario.cluster.replicas}; "
                "set it to 1"
            )
        self.told: list[str] = []  # what the recording warns of
        with told_by_recording(self.told):
            self.recorded = read_recorded(path)
        self.order = order_of(scenario, path)
        self.decisions: Decisions | None = None
        if self.order is not None:
            self.decisions = Decisions(path, self.recorded.requests, self.order)

    def compare(self, result: Result) -> Comparison:
        """Hold the finished run beside the recording, and put what that says into its summary.

        Reads the records of `result`, which must not be discarded yet; modifies its summary only.
        """
        cost = result.resolved.step_time.cost
        charged = cost.front_end_us + cost.reply_us > 0
        clock: Clock = "client" if charged and has_client(self.recorded.requests) else "engine"
        measured = measured_side(self.recorded.requests, clock)
        simulated = simulated_side(result.records, clock, cost.reply_us, self.order)
        if self.order is not None:
            measured, simulated = both_of(measured, simulated)
        if not len(measured.row) or not len(simulated.row):
            raise InputError(f"--against {self.recorded.path}: no request ended both there and in the run")
        begin = float(np.nanmin(result.records.column("ready_time")))
        ends = (
            float(self.recorded.steps.update_end[-1] - np.nanmin(self.recorded.requests.queued_time)),
            float(np.nanmax(result.records.column("finish_time")) - begin),
        )
        curves = (
            measured_curves(self.recorded, max(ends)), simulated_curves(result.timeseries, begin, max(ends)),
        )  # fmt: skip
        if self.decisions is not None:
            self.decisions.finish()
        summary = self._summary(clock, measured, simulated, curves, result.summary["num_steps"])
        result.summary["against"] = summary
        names = [self.recorded.requests.name[row] for row in measured.row] if self.order is not None else []
        return Comparison(summary, self.order is not None, names, measured, simulated, *curves)

    def _summary(
        self, clock: Clock, measured: Side, simulated: Side, curves: tuple[Curves, Curves], num_steps: int
    ) -> dict[str, Any]:
        steps = int(np.count_nonzero(self.recorded.steps.num_tokens))
        sides = (
            side_figures(measured, curves[0]) | {"num_steps": steps},
            side_figures(simulated, curves[1]) | {"num_steps": num_steps},
        )
        summary: dict[str, Any] = {
            "recording": str(self.recorded.path),
            "same_requests": self.order is not None,
            "clock": clock,
            "warnings": self.told,
            "measured": sides[0],
            "simulated": sides[1],
        }
        if self.decisions is None:
            return summary
        hits = int(np.count_nonzero(measured.num_cached_tokens == simulated.num_cached_tokens))
        summary |= {
            "requests_with_equal_hits": hits,
            "ttft_correlation": correlation(measured, simulated),
            "steps_alike": self.decisions.num_same,
            "first_difference": None,
        }
        if (parting := self.decisions.parting) is not None:
            summary["first_difference"] = parting._asdict()
        return summary


def order_of(scenario: Scenario, path: Path) -> Ints | None:
    """The recording's number of each request of the run; None where the workload is another load."""
    workload = scenario.workload
    if not isinstance(workload, Recording) or not path.samefile(workload.path):
        return None
    return workload.order()


def side_figures(side: Side, curves: Curves) -> dict[str, Any]:
    """What is said of one side: latencies in ms, shares of 1, means over time."""
    prompt = int(side.prompt_len.sum())
    told: dict[str, Any] = {"requests": len(side.row)}
    for name in LATENCIES:
        told |= {f"{figure}_{name}": value for figure, value in figures(getattr(side, name))}
    hits = int(np.maximum(side.num_cached_tokens, 0).sum())
    return told | {
        "prefix_cache_hits": hits,
        "prefix_cache_queries": prompt,
        "prefix_cache_hit_rate": hits / prompt,
        "num_preemptions": int(side.num_preemptions.sum()),
        "mean_num_requests_running": float(curves.running.mean()),
        "mean_num_requests_waiting": float(curves.waiting.mean()),
        "mean_kv_cache_usage_perc": float(curves.kv_cache_usage_perc.mean()),
    }


def correlation(measured: Side, simulated: Side) -> float | None:
    """Of the two TTFTs of each request; None where it has none."""
    if measured.ttft_ms.std() == 0 or simulated.ttft_ms.std() == 0:
        return None
    return float(np.corrcoef(measured.ttft_ms, simulated.ttft_ms)[0, 1])
