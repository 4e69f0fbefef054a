"""Points and their runs: what a point is, whether it keeps the promise, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sim.errors import InputError
from sim.planning.objective import GOOD, KEYS, Limit, overload
from sim.records import Records
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.scenario_file import Draft, check, copied, override
from sim.sweeps.processes import Everywhere
from sim.sweeps.work import DIED

FIGURES = (  # of the summary, kept of every run
    "completed", "failed", "duration", "request_throughput", "output_throughput", "total_token_throughput",
    "prefix_cache_hit_rate", "prefix_cache_ceiling", "saturation", "queueing_share", "completion_ratio",
    "busy_time", "mean_num_requests_running", "max_num_requests_running", "mean_kv_cache_usage_perc",
    "max_kv_cache_usage_perc", "num_preemptions", "num_evictions", "prefix_cache_queries",
    "prefix_cache_hits", "token_fates", "total_input_tokens", "num_gpu_blocks", "block_size",
)  # fmt: skip
NOTES = ("assumed", "warnings")


class Point(NamedTuple):
    """One configuration: its values by name, and the overrides that make it of the scenario."""

    values: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(f"{name}={shown(value)}" for name, value in self.values)


class Run(NamedTuple):
    """One simulation of a point. `error` says why there are no figures."""

    seed: int
    figures: dict[str, Any]
    error: str
    broken: str  # why it does not keep the promise; empty: it does
    ratio: float  # how much of its tightest limit it takes up


class Evaluation(NamedTuple):
    """A point with a run for each seed."""

    point: Point
    runs: tuple[Run, ...]

    @property
    def kept(self) -> bool:
        return not any(run.broken for run in self.runs)

    @property
    def worst(self) -> Run:
        """The run that breaks the promise most, or comes nearest to it; the first of equals."""
        return max(self.runs, key=lambda run: (bool(run.error), bool(run.broken), run.ratio))

    def mean(self, name: str) -> float:
        """The mean over the seeds of a figure that every run has."""
        return sum(float(run.figures[name]) for run in self.runs) / len(self.runs)


class Task(NamedTuple):
    """One run to make, and what to hold it against."""

    scenario: Scenario
    limits: tuple[Limit, ...]


class Bench(NamedTuple):
    """What turns points into evaluations; `known` has all so far, in the order they were asked for."""

    base: Draft
    overrides: tuple[str, ...]
    limits: tuple[Limit, ...]
    seeds: tuple[int, ...]
    everywhere: Everywhere
    known: dict[Point, Evaluation]
    told: Callable[[Evaluation], None]

    def scenario(self, point: Point, seed: int | None = None) -> Scenario:
        """A point's scenario. Raises InputError, one line, where there is none such."""
        draft = copied(self.base)
        for text in (*self.overrides, *point.overrides):
            override(draft, text)
        scenario = check(draft)
        return scenario if seed is None else scenario.model_copy(update={"seed": seed})

    def evaluate(self, points: list[Point]) -> list[Evaluation]:
        """The evaluations of points, those not yet known run side by side. Modifies `known`."""
        new = list(dict.fromkeys(point for point in points if point not in self.known))
        tasks = [Task(self.scenario(point, seed), self.limits) for point in new for seed in self.seeds]
        for task in tasks:
            resolve(task.scenario)
        runs = dict(self._run(tasks))
        for i, point in enumerate(new):
            first = i * len(self.seeds)
            evaluation = Evaluation(point, tuple(runs[first + j] for j in range(len(self.seeds))))
            self.known[point] = evaluation
            self.told(evaluation)
        return [self.known[point] for point in points]

    def _run(self, tasks: list[Task]) -> Iterator[tuple[int, Run]]:
        """Yield each task's run by its number; the very first run is alone, so that it alone compiles."""
        alone = 0 if self.known else 1
        for first, some in ((0, tasks[:alone]), (alone, tasks[alone:])):
            for number, run in self.everywhere(work, some):
                yield first + number, run if run is not None else _died(some[number])


def work(task: Task) -> Run:
    """Run a point with one seed. Raises WorkloadError for bad data in the workload's files."""
    from sim.simulation import run

    scenario = task.scenario
    try:
        result = run(scenario)
    except InputError as error:
        return _without_figures(scenario, str(error))
    figures = {name: result.summary[name] for name in (*FIGURES, *NOTES)}
    figures |= {
        KEYS[limit.name]: result.summary[KEYS[limit.name]] for limit in task.limits if limit.name != GOOD
    }
    figures["good_share"] = _good_share(result.summary)
    too_long = result.records.column("prompt_len") >= result.resolved.config.max_model_len
    refused = result.records.column("refused") != 0
    figures["refused_by_pool"] = int(np.count_nonzero(refused & ~too_long))
    figures["mean_stay"] = _mean_stay(result.records, result.summary)
    result.records.discard()
    return judge(scenario.seed, figures, task.limits)


def judge(seed: int, figures: dict[str, Any], limits: Sequence[Limit]) -> Run:
    """A run with these figures, held against the promise."""
    tightest = max(limits, key=lambda limit: limit.ratio(figures))
    ratio = tightest.ratio(figures)
    broken = overload(figures)
    if ratio > 1.0:
        value = tightest.show(tightest.figure(figures))
        over = f"{tightest.name} {value} {'<' if tightest.name == GOOD else '>'} {tightest.text}"
        broken = f"{broken}, {over}" if broken else over
    return Run(seed, figures, "", broken, ratio)


def shown(value: Any) -> str:
    """A value in few characters, as `--set` reads it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _good_share(summary: dict[str, Any]) -> float | None:
    """The share of all requests, refused ones too, that kept the scenario's own `slo`."""
    goodput, throughput = summary.get("request_goodput"), summary["request_throughput"]
    if goodput is None or not throughput:
        return None
    share: float = goodput / throughput * summary["completed"] / (summary["completed"] + summary["failed"])
    return share


def _mean_stay(records: Records, summary: dict[str, Any]) -> float:
    """Seconds that a session is there in the mean, its pauses included; without sessions, a request."""
    if summary["sessions"] is None:
        return float(summary["mean_e2el_ms"]) / 1e3
    session, arrival, finish = (
        records.column(name) for name in ("session_id", "arrival_time", "finish_time")
    )
    ran = (session >= 0) & ~np.isnan(finish)
    _, number = np.unique(session[ran], return_inverse=True)
    first, last = np.full(number.max() + 1, np.inf), np.zeros(number.max() + 1)
    np.minimum.at(first, number, arrival[ran])
    np.maximum.at(last, number, finish[ran])
    return float((last - first).mean())


def _died(task: Task) -> Run:
    return _without_figures(task.scenario, DIED)


def _without_figures(scenario: Scenario, error: str) -> Run:
    text = " ".join(error.removeprefix(f"{scenario.name}: ").split())
    return Run(scenario.seed, {}, text, text, float("inf"))
