"""results/validation.md: every bar with the figure reached, and what lies behind it.

    prefixsim calibrate --validate

makes it anew. Equal inputs give equal bytes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.calibrate import require_scipy
from sim.errors import InputError
from sim.out_file import check_out, replace_text
from sim.validate import (
    cache_theory,
    closed_form,
    components,
    context,
    queueing,
    routing,
    silicon_page,
    single_request,
    step_speed,
)
from sim.validate.engine_runs import pool_section, rtx4090_section
from sim.validate.section import Check, Section, table

if TYPE_CHECKING:
    from rich.console import Console

COMMAND = "prefixsim calibrate --validate"
DATA, PAGE = Path("..", "shared"), Path("results", "validation.md")
_SIGNS = {"met": "green", "MISSED": "red", "not checked": "yellow"}


def check_options(data: Path | None, out: Path | None) -> None:
    """Raise InputError, one line, for what `validate` could not work with; quick."""
    require_scipy("calibrate")
    if data is not None and not data.is_dir():
        raise InputError(f"--data {data}: no such folder")
    check_place(out or PAGE)


def validate(
    data: Path | None = None, out: Path | None = None, *, progress: Callable[[str], None] | None = None
) -> int:
    """Write the page to `out` and its figures to the folder beside it of the same stem.

    `data` holds calibration/ and traces/, the measurements that are not shipped; sections without
    theirs are skipped. None: DATA, PAGE. `progress` is told the title of each section when it is done.
    Returns 1 if a bar is missed, else 0. All is written, or
    nothing: raises InputError, one line, for damaged files or a place that cannot be written.
    """
    from rich.console import Console

    check_options(data, out)  # before a minute's work
    out = out or PAGE
    sections = []
    for section in all_sections(data or DATA):
        sections.append(section)
        if progress is not None:
            progress(section.title)
    write(sections, out)
    checks = [check for section in sections for check in section.checks]
    show(checks, Console())
    return int(any(check.met is False for check in checks))


def all_sections(data: Path) -> Iterator[Section]:
    """In the page's order, each made when its turn comes."""
    yield components.section()
    yield closed_form.section()
    yield step_speed.section()
    yield context.section(data)
    yield silicon_page.section()
    yield single_request.section()
    yield rtx4090_section(data)
    yield pool_section()
    yield routing.section()
    yield queueing.section()
    yield cache_theory.section()


def to_text(sections: Sequence[Section], folder: str) -> str:
    """The page in Markdown; `folder`: where its figures are, from the page."""
    checks = [check for section in sections for check in section.checks]
    lines = [
        "# What was checked against measurements and theory",
        "",
        f"Made by `{COMMAND}`, which exits with 1 if a bar is missed. {tally(checks)}",
        "",
        *table(["bar", "reached", "bar at", ""], [_row(check) for check in checks]),
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", *section.lines]
        for name in section.figures:
            lines += ["", f"![{section.title}]({folder}/{name})"]
    return "\n".join([*lines, ""])


def tally(checks: Sequence[Check]) -> str:
    """How many bars are met, missed, not checked."""
    counts = [sum(check.verdict == verdict for check in checks) for verdict in _SIGNS]
    return f"{len(checks)} bars: {counts[0]} met, {counts[1]} missed, {counts[2]} not checked."


def check_place(out: Path) -> None:
    """Raises InputError if the page cannot be `out`."""
    if out.suffix != ".md":
        raise InputError(f"--out {out}: should be the name of a Markdown file, as in validation.md")
    if out.parent.is_dir():  # else it is made
        check_out(out)
    if (folder := out.with_suffix("")).exists() and not folder.is_dir():
        raise InputError(f"--out {out}: the figures go into a folder {folder}, but a file is there")


def write(sections: Sequence[Section], out: Path) -> None:
    """The page and its figures, whole or not at all."""
    check_place(out)
    folder = out.with_suffix("")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"--out {out}: cannot write there: {error.strerror}") from None
    try:
        figures = {name: draw for section in sections for name, draw in section.figures.items()}
        for name, draw in figures.items():
            draw(partial / name)
        if figures:
            folder.mkdir(exist_ok=True)
        for name in figures:
            os.replace(partial / name, folder / name)
        replace_text(out, to_text(sections, folder.name))
    except OSError as error:
        raise InputError(f"--out {out}: cannot write the page: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def show(checks: Sequence[Check], console: Console) -> None:
    """Print every bar with its verdict."""
    from rich.table import Table

    found = Table("bar", "reached", "bar at", "", title=tally(checks), title_justify="left")
    for check in checks:
        found.add_row(*_row(check)[:3], f"[{_SIGNS[check.verdict]}]{check.verdict}[/]")
    console.print(found)


def _row(check: Check) -> tuple[str, str, str, str]:
    return check.what, check.reached, check.bar, check.verdict
