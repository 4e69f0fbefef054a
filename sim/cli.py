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
