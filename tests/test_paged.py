"""PagedAttention in the engine: groups, copies, swaps, reserved prefixes."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import make, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from model_paged import Group, Model
from simulation import Run, engine, in_order, linear, prompts
from typer.testing import CliRunner

from sim._jit import entry
from sim.cache_kinds import EquippedPaged
from sim.caches import paged
from sim.caches.paged import block_tables
from sim.cli import app
from sim.columns import K
from sim.core import Core, EngineConfig
from sim.engine import Records
from sim.request import Batch
from sim.simulate import simulate

mix = entry(block_tables.mix)
draw_parent = entry(block_tables.draw_parent)
BASE, TOKEN = 1e-3, 1e-5  # seconds of a step, and of a token


def run(batch: Batch, config: EngineConfig, kind: EquippedPaged | None = None, **options: Any) -> Run:
    """Simulate with paged to the end."""
    chunks: list[Records] = []
    totals = simulate(
        iter([batch]), config, linear(config, BASE, TOKEN), kind=kind or EquippedPaged(),
        on_records=chunks.append, **options,
    )  # fmt: skip
    return Run(totals, in_order(chunks))


def figures(result: Run) -> dict[str, Any]:
    """What the summary says of the cache."""
    return paged.figures(result.totals.cache_sums)


def one(prompt: int, outputs: int, **columns: Any) -> Batch:
    return prompts([[(1, prompt)]], output_len=outputs, **columns)


@pytest.mark.parametrize("beam", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_engine_equals_a_second_account_of_the_rules(seed: int, beam: bool) -> None:
    """Small pools, so that most runs preempt; steps, copies, swaps, sums and ends are all equal."""
    seen: Counter[str] = Counter()
    for number in range(40):
        rng = random.Random(f"{seed} {beam} {number}")
        compare_with_model(rng, beam, seen)
    assert min(seen[what] for what in ("preempted", "copied", "hit", "refused")) > 3, seen
    assert seen["swapped"] > 3 and seen["recomputed"] > 3, seen


def smallest_pool(kind: EquippedPaged, batch: Batch, config: EngineConfig) -> EngineConfig:
    """The fewest blocks in which all those can run that could run in the pool of `config`."""

    def able(config: EngineConfig) -> int:
        return int((kind.blocks_needed(batch, config) < config.num_gpu_blocks).sum())

    smaller = config
    while able(smaller) == able(config) > 0:
        config, smaller = smaller, smaller._replace(num_gpu_blocks=smaller.num_gpu_blocks - 1)
    return config


def compare_with_model(rng: random.Random, beam: bool, seen: Counter[str]) -> None:
    size = rng.choice([1, 2, 4, 8, 16])
    n = rng.randint(2, 14)
    longest = rng.choice([6, 30, 80])
    wide = rng.choice([1, 2, 6])
    lens = [rng.randint(2, longest) for _ in range(n)]
    outs = [rng.randint(1, longest) for _ in range(n)]
    widths = [rng.randint(1, wide) for _ in range(n)]
    beams = [beam and rng.random() < 0.7 for _ in range(n)]
    prefixes = [rng.randint(1, longest // 2) for _ in range(rng.choice([0, 0, 1, 2]))]
    groups_of = [rng.randint(-1, len(prefixes) - 1) for _ in range(n)]
    mode = rng.choice([None, "swap", "recompute"])
    blocks = rng.choice([1, 2, 4]) * (wide * longest // size + 4) + sum(-(-p // size) for p in prefixes)
    config = engine(
        block_size=size, num_gpu_blocks=blocks + 1, max_num_batched_tokens=rng.choice([5, 20, 512]),
        max_num_seqs=rng.choice([4, 12, 40]), watermark=rng.choice([0.0, 0.01, 0.1]), max_model_len=1000,
    )  # fmt: skip
    batch = prompts(
        [[(1, length)] for length in lens], output_len=outs, gap=0.0, prefix_group=groups_of,
        n=[1 if b else w for w, b in zip(widths, beams, strict=True)],
        beam_width=[w if b else 1 for w, b in zip(widths, beams, strict=True)],
    )  # fmt: skip
    key = rng.randrange(2**32)
    kind = EquippedPaged(preemption_mode=mode, prefix_lens=tuple(prefixes), seed=key)
    if rng.random() < 0.5:
        config = smallest_pool(kind, batch, config)
    result = run(batch, config, kind)

    def parents(group: Group) -> list[int]:
        seed, step = mix(key ^ mix(group.number)), group.tokens - group.prompt
        return [int(draw_parent(seed, step, j, group.width)) for j in range(group.width)]

    spare = int(config.watermark * config.num_gpu_blocks)
    model = Model(
        block_size=size, blocks=config.num_gpu_blocks - 1, budget=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs, watermark=spare, mode=mode, prefixes=prefixes, parents=parents,
    )  # fmt: skip
    refused = result.records["refused"].tolist()
    model.run(
        [Group(i, lens[i], outs[i], widths[i], beams[i], groups_of[i]) for i in range(n) if not refused[i]]
    )
    sums, totals = figures(result), result.totals
    assert totals.num_steps == model.steps
    assert totals.num_scheduled_tokens == model.computed_tokens
    ran = result.records["refused"] == 0
    assert totals.itl_count == (np.array(widths) * (np.array(outs) - 1))[ran].sum()
    assert totals.num_preemptions == model.preemptions
    assert sums["num_cow_copies"] == model.copies
    assert (sums["num_blocks_swapped_out"], sums["num_blocks_swapped_in"]) == (
        model.swapped_out,
        model.swapped_in,
    )
    assert totals.cache_sums[:2].tolist() == [model.entries_sum, model.used_sum]
    ends = [(end, i) for i, end in enumerate(result.records["finish_time"].tolist()) if not refused[i]]
    assert model.total - model.free == sum(len(blocks) for _, blocks in model.prefixes)
    order = {number: place for place, number in enumerate(model.finished)}
    assert [i for _, i in sorted(ends, key=lambda e: (e[0], order[e[1]]))] == model.finished
    seen["preempted"] += model.preemptions > 0
    seen["copied"] += model.copies > 0
    seen["swapped"] += model.swapped_out > 0
    seen["recomputed"] += model.preemptions > 0 and model.swapped_out == 0
    seen["hit"] += totals.prefix_cache_hits > 0
    seen["refused"] += any(refused)


def test_beams_of_width_6_conserve_blocks_at_every_step() -> None:
    """1,000 requests in a pool that preempts; looked at after every step."""
    rng = np.random.default_rng(1)
    lens, outs = rng.integers(10, 120, 1000).tolist(), rng.integers(1, 60, 1000).tolist()
    batch = prompts([[(1, n)] for n in lens], output_len=outs, gap=0.002, beam_width=6, prefix_group=0)
    config = engine(num_gpu_blocks=140, max_num_seqs=96, max_num_batched_tokens=512, watermark=0.01)
    looks = 0

    def look(core: Core) -> None:
        nonlocal looks
        looks += 1
        paged.audit(core)

    kind = EquippedPaged(prefix_lens=(37,), copy_seconds=1e-6, swap_seconds=1e-5)
    result = run(batch, config, kind, horizon=lambda _: -math.inf, observe=look)
    sums = figures(result)
    assert looks > result.totals.num_steps > 1000
    assert (result.records["refused"] == 0).all()
    assert result.totals.num_preemptions > 100
    assert sums["num_blocks_swapped_out"] == sums["num_blocks_swapped_in"] > 1000
    assert sums["num_cow_copies"] > 50_000
    moved = sums["num_blocks_swapped_out"] + sums["num_blocks_swapped_in"]
    assert sums["copy_time"] == pytest.approx(sums["num_cow_copies"] * 1e-6 + moved * 1e-5)


def test_shape_of_a_step_counts_sequences() -> None:
    """What attention is timed by: a prompt of 5 once; then 3 sequences over 6, 7, … tokens."""
    shapes: list[list[int]] = []

    def look(core: Core) -> None:
        shapes.append(core.count[K.shape_decodes : K.shape_context + 1].tolist())

    run(one(5, 3, n=3), engine(), horizon=lambda _: -math.inf, observe=look)
    prefill, decodes = [0, 0, 1, 5, 25, 0, 0], [[3, 3 * (6 + i), 0, 0, 0, 0, 0] for i in range(2)]
    met = [shape for i, shape in enumerate(shapes) if any(shape) and shape not in shapes[:i]]
    assert met == [prefill, *decodes]


def test_recomputed_outputs_are_of_every_sequence() -> None:
    """A group of 2 that has lost 4 + 2 * k tokens: its prompt in one step, k outputs of both in the next."""
    shapes: list[tuple[int, ...]] = []

    def look(core: Core) -> None:
        names = (K.shape_prefills, K.shape_tokens, K.shape_squares, K.shape_cross, K.shape_context)
        shapes.append(tuple(core.count[list(names)].tolist()))

    batch = prompts([[(1, 4)], [(2, 4)]], output_len=9, gap=0.0, n=2)
    config = engine(block_size=4, num_gpu_blocks=9)
    kind = EquippedPaged(preemption_mode="recompute")
    run(batch, config, kind, horizon=lambda _: -math.inf, observe=look)
    alone = {shape for shape in shapes if shape[0] == 2 and shape[4] > 0}
    (shape,) = alone
    outputs = shape[1] // 2
    assert outputs > 1
    assert shape == (2, 2 * outputs, 2 * outputs * outputs, 2 * outputs * 4, 2 * 4)


def test_what_the_memory_holds_counts_shared_slots_once() -> None:
    """3 samples of a prompt of 5: each ends with a block of its own, 6 tokens in it and room for one more."""
    held = run(one(5, 2, n=3), engine(memory_states=True)).totals.fullest_states.tolist()
    assert held == [3 * 6, 3 * 1, 3 * 9, 0]


@given(
    size=st.sampled_from([1, 4, 16]),
    prompt=st.integers(1, 70),
    outputs=st.integers(1, 40),
    n=st.integers(1, 6),
)
@settings(max_examples=40, deadline=None)
def test_samples_share_the_prompt(size: int, prompt: int, outputs: int, n: int) -> None:
    """Alone: full blocks of the prompt once, all else a copy a sequence; the tail is copied n - 1 times."""
    result = run(one(prompt, outputs, n=n), engine(block_size=size))
    entries = blocks = 0
    for step in range(outputs):  # the first computes the prompt, the others write one token each
        table = -(-(prompt + step) // size)
        entries += n * table
        own = table - prompt // size
        blocks += prompt // size + (n * own if step else own)
    assert result.totals.cache_sums[:2].tolist() == [entries, blocks]
    assert figures(result)["num_cow_copies"] == (n - 1 if prompt % size and outputs > 1 else 0)
    assert result.totals.num_scheduled_tokens == prompt + n * (outputs - 1)


def test_copies_and_swaps_take_their_time() -> None:
    """The step that copies is longer by just that: one sequence more or less, and all else equal."""
    config = engine()
    plain = run(one(20, 5, n=4), config)
    timed = run(one(20, 5, n=4), config, EquippedPaged(copy_seconds=0.5))
    assert timed.e2el[0] - plain.e2el[0] == pytest.approx(3 * 0.5)
    assert timed.ttft[0] == plain.ttft[0]  # the prompt's step copies nothing
    assert figures(timed)["copy_time"] == 1.5


def test_swapped_groups_compute_nothing_twice() -> None:
    """Two groups of 2 in 7 blocks of 4: the later one is moved away, and comes back with all it had."""
    batch = prompts([[(1, 4)], [(2, 4)]], output_len=9, gap=0.0, n=2)
    config = engine(block_size=4, num_gpu_blocks=9)
    swapped = run(batch, config)
    again = run(batch, config, EquippedPaged(preemption_mode="recompute"))
    once = 2 * (4 + 2 * 8)
    assert swapped.records["num_preemptions"].tolist() == [0, 1]
    assert swapped.totals.num_scheduled_tokens == once
    assert figures(swapped)["num_blocks_swapped_out"] == figures(swapped)["num_blocks_swapped_in"] > 0
    assert again.totals.num_scheduled_tokens > once
    assert figures(again)["num_blocks_swapped_out"] == 0


def test_preempted_groups_come_before_waiting_ones() -> None:
    """A third request, small enough to fit at any time, waits until the preempted one runs again."""
    batch = prompts([[(1, 4)], [(2, 4)], [(3, 2)]], output_len=[9, 9, 1], gap=0.0, n=[2, 2, 1])
    result = run(batch, engine(block_size=4, num_gpu_blocks=9, max_num_seqs=4))
    records = result.records
    assert records["num_preemptions"].tolist() == [0, 1, 0]
    assert records["scheduled_time"][2] >= records["finish_time"][0]


def test_max_num_seqs_counts_sequences() -> None:
    batch = prompts([[(i, 10)] for i in range(6)], output_len=5, gap=0.0, n=4)
    assert run(batch, engine(max_num_seqs=9)).totals.max_num_running == 2
    assert run(batch, engine(max_num_seqs=3)).records["refused"].all()


def test_budget_counts_sequences() -> None:
    """A step has tokens for one group of 4 of two."""
    batch = prompts([[(i, 1)] for i in range(2)], output_len=5, gap=0.0, n=4)
    result = run(batch, engine(max_num_batched_tokens=7))
    assert result.totals.num_steps == 1 + 4 + 4


def test_admission_leaves_the_watermark() -> None:
    """Pool of 20 with 2 to spare: two prompts of 9 blocks fit, of 10 only one at a time; of 19 none."""

    def running(blocks: int) -> int:
        batch = prompts([[(i, 16 * blocks)] for i in range(2)], gap=0.0)
        result = run(batch, engine(num_gpu_blocks=21, watermark=0.1))
        return 0 if result.records["refused"].all() else result.totals.max_num_running

    assert [running(blocks) for blocks in (9, 10, 19)] == [2, 1, 0]


def test_reserved_prefix_hits_inside_a_block() -> None:
    """341 of 401 tokens: 21 blocks are shared, the 22nd is copied by each request."""
    batch = prompts([[(1, 341), (-50 - i, 60)] for i in range(5)], output_len=2, prefix_group=0)
    result = run(batch, engine(), EquippedPaged(prefix_lens=(341,)))
    assert result.hits == [341] * 5
    assert figures(result)["num_cow_copies"] == 5
    assert figures(result)["blocks_saved_by_sharing"] is None
    assert result.totals.max_blocks_used == 22 + math.ceil(402 / 16) - 21
    assert result.totals.num_scheduled_tokens == 5 * (60 + 1)
    short = run(one(100, 2, prefix_group=0), engine(), EquippedPaged(prefix_lens=(341,)))
    assert short.hits == [99]


def test_nothing_else_hits() -> None:
    """No automatic lookup: equal prompts, of no known group or in a salted namespace, compute all."""
    batch = prompts([[(1, 64)]] * 3, prefix_group=[-1, 0, 1], namespace=[0, 1, 0])
    assert run(batch, engine(), EquippedPaged(prefix_lens=(48,))).hits == [0, 0, 0]


def test_one_sequence_is_vllm_without_a_cache() -> None:
    """With room for all, groups of one are scheduled as the baseline schedules them."""
    rng = np.random.default_rng(3)
    lens, outs = rng.integers(1, 300, 200).tolist(), rng.integers(1, 50, 200).tolist()
    batch = prompts([[(1, n)] for n in lens], output_len=outs, gap=0.01)
    config = engine(enable_prefix_caching=False, max_num_batched_tokens=256)
    chunks: list[Records] = []
    simulate(iter([batch]), config, linear(config, BASE, TOKEN), on_records=chunks.append)
    baseline, paged = in_order(chunks), run(batch, config).records
    for name in ("scheduled_time", "first_token_time", "finish_time"):
        assert np.array_equal(baseline[name], paged[name])


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "shared_prefix", "num_groups": 5, "suffix_len": 20,
         "prefix_len": {"distribution": "uniform", "low": 30, "high": 90}},
        {"kind": "few_shot", "num_groups": 4, "num_examples": 9, "examples_per_request": 3,
         "system_prompt_len": 11, "question_len": 20,
         "example_len": {"distribution": "uniform", "low": 3, "high": 40}},
    ],
)  # fmt: skip
def test_workloads_know_their_prefixes(spec: dict[str, Any]) -> None:
    workload = make({**spec, "num_requests": 60, "output_len": 4, "request_rate": 1})
    seed = np.random.SeedSequence(5)
    lens, batch = workload.group_prefixes(seed), whole(workload, seed=seed)
    assert (batch.prompt_len - 20 == lens[batch.prefix_group]).all()
    drawn = {"kind": "few_shot", "num_examples": 9, "examples_per_request": 3, "num_requests": 6}
    drawn |= {"example_len": 5, "question_len": 20, "output_len": 4, "request_rate": 1}
    assert make(drawn).group_prefixes(seed) is None


SCENARIO = """
engine: {num_gpu_blocks: 40, block_size: 8, async_scheduling: false, watermark: 0.01}
cache: {kind: paged, reserve_prefixes: true}
cost: {base_us: 1000, token_us: 10}
workload:
  {kind: shared_prefix, num_groups: 2, prefix_len: 21, suffix_len: 9, output_len: 20, request_rate: 30,
   num_requests: 40, beam_width: 4}
"""


def prefixsim(tmp_path: Path, *words: str, options: Sequence[str] = ()) -> Any:
    """The command on SCENARIO with `options` laid over it; `words` are `run`, say, and more."""
    path = tmp_path / "paged.yaml"
    path.write_text(SCENARIO)
    sets = [part for option in options for part in ("--set", option)]
    return CliRunner().invoke(app, [words[0], str(path), *words[1:], *sets])


def test_same_bytes_compiled_and_plain(tmp_path: Path) -> None:
    here = prefixsim(tmp_path, "run", "--format", "json")
    command = [sys.executable, "-m", "sim.cli", "run", str(tmp_path / "paged.yaml"), "--format", "json"]
    env = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    home = Path(__file__).resolve().parent.parent
    plain = subprocess.run(command, env=env, capture_output=True, text=True, cwd=home, check=True)
    assert plain.stdout == here.stdout
    summary = json.loads(here.stdout)
    assert summary["num_cow_copies"] > 0 and summary["prefix_cache_hits"] == 40 * 21
    assert any("parents of beams" in text for text in summary["assumed"])


def refused(done: Any) -> str:
    """The one line in which something was refused."""
    assert done.exit_code == 2
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    return str(done.stderr)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("engine.async_scheduling=true", "async_scheduling"),
        ("engine.scheduling_policy=priority", "scheduling_policy"),
        ("engine.max_loras=2", "max_loras"),
        ("reset_prefix_cache=[1.0]", "reset_prefix_cache"),
        ("workload.prefix_len=2000", "num_gpu_blocks"),
        ("cache.preemption_mode=both", "preemption_mode"),
        ("workload={kind: scan, num_requests: 3, prompt_len: 20, output_len: 2, request_rate: 1}", "reserve"),
    ],
)
def test_what_paged_cannot_do_is_one_line(tmp_path: Path, option: str, said: str) -> None:
    assert said in refused(prefixsim(tmp_path, "run", options=[option]))


def test_nothing_of_paged_can_be_kept_or_drawn(tmp_path: Path) -> None:
    kept = tmp_path / "cache.npz"
    assert "--save-cache" in refused(prefixsim(tmp_path, "run", "--save-cache", str(kept)))
    assert not kept.exists()
    assert "paged" in refused(prefixsim(tmp_path, "explain"))


def test_without_caching_nothing_is_reserved(tmp_path: Path) -> None:
    off = ["engine.enable_prefix_caching=false"]
    summary = json.loads(prefixsim(tmp_path, "run", "--format", "json", options=off).stdout)
    assert summary["prefix_cache_hits"] == 0
