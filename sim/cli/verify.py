"""`prefixsim verify`: replay recorded decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import app
from sim.cli.messages import announce_compilation, one_line_errors


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Recorded decisions, .json or .json.gz.")],
) -> None:
    """Replay recorded engine decisions; exit 1 if any differs."""
    with one_line_errors():
        from sim.verify import main as replay

        announce_compilation()
        raise typer.Exit(replay(files))
