"""How far simulated end-to-end latencies are from the measured ones, held against the bars.

TPOT is compared as it is. A client measures its mean TTFT from outside, with network, HTTP and tokenizer
in it, so one offset and one scale for each GPU are fitted on tensor-parallel sizes 1 and 4 and tested
on 2 and 8. Nothing else is fitted to these rows.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from sim.calibrate.aiconfigurator import PACKAGE, package_folder
from sim.errors import InputError
from sim.plots import BLUE, GREY, ORANGE, drawn
from sim.validate.section import Check, Section, at_most, skipped, table
from sim.validate.silicon import TABLE, read_rows, simulated

Floats = npt.NDArray[np.float64]

TITLE = "Llama-3.1-70B fp8 on H100, H200 and B200, end to end"
SATURATED_MS = 3000.0  # measured mean TTFT above which the KV cache was full
TPOT_BAR, TPOT_BAR_OF_GPU, TPOT_AIM = 8.0, 10.0, 5.0
TTFT_BAR = 13.0
FACTOR = 2.0  # that a saturated row's TTFT may be off
FITTED_TP, TESTED_TP = (1, 4), (2, 8)
GPUS = ("b200-sxm", "h100-sxm", "h200-sxm")
_COLOURS = dict(zip(GPUS, ("#009E73", ORANGE, BLUE), strict=True))  # Okabe and Ito's green
_SATURATED_BAR = "silicon, saturated rows: TTFT"
BARS = (
    "silicon TPOT, 158 rows",
    *(f"silicon TPOT, {gpu}" for gpu in GPUS),
    "silicon mean TTFT, TP held out",
    *(f"silicon mean TTFT, TP held out, {gpu}" for gpu in GPUS),
    _SATURATED_BAR,
)


class Line(NamedTuple):
    """measured TTFT = offset_ms + scale * simulated."""

    offset_ms: float
    scale: float


def section() -> Section:
    """All rows, simulated twice where the KV type is in doubt."""
    try:
        package_folder()
    except InputError as problem:
        return skipped(TITLE, BARS, str(problem))
    rows = read_rows()
    found = simulated(rows, "fp8")
    h100 = simulated(rows[rows.gpu == "h100-sxm"], "bf16")
    below, above = unsaturated(found), saturated(found)
    either = pd.concat([found[found.gpu != "h100-sxm"], h100]).sort_index()
    return Section(
        TITLE,
        checks(found, either),
        [
            f"The {len(found)} rows of {TABLE.as_posix()} in {PACKAGE}. How they were run is inferred: vLLM "
            "0.10.2, fp8 KV, a closed loop, and what else sim/validate/silicon.py says.",
            "",
            f"{len(below)} rows with a measured mean TTFT up to {SATURATED_MS:,.0f} ms. TPOT: mean absolute "
            f"error (and mean error), percent; the aim beyond the bar is {TPOT_AIM:g} %.",
            "",
            *_tpot_table(below),
            "",
            "Mean TTFT: raw, and after one offset and one scale for each GPU, fitted on TP 1 and 4 and "
            "tested on TP 2 and 8.",
            "",
            *_ttft_table(below),
            "",
            f"The {len(above)} rows above, whose KV cache was full. Those of the H100 fit a pool of half as "
            "many tokens, that is KV in bf16: with 64 users of 8,192 + 1,024 tokens TPOT is that of 32. Both "
            "readings are shown; the bars are held with fp8.",
            "",
            *_saturated_table(above, either),
            "",
            "TPOT of the other rows with bf16 KV on the H100: "
            f"{_spread(tpot_errors(unsaturated(h100)))} there, "
            f"{_spread(tpot_errors(unsaturated(either)))} with all GPUs.",
        ],
        {"silicon_tpot.png": partial(tpot_figure, found), "silicon_ttft.png": partial(ttft_figure, found)},
    )


def checks(found: pd.DataFrame, either: pd.DataFrame) -> list[Check]:
    """All bars of rows with their simulated latencies; `either` has the H100's with bf16 KV."""
    below = unsaturated(found)
    result = [at_most(f"silicon TPOT, {len(below)} rows", _mape(tpot_errors(below)), TPOT_BAR)]
    result += [
        at_most(f"silicon TPOT, {gpu}", _mape(tpot_errors(below[below.gpu == gpu])), TPOT_BAR_OF_GPU)
        for gpu in GPUS
    ]
    by_gpu = {gpu: held_out_ttft_errors(below[below.gpu == gpu]) for gpu in GPUS}
    everywhere = np.concatenate(list(by_gpu.values()))
    result.append(at_most("silicon mean TTFT, TP held out", _mape(everywhere), TTFT_BAR))
    result += [
        at_most(f"silicon mean TTFT, TP held out, {gpu}", _mape(errors), TTFT_BAR)
        for gpu, errors in by_gpu.items()
    ]
    other = f"; {_worst_factor(saturated(either)):.1f} x if the H100's KV was bf16"
    worst = _worst_factor(saturated(found))
    check = at_most(_SATURATED_BAR, worst, FACTOR, "x")
    result.append(check._replace(reached=check.reached + other))
    return result


def _worst_factor(above: pd.DataFrame) -> float:
    """The most that simulated and measured mean TTFT are apart, the larger over the smaller."""
    return float(np.exp(np.abs(np.log(above.sim_ttft_ms / above.ttft_ms))).max())


def unsaturated(found: pd.DataFrame) -> pd.DataFrame:
    """The rows whose KV cache was not full."""
    return found[found.ttft_ms <= SATURATED_MS]


def saturated(found: pd.DataFrame) -> pd.DataFrame:
    """The others."""
    return found[found.ttft_ms > SATURATED_MS]


def tpot_errors(found: pd.DataFrame) -> Floats:
    """Simulated against measured TPOT, percent."""
    return _percent(found.sim_tpot_ms.to_numpy(np.float64), found.tpot_ms)


def ttft_errors(found: pd.DataFrame, line: Line) -> Floats:
    """Corrected simulated TTFT against the measured, percent."""
    return _percent(line.offset_ms + line.scale * found.sim_ttft_ms.to_numpy(np.float64), found.ttft_ms)


def fit_ttft(found: pd.DataFrame) -> Line:
    """Offset and scale of least squares of the relative error."""
    ones, simulated_ms = np.ones(len(found)), found.sim_ttft_ms.to_numpy(np.float64)
    terms = np.stack([ones, simulated_ms], axis=1) / found.ttft_ms.to_numpy(np.float64)[:, None]
    offset, scale = np.linalg.lstsq(terms, ones, rcond=None)[0]
    return Line(float(offset), float(scale))


def held_out_ttft_errors(of_gpu: pd.DataFrame) -> Floats:
    """Percent, on the tensor-parallel sizes that the line was not fitted to."""
    line = fit_ttft(of_gpu[of_gpu.tp.isin(FITTED_TP)])
    return ttft_errors(of_gpu[of_gpu.tp.isin(TESTED_TP)], line)


def tpot_figure(found: pd.DataFrame, path: Path) -> None:
    """Each row's TPOT, simulated against measured."""
    _scatter(found, "tpot_ms", "Time per output token", path)


def ttft_figure(found: pd.DataFrame, path: Path) -> None:
    """Each row's mean TTFT, simulated against measured, as simulated."""
    _scatter(found, "ttft_ms", "Mean time to first token, no offset, no scale", path)


def _scatter(found: pd.DataFrame, column: str, title: str, path: Path) -> None:
    both = found[[column, f"sim_{column}"]].to_numpy(np.float64)
    ends = (0.8 * both.min(), 1.25 * both.max())
    with drawn(path, (5.6, 5.4)) as figure:
        axes = figure.subplots()
        axes.plot(ends, ends, color=GREY, lw=1.0)
        for gpu, colour in _COLOURS.items():
            for part, mark in ((unsaturated(found), "."), (saturated(found), "x")):
                of_gpu = part[part.gpu == gpu]
                label = gpu if mark == "." else "_nolegend_"
                axes.plot(
                    of_gpu[column], of_gpu[f"sim_{column}"], mark, color=colour, ms=6.0, label=label
                )
        axes.plot([], [], "x", color=GREY, ms=6.0, label="KV cache full")
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
        axes.set(title=title, xlabel="measured, ms", ylabel="simulated, ms")
        axes.legend(loc="upper left")


def _tpot_table(below: pd.DataFrame) -> list[str]:
    users = sorted(set(below.concurrency))
    rows = []
    for (gpu, tp), part in below.groupby(["gpu", "tp"]):
        cells = [_spread(tpot_errors(part[part.concurrency == n])) for n in users]
        rows.append((gpu, tp, *cells, _spread(tpot_errors(part))))
    rows += [
        (gpu, "all", *[""] * len(users), _spread(tpot_errors(below[below.gpu == gpu]))) for gpu in GPUS
    ]
    rows.append(("all", "all", *[""] * len(users), _spread(tpot_errors(below))))
    return table(["GPU", "TP", *(f"{n} users" for n in users), "all"], rows)


def _ttft_table(below: pd.DataFrame) -> list[str]:
    rows = []
    for gpu in GPUS:
        part = below[below.gpu == gpu]
        line = fit_ttft(part[part.tp.isin(FITTED_TP)])
        raw = _spread(ttft_errors(part, Line(0.0, 1.0)))
        fitted = _mape(ttft_errors(part[part.tp.isin(FITTED_TP)], line))
        held_out = _mape(held_out_ttft_errors(part))
        rows.append(
            (gpu, raw, f"{line.offset_ms:.1f} ms", f"{line.scale:.3f}", f"{fitted:.1f}", f"{held_out:.1f}")
        )
    return table(["GPU", "raw", "offset", "scale", "TP 1, 4 (fitted)", "TP 2, 8 (held out)"], rows)


def _saturated_table(above: pd.DataFrame, either: pd.DataFrame) -> list[str]:
    other = either.loc[above.index]
    in_bf16 = above.gpu == "h100-sxm"
    run = (above.gpu, above.tp, above.isl.map("{:,}".format), above.osl.map("{:,}".format), above.concurrency)
    figures = []
    for column, digits in (("ttft_ms", "{:,.0f}"), ("tpot_ms", "{:.1f}")):
        bf16 = other[f"sim_{column}"].map(digits.format).where(in_bf16, "")
        figures += [above[column].map(digits.format), above[f"sim_{column}"].map(digits.format), bf16]
    kinds = ("measured", "simulated", "bf16 KV")
    heads = [f"{name} ms, {kind}" for name in ("TTFT", "TPOT") for kind in kinds]
    return table(["GPU", "TP", "input", "output", "users", *heads], zip(*run, *figures, strict=True))


def _percent(simulated: Floats, measured: pd.Series[float]) -> Floats:
    result: Floats = 100.0 * (simulated / measured.to_numpy(np.float64) - 1.0)
    return result


def _mape(errors: Floats) -> float:
    return float(np.abs(errors).mean())


def _spread(errors: Floats) -> str:
    return f"{_mape(errors):.1f} ({errors.mean():+.1f})" if len(errors) else ""
