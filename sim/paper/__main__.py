"""`python -m sim.paper`: run the paper's experiments and write results/paper.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sim.calibrate.write import write as write_calibration
from sim.paper import experiments
from sim.paper.engine_2023 import engine_2023
from sim.paper.page import write

PAGE = Path("results", "paper.md")


def main(arguments: Sequence[str]) -> int:
    """With `--engine`, only write the step time that the scenarios use."""
    write_calibration(engine_2023(), experiments.FOLDER / "engine_2023.yaml")
    if "--engine" in arguments:
        return 0

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
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
