"""`prefixsim calibrate`: fit the time of a step."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.app import app
from sim.cli.messages import announce_compilation, one_line_errors, say
from sim.cli.types import WeightType
from sim.errors import InputError

if TYPE_CHECKING:
    from sim.calibration import Calibration


class Source(StrEnum):
    aiconfigurator = "aiconfigurator"


@app.command()
def calibrate(
    gpu: Annotated[str | None, typer.Option(help="A GPU: a name, or a YAML file.")] = None,
    model: Annotated[str | None, typer.Option(help="A model: a name, or a YAML file.")] = None,
    source: Annotated[
        Source | None, typer.Option("--from", help="NVIDIA's measured kernel tables.")
    ] = None,
    timings: Annotated[
        Path | None, typer.Option("--from-csv", metavar="FILE", help="Your own times, from `measure`.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="FILE", help="Requests of a measured run; fits whole steps."),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --from-run: the segments that were sent.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    weights: Annotated[WeightType, typer.Option(help="Type of the weights.")] = WeightType.bf16,
    kv: Annotated[
        list[WeightType] | None, typer.Option(help="Type of the KV cache; again for another. Default: all.")
    ] = None,
    assume_kappa: Annotated[
        bool, typer.Option("--assume-kappa", help="Do without measured prefill over cached context.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The calibration; default: named by what it is of.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Fit nothing; write a page of every figure beside its bar.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measurements for --validate. Default: ../shared.")
    ] = None,
) -> None:
    """Fit the time of a step to measured kernels; print held-out errors, write a calibration file."""
    with one_line_errors():
        if validate:
            if any(one is not None for one in (gpu, model, source, timings, run, load)):
                raise InputError("calibrate --validate: goes with --data and --out only")
            announce_compilation()
            from sim.validate.page import validate as hold_against_bars

            raise typer.Exit(hold_against_bars(data, out))
        if data is not None:
            raise InputError("calibrate: --data goes with --validate only")
        if gpu is None or model is None:
            raise InputError("calibrate: give --gpu and --model, as in --gpu h100-sxm --model llama-3.1-8b")
        from sim.calibrate.command import default_name, fit, fit_to_run
        from sim.calibrate.command import show as show_errors
        from sim.calibrate.write import write
        from sim.hardware import load_gpu, load_model

        if sum(one is not None for one in (source, timings, run)) != 1:
            raise InputError("calibrate: give one of --from aiconfigurator, --from-csv and --from-run")
        if (run is None) != (load is None):
            raise InputError("calibrate: --from-run and --load go together: a run, and what was sent")
        fitted: Calibration
        if run is not None and load is not None:
            announce_compilation()
            fitted = fit_to_run(load, run, load_gpu(gpu), load_model(model))
        else:
            fitted = fit(
                load_gpu(gpu),
                load_model(model),
                tp=tp,
                weights=weights.value,
                kv_dtypes=[one.value for one in kv or ()],
                timings=timings,
                assume_kappa=assume_kappa,
            )
        from rich.console import Console

        path = out or default_name(fitted)
        write(fitted, path)
        show_errors(fitted, Console())
        say(f"written: {path}; simulate with it: `cost: {path}` in a scenario")
