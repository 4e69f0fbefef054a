"""`prefixsim verify`: replay recorded decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import Format, FormatOption, app
from sim.cli.messages import announce_compilation, one_line_errors


@app.command()
def verify(
    files: Annotated[
        list[Path], typer.Argument(help="Recordings of a vLLM server, or recorded cases; plain or gzipped.")
    ],
    output: FormatOption = Format.table,
) -> None:
    """Replay recorded engine decisions; exit 1 if any differs."""
    with one_line_errors():
        from sim.verify import main as replay

        announce_compilation()
        raise typer.Exit(replay(files, output is Format.json))
