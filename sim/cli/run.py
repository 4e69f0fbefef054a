"""`prefixsim run`: simulate a scenario."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import Format, FormatOption, app
from sim.cli.messages import announce_compilation, one_line_errors, progress_bar, say


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
            metavar="DIR",
            help="Write summary.json, requests.parquet, timeseries.parquet, scenario.yaml and run.png there.",
        ),
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Simulate a scenario and report hit rate, latencies and load."""
    with one_line_errors():
        from sim.report import result_folder, show, to_json, write
        from sim.scenario import load

        loaded = load(scenario, overrides or ())
        from sim.simulation import run as simulate  # with numba: bad input is told before it

        with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
            announce_compilation()
            with progress_bar(loaded) as progress:
                result = simulate(loaded, progress=progress, folder=folder)
            if folder is not None:
                write(result, folder)
            result.records.discard()
        if out is not None:
            say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
        if output is Format.json:
            for text in result.summary["warnings"]:
                say(f"warning: {text}")
            sys.stdout.write(to_json(result.summary))
        else:
            from rich.console import Console

            show(result, Console())
        sys.stdout.flush()
