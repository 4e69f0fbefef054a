"""The folder that a command leaves its results in: whole or not at all, and nobody else's."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import InputError
from sim.report import to_json

if TYPE_CHECKING:
    from sim.against.beside import Comparison
    from sim.simulation import Result

DAY = 24 * 3600.0  # seconds
RESULT_FILES = frozenset(
    {"summary.json", "requests.parquet", "timeseries.parquet", "scenario.yaml", "run.png"}
)
AGAINST_FILES = frozenset({"against.csv", "against.png"})  # beside them, of a run held beside a recording
MRC_FILES = frozenset({"mrc.json", "mrc.csv", "mrc.png", "timed.csv", "scenario.yaml"})
COMPARE_FILES = frozenset({"compare.csv", "compare.png"})  # and a folder of RESULT_FILES for each value
PLAN_FILES = frozenset({"plan.csv", "plan.json"})  # and winner*.yaml


@contextlib.contextmanager
def result_folder(out: Path) -> Iterator[Path]:
    """A folder to write a run's files into; it becomes `out` when the block ends well.

    It is a hidden sibling of `out`, removed if the block fails; one that a killed run left is
    removed by a run to the same place a day later. What a former run left at `out` is replaced;
    anything else there is refused. Raises InputError, before the block where it can.
    """
    out = out.resolve()
    _refuse_foreign(out)
    _remove_abandoned(out)
    partial = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise InputError(f"--out {out}: cannot write there: {_reason(error)}") from None
    try:
        yield partial
        _replace(partial, out)
    except OSError as error:
        raise InputError(f"--out {out}: cannot write the results: {_reason(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _refuse_foreign(out: Path) -> None:
    try:
        names = sorted(os.listdir(out))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InputError(f"--out {out}: there is a file of that name; give a folder") from None
    except OSError as error:
        raise InputError(f"--out {out}: cannot be read: {_reason(error)}") from None
    allowed = RESULT_FILES | AGAINST_FILES
    if "mrc.json" in names:
        allowed = MRC_FILES
    if "compare.csv" in names:
        allowed = COMPARE_FILES | {name for name in names if _is_result_folder(out / name)}
    elif "plan.csv" in names:
        allowed = PLAN_FILES | {name for name in names if fnmatch.fnmatchcase(name, "winner*.yaml")}
    foreign = [name for name in names if name not in allowed]
    if foreign:
        raise InputError(f"--out {out}: holds {foreign[0]}, which no run wrote; give a new or empty folder")


def _is_result_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and set(os.listdir(path)) <= RESULT_FILES


def _remove_abandoned(out: Path) -> None:
    """Remove partial results for `out` in which nothing has changed for a day."""
    for partial in out.parent.glob(f".{glob.escape(out.name)}.????????.partial"):
        with contextlib.suppress(OSError):
            if max(path.stat().st_mtime for path in (partial, *partial.iterdir())) < time.time() - DAY:
                shutil.rmtree(partial, ignore_errors=True)


def _replace(partial: Path, out: Path) -> None:
    """Rename `partial` to `out`; what is there steps aside first, for a rename is not a merge."""
    former = partial.with_suffix(".former")
    if out.exists():
        _refuse_foreign(out)  # somebody may have written there during the run
        out.rename(former)
    try:
        partial.rename(out)
    except OSError:
        if former.exists():
            former.rename(out)
        raise
    shutil.rmtree(former, ignore_errors=True)


def write(result: Result, folder: Path, comparison: Comparison | None = None) -> None:
    """Write summary.json, scenario.yaml, timeseries.parquet and run.png beside the run's requests.parquet.

    With a comparison, against.csv and against.png too.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sim.plots import run_figure
    from sim.scenario_file import to_yaml

    (folder / "summary.json").write_text(to_json(result.summary), encoding="utf-8")
    (folder / "scenario.yaml").write_text(to_yaml(result.resolved.scenario), encoding="utf-8")
    pq.write_table(pa.table(result.timeseries), folder / "timeseries.parquet", compression="zstd")
    run_figure(result, folder / "run.png")
    if comparison is not None:
        from sim.against.figures import against_figure
        from sim.against.tables import to_csv

        (folder / "against.csv").write_text(to_csv(comparison), encoding="utf-8")
        against_figure(comparison, folder / "against.png")


def _reason(error: OSError) -> str:
    return error.strerror.lower() if error.strerror else str(error)
