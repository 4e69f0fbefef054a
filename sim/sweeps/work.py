"""What a worker does for a sweep: one run, and what is kept of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sim.errors import InputError
from sim.scenario import Engine, Scenario, WholeStep
from sim.sweeps.key import code_version
from workloads import FourteenTokens, WorkloadError

Figure = float | int | None
ALWAYS = ("saturation", "completed", "failed")  # kept beside the metrics
DIED = "the process that ran it died, for want of memory perhaps"

_ALONE = threading.Lock()  # a run takes the process's warnings; it would not share the interpreter anyway


class Job(NamedTuple):
    """One run to make, and the figures to keep."""

    scenario: Scenario
    metrics: list[str]


class Outcome(NamedTuple):
    """What a run left, or why it could not be; `code` is of the sources that ran it."""

    figures: dict[str, Any]
    error: str
    code: str


def work(job: Job) -> Outcome:
    """Run a job. Whatever goes wrong is told in the outcome; only an interruption is raised."""
    from sim.simulation import run
    from sim.sweeps.content import with_content

    try:
        with _ALONE:
            result = run(with_content(job.scenario))
            result.records.discard()
    except (InputError, WorkloadError) as error:
        return failed(str(error))
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")
    figures = dict(_figures(result.summary))
    kept = {name: figures.get(name) for name in job.metrics}
    return Outcome(kept | {name: result.summary[name] for name in ALWAYS}, "", code_version())


def failed(error: str) -> Outcome:
    """The outcome of a run that could not be made."""
    return Outcome({}, " ".join(error.split()), code_version())


def metric_names(scenario: Scenario) -> list[str]:
    """The figures that a run of `scenario` has, by their keys in the summary; compiles on the way.

    They come from two tiny requests on the smallest engine, so that no metric is known twice.
    """
    from sim.simulation import run

    changes = {
        "engine": Engine(num_gpu_blocks=16, max_model_len=64),
        "workload": FourteenTokens(),
        "cache": type(scenario.cache)(),  # without options: that workload has no prefixes to reserve
        "cost": WholeStep(base_us=1000.0),
        "measure_from": None if scenario.measure_from is None else 0.0,
        "reset_prefix_cache": [0.0] if scenario.reset_prefix_cache else [],
    }
    result = run(scenario.model_copy(update=changes))
    result.records.discard()
    return [name for name, _ in _figures(result.summary)]


def _figures(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Figure]]:
    """The numbers of a summary; those of a mapping in it as mapping.key."""
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield prefix + key, value
