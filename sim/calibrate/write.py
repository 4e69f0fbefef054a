"""A calibration as the YAML file that simulations read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.calibration import Calibration
from sim.out_file import replace_text
from sim.yaml_lines import dump

DIGITS = 7  # significant, of a coefficient


def to_text(calibration: Calibration) -> str:
    """The file's text; reading it back gives the same calibration, but for the last digits."""
    kv = " and ".join(calibration.kv_dtypes)
    what = f"{calibration.model} on {calibration.gpu}, tp {calibration.tp}, {calibration.weights} weights"
    head = f"# Step time of {what}, {kv} KV. Microseconds, per GPU.\n"
    if calibration.form == "kernels":
        head += "# gemm, experts, attention, elementwise: of a layer; sim/calibration.py defines the terms.\n"
    data = {"form": calibration.form, **calibration.model_dump(exclude_defaults=True, exclude_none=True)}
    return head + dump(_rounded(data))


def write(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all. Raises InputError, one line, where it cannot."""
    replace_text(path, to_text(calibration))


def _rounded(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_rounded(value) for value in data]
    return float(f"{data:.{DIGITS}g}") if isinstance(data, float) else data
