"""The calibrations in sim/calibrations: which, and how they are made.

    python -m sim.calibrate.shipped [DATE]

fits all of them anew from aiconfigurator-core's tables. A fit whose steps are further from the
tables than the bar allows is not shipped; the roofline serves there. The L40S is left out: its decode
attention, fast as long as the KV is in its large cache, is off by 18 to 36 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sim.calibrate.bars import bar_of, meets
from sim.calibrate.command import today
from sim.calibrate.sources import from_aiconfigurator
from sim.calibrate.write import write
from sim.calibration import KernelCalibration, name_of
from sim.errors import InputError
from sim.hardware import Dtype, load_gpu, load_model

FOLDER = Path(__file__).parent.parent / "calibrations"
GPUS = ("a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm")
MODELS = {  # and at which tensor-parallel sizes
    "llama-3.1-8b": (1, 2),
    "llama-3.1-70b": (1, 2, 4, 8),
    "qwen3-8b": (1, 2),
    "qwen3-32b": (1, 2, 4, 8),
    "qwen3-30b-a3b": (1, 2, 4),
}


class Target(NamedTuple):
    """What one file is of."""

    gpu: str
    model: str
    tp: int
    weights: Dtype


def targets() -> Iterator[Target]:
    """Everything that is to be fitted; A100 has no fp8, LLaMA-13B is the PagedAttention paper's."""
    for gpu in GPUS:
        types: tuple[Dtype, ...] = ("bf16",) if gpu == "a100-sxm" else ("bf16", "fp8")
        for model, sizes in MODELS.items():
            for tp in sizes:
                for weights in types:
                    yield Target(gpu, model, tp, weights)
    yield Target("a100-sxm", "llama-13b", 1, "bf16")


def fit(target: Target, date: str) -> KernelCalibration:
    """One calibration, for every KV type that was timed. Raises InputError if a table is missing."""
    gpu, model = load_gpu(target.gpu), load_model(target.model)
    return from_aiconfigurator(
        gpu, model, tp=target.tp, weights=target.weights, kv_dtypes=[], date=date
    )


def is_good_enough(calibration: KernelCalibration) -> bool:
    """Whether its steps are within the bar of the tables', for every KV type."""
    for component, error in calibration.errors.items():
        if component.startswith("step_against_tables"):
            bar = bar_of(component, calibration.gpu)
            if bar is not None and not meets(error, bar):
                return False
    return True


def main() -> None:
    """Fit and write all, telling what is left out."""
    date = sys.argv[1] if len(sys.argv) > 1 else today()
    for target in targets():
        name = name_of(*target)
        try:
            fitted = fit(target, date)
        except InputError as error:
            print(f"{name}: left out: {error}")
            continue
        steps = {k: e for k, e in fitted.errors.items() if k.startswith("step_against_tables")}
        said = ", ".join(f"{name} {e.mape} / {e.p95} %" for name, e in steps.items())
        if not is_good_enough(fitted):
            print(f"{name}: left out: {said}")
            continue
        path = FOLDER / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        write(fitted, path)
        print(f"{name}: {said}")


if __name__ == "__main__":
    main()
