"""Same seed, same bytes: compiled or not, and wherever `advance`, records and batches are cut."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sim import engine, state
from sim.cache_kinds import APC, CacheKind
from sim.chains import new_tree
from sim.cli import app
from sim.clock import Clock
from sim.core import Core, EngineConfig
from sim.cost import StepCost, linear_cost
from sim.request import Batch, make_batch
from sim.simulate import simulate

MANY = 20_000  # steps: more than any case needs
# of the totals: compared apart
TABLES = ("itl_histogram", "samples", "durations", "state_times", "fullest_states")


def at_every_step() -> Callable[[Clock], float]:
    """Cut at every step, and give up on requests that preempt one another for ever.

    vLLM's rule does that where requests of one priority have arrived at one instant: of the two,
    the victim is the first in the running list, which is the one that was resumed earlier.
    """
    steps = itertools.count()

    def horizon(_: Clock) -> float:
        assume(next(steps) < MANY)
        return -math.inf

    return horizon


class Case(NamedTuple):
    """A small load and an engine for it."""

    config: EngineConfig
    cost: StepCost
    columns: dict[str, Any]  # of make_batch, but for the segments
    rows: list[list[tuple[int, int]]]  # segments (id, tokens) of each request
    concurrency: int | None
    think: list[float]  # seconds, taken in turn


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Pools that overflow, budgets that chunk, arrivals that meet ends of steps."""
    integers, booleans = st.integers, st.booleans()
    block_size = draw(integers(1, 4))
    chunked = draw(booleans)
    budget = draw(integers(1, 24)) if chunked else 64
    config = EngineConfig(
        block_size=block_size,
        num_gpu_blocks=draw(integers(4, 30)),
        max_num_batched_tokens=budget,
        max_num_seqs=draw(integers(1, 6)),
        max_model_len=draw(integers(30, 60)),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        max_loras=draw(integers(0, 2)),
        priority_policy=draw(booleans),
        reserve_full_isl=draw(booleans),
        enable_chunked_prefill=chunked,
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        async_scheduling=draw(booleans),
        free_all_last=draw(booleans),
        token_fates=block_size > 1,
        residency=block_size > 1,
        memory_states=block_size > 1,
    )
    # On the grid all times are whole seconds: arrivals, ends of steps and front ends meet.
    grid = draw(booleans)

    def duration(*fine: float) -> float:
        return draw(integers(0, 2).map(float) if grid else st.sampled_from(fine))

    cost = linear_cost(
        duration(0.0, 0.037),
        duration(0.0, 0.0003),
        seq_s=duration(0.0, 0.0021),
        max_num_batched_tokens=budget,
    )
    cost = cost._replace(
        cpu0_us=1e6 * duration(0.0, 0.0113),
        front_end_us=1e6 * duration(0.0, 1.77e-5),
        hash_us_per_block=1e6 * duration(0.0, 3.3e-6),
    )
    n = draw(integers(1, 24))
    each = functools.partial(st.lists, min_size=n, max_size=n)
    prefixes = draw(each(st.tuples(integers(0, 2), integers(0, 20))))
    suffixes = draw(each(integers(1, 20)))
    outputs = draw(each(integers(1, 9)))
    gaps = draw(each(st.sampled_from([0.0, 1.0, 2.0, 5.0] if grid else [0.0, 0.05, 0.3771, 2.5])))
    columns = {
        "arrival_time": list(itertools.accumulate(gaps)),
        "prompt_len": [length + suffix for (_, length), suffix in zip(prefixes, suffixes, strict=True)],
        "output_len": outputs,
        "max_tokens": [o + extra for o, extra in zip(outputs, draw(each(integers(0, 1))), strict=True)],
        "priority": draw(each(integers(0, 2))),
        "lora": (loras := draw(each(integers(0, 3)))),
        "namespace": loras,
        "prefix_group": [group for group, _ in prefixes],
        "n": draw(st.just([1] * n) | each(integers(1, 3))),
    }
    rows = [
        [(group, length), (1000 + i, suffix + output)]
        for i, ((group, length), suffix, output) in enumerate(zip(prefixes, suffixes, outputs, strict=True))
    ]
    return Case(
        config,
        cost,
        columns,
        [[pair for pair in row if pair[1]] for row in rows],
        draw(st.none() | integers(1, 7)),
        draw(st.sampled_from([[0.0], [1.0], [0.0, 0.1, 2.0], [1e-300]])),
    )


def batches(case: Case, size: int) -> Iterator[Batch]:
    """The load of a case, `size` requests at a time."""
    for start in range(0, len(case.rows), size):
        rows = case.rows[start : start + size]
        flat = [pair for row in rows for pair in row]
        columns = {name: column[start : start + size] for name, column in case.columns.items()}
        if case.concurrency is not None:
            columns["arrival_time"] = [0.0] * len(rows)
        yield make_batch(
            segment_start=list(itertools.accumulate(map(len, rows), initial=0)),
            segment_id=[segment for segment, _ in flat],
            segment_len=[length for _, length in flat],
            **columns,
        )


def outcome(
    case: Case,
    horizon: Callable[[Clock], float] = Clock.horizon,
    size: int = 2048,
    kind: CacheKind = APC,
    observe: Callable[[Core], None] | None = None,
) -> bytes:
    """Every bit that a run gives: its totals, samples, and records in the order in which they came."""
    chunks: list[dict[str, Any]] = []
    totals = simulate(
        batches(case, size),
        case.config,
        case.cost,
        kind=kind,
        observe=observe,
        on_records=chunks.append,
        concurrency=case.concurrency,
        think_times=itertools.cycle(case.think),
        horizon=horizon,
    )
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in sorted(chunks[0])}
    assert sorted(columns["request_id"].tolist()) == list(range(len(case.rows)))
    numbers = {name: value for name, value in totals._asdict().items() if name not in TABLES}
    lines = [f"{name}={value!r}" for name, value in numbers.items()]
    lines += [f"{name}: {column.tolist()}" for name, column in columns.items()]
    start, interval, samples, after = totals.samples
    lines.append(f"{len(samples)} samples from {start!r}, {interval!r} apart, then {after.tolist()}")
    tables = (totals.itl_histogram, samples, totals.durations, totals.state_times, totals.fullest_states)
    lines += [hashlib.sha256(table.tobytes()).hexdigest() for table in tables]
    return "\n".join(lines).encode()


@given(cases())
@settings(max_examples=300)
def test_cut_anywhere(case: Case) -> None:
    reference = outcome(case, at_every_step())
    assert outcome(case, Clock.peek) == reference, "cut at every event"
    assert outcome(case) == reference, "cut at the next outside event"


@given(cases(), st.integers(1, 5))
@settings(max_examples=100)
def test_batches_and_buffers_of_any_size(case: Case, size: int) -> None:
    """Chunks of arrivals, chunks of records, and the growth of chain tree and history decide nothing."""
    reference = outcome(case, at_every_step())
    assert outcome(case, size=size) == reference, f"{size} requests a batch"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "ROWS", size)
        assert outcome(case) == reference, f"{size} rows"
        assert outcome(case, at_every_step(), size) == reference, f"{size} rows, cut at every step"
        patch.setattr(state, "new_tree", lambda *_: new_tree(64, 8, 2))
        patch.setattr(state, "HISTORY_NODES", 2)
        assert outcome(case) == reference, "a tree and a history that grow often"


def digests(examples: int) -> list[str]:
    """Digests of the first cases, the same cases in every process (hypothesis draws repeatably)."""
    found = []

    @given(cases())
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    def collect(case: Case) -> None:
        found.append(hashlib.sha256(repr(case).encode() + outcome(case, at_every_step())).hexdigest())

    collect()
    return found


def in_plain_python(code: str, *arguments: str) -> str:
    """What `code` prints in a process without compilation."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_compiled_or_not() -> None:
    code = "import json; from test_determinism import digests; print(json.dumps(digests(100)))"
    assert json.loads(in_plain_python(code)) == digests(100)


SCENARIO = """\
engine: {block_size: 16, num_gpu_blocks: 60, max_num_batched_tokens: 256, max_num_seqs: 8}
workload:
  kind: shared_prefix
  num_requests: 60
  num_groups: 3
  prefix_len: {distribution: uniform, low: 0, high: 300}
  suffix_len: {distribution: lognormal, mean: 60, sigma: 1.2}
  output_len: {distribution: uniform, low: 1, high: 40}
slo: {ttft: 2000}
"""
LOADS = {
    "open": ["workload.request_rate=40", "engine.max_model_len=400"],
    "open, synchronous": ["workload.request_rate=40", "engine.async_scheduling=false"],
    "closed, no thought": ["workload.concurrency=12", "engine.max_model_len=400"],
    "closed, thinking": [
        "workload.concurrency=12",
        "workload.think_time=0.05",
        "workload.think_time_distribution=exponential",
        "engine.async_scheduling=false",
    ],
}


def result_digests(folder: Path) -> dict[str, dict[str, str]]:
    """Run every load through the command; digests of the files it leaves."""
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO)
    found = {}
    for name, overrides in LOADS.items():
        out = folder / name
        options = [text for override in overrides for text in ("--set", override)]
        assert CliRunner().invoke(app, ["run", str(scenario), "--out", str(out), *options]).exit_code == 0
        found[name] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())
        }
    return found


def test_result_files_have_the_same_bytes(tmp_path: Path) -> None:
    first, second, plain = (tmp_path / name for name in ("first", "second", "plain"))
    for folder in (first, second, plain):
        folder.mkdir()
    digests = result_digests(first)
    wanted = {"summary.json", "requests.parquet", "timeseries.parquet"}
    assert all(wanted <= files.keys() for files in digests.values())
    summary = json.loads((first / "open" / "summary.json").read_text())
    assert summary["num_preemptions"] > 0 and summary["failed"] > 0 and summary["prefix_cache_hits"] > 0
    assert result_digests(second) == digests
    code = (
        "import json, pathlib, sys; from test_determinism import result_digests;"
        "print(json.dumps(result_digests(pathlib.Path(sys.argv[1]))))"
    )
    assert json.loads(in_plain_python(code, str(plain))) == digests
