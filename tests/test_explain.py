"""The whiteboard: the documentation's examples to the block, any small run as the engine decides it."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from sim.columns import T
from sim.core import EngineConfig
from sim.cost import linear_cost
from sim.errors import InputError
from sim.explain import explain, walk_of
from sim.explain.events import Admission, Arrival, Board, Event, Finish, Running, Verdict
from sim.explain.examples import fourteen_tokens, timeline
from sim.explain.walk import TooLong, Walk
from sim.request import Batch, make_batch
from sim.simulate import simulate
from workloads import FourteenTokens, SharedPrefix

E = TypeVar("E")


def of(events: list[Event], kind: type[E]) -> dict[str, E]:
    """The first event of a kind for each request."""
    found: dict[str, E] = {}
    for event in events:
        if isinstance(event, kind):
            found.setdefault(event.request, event)  # type: ignore[union-attr]
    return found


def less_one(blocks: tuple[int, ...]) -> list[int]:
    return [block - 1 for block in blocks]


def test_fourteen_tokens() -> None:
    """Known answer 2: of 14 tokens, 10 of them shared, 8 hit and 6 are computed."""
    walk = fourteen_tokens()
    admitted = of(list(walk.events()), Admission)
    first, second = admitted["R0"], admitted["R1"]
    assert (first.hit_tokens, first.scheduled) == (0, 14)
    assert (second.hit_tokens, second.scheduled, second.left) == (8, 6, 0)
    assert [one.verdict for one in second.looked] == [
        Verdict.HIT, Verdict.HIT, Verdict.DIFFERS, Verdict.NOT_FULL
    ]  # fmt: skip
    assert [walk.tokens.draw(one.tokens) for one in second.looked] == ["abcd", "efgh", "ijqr", "st"]
    assert (second.looked[2].block, second.looked[2].common) == (3, 2)
    board = second.board
    assert board.tables == {"R0": (1, 2, 3, 4), "R1": (1, 2, 5, 6)}
    assert board.refs == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1}
    assert board.free == (7, 8, 9, 10)
    assert sorted(board.hashes.values()) == [(1,), (2,), (3,), (5,)]


def test_hashes_are_vllms() -> None:
    """The names on the whiteboard are sha256 of the pickled (parent, tokens, extra keys)."""
    board = of(list(fourteen_tokens().events()), Admission)["R0"].board
    parent = hashlib.sha256(pickle.dumps("vllm-none-hash", protocol=5)).digest()
    for block in (1, 2, 3):
        tokens = tuple(range(4 * block - 4, 4 * block))
        parent = hashlib.sha256(pickle.dumps((parent, tokens, None), protocol=5)).digest()
        assert board.hashes[parent] == (block,)
        assert board.contents[block].tokens == tokens


TIMELINE = [
    # free_all_last, queue after R0, after R1, R2's table, evictions
    (True, [7, 8, 9, 4, 3, 2], [7, 8, 9, 4, 3, 2, 6, 5, 1, 0], [0, 1, 2, 7, 8, 9, 4, 3], [3]),
    (False, [4, 7, 8, 9, 3, 2], [6, 4, 7, 8, 9, 3, 2, 5, 1, 0], [0, 1, 2, 6, 4, 7, 8, 9], []),
]


@pytest.mark.parametrize(("rule", "after_r0", "after_r1", "table", "evicted"), TIMELINE)
def test_timeline(
    rule: bool, after_r0: list[int], after_r1: list[int], table: list[int], evicted: list[int]
) -> None:
    """Known answer 3, with the ids of a pool without null block."""
    events = list(timeline(free_all_last=rule).events())
    admitted, ended = of(events, Admission), of(events, Finish)
    assert less_one(admitted["R0"].board.tables["R0"]) == [0, 1, 2, 3]
    grown = [event.taken for event in events if isinstance(event, Running) and event.taken]
    assert grown == [{"R0": (5,)}]
    assert {name: event.hit_tokens for name, event in admitted.items()} == {"R0": 0, "R1": 8, "R2": 12}
    assert less_one(admitted["R1"].board.tables["R1"]) == [0, 1, 5, 6]
    assert list(ended) == ["R0", "R1", "R2"]
    assert less_one(ended["R0"].board.free) == after_r0
    assert less_one(ended["R1"].board.free) == after_r1
    assert less_one(admitted["R2"].board.tables["R2"]) == table
    assert less_one(admitted["R2"].evicted) == evicted
    assert less_one(admitted["R2"].touched) == [0, 1, 2]


def test_null_block_timeline() -> None:
    """Known answer 3, third row: as vLLM counts."""
    admitted = of(list(timeline(free_all_last=False).events()), Admission)
    assert admitted["R2"].board.tables["R2"] == (1, 2, 3, 7, 5, 8, 9, 10)


def check_board(board: Board, config: EngineConfig) -> None:
    """The invariants that a drawing makes visible."""
    assert sorted([*board.free, *board.refs]) == list(range(1, config.num_gpu_blocks))
    named = [block for table in board.tables.values() for block in table]
    assert {block: named.count(block) for block in named} == board.refs
    cached = [block for blocks in board.hashes.values() for block in blocks]
    assert len(cached) == len(set(cached))
    for name, blocks in board.hashes.items():
        assert all(board.contents[block].hash == name for block in blocks)
        assert all(len(board.contents[block].tokens) == config.block_size for block in blocks)


def run_both(walk: Walk, batch: Batch, **closed_loop: Any) -> list[Event]:
    """Walk, checking each picture, and compare what became of each request with the engine's records."""
    events = list(walk.events())
    for event in events:
        check_board(event.board, walk.config)
    records: dict[int, tuple[int, float]] = {}
    ready: dict[int, float] = {}

    def collect(chunk: dict[str, np.ndarray[Any, Any]]) -> None:
        names = ("request_id", "num_cached_tokens", "finish_time", "ready_time")
        for number, hit, end, time in zip(*(chunk[name].tolist() for name in names), strict=True):
            records[number] = hit, end
            ready[number] = time

    totals = simulate(iter([batch]), walk.config, walk.cost, on_records=collect, **closed_loop)
    admitted, ended = of(events, Admission), of(events, Finish)
    for number, (hit, end) in records.items():
        name = f"R{number}"
        if name in ended:
            assert (admitted[name].hit_tokens, ended[name].time) == (hit, end)
        else:
            assert np.isnan(end)
    assert len(records) == len(of(events, Arrival))
    walked = [walk.core.times[T.ready_time, walk.requests[number].slot] for number in ready]
    np.testing.assert_array_equal(walked, list(ready.values()))
    assert walk.num_steps == totals.num_steps
    evicted = [block for event in events if isinstance(event, Admission | Running) for block in event.evicted]
    assert len(evicted) == totals.num_evictions
    return events


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("all_last", [False, True])
def test_a_tight_pool_is_told_as_the_engine_runs_it(seed: int, asynchronous: bool, all_last: bool) -> None:
    """Same hits, ends, steps and evictions as `simulate`, with preemptions, chunks and waiting."""
    workload = SharedPrefix.model_validate(
        {
            "num_requests": 10, "num_groups": 2, "prefix_len": 9, "request_rate": 40 + 20.0 * seed,
            "suffix_len": {"distribution": "uniform", "low": 1, "high": 12},
            "output_len": {"distribution": "uniform", "low": 1, "high": 9},
        }
    )  # fmt: skip
    (batch,) = workload.batches(np.random.SeedSequence(seed), 4)
    config = EngineConfig(
        4, 9 + seed, 16, 3, 64, async_scheduling=asynchronous, free_all_last=all_last, watermark=0.1
    )
    cost = linear_cost(0.01, 0.0001, max_num_batched_tokens=16)._replace(front_end_us=900.0)
    run_both(Walk(config, cost, [batch]), batch)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_closed_loop(asynchronous: bool) -> None:
    workload = FourteenTokens(num_requests=7, concurrency=2)
    (batch,) = workload.batches(np.random.SeedSequence(0), 4)
    config = EngineConfig(4, 11, 64, 4, 64, async_scheduling=asynchronous)
    cost = linear_cost(0.01, 0.0, max_num_batched_tokens=64)
    thinking = [0.5, 0.013, 0.3, 0.001, 0.2, 0.1, 0.4, 0.6]
    walk = Walk(config, cost, [batch], concurrency=2, think_times=iter(thinking))
    run_both(walk, batch, concurrency=2, think_times=iter(thinking))


def small_run(prompts: list[list[tuple[int, int]]], num_gpu_blocks: int = 20, **config: Any) -> list[Event]:
    """Prompts of (segment, length) pieces with one output token each, one after the other."""
    segments = [[*prompt, (100 + i, 1)] for i, prompt in enumerate(prompts)]
    flat = [piece for row in segments for piece in row]
    batch = make_batch(
        [10.0 * i for i in range(len(prompts))],
        [sum(length for _, length in prompt) for prompt in prompts],
        [1] * len(prompts),
        np.cumsum([0, *map(len, segments)]),
        [segment for segment, _ in flat],
        [length for _, length in flat],
    )
    cost = linear_cost(1.0, 0.0, max_num_batched_tokens=64)
    return list(Walk(EngineConfig(4, num_gpu_blocks, 64, 4, 256, **config), cost, [batch]).events())


def last_lookup(events: list[Event]) -> list[Verdict]:
    return [one.verdict for one in [e for e in events if isinstance(e, Admission)][-1].looked]


def test_why_a_block_misses() -> None:
    hit, after = Verdict.HIT, Verdict.AFTER_MISS
    assert last_lookup(small_run([[(1, 8)], [(1, 8)]])) == [hit, Verdict.LAST_TOKEN]
    assert last_lookup(small_run([[(1, 8)], [(2, 9)]])) == [Verdict.UNKNOWN, after, Verdict.NOT_FULL]
    evicting = small_run([[(1, 12)], [(2, 20)], [(1, 12)]], num_gpu_blocks=7)
    assert last_lookup(evicting) == [hit, Verdict.EVICTED, after]
    assert last_lookup(small_run([[(1, 9)], [(1, 9)]], enable_prefix_caching=False)) == [
        Verdict.CACHING_OFF, Verdict.CACHING_OFF, Verdict.CACHING_OFF
    ]  # fmt: skip


def test_a_block_that_is_not_full_is_named() -> None:
    """R0 still runs, and its last block begins as R1's third."""
    batch = make_batch([0, 1], [10, 13], [5, 1], [0, 1, 3], [1, 1, 2], [15, 10, 4])
    config = EngineConfig(4, 20, 64, 4, 64)
    walk = Walk(config, linear_cost(1.0, 0.0, max_num_batched_tokens=64), [batch])
    looked = of(list(walk.events()), Admission)["R1"].looked
    assert [one.verdict for one in looked][:3] == [Verdict.HIT, Verdict.HIT, Verdict.DIFFERS]
    batch = make_batch([0, 1], [10, 13], [5, 1], [0, 1, 2], [1, 1], [15, 14])
    walk = Walk(config, linear_cost(1.0, 0.0, max_num_batched_tokens=64), [batch])
    looked = of(list(walk.events()), Admission)["R1"].looked
    assert [one.verdict for one in looked][:3] == [Verdict.HIT, Verdict.HIT, Verdict.UNFINISHED]
    assert looked[2].block == 3


def test_many_tokens_are_drawn_as_ranges() -> None:
    (batch,) = FourteenTokens(prompt_len=60, shared_len=50).batches(np.random.SeedSequence(0), 16)
    config = EngineConfig(16, 20, 64, 4, 128)
    walk = Walk(config, linear_cost(1.0, 0.0, max_num_batched_tokens=64), [batch])
    first = of(list(walk.events()), Arrival)["R0"].prompt
    assert walk.tokens.draw(first[:16]) == "A0-15"
    assert walk.tokens.draw(first[48:60], 16) == "A48-49 B0-9 _x4"


def test_printed_examples(capsys: pytest.CaptureFixture[str]) -> None:
    explain(None)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for expected in (
        "[1 abcd x2] [2 efgh x2] [5 ijqr x1] [6 st__ x1]",
        "head > 7 8 9 10 < tail",
        "9da1c5 abcd: 1",
        "MISS  differs: only the first 2 tokens as in block 3; a part never hits",
        "Hit 8 of 14 tokens; 6 to compute now.",
        "free  7 8 9 4 3* 2* 6 5* 1* 0*          │ free  6 4 7 8 9 3* 2* 5* 1* 0*",
        "R2    0 1 2 7 8 9 4 3                   │ R2    0 1 2 6 4 7 8 9",
        "evicted: 3",
        "1 2 3 7 5 8 9 10",
    ):
        assert expected in text


SCENARIO = """\
engine: {block_size: 4, num_gpu_blocks: 11, max_num_batched_tokens: 64, max_num_seqs: 8}
cost: {base_us: 1000}
workload: {kind: fourteen_tokens, output_len: 4, arrival: constant, request_rate: 1}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    return path


def test_scenario(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explain(scenario)
    text = capsys.readouterr().out
    assert text.startswith("small: 2 requests, 10 blocks of 4 tokens\n")
    assert "In all: 8 of 28 prompt tokens hit; cached blocks evicted: 0; steps: 8." in text
    assert "1000.000 ms" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.num_requests=21", "at most 20 requests.*--set workload.num_requests="),
        ("engine.num_gpu_blocks=202", "at most 200 blocks.*has 201.*--set engine.num_gpu_blocks="),
        ("cache=radix", "draws the blocks of apc, not radix; try --set cache=apc"),
        ("workload.output_len=101", "none of the 2 requests fits in 10 blocks.*raise engine.num_gpu_blocks"),
    ],
)
def test_refusals(scenario: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=message) as caught:
        explain(scenario, [override])
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_too_many_steps(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="at most 200 engine steps.*lower"):
        explain(scenario, ["workload.output_len=101", "engine.num_gpu_blocks=40"])
    assert capsys.readouterr().out == ""


def test_one_refused_among_others(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk, _ = walk_of(scenario, ["workload.output_len={distribution: uniform, low: 20, high: 30}",
                                 "workload.num_requests=6", "seed=2"])  # fmt: skip
    refused = [event.refused for event in walk.events() if isinstance(event, Arrival)]
    assert 0 < sum(refused) < 6


def test_overrides_need_a_scenario() -> None:
    with pytest.raises(InputError, match="name a scenario"):
        explain(None, ["seed=1"])


def test_too_long_is_raised_before_the_end() -> None:
    walk = fourteen_tokens()
    walk.max_steps = 2
    with pytest.raises(TooLong):
        list(walk.events())


def test_the_command_needs_no_compiler(tmp_path: Path) -> None:
    """In a fresh process nothing is compiled, whatever the cache holds, and the output is plain text."""
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_DISABLE_JIT"}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
    code = "import sys; from sim.cli import app; app(['explain'], standalone_mode=False); "
    code += "sys.exit('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert not (tmp_path / "cache").exists()
