"""`prefixsim calibrate`: fit the time of a step."""

from __future__ import annotations

from collections.abc import Mapping
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
    recording: Annotated[
        Path | None,
        typer.Option(
            "--from-recording", metavar="FILE", help="What the vLLM recorder wrote; fits whole steps."
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --from-run: the segments that were sent.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel size. Default: 1.")] = None,
    weights: Annotated[
        WeightType | None, typer.Option(help="Type of the weights. Default: bf16.")
    ] = None,
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
    """Fit the time of a step to measured kernels; print held-out errors, write a calibration file.

    Kernels and --from-run need scipy: pip install 'prefixsim\\[calibrate]'.
    """
    with one_line_errors():
        about = {"--tp": tp, "--weights": weights, "--kv": kv or None, "--assume-kappa": assume_kappa or None}
        if validate:
            given = (gpu, model, source, timings, run, recording, load, *about.values())
            if any(one is not None for one in given):
                raise InputError("calibrate --validate: goes with --data and --out only")
            from sim.validate.page import DATA, check_options
            from sim.validate.page import validate as hold_against_bars

            check_options(data, out)
            if data is None and out is None and not DATA.is_dir():
                raise InputError(f"calibrate --validate: no measurements in {DATA}: give --data or --out")
            announce_compilation()
            raise typer.Exit(hold_against_bars(data, out, progress=lambda title: say(f"checked: {title}")))
        if data is not None:
            raise InputError("calibrate: --data goes with --validate only")
        if recording is not None:
            _refuse("--from-recording", {"--from": source, "--from-csv": timings, "--from-run": run})
            _refuse("--from-recording", {"--load": load, **about, "--weights": None})
            _from_recording(recording, gpu, model, weights, out)
            return
        if gpu is None or model is None:
            raise InputError("calibrate: give --gpu and --model, as in --gpu h100-sxm --model llama-3.1-8b")
        if sum(one is not None for one in (source, timings, run)) != 1:
            raise InputError(
                "calibrate: give one of --from aiconfigurator, --from-csv, --from-run and --from-recording"
            )
        if (run is None) != (load is None):
            raise InputError("calibrate: --from-run and --load go together: a run, and what was sent")
        if source is not None:
            _refuse("--from aiconfigurator", {"--assume-kappa": assume_kappa or None})
        if run is not None:
            _refuse("--from-run", about)
        from sim.calibrate.command import default_name, fit, fit_to_run
        from sim.hardware import load_gpu, load_model
        from sim.out_file import check_out

        read = [Path(name) for name in (gpu, model)] + [path for path in (timings, run, load) if path]
        if out is not None:
            check_out(out, inputs=read, endings=(".yaml", ".yml"))
        fitted: Calibration
        gpu_spec, model_spec = load_gpu(gpu), load_model(model)
        if run is not None and load is not None:
            announce_compilation()
            fitted = fit_to_run(load, run, gpu_spec, model_spec)
        else:
            fitted = fit(
                gpu_spec,
                model_spec,
                tp=1 if tp is None else tp,
                weights=(weights or WeightType.bf16).value,
                kv_dtypes=list(dict.fromkeys(one.value for one in kv or ())),
                timings=timings,
                assume_kappa=assume_kappa,
            )
        _leave(fitted, out or default_name(fitted, timings or run), read)


def _from_recording(
    recording: Path, gpu: str | None, model: str | None, weights: WeightType | None, out: Path | None
) -> None:
    """Fit whole steps to a recording, whose own words name GPU and model where nobody else does."""
    from sim.calibrate.command import default_name, fit_to_recording, formula
    from sim.hardware import load_gpu, load_model
    from sim.out_file import check_out

    read = [recording, *(Path(name) for name in (gpu, model) if name is not None)]
    if out is not None:
        check_out(out, inputs=read, endings=(".yaml", ".yml"))
    fitted = fit_to_recording(
        recording,
        gpu=load_gpu(gpu).name if gpu is not None else None,
        model=load_model(model).name if model is not None else None,
        weights=(weights or WeightType.bf16).value,
    )
    _leave(fitted.calibration, out or default_name(fitted.calibration, recording), read)
    say(formula(fitted.calibration))
    for text in fitted.warnings:
        say(f"warning: {text}")


def _leave(fitted: Calibration, path: Path, read: list[Path]) -> None:
    """Write the calibration, and print its errors."""
    from rich.console import Console

    from sim.calibrate.command import show as show_errors
    from sim.calibrate.write import write
    from sim.out_file import check_out

    check_out(path, inputs=read)
    write(fitted, path)
    show_errors(fitted, Console())
    say(f"written: {path}; simulate with it: `cost: {path}` in a scenario")


def _refuse(source: str, given: Mapping[str, object]) -> None:
    """Refuse options that would do nothing. Raises InputError, one line."""
    if idle := [name for name, value in given.items() if value is not None]:
        raise InputError(f"calibrate: {' and '.join(idle)} would do nothing with {source}; leave it out")
