"""`python -m sim.paper`: run the paper's experiments and write results/paper.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.calibrate.write import write as write_calibration
from sim.paper import experiments
from sim.paper.engine_2023 import engine_2023
from sim.paper.page import write

PAGE = Path("results", "paper.md")


def main(engine: Annotated[bool, typer.Option("--engine", help="Only write the step time.")] = False) -> None:
    """Run the PagedAttention paper's experiments, some minutes, and write results/paper.md.

    The step time that the scenarios use, scenarios/paper/engine_2023.yaml, is written first.
    """
    write_calibration(engine_2023(), experiments.FOLDER / "engine_2023.yaml")
    if engine:
        return

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rates, latencies = experiments.prefixes(tell)
    tables = {
        "prefix_rates": rates,
        "prefix_latency": latencies,
        "memory": experiments.memory(tell),
        "sharing": experiments.sharing(tell),
        "lineages": experiments.lineages(tell),
        "block_sizes": experiments.block_sizes(tell),
    }
    write(tables, PAGE)
    tell(f"{PAGE} written")


if __name__ == "__main__":
    typer.run(main)
