"""`prefixsim run`: simulate a scenario."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli.app import Format, FormatOption, OverridesOption, app
from sim.cli.messages import announce_compilation, one_line_errors, progress_bar, say
from sim.errors import InputError
from sim.out_file import check_out, replace_text

if TYPE_CHECKING:
    from sim.against.beside import Beside, Comparison
    from sim.recorder import Recorder
    from sim.scenario import Scenario
    from sim.simulation import Result
    from sim.warm_start import SavedCache


@app.command()
def run(
    scenario: Annotated[
        Path | None, typer.Argument(help="A scenario in YAML; none where --set names a workload.")
    ] = None,
    overrides: OverridesOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write summary.json, requests.parquet, timeseries.parquet, scenario.yaml and run.png there.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="PATH=A,B",
            help="Run the same load with each value of a field, side by side; with --out, a folder for each.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json[.gz]", help="Write steps and requests there, to open in Perfetto."),
    ] = None,
    timeline_window: Annotated[
        str | None,
        typer.Option(metavar="START:END", help="Simulated seconds that the timeline shows."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page of figures and tables there."),
    ] = None,
    save_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Write the prefix cache that the run leaves there."),
    ] = None,
    load_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Begin with a prefix cache that another run has left."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hold the run beside the recording of a real one."),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Run again with twice the pool, half the block, and without caching."),
    ] = False,
    output: FormatOption = Format.table,
) -> None:
    """Simulate a scenario and report hit rate, latencies and load."""
    with one_line_errors():
        if scenario is None and not any(text.startswith("workload") for text in overrides or ()):
            raise InputError("run: give a scenario in YAML, or name a workload with --set workload.kind=…")
        if compare is not None:
            if what_if or any(given is not None for given in (timeline, timeline_window, report, against)):
                raise InputError(
                    "--timeline, --report, --against and --what-if are of one run; leave out --compare"
                )
            if save_cache is not None or load_cache is not None:
                raise InputError("--save-cache and --load-cache are of one run; leave them out, or --compare")
            _run_side_by_side(scenario, overrides or (), compare, out, output)
            return
        from sim.report import print_lines, show, to_json
        from sim.result_folder import result_folder, write
        from sim.scenario_file import load

        loaded = load(scenario, overrides or ())
        inputs = [scenario] if scenario is not None else []
        if report is not None:
            _check_file("--report", report, (".html",), inputs, out)
        recorder = _recorder(timeline, timeline_window, inputs, out)
        if recorder is not None and loaded.cluster.replicas > 1:
            raise InputError(
                f"--timeline shows one engine, and cluster.replicas is {loaded.cluster.replicas}; set it to 1"
            )
        cache = _cache(load_cache, save_cache, inputs, out)
        beside = _beside(against, loaded)
        from sim.simulation import run as simulate  # with numba: bad input is told before it
        from sim.watcher import together

        with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
            announce_compilation()
            with progress_bar(loaded) as progress:
                result = simulate(
                    loaded,
                    progress=progress,
                    folder=folder,
                    watcher=together(recorder, beside.decisions if beside is not None else None),
                    cache=cache,
                    save_cache=save_cache is not None,
                )
            if what_if:
                from sim.what_if import answers

                result.summary["what_if"] = answers(result, progress_bar, cache)
            comparison = beside.compare(result) if beside is not None else None
            if folder is not None:
                write(result, folder, comparison)
            page = _page(result, comparison) if report is not None else ""
            result.records.discard()
        if out is not None:
            say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
        if save_cache is not None and result.cache is not None:
            from sim.snapshot_file import write_cache

            write_cache(save_cache, result.cache)
            say(f"written: {save_cache}")
        if report is not None:
            replace_text(report, page)
            say(f"written: {report}")
        if timeline is not None and recorder is not None:
            from sim.timeline import left_out, write_timeline

            write_timeline(recorder, timeline)
            say(f"written: {timeline}")
            num_requests = result.records.num_rows + result.records.num_left_out
            if (told := left_out(recorder, num_requests)) is not None:
                say(told)
        if output is Format.json:
            for text in result.summary["warnings"]:
                say(f"warning: {text}")
            sys.stdout.write(to_json(result.summary))
        else:
            from rich.console import Console

            show(result, Console())
            if comparison is not None:
                from sim.against.tables import lines as against_lines

                print_lines(against_lines(comparison.summary), Console())
            if what_if:
                from sim.what_if import lines

                print_lines(lines(result.summary["what_if"]), Console())
        sys.stdout.flush()


def _run_side_by_side(
    scenario: Path | None, overrides: Sequence[str], compared: str, out: Path | None, output: Format
) -> None:
    """Run a scenario once for each value of `compared`, and report the runs together."""
    from sim.compare import folder_names, lines, load_all, to_csv, to_object
    from sim.report import print_lines, to_json
    from sim.result_folder import result_folder, write

    field, scenarios = load_all(scenario, overrides, compared)
    from sim.simulation import run as simulate

    summaries: dict[str, dict[str, Any]] = {}
    ttft = {}
    with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
        announce_compilation()
        for (value, loaded), name in zip(scenarios.items(), folder_names(field, scenarios), strict=True):
            within = folder / name if folder is not None else None
            if within is not None:
                within.mkdir()
            with progress_bar(loaded) as progress:
                result = simulate(loaded, progress=progress, folder=within)
            summaries[value] = result.summary
            if within is not None:
                write(result, within)
                ttft[value] = result.records.column("ttft_ms")
            result.records.discard()
        if folder is not None:
            from sim.plots import compare_figure

            (folder / "compare.csv").write_text(to_csv(field, summaries), encoding="utf-8")
            compare_figure(field, ttft, folder / "compare.png")
    if out is not None:
        say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
    if output is Format.json:
        for value, summary in summaries.items():
            for text in summary["warnings"]:
                say(f"warning ({value}): {text}")
        sys.stdout.write(to_json(to_object(field, summaries)))
    else:
        from rich.console import Console

        print_lines(lines(field, summaries), Console())
    sys.stdout.flush()


def _recorder(
    timeline: Path | None, window: str | None, inputs: Sequence[Path], out: Path | None
) -> Recorder | None:
    """What takes the timeline down; raises InputError if it could not be written or the window is none."""
    if timeline is None:
        if window is not None:
            raise InputError("--timeline-window: there is no timeline; name its file with --timeline")
        return None
    _check_file("--timeline", timeline, (".json", ".gz"), inputs, out)
    from sim.recorder import Recorder

    start, colon, end = (window or ":").partition(":")
    try:
        recorder = Recorder(float(start or 0.0), float(end or math.inf))
    except ValueError:
        colon = ""
    if not colon or not 0.0 <= recorder.start < recorder.end:
        raise InputError(f"--timeline-window {window}: should read START:END in seconds, as in 60:90")
    return recorder


def _cache(
    load: Path | None, save: Path | None, inputs: Sequence[Path], out: Path | None
) -> SavedCache | None:
    """The cache to begin with; raises InputError if it cannot be read, or the one to save not written."""
    if save is not None:
        _check_file("--save-cache", save, (".npz",), [*inputs, *([load] if load else [])], out)
    if load is None:
        return None
    from sim.snapshot_file import read_cache

    return read_cache(load)


def _check_file(
    option: str, path: Path, endings: Sequence[str], inputs: Sequence[Path], out: Path | None
) -> None:
    """Raise InputError if the file that `option` names cannot be written."""
    if out is not None and path.resolve().is_relative_to(out.resolve()):
        raise InputError(f"{option} {path}: lies in --out {out}, which is replaced; name a file elsewhere")
    check_out(path, option=option, inputs=inputs, endings=endings)


def _beside(against: Path | None, scenario: Scenario) -> Beside | None:
    """The recording to hold the run beside; raises InputError if it is none or not of such a run."""
    if against is None:
        return None
    from sim.against.beside import Beside

    return Beside(against, scenario)


def _page(result: Result, comparison: Comparison | None) -> str:
    from sim.html_report import to_html  # with jinja2 and matplotlib: only a run that needs them waits

    return to_html(result, comparison)
