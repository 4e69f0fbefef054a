"""`prefixsim trace`: describe, convert and fetch traces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.app import Format, FormatOption, app
from sim.cli.messages import announce_compilation, one_line_errors, say
from sim.errors import InputError
from sim.errors import describe as describe_error

if TYPE_CHECKING:
    from workloads import Trace

trace_app = typer.Typer(help="Describe, convert and fetch traces.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A trace, plain or gzipped.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="A field of a scenario's trace, as in trace_block_size=16."
    ),
]
SkipOption = Annotated[bool, typer.Option("--skip-bad-lines", help="Leave bad lines out and count them.")]
SeedOption = Annotated[int, typer.Option(min=0, help="For what a file does not say: session starts, groups.")]


class Target(StrEnum):
    mooncake = "mooncake"
    segments = "segments"


@trace_app.command("describe")
def describe(
    file: FileArgument,
    block_size: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1 << 20, help="Tokens in a block of the ideal hit rate; again for another."),
    ] = None,
    fields: SetOption = None,
    skip_bad_lines: SkipOption = False,
    seed: SeedOption = 0,
    output: FormatOption = Format.table,
) -> None:
    """Load, lengths, ideal hit rate by block size, and how soon content is used again; one pass."""
    with one_line_errors():
        trace = trace_of(file, fields or [], skip_bad_lines)
        from sim.trace.describe import BLOCK_SIZES
        from sim.trace.describe import describe as figures_of

        announce_compilation()
        with _warnings_said():
            figures = figures_of(trace, block_size or BLOCK_SIZES, seed=seed)
        if output is Format.json:
            import json

            sys.stdout.write(json.dumps(figures, indent=2) + "\n")
        else:
            from rich.console import Console

            from sim.trace.table import show

            show(figures, Console())
        sys.stdout.flush()


@trace_app.command("convert")
def convert(
    file: FileArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; gzipped if it ends in .gz.")],
    to: Annotated[Target, typer.Option("--to", help="The form to write.")] = Target.mooncake,
    block_size: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="Tokens of an id, where the trace has none. Default: 512."),
    ] = None,
    fields: SetOption = None,
    skip_bad_lines: SkipOption = False,
    seed: SeedOption = 0,
) -> None:
    """Write a trace as Mooncake JSONL or as JSONL of segments."""
    with one_line_errors():
        if block_size is not None and to is Target.segments:
            raise InputError("trace convert: segments have no block size: drop --block-size")
        trace = trace_of(file, fields or [], skip_bad_lines)
        from sim.trace.convert import convert as write

        with _warnings_said():
            reader = write(trace, out, to.value, block_size=block_size, seed=seed)
        if reader.skipped.count:
            say(f"skipped {reader.skipped.count} bad lines; the first: {reader.skipped.first}")
        if reader.empty_outputs and to is Target.segments:
            say(f"{reader.empty_outputs} requests had an output length of 0, written as 1")
        say(f"written: {out}")


@trace_app.command("fetch")
def fetch(
    name: Annotated[str | None, typer.Argument(help="A public trace; without one, lists them.")] = None,
) -> None:
    """Download a public trace into the user's cache, check it, and print its path."""
    with one_line_errors():
        from sim.trace.fetch import SOURCES
        from sim.trace.fetch import fetch as path_of

        if name is None:
            for known, source in SOURCES.items():
                print(f"{known:24}{source.licence:12}{source.what}")
            return
        print(path_of(name, SOURCES), flush=True)


@contextlib.contextmanager
def _warnings_said() -> Iterator[None]:
    """Say what a trace warns of, a line each."""
    from workloads.errors import told_by_workload

    told: list[str] = []
    with told_by_workload(told):
        yield
    for text in told:
        say(f"warning: {text}")


def trace_of(file: Path, fields: Sequence[str], skip_bad_lines: bool = False) -> Trace:
    """The trace as a scenario would say it. Raises InputError for a field that there is not."""
    from pydantic import ValidationError

    from sim.yaml_lines import parse
    from workloads import Trace

    data: dict[str, Any] = {"path": str(file)}
    if skip_bad_lines:
        data["skip_bad_lines"] = True
    for field in fields:
        path, equals, text = field.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise InputError(f"--set {field}: should read field=value, as in trace_block_size=16")
        target = data
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise InputError(f"--set {field}: {key} has no fields")
        target[keys[-1]] = parse(f"value: {text}", f"--set {field}", {})["value"]
    try:
        return Trace.model_validate(data)
    except ValidationError as error:
        raise InputError(describe_error(error, Trace, data, lambda _: "--set")) from None
