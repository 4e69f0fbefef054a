"""`prefixsim plan`: the highest rate, the fewest replicas, the smallest pool that keep a promise."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import Format, FormatOption, JobsOption, OverridesOption, app
from sim.cli.messages import announce_compilation, one_line_errors, say


@app.command()
def plan(
    scenario: Annotated[Path, typer.Argument(help="A scenario in YAML.")],
    slo: Annotated[
        list[str] | None,
        typer.Option(
            "--slo", metavar="NAME=LIMIT", help="A promise, as in ttft_p95=2s, tpot_mean=50ms, good=0.95."
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="PATH=LOW..HIGH|A,B",
            help="Seek the smallest of a range; try each of a list. Without a range, seek the highest rate.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Runs at each point, from the scenario's seed on.")
    ] = 3,
    price: Annotated[
        float | None, typer.Option(help="Of an hour of one GPU, in any currency, for the cost of tokens.")
    ] = None,
    jobs: JobsOption = None,
    overrides: OverridesOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write plan.csv (every run), plan.json and the winners' scenarios there."
        ),
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Search for what keeps a promise on latency, several seeds at each point; exit 1 if nothing does."""
    with one_line_errors():
        from sim.planning.cost import check_price
        from sim.planning.evaluate import Bench
        from sim.planning.objective import parse_limits
        from sim.planning.report import lines, to_object, told, write
        from sim.planning.vary import parse_vary
        from sim.planning.winners import make_plan
        from sim.report import print_lines, to_json
        from sim.result_folder import result_folder
        from sim.scenario_file import load, read
        from sim.sweeps.processes import on_processes

        check_price(price)
        limits, varied = parse_limits(slo or ()), parse_vary(vary or ())
        first = load(scenario, overrides or ()).seed
        bench = Bench(
            read(scenario),
            tuple(overrides or ()),
            limits,
            tuple(range(first, first + seeds)),
            functools.partial(on_processes, jobs=jobs),
            {},
            lambda one: say(told(one)),
        )
        with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
            announce_compilation()
            made = make_plan(bench, varied)
            if folder is not None:
                write(made, bench, price, folder)
        if out is not None:
            say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
        if output is Format.json:
            sys.stdout.write(to_json(to_object(made, bench, price)))
        else:
            from rich.console import Console

            print_lines(lines(made, bench, price), Console())
        sys.stdout.flush()
        if made.best is None:
            raise typer.Exit(1)
