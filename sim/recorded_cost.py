"""`cost: recorded`: the recording's own step times, and a fit of them for steps that it has not."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sim.calibration import WholeStepCalibration
from sim.front_end import FrontEnd
from sim.recorded_server import RECORDED
from sim.scenario import Scenario
from workloads import Recording

if TYPE_CHECKING:
    from sim.calibrate.from_recording import Fitted
    from sim.leader import Leader


def leader_of(scenario: Scenario) -> Leader | None:
    """What leads the engine through the recorded steps; None where the scenario asks for no such thing.

    The engines of a cluster have none: the recording is of one. Nor has one that overlaps steps where the
    recorded one did not, or the other way round: when a step begins is then another matter from the start.
    """
    if scenario.cost != RECORDED or scenario.cluster.replicas > 1 or _overlaps_otherwise(scenario):
        return None
    from sim.leader import Leader
    from sim.recorded_steps import recorded_steps

    assert isinstance(scenario.workload, Recording)
    return Leader(recorded_steps(scenario.workload.path), scenario.workload.order())


def fit_of(scenario: Scenario) -> tuple[WholeStepCalibration, str, list[str]]:
    """The calibration for steps that are not recorded, the name to report, and warnings.

    Requests arrive in the engine's queue, where the recording has them, so no front end takes time.
    Raises InputError for what is no recording.
    """
    assert isinstance(scenario.workload, Recording)
    path = scenario.workload.path
    status = os.stat(path)
    fitted = _fitted(path, status.st_size, status.st_mtime_ns)
    told = list(fitted.warnings)
    if scenario.cluster.replicas > 1:
        told.append(
            f"cost: {RECORDED}: the recording is of one engine: with {scenario.cluster.replicas} replicas "
            "all step times are those of a fit of its steps"
        )
    elif _overlaps_otherwise(scenario):
        told.append(
            f"cost: {RECORDED}: async_scheduling is not as recorded: "
            "all step times are those of a fit of its steps"
        )
    fit, tp = fitted.calibration, scenario.engine.tensor_parallel_size
    if (scenario.gpu, scenario.model, tp) != (fit.gpu, fit.model, fit.tp):
        told.append(
            f"step time is that of {fit.gpu}, {fit.model}, tp {fit.tp}, as recorded, "
            f"not of {scenario.gpu}, {scenario.model}, tp {tp}"
        )
    at_the_queue = {"front_end": FrontEnd(hash_us_per_block={})}
    return fit.model_copy(update=at_the_queue), f"{RECORDED}: the steps of {path}", told


def _overlaps_otherwise(scenario: Scenario) -> bool:
    from sim.recording import read_header

    assert isinstance(scenario.workload, Recording)
    recorded = read_header(scenario.workload.path).effective
    return scenario.engine.async_scheduling != recorded.async_scheduling


@functools.lru_cache(maxsize=1)
def _fitted(path: str, size: int, modified: int) -> Fitted:
    from sim.calibrate.from_recording import fit_recording
    from sim.recording.told import told_by_recording

    with told_by_recording([]):  # whoever reads the requests tells
        return fit_recording(Path(path), date="")
