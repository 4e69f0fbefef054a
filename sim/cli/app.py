"""The application, its entry point, and what several commands share."""

from __future__ import annotations

import io
import signal
import sys
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sim.cli.messages import leave, say


class Commands(TyperGroup):
    """The commands; a wrong use of one ends as other bad input does, in one line and status 2."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line. Raises SystemExit."""
        try:
            status = super().main(*args, **kwargs | {"standalone_mode": False})
        except typer.TyperException as error:
            text = " ".join(error.format_message().split()).replace("Value error, ", "")
            if text:  # none: the help was shown, for want of more
                context = getattr(error, "ctx", None)
                command = "prefixsim" if context is None else context.command_path
                say(f"{text[0].lower()}{text[1:].rstrip('.')}; see {command} --help")
            sys.exit(2)
        sys.exit(status)


app = typer.Typer(
    name="prefixsim",
    cls=Commands,
    help="Simulate LLM prefix caching under load, with the decisions vLLM would make.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Format(StrEnum):
    table = "table"
    json = "json"


OverridesOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field, as in engine.block_size=16."),
]
JobsOption = Annotated[
    int | None, typer.Option("--jobs", min=1, max=1024, help="Processes. Default: one for each processor.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Of stdout.")]


def _version(asked: bool) -> None:
    if asked:
        from sim import __version__

        print(f"prefixsim {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Simulate LLM prefix caching under load, with the decisions vLLM would make."""


def main() -> None:
    """Entry point of `prefixsim`."""
    signal.signal(signal.SIGINT, leave)  # until a command begins
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # clean up, as on Ctrl-C
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8
    try:
        app()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; Python's own end would show a traceback
