"""`prefixsim explain`: a small run step by step, as a person would draw it on a whiteboard."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import InputError
from sim.traffic import think_times

if TYPE_CHECKING:
    from rich.console import Console

    from sim.explain.events import Event
    from sim.explain.walk import Walk

MAX_REQUESTS = 20
MAX_BLOCKS = 200
MAX_STEPS = 200

LEGEND = (
    "A row of boxes is a request's block table: [block tokens xN], N tables naming the block; _ is a "
    "place without a token. A full block is named by a hash of its tokens and of all before them: here "
    "the first 6 hex digits of vLLM's sha256. A cached block that nobody uses waits in the free queue, "
    "(block tokens), where it can still be hit until it is taken. A sampled token gets its place in a "
    "block in the next step."
)


def explain(scenario_path: Path | None = None, overrides: Sequence[str] = ()) -> None:
    """Print the two examples of vLLM's documentation, or a small scenario, to stdout.

    `overrides` are as in sim.scenario.load. Raises InputError for a scenario too large to draw.
    """
    from rich.console import Console

    from sim.explain.render import WIDTH

    console = Console(
        width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False
    )
    if scenario_path is None:
        if overrides:
            raise InputError(f"--set {overrides[0]}: the examples are fixed; name a scenario to change one")
        _show_examples(console)
    else:
        _show_scenario(console, scenario_path, overrides)


def _show_examples(console: Console) -> None:
    from sim.explain.examples import fourteen_tokens
    from sim.explain.timeline import show_timeline

    _title(console, "1. Two prompts of 14 tokens, the first 10 of them the same; blocks of 4 tokens")
    _show(console, fourteen_tokens(), logical_time=True)
    _title(console, "2. The documentation's timeline: who frees what, and in which order it is taken again")
    _say(
        console,
        "R0 has 15 tokens and grows; R1 has 14, of which 10 are R0's; R2 has 29, of which 12 are R0's. "
        "Blocks of 4, 10 of them, counted from 0 as the documentation does. A * marks a free block whose "
        "content is still cached.",
    )
    show_timeline(console)


def _show_scenario(console: Console, path: Path, overrides: Sequence[str]) -> None:
    from sim.explain.walk import TooLong

    try:
        walk, told = walk_of(path, overrides)
        events = list(walk.events())  # all of them first: nothing is printed of a run that is too long
    except TooLong:
        raise InputError(
            f"{path}: explain shows at most {MAX_STEPS} engine steps, and this run takes more; "
            "lower the number of requests or their output lengths, with --set or in the file"
        ) from None
    config = walk.config
    title = f"{path.stem}: {len(walk.requests)} requests, {config.num_gpu_blocks - 1} blocks of "
    _title(console, f"{title}{config.block_size} tokens")
    for text in told:
        _say(console, f"warning: {text}")
    _show(console, walk, logical_time=False, events=events)


def walk_of(path: Path, overrides: Sequence[str] = ()) -> tuple[Walk, list[str]]:
    """A scenario ready to be walked through, and its warnings. Raises InputError if it is too large."""
    import numpy as np

    from sim.explain.walk import Walk
    from sim.resolve import resolve
    from sim.samples import samples
    from sim.scenario_file import load

    scenario = load(path, overrides)
    if scenario.prime is not None:
        raise InputError(f"{path}: explain draws one workload: drop prime, and call measure workload")
    if scenario.cache.kind != "apc":
        raise InputError(
            f"{path}: explain draws the blocks of apc, not {scenario.cache.kind}; try --set cache=apc"
        )
    resolved = resolve(scenario)
    config, workload = resolved.config, scenario.workload
    if config.num_gpu_blocks > MAX_BLOCKS + 1:
        raise InputError(
            f"{path}: explain draws at most {MAX_BLOCKS} blocks, and this pool has "
            f"{config.num_gpu_blocks - 1}; try --set engine.num_gpu_blocks=21"
        )
    if scenario.cluster.replicas > 1:
        raise InputError(
            f"{path}: explain draws one engine, and cluster.replicas is {scenario.cluster.replicas}; "
            "try --set cluster.replicas=1"
        )
    seed = np.random.SeedSequence(scenario.seed)
    if scenario.reset_prefix_cache or scenario.measure_from is not None:
        raise InputError(f"{path}: explain knows neither reset_prefix_cache nor measure_from: drop them")
    if workload.has_sessions:
        raise InputError(f"{path}: explain draws requests whose arrival is known; sessions wait for answers")
    batches, num_requests = [], 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in workload.batches(seed, config.block_size):
            if (batch.n > 1).any():
                if workload.concurrency is not None:
                    raise InputError(f"{path}: explain draws several samples in no closed loop: set n to 1")
                batch = samples(batch, num_requests).batch  # each is drawn as a request
                batch = batch._replace(n=np.ones_like(batch.n))
            batches.append(batch)
            num_requests += len(batch.prompt_len)
            if num_requests > MAX_REQUESTS:
                known = [one for one in ("num_requests", "limit") if one in type(workload).model_fields]
                remedy = f"; try --set workload.{known[0]}={MAX_REQUESTS // 4}" if known else ""
                most = f"explain draws at most {MAX_REQUESTS} requests, and this workload has more"
                raise InputError(f"{path}: {most}{remedy}")
    if num_requests == 0:
        raise InputError(f"{path}: the workload has no requests")
    walk = Walk(
        config._replace(max_num_seqs=min(config.max_num_seqs, num_requests)),  # no need for more seats
        resolved.step_time.cost,
        batches,
        concurrency=workload.concurrency,
        think_times=think_times(workload, seed),
        max_steps=MAX_STEPS,
    )
    if walk.all_refused():
        raise InputError(
            f"{path}: none of the {num_requests} requests fits in {config.num_gpu_blocks - 1} blocks of "
            f"{config.block_size} tokens and {config.max_model_len} tokens of length; "
            "raise engine.num_gpu_blocks, or shorten the prompts"
        )
    told = [*resolved.step_time.warnings, *(str(one.message) for one in caught)]
    return walk, told


def _show(console: Console, walk: Walk, *, logical_time: bool, events: Sequence[Event] | None = None) -> None:
    from sim.explain.render import Painter

    _say(console, LEGEND)
    _say(console, walk.tokens.legend())
    console.print()
    painter = Painter(console, walk.tokens, logical_time=logical_time)
    for event in events or walk.events():
        painter.event(event)
    _say(console, walk.totals())
    console.print()


def _title(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(text, "bold"), soft_wrap=True)
    console.print()


def _say(console: Console, text: str) -> None:
    from sim.explain.render import WIDTH

    for line in textwrap.wrap(text, min(console.width, WIDTH)):
        console.print(line, soft_wrap=True)
