"""`prefixsim bench`: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import Format, FormatOption, app
from sim.cli.messages import announce_compilation, one_line_errors


@app.command()
def bench(
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The Mooncake conversation trace, for work M.")
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Measure this machine: requests per second and memory on the works S and M."""
    with one_line_errors():
        from sim.bench import bench as measure

        announce_compilation()
        measure(trace, output.value)
