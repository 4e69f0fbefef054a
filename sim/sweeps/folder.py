"""The folder of a sweep's results: whose it is, and what is in it from the beginning."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from sim.errors import InputError
from sim.out_file import reason, replace_text
from sim.sweeps.journal import read_journal

SWEEP, JOURNAL, SCENARIOS = "sweep.yaml", "journal.jsonl", "scenarios"
TABLE, CURVES = "sweep.csv", "curves.csv"


def check_folder(out: Path, sweep: str, num_runs: int, *, resume: bool) -> None:
    """Raise InputError, one line, if `out` is not for the sweep that reads `sweep`. Modifies nothing.

    A new or empty folder is, and one that the same sweep has written: where no run has ended, or all
    have, it starts anew; else it goes on with `resume`, and without is refused.
    """
    where = f"--out {out}"
    try:
        names = sorted(os.listdir(out))
        if names == [JOURNAL] and not read_journal(out / JOURNAL)[0]:
            return  # it is made first
        if not names:
            return
        if SWEEP not in names:
            raise InputError(f"{where}: holds {names[0]}, which no sweep wrote; give a new or empty folder")
        former = (out / SWEEP).read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InputError(f"{where}: there is a file of that name; give a folder") from None
    except (OSError, UnicodeDecodeError) as error:
        told = reason(error) if isinstance(error, OSError) else f"{SWEEP} is not UTF-8 text"
        raise InputError(f"{where}: cannot be read: {told}; give another folder") from None
    if former != sweep:
        what = "this sweep as it was before a change" if _name(former) == _name(sweep) else "another sweep"
        raise InputError(f"{where}: holds {what} ({_difference(former, sweep)}); give another folder")
    done = len(read_journal(out / JOURNAL)[0])
    if not resume and 0 < done < num_runs:
        raise InputError(
            f"{where}: holds {done} of {num_runs} runs of this sweep; add --resume, or give another folder"
        )


def make_folder(out: Path) -> None:
    """Make a folder where there is none. Raises InputError, one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot write there: {reason(error)}; give another folder") from None


def prepare_folder(out: Path, sweep: str, scenarios: list[str]) -> None:
    """Write the sweep and each point's scenario. Raises InputError, one line."""
    replace_text(out / SWEEP, sweep)  # first: it says whose the folder is
    make_folder(out / SCENARIOS)
    for number, text in enumerate(scenarios):
        replace_text(out / SCENARIOS / f"{number}.yaml", text)


def _name(sweep: str) -> str:
    return sweep.partition("\n")[0]


def _difference(former: str, sweep: str) -> str:
    """The first line in which two sweeps differ."""
    pairs = itertools.zip_longest(former.splitlines(), sweep.splitlines(), fillvalue="")
    old, new = next((old.strip(), new.strip()) for old, new in pairs if old != new)
    return f"there {old[:60]!r}, now {new[:60]!r}"
