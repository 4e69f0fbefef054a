"""`python -m sim.three_systems`: run the sweep of the three systems and write results/three_systems.md."""

from __future__ import annotations

import functools
from pathlib import Path

import typer

from sim.cli.messages import announce_compilation, counting_bar, one_line_errors, say
from sim.sweeps.execute import run_sweep
from sim.sweeps.folder import TABLE
from sim.sweeps.processes import on_processes
from sim.sweeps.schema import load_sweep
from sim.three_systems.means import read
from sim.three_systems.page import write

SWEEP = Path("scenarios", "sweeps", "three_systems.yaml")
PAGE = Path("results", "three_systems.md")


def make(sweep: Path, page: Path, jobs: int | None = None) -> None:
    """Run `sweep` into the folder beside `page` of the same stem, or what is missing there; write the page.

    Raises InputError, one line, as a sweep does.
    """
    plan, folder = load_sweep(sweep), page.with_suffix("")
    with counting_bar(plan.name, "runs") as progress:
        announce_compilation()
        run_sweep(plan, folder, functools.partial(on_processes, jobs=jobs), resume=True, progress=progress)
    write(read(folder / TABLE), page)


def main() -> None:
    """Run the sweep of the three systems, or what is missing of it, and write results/three_systems.md."""
    with one_line_errors():
        make(SWEEP, PAGE)
        say(f"written: {PAGE}")


if __name__ == "__main__":
    typer.run(main)
