"""`python -m sim.gallery NAME`: draw the pictures of results/NAME from the tables there."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.messages import one_line_errors, say
from sim.gallery import bench, fourteen_tokens

DRAW = {"fourteen_tokens": fourteen_tokens.draw, "bench": bench.draw}


class Name(StrEnum):
    fourteen_tokens = "fourteen_tokens"
    bench = "bench"


def main(name: Annotated[Name, typer.Argument(help="The folder in results/.")]) -> None:
    """Draw the pictures of results/NAME from the tables there."""
    with one_line_errors():
        say(f"written: {DRAW[name](Path('results', name))}")


if __name__ == "__main__":
    typer.run(main)
