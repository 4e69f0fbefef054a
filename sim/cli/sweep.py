"""`prefixsim sweep`: one scenario over a grid, with several seeds."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.app import Format, FormatOption, JobsOption, app
from sim.cli.messages import announce_compilation, counting_bar, one_line_errors, say

if TYPE_CHECKING:
    from sim.sweeps.processes import Everywhere


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep in YAML.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field of the base scenario."),
    ] = None,
    jobs: JobsOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Dask scheduler instead, as in tcp://10.0.0.1:8786."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For the results. Default: results/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a stopped sweep ended.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Run a grid of more than 100,000 runs.")] = False,
    output: FormatOption = Format.table,
) -> None:
    """Run a scenario at every point of a grid, with several seeds; exit 1 if a run fails."""
    with one_line_errors():
        from sim.sweeps.execute import run_sweep
        from sim.sweeps.schema import load_sweep

        plan = load_sweep(file, overrides or (), large=yes)
        folder = out if out is not None else Path("results") / plan.name
        with _everywhere(jobs, cluster) as everywhere, counting_bar(plan.name, "runs") as progress:
            announce_compilation()
            try:
                results = run_sweep(plan, folder, everywhere, resume=resume, progress=progress)
            except KeyboardInterrupt:
                say(f"interrupted; what {folder} has stays there: --resume goes on")
                raise typer.Exit(130) from None
        from sim.sweeps.figures import write_figure
        from sim.sweeps.folder import TABLE
        from sim.sweeps.table import lines, to_object

        if not write_figure(results, folder):
            some_ran = len(results.errors) < len(results.runs)
            why = "more axes than one can show" if some_ran else "every run failed"
            say(f"no figure: {why}; see {TABLE}")
        say(f"written: {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
        if output is Format.json:
            from sim.report import to_json

            sys.stdout.write(to_json(to_object(results)))
        else:
            from rich.console import Console

            from sim.report import print_lines

            print_lines(lines(results), Console())
        sys.stdout.flush()
        if results.errors:
            raise typer.Exit(1)


@contextlib.contextmanager
def _everywhere(jobs: int | None, cluster: str | None) -> Iterator[Everywhere]:
    """Where the runs happen."""
    if cluster is None:
        from sim.sweeps.processes import on_processes

        yield functools.partial(on_processes, jobs=jobs)
        return
    if jobs is not None:
        from sim.errors import InputError

        raise InputError("--jobs: the cluster's workers are as many as they are; drop --jobs, or --cluster")
    from sim.sweeps.cluster import connected, on_cluster

    with connected(cluster) as client:
        yield functools.partial(on_cluster, client=client)
