"""`prefixsim explain`: a small run, step by step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import app
from sim.cli.messages import one_line_errors


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
    with one_line_errors():
        if "sim._jit" not in sys.modules:  # a few steps in plain Python take less time than compiling
            os.environ.setdefault("NUMBA_DISABLE_JIT", "1")
        from sim.explain import explain as narrate

        narrate(scenario, overrides or ())
