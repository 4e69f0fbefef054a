"""The suite that every cache inherits: whatever is in KINDS runs through all of it, in each variant."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance import MACHINES, at_every_step, audit, name_of, variants
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from simulation import engine, in_order, linear, prompts
from test_determinism import in_plain_python
from typer.testing import CliRunner

from sim.blocks import FREE
from sim.cache_kinds import APC, KINDS, CacheKind
from sim.cli import app
from sim.clock import Clock
from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.plots import drawn, prompt_parts, tokens_over_time
from sim.request import Batch, make_batch
from sim.scenario_file import load
from sim.simulate import simulate
from sim.simulation import run
from sim.totals import Totals

VARIANTS = variants()
MOST_STEPS = 20_000  # more than any case needs
every_cache = pytest.mark.parametrize("kind", VARIANTS, ids=name_of)


class Outcome(NamedTuple):
    """A finished run: its records by request id, and the engine as it was at the end."""

    totals: Totals
    records: dict[str, Any]
    num_free: int


def simulated(
    kind: CacheKind,
    batch: Batch,
    config: EngineConfig,
    cost: StepCost | None = None,
    *,
    horizon: Callable[[Clock], float] = at_every_step,
    **options: Any,
) -> Outcome:
    """Run to the end, with the books audited after every step."""
    chunks: list[dict[str, Any]] = []
    steps = itertools.count()
    last: list[Core] = []

    def observe(core: Core) -> None:
        if next(steps) >= MOST_STEPS:
            reject()  # requests that preempt one another for ever, as in the real ones
        audit(core)
        last[:] = [core]

    totals = simulate(
        iter([batch]), config, cost or linear(config), kind=kind, on_records=chunks.append, horizon=horizon,
        observe=observe, **options,
    )  # fmt: skip
    return Outcome(totals, in_order(chunks), int(last[0].pool.count[FREE]) if last else -1)


@st.composite
def loads(draw: st.DrawFn) -> tuple[EngineConfig, Batch]:
    """Small loads that share prefixes, and engines that are short of something."""
    integers = st.integers
    block_size = draw(integers(1, 4))
    config = EngineConfig(
        block_size=block_size,
        num_gpu_blocks=draw(integers(6, 40)),
        max_num_batched_tokens=draw(integers(4, 24)),
        max_num_seqs=draw(integers(1, 6)),
        max_model_len=draw(integers(30, 60)),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        token_fates=draw(st.booleans()),
        memory_states=True,
    )
    n = draw(integers(1, 20))
    each = functools.partial(st.lists, min_size=n, max_size=n)
    prefixes = draw(each(st.tuples(integers(0, 2), integers(0, 20))))
    suffixes, outputs = draw(each(integers(1, 20))), draw(each(integers(1, 9)))
    gaps = draw(each(st.sampled_from([0.0, 0.0, 0.01, 0.5])))
    rows = [
        [pair for pair in [(group, length), (1000 + i, suffix + output)] if pair[1]]
        for i, ((group, length), suffix, output) in enumerate(zip(prefixes, suffixes, outputs, strict=True))
    ]
    batch = make_batch(
        np.cumsum(gaps),
        [length + suffix for (_, length), suffix in zip(prefixes, suffixes, strict=True)],
        outputs,
        list(itertools.accumulate(map(len, rows), initial=0)),
        [segment for row in rows for segment, _ in row],
        [length for row in rows for _, length in row],
        max_tokens=[o + extra for o, extra in zip(outputs, draw(each(integers(0, 2))), strict=True)],
        prefix_group=[group for group, _ in prefixes],
        n=draw(st.sampled_from([1, 1, 3])),
    )
    return config, batch


def digest(outcome: Outcome) -> str:
    """Every bit of a run's records and sums."""
    numbers = {
        name: value.tolist() if isinstance(value, np.ndarray) else repr(value)
        for name, value in outcome.totals._asdict().items()
        if name not in ("itl_histogram", "samples")
    }
    columns = {name: column.tolist() for name, column in outcome.records.items()}
    return hashlib.sha256(json.dumps([numbers, columns], sort_keys=True).encode()).hexdigest()


@every_cache
@given(loads())
@settings(max_examples=20)
def test_the_books_balance_at_every_step_and_in_the_end(
    kind: CacheKind, load: tuple[EngineConfig, Batch]
) -> None:
    config, batch = load
    outcome = simulated(kind, batch, config)
    records, served = outcome.records, outcome.records["refused"] == 0
    assert sorted(records["request_id"].tolist()) == list(range(len(batch.prompt_len)))
    for earlier, later in itertools.pairwise(
        ("arrival_time", "ready_time", "scheduled_time", "first_token_time", "finish_time")
    ):
        assert (records[earlier][served] <= records[later][served]).all(), f"{earlier} <= {later}"
    hits = records["num_cached_tokens"][served]
    assert (hits >= 0).all() and (hits <= records["prompt_len"][served] - 1).all()
    if not config.enable_prefix_caching or not kind.looks_up:
        assert outcome.totals.prefix_cache_hits == 0
    assert (records["output_len"][served] >= 1).all()
    if served.any():
        assert outcome.num_free == config.num_gpu_blocks - 1, "all memory can be had again"


@every_cache
@given(loads())
@settings(max_examples=10)
def test_where_the_engine_is_cut_decides_nothing(kind: CacheKind, load: tuple[EngineConfig, Batch]) -> None:
    config, batch = load
    reference = digest(simulated(kind, batch, config))
    assert digest(simulated(kind, batch, config, horizon=Clock.peek)) == reference
    assert digest(simulated(kind, batch, config, horizon=Clock.horizon)) == reference


def digests(examples: int) -> list[str]:
    """Digests of the first loads under every variant, the same loads in every process."""
    found: list[str] = []

    @given(loads())
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    def collect(load: tuple[EngineConfig, Batch]) -> None:
        config, batch = load
        found.extend(digest(simulated(kind, batch, config)) for kind in VARIANTS)

    collect()
    return found


def test_compiled_or_not() -> None:
    code = "import json; from test_conformance import digests; print(json.dumps(digests(12)))"
    assert json.loads(in_plain_python(code)) == digests(12)


def shared(n: int, gap: float, *, prefix: int = 70, suffix: int = 31, output: int = 20) -> Batch:
    """Prompts of two groups, in turn."""
    rows = [[(i % 2, prefix), (100 + i, suffix)] for i in range(n)]
    return prompts(rows, output_len=output, gap=gap)


def ample(num_gpu_blocks: int) -> EngineConfig:
    """An engine with memory for all of `shared`, under every cache."""
    return engine(num_gpu_blocks=num_gpu_blocks, max_model_len=512)


@every_cache
def test_an_ample_pool_may_have_any_size(kind: CacheKind) -> None:
    batch = shared(40, gap=0.01)
    small, large = (
        simulated(kind, batch, ample(1 + blocks)).records
        for blocks in (2048, 4096)
    )
    assert all(np.array_equal(small[name], large[name], equal_nan=True) for name in small)


@every_cache
def test_without_sharing_and_with_memory_for_all_every_cache_is_the_same_server(kind: CacheKind) -> None:
    batch = shared(40, gap=0.01)
    config = ample(1 + 2048)._replace(enable_prefix_caching=False)
    ours, baseline = (simulated(each, batch, config).records for each in (kind, APC))
    for name in ("scheduled_time", "first_token_time", "finish_time"):
        assert np.array_equal(ours[name], baseline[name]), name


@every_cache
def test_what_is_not_hit_is_computed_once(kind: CacheKind) -> None:
    outcome = simulated(kind, shared(40, gap=0.01), ample(1 + 2048))
    records = outcome.records
    prompt = (records["prompt_len"] - records["num_cached_tokens"]).sum()
    assert outcome.totals.num_preemptions == 0
    assert outcome.totals.num_scheduled_tokens == prompt + (records["output_len"] - 1).sum()


@every_cache
def test_one_at_a_time_waits_are_lindleys(kind: CacheKind) -> None:
    """max_num_seqs 1 and no sharing: W(k+1) = max(0, W(k) + S(k) - gap), job by job."""
    config = engine(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=8192)
    rng = np.random.default_rng(3)
    lens = rng.integers(1, 4000, 200).tolist()
    batch = prompts([[(i, length)] for i, length in enumerate(lens)], gap=0.02)
    outcome = simulated(kind, batch, config, linear(config, 1e-3, 1e-5), horizon=Clock.horizon)
    wait = 0.0
    for k, length in enumerate(lens):
        found = outcome.records["scheduled_time"][k] - outcome.records["arrival_time"][k]
        assert found == pytest.approx(wait, abs=1e-9)
        wait = max(0.0, wait + 1e-3 + 1e-5 * length - 0.02)
    assert wait >= 0.0 and outcome.records["scheduled_time"][-1] > outcome.records["arrival_time"][-1]


@every_cache
def test_too_little_memory_makes_requests_wait_and_none_is_lost(kind: CacheKind) -> None:
    batch = shared(60, gap=0.0, output=40)
    outcome = simulated(kind, batch, engine(num_gpu_blocks=1 + 40, max_model_len=512))
    assert (outcome.records["refused"] == 0).all()
    assert (outcome.records["output_len"] == 40).all()
    assert outcome.totals.max_num_running < 60


@every_cache
def test_what_can_never_fit_is_refused(kind: CacheKind) -> None:
    rows = [[(0, 30)], [(1, 5000)], [(2, 30)]]
    outcome = simulated(kind, prompts(rows, gap=1.0), engine(num_gpu_blocks=1 + 64, max_model_len=512))
    assert outcome.records["refused"].tolist() == [0, 1, 0]


@every_cache
def test_long_answers_hide_what_caching_saves(kind: CacheKind) -> None:
    ratios = []
    for output in (1, 2000):
        batch = shared(6, gap=0.001, prefix=2000, suffix=20, output=output)
        on, off = (
            simulated(
                kind, batch, engine(enable_prefix_caching=caching, max_model_len=8192), horizon=Clock.horizon
            )
            for caching in (True, False)
        )
        taken = [(run.records["finish_time"] - run.records["arrival_time"]).mean() for run in (on, off)]
        ratios.append(taken[0] / taken[1])
    assert ratios[1] == pytest.approx(1.0, abs=0.05)
    assert ratios[0] <= 1.0 + 1e-9


SCENARIO = """\
engine: {block_size: 16, num_gpu_blocks: 80, max_num_batched_tokens: 512, max_num_seqs: 8,
  max_model_len: 512, async_scheduling: false}
workload: {kind: shared_prefix, num_requests: 40, request_rate: 30, num_groups: 2, prefix_len: 100,
  suffix_len: 30, output_len: 20}
"""


@pytest.mark.parametrize("kind", [cls().kind for cls in KINDS])
def test_all_reports_of_a_run(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO + f"cache: {kind}\n")
    out, page, lanes = tmp_path / "out", tmp_path / "page.html", tmp_path / "lanes.json"
    options = ["--out", str(out), "--report", str(page), "--timeline", str(lanes), "--what-if"]
    result = CliRunner().invoke(app, ["run", str(path), *options])
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["cache"] == kind and summary["completed"] == 40
    assert page.stat().st_size > 1000 and json.loads(lanes.read_text())["traceEvents"]
    again = CliRunner().invoke(app, ["run", str(out / "scenario.yaml"), "--format", "json"])
    assert json.loads(again.stdout)["mean_ttft_ms"] == summary["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("options", "setting", "lines"),
    [
        ("apc", "blocks of 16, prefix caching on, sync", ["Hit rate (%):"]),
        ("{kind: radix, schedule_policy: lpm}", "cache radix (schedule_policy lpm)", ["Hit rate (%):"]),
        ("contiguous", "blocks of 16, cache contiguous, sync", ["none: cache contiguous looks nothing up"]),
        (
            "paged",  # 100 of the 130 prompt tokens of each request
            "blocks of 16, cache paged, sync",
            [
                "Hit rate in reserved prefixes (%):        76.92",
                "Prompt tokens hit there:                  4000",
            ],
        ),
    ],
)
def test_the_console_names_the_cache_and_its_hits(
    options: str, setting: str, lines: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO + f"cache: {options}\n")
    result = CliRunner().invoke(app, ["run", str(path)])
    assert result.exit_code == 0, result.output
    assert setting in result.stdout.splitlines()[1]
    assert all(any(line.startswith(one) for line in result.stdout.splitlines()) for one in lines)


def test_a_figure_shows_hits_in_reserved_prefixes(tmp_path: Path) -> None:
    """76.92 % of the tokens, as the counters have it, and the rest computed."""
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO + "cache: paged\n")
    result = run(load(path))
    parts, edges = prompt_parts(result.summary), np.array([-1.0, 1000.0])
    with drawn(io.BytesIO(), (4.0, 3.0)) as figure:
        axes = tokens_over_time(figure.add_subplot(), result.records, edges, 0.0, parts)
        hit, total = (float(patch.get_data().values[0]) for patch in axes.patches)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "hit in a reserved prefix", "computed: nothing is looked up",
    ]  # fmt: skip
    assert hit * 1001.0 == pytest.approx(4000) and total * 1001.0 == pytest.approx(5200)


@pytest.mark.parametrize("kind", [cls().kind for cls in KINDS])
def test_replicas_of_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO + f"cache: {kind}\n")
    for router in ("round_robin", "kv_aware"):
        cluster = ["--set", "cluster.replicas=2", "--set", f"cluster.router={router}"]
        result = CliRunner().invoke(app, ["run", str(path), *cluster, "--format", "json"])
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        assert summary["completed"] == sum(row["requests"] for row in summary["by_replica"]) == 40


def test_every_cache_is_held_against_a_model_of_its_own() -> None:
    """A hypothesis state machine, or random lives, against a small independent model."""
    assert MACHINES.keys() == {cls().kind for cls in KINDS}
    assert all((Path(__file__).parent / name).is_file() for name in MACHINES.values())
