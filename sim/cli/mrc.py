"""`prefixsim mrc`: the hit rate at every capacity."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.cli.app import Format, FormatOption, app
from sim.cli.messages import announce_compilation, one_line_errors, progress_bar, say
from sim.cli.trace import trace_of
from sim.errors import InputError

if TYPE_CHECKING:
    from sim.mrc.load import Load
    from sim.mrc.report import Scale
    from sim.mrc.study import Asked, Study
    from sim.scenario import Scenario


class Count(StrEnum):
    vllm = "vllm"
    whole_ids = "whole-ids"


class LongRequests(StrEnum):
    keep_head = "keep-head"
    refuse = "refuse"


@app.command()
def mrc(
    source: Annotated[
        Path, typer.Argument(metavar="SCENARIO_OR_TRACE", help="A scenario (.yaml), or a trace.")
    ],
    block_size: Annotated[
        str | None,
        typer.Option(
            metavar="B,…",
            help="Tokens in a block. Default: the scenario's; of a trace, what its ids stand for, else 16.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Capacities in blocks: only there, with FIFO and Belady for scale."),
    ] = None,
    count: Annotated[
        Count,
        typer.Option(help="vLLM's rule, or a trace's ids as blocks, whole even where they stand for a part."),
    ] = Count.vllm,
    last: Annotated[
        int | None, typer.Option(min=1, help="Count so many requests; those before only warm the cache.")
    ] = None,
    outputs: Annotated[bool, typer.Option("--outputs", help="Keep answers in the cache as well.")] = False,
    null_block: Annotated[
        bool, typer.Option("--null-block", help="Let capacities be num_gpu_blocks, with the null block.")
    ] = False,
    long_requests: Annotated[
        LongRequests,
        typer.Option(help="What becomes of a request that is larger than the pool; refuse needs --at."),
    ] = LongRequests.keep_head,
    timed: Annotated[
        int | None,
        typer.Option(min=2, max=256, help="Lay so many whole timed runs of the scenario beside the curve."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field of the scenario, or of the trace."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write mrc.json, mrc.csv (the whole curve) and mrc.png there."),
    ] = None,
    output: FormatOption = Format.table,
) -> None:
    """Hit rate of a load at every pool capacity, in one pass; what timed runs lose against it."""
    with one_line_errors():
        sizes = _numbers("--block-size", block_size, 1)
        capacities = _numbers("--at", at, 1 + null_block)
        if long_requests is LongRequests.refuse and not capacities:
            raise InputError("--long-requests refuse: each capacity refuses others; name some with --at")
        if count is Count.whole_ids and (outputs or timed):
            raise InputError("--count whole-ids: ids name prompts only; leave --outputs and --timed out")
        if timed and last is not None:
            raise InputError("--timed: a run counts all its requests; leave --last out, or set measure_from")
        scenario = _scenario(source, overrides or (), timed)
        load, asked, scale = _setting(source, scenario, overrides or (), sizes)
        load = load._replace(whole_ids=count is Count.whole_ids, outputs=outputs or timed is not None)
        if load.whole_ids and not sizes:
            asked = asked._replace(block_sizes=())
        asked = asked._replace(
            at=[blocks - null_block for blocks in capacities],
            last=last,
            refuse_long=long_requests is LongRequests.refuse,
        )
        scale = scale._replace(null_block=null_block)
        from sim.result_folder import result_folder

        with result_folder(out) if out is not None else contextlib.nullcontext() as folder:
            announce_compilation()
            studies = _studies(load, asked, scenario, timed, given=bool(sizes))
            if folder is not None:
                _write(studies, scale, scenario, folder)
        if out is not None:
            say(f"written: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")
        _show(studies, scale, output)


def _numbers(option: str, text: str | None, least: int) -> list[int]:
    """The whole numbers of an option such as 16,64. Raises InputError, one line."""
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    good = all(word.isascii() and word.isdigit() and least <= int(word) < 2**31 for word in words)
    if not good or len(set(words)) < len(words):
        raise InputError(
            f"{option} {text}: should be different whole numbers, {least} to 2147483647, as in 16,64"
        )
    return [int(word) for word in words]


def _scenario(source: Path, overrides: Sequence[str], timed: int | None) -> Scenario | None:
    """The scenario; None for a trace. Raises InputError if it cannot be counted."""
    if source.suffix not in (".yaml", ".yml"):
        if timed is not None:
            raise InputError(f"--timed: {source} is a trace, which names no engine; give a scenario (.yaml)")
        return None
    from sim.scenario_file import load

    scenario = load(source, overrides)
    if scenario.cache.kind != "apc":
        raise InputError(
            f"{source}: mrc counts the blocks of cache: apc, not of {scenario.cache.kind}: set cache to apc"
        )
    if not scenario.engine.enable_prefix_caching:
        raise InputError(
            f"{source}: engine.enable_prefix_caching is false, so nothing ever hits; set it true"
        )
    if scenario.cluster.replicas > 1:
        raise InputError(f"{source}: cluster.replicas: a curve is of one pool; --set cluster.replicas=1")
    if scenario.prime is not None:
        raise InputError(f"{source}: prime: a curve begins with an empty cache; give its load as workload")
    if scenario.reset_prefix_cache:
        raise InputError(
            f"{source}: reset_prefix_cache: a curve knows no resets; --set reset_prefix_cache=[]"
        )
    if scenario.measure_from is not None and scenario.workload.concurrency is not None:
        raise InputError(
            f"{source}: measure_from: when requests of a closed loop arrive, only a run knows; leave it out"
        )
    return scenario


def _setting(
    source: Path, scenario: Scenario | None, overrides: Sequence[str], sizes: Sequence[int]
) -> tuple[Load, Asked, Scale]:
    """What to walk through, what to ask, and what blocks weigh."""
    from sim.mrc.load import Load
    from sim.mrc.report import Scale
    from sim.mrc.study import Asked

    if scenario is None:
        return Load(str(source), trace_of(source, overrides)), Asked(sizes), Scale()
    from sim.resolve import resolve

    resolved = resolve(scenario)
    config = resolved.config
    load = Load(scenario.name, scenario.workload, scenario.seed, max_model_len=config.max_model_len)
    asked = Asked(sizes or [config.block_size], measure_from=scenario.measure_from)
    pool = (config.block_size, config.num_gpu_blocks - 1)
    return load, asked, Scale(kv_bytes_per_token=resolved.kv_bytes_per_token, pool=pool)


def _studies(
    load: Load, asked: Asked, scenario: Scenario | None, timed: int | None, *, given: bool
) -> list[Study]:
    """The pass, then the timed runs; `given`: the block sizes are those of the option."""
    from sim.mrc.study import study
    from workloads import WorkloadError

    try:
        with _reading() as progress:
            studies = study(load, asked, progress=progress)
    except WorkloadError as error:
        field = "engine.block_size" if scenario is not None and not given else "--block-size"
        raise InputError(str(error).replace("engine.block_size", field)) from None
    if scenario is None or timed is None:
        return studies
    from sim.mrc.timed import capacities, timed_point

    finished = []
    for one in studies:
        blocks = capacities(one.curve, timed)
        points = []
        for number, capacity in enumerate(blocks, 1):
            say(f"timed run {number} of {len(blocks)}: {capacity:,} blocks of {one.curve.block_size}")
            with progress_bar(scenario) as bar:
                points.append(timed_point(scenario, one.curve, capacity, progress=bar))
        finished.append(one._replace(timed=points))
    return finished


@contextlib.contextmanager
def _reading() -> Iterator[Callable[[int], None] | None]:
    """The number of requests read, on stderr; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} requests read"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done: bar.update(task, completed=done)


def _write(studies: list[Study], scale: Scale, scenario: Scenario | None, folder: Path) -> None:
    """Write the files of --out."""
    from sim.mrc.figure import write_figure
    from sim.mrc.report import timed_rows, to_json, whole_curve, write_csv
    from sim.scenario_file import to_yaml

    with (folder / "mrc.json").open("w", encoding="utf-8") as file:
        file.writelines(to_json(studies, scale))
    write_csv(studies, folder / "mrc.csv", partial(whole_curve, scale=scale))
    if studies[0].timed:
        write_csv(studies, folder / "timed.csv", partial(timed_rows, scale=scale))
    if scenario is not None:
        (folder / "scenario.yaml").write_text(to_yaml(scenario), encoding="utf-8")
    write_figure(studies, scale, folder / "mrc.png")


def _show(studies: list[Study], scale: Scale, output: Format) -> None:
    from sim.mrc.console import lines
    from sim.mrc.report import to_json
    from sim.report import print_lines

    if output is Format.json:
        sys.stdout.writelines(to_json(studies, scale))
    else:
        from rich.console import Console

        for study in studies:
            print_lines(lines(study, scale), Console())
    sys.stdout.flush()
