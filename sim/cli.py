"""The command. Results go to stdout, progress and messages to stderr.

Exit status: 0 good, 1 something was found, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.errors import InputError

if TYPE_CHECKING:
    from sim.scenario import Scenario

app = typer.Typer(
    name="prefixsim",
    help="Simulate LLM prefix caching under load, with the decisions vLLM would make.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Format(StrEnum):
    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Of stdout.")]


def _version(asked: bool) -> None:
    if asked:
        from sim import __version__

        print(f"prefixsim {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate LLM prefix caching under load, with the decisions vLLM would make."""


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario in YAML.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, as in engine.block_size=16."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write summary.json, requests.parquet, scenario.yaml and run.png there."
        ),
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Simulate a scenario and report hit rate, latencies and load."""
    with _one_line_errors():
        from sim.report import result_folder, show, to_json, write
        from sim.scenario import load

        loaded = load(scenario, overrides or ())
        from sim.simulation import run as simulate  # with numba: bad input is told before it

        with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
            _announce_compilation()
            with _progress(loaded) as progress:
                result = simulate(loaded, progress=progress, folder=folder)
            if folder is not None:
                write(result, folder)
            result.records.discard()
        if out is not None:
            _say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
        if output is Format.json:
            for text in result.summary["warnings"]:
                _say(f"warning: {text}")
            sys.stdout.write(to_json(result.summary))
        else:
            from rich.console import Console

            show(result, Console())
        sys.stdout.flush()


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Recorded decisions, .json or .json.gz.")],
) -> None:
    """Replay recorded engine decisions; exit 1 if any differs."""
    with _one_line_errors():
        from sim.verify import main as replay

        _announce_compilation()
        raise typer.Exit(replay(files))


@app.command()
def explain(
    scenario: Annotated[
        Path | None, typer.Argument(help="A small scenario; default: the 14-token example.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, as in workload.num_requests=3."),
    ] = None,
) -> None:
    """Show a small run step by step: block tables, reference counts, free queue, hash table."""
    with _one_line_errors():
        if "sim._jit" not in sys.modules:  # a few steps in plain Python take less time than compiling
            os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        from sim.explain import explain as narrate

        narrate(scenario, overrides or ())


@app.command()
def bench(
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The Mooncake conversation trace, for work M.")
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Measure this machine: requests per second and memory on the works S and M."""
    with _one_line_errors():
        from sim.bench import bench as measure

        _announce_compilation()
        measure(trace, output.value)


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


class WeightType(StrEnum):
    bf16 = "bf16"
    fp8 = "fp8"


class Source(StrEnum):
    aiconfigurator = "aiconfigurator"


@app.command()
def calibrate(
    gpu: Annotated[str, typer.Option(help="A GPU: a name, or a YAML file.")],
    model: Annotated[str, typer.Option(help="A model: a name, or a YAML file.")],
    source: Annotated[
        Source | None, typer.Option("--from", help="NVIDIA's measured tables, from the extra [calibrate].")
    ] = None,
    timings: Annotated[
        Path | None, typer.Option("--from-csv", metavar="FILE", help="Your own times, from `measure`.")
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
) -> None:
    """Fit the time of a step to measured kernels; print held-out errors, write a calibration file."""
    with _one_line_errors():
        from sim.calibrate.command import default_name, fit
        from sim.calibrate.command import show as show_errors
        from sim.calibrate.write import write
        from sim.hardware import load_gpu, load_model

        if (source is None) == (timings is None):
            raise InputError("calibrate: give one of --from aiconfigurator and --from-csv FILE")
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
        _say(f"written: {path}; simulate with it: `cost: {path}` in a scenario")


@app.command()
def measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Append to this CSV what it does not hold yet.")],
    model: Annotated[
        str | None, typer.Option(help="The model whose shapes are timed: a name, or a YAML file.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where; a CPU gets small shapes.")] = Device.cuda,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: the shapes of one of so many ranks.")] = 1,
    weights: Annotated[WeightType, typer.Option(help="Type of the weights.")] = WeightType.bf16,
    kv: Annotated[WeightType, typer.Option(help="Type of the KV cache.")] = WeightType.bf16,
    cpu_hash: Annotated[
        bool, typer.Option("--cpu-hash", help="Time block hashes on this CPU instead; needs no torch.")
    ] = False,
) -> None:
    """Time kernels on this device, for `calibrate --from-csv`; the same command goes on where it ended."""
    with _one_line_errors():
        from sim.measure import measure as time_kernels
        from sim.measure import measure_hashes

        if cpu_hash == (model is not None):
            raise InputError("measure: give either --model, as in --model llama-3.1-8b, or --cpu-hash")
        try:
            if model is None:
                result = measure_hashes(out, tell=_say)
            else:
                result = time_kernels(
                    out, device=device.value, model=model, tp=tp, weights=weights.value, kv_dtype=kv.value,
                    tell=_say,
                )  # fmt: skip
        except KeyboardInterrupt:
            _say(f"interrupted; {out} keeps what was measured, and the same command goes on from there")
            raise typer.Exit(130) from None
        _say(f"{out}: {result.timed} points timed, {result.kept} there before, {result.skipped} skipped")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a scenario."""
    import json

    from sim.scenario import Scenario

    with _one_line_errors():
        print(json.dumps(Scenario.model_json_schema(), indent=2), flush=True)


def main() -> None:
    """Entry point of `prefixsim`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up, as on Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8
    app()


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Bad input ends in one line and status 2; nothing else is hidden."""
    from workloads.errors import WorkloadError

    try:
        yield
    except (InputError, WorkloadError) as error:
        _say(" ".join(str(error).split()))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _say("interrupted; nothing was written")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit fails too
        raise typer.Exit(0) from None
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        _say(f"not enough memory{what}; lower the largest numbers of the scenario, or give it more")
        raise typer.Exit(2) from None
    except OSError as error:  # a full disk, a folder that went away
        _say(f"{error.filename or 'input or output'}: {error.strerror or error}")
        raise typer.Exit(2) from None


def _say(text: str) -> None:
    print(f"prefixsim: {text}", file=sys.stderr, flush=True)


def _announce_compilation() -> None:
    from sim._jit import is_compiled_cached

    if not is_compiled_cached():
        _say("compiling for the first time; later runs load the machine code from the cache")


@contextlib.contextmanager
def _progress(scenario: Scenario) -> Iterator[Callable[[int, float], None] | None]:
    """A bar on stderr with requests done and simulated time; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
        TextColumn("{task.fields[seconds]:,.0f} s simulated"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(scenario.name, total=scenario.workload.expected_requests, seconds=0.0)
        yield lambda done, seconds: bar.update(task, completed=done, seconds=seconds)


if __name__ == "__main__":
    main()
