"""What commands say on stderr: errors in one line, progress, what takes time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from sim.errors import InputError
from sim.out_file import reason

if TYPE_CHECKING:
    from sim.scenario import Scenario

INTERRUPTED = "interrupted; nothing was written"


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Bad input ends in one line and status 2, Ctrl-C in one and 130; nothing else is hidden."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, interrupt)  # from here on, there is what to clean up
    try:
        try:
            yield
        except ValueError as error:
            told = sys.modules.get("workloads.errors")  # half a second to load, and not all commands do
            if told is None or not isinstance(error, told.WorkloadError):
                raise
            raise InputError(str(error)) from None
    except InputError as error:
        say(" ".join(str(error).split()))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        say(INTERRUPTED)
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit fails too
        raise typer.Exit(0) from None
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        say(f"not enough memory{what}; lower the largest numbers of the scenario, or give it more")
        raise typer.Exit(2) from None
    except OSError as error:  # a full disk, a folder that went away
        say(f"{error.filename or 'input or output'}: {reason(error)}")
        raise typer.Exit(2) from None
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def interrupt(*_: object) -> None:
    """What Ctrl-C does while a command works. Raises KeyboardInterrupt.

    Where a destructor or a callback of the compiler swallows that, it is raised again a second later.
    """
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    raise KeyboardInterrupt


def leave(*_: object) -> None:
    """What Ctrl-C does while there is nothing to clean up: end at once, in one line."""
    say(INTERRUPTED)
    os._exit(130)


def say(text: str) -> None:
    print(f"prefixsim: {text}", file=sys.stderr, flush=True)


def announce_compilation() -> None:
    """Say it when something is compiled: input that is refused before that is refused in one line."""
    from sim._jit import before_compiling

    before_compiling(
        lambda: say("compiling for the first time; later runs load the machine code from the cache")
    )


@contextlib.contextmanager
def progress_bar(scenario: Scenario) -> Iterator[Callable[[int, float], None] | None]:
    """A bar on stderr with requests done and simulated time; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
        TextColumn("{task.fields[seconds]:,.0f} s simulated"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(scenario.name, total=_expected(scenario), seconds=0.0)
        yield lambda done, seconds: bar.update(task, completed=done, seconds=seconds)


def _expected(scenario: Scenario) -> int | None:
    """The requests of all phases, where their number is known."""
    counts = [load.expected_requests for load in (scenario.prime, scenario.workload) if load is not None]
    return None if None in counts else sum(count for count in counts if count is not None)


@contextlib.contextmanager
def counting_bar(what: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr with how many of all are done and the time left; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
        TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
