"""A run beside a recording: where decisions part and why, and what both sides are said to have done."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from simulation import engine, in_order, linear, prompts

from sim.against.decisions import Decisions
from sim.against.sides import measured_curves, measured_side, read_recorded, simulated_curves
from sim.blocks import FREE
from sim.clock import Clock
from sim.columns import K, W
from sim.core import Core, EngineConfig
from sim.cost import StepCost
from sim.recording import read_requests, read_steps
from sim.request import Batch
from sim.simulate import simulate
from sim.timeseries import time_series

LATE = "the recording scheduled r1, which the simulation got 0.5 ms later; its step began 10 ms earlier"
EARLY = "the simulation scheduled r1, which the recording got 0.5 ms later; its step began 3 ms later"
SPLIT = "r0 got 64 tokens over 0 computed ones in the recording, 32 over 0 in the simulation"

Floats = npt.NDArray[np.float64]

MEASURED = Path(__file__).parent / "measured"
CONFIG = engine(
    block_size=32, num_gpu_blocks=60, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=900
)


class Taken:
    """Takes a run of a synchronous engine down as a recording of version 1."""

    def __init__(self, batch: Batch, config: EngineConfig) -> None:
        self.batch = batch
        self.config = config
        self.decisions = Decisions.__new__(Decisions)
        self.decisions.order = np.arange(len(batch.n))
        self.steps: list[dict[str, Any]] = []
        self.num_steps = 0
        self.seen: set[int] = set()

    def horizon(self, clock: Clock) -> float:
        return clock.now

    def observe(self, core: Core) -> None:
        new = int(core.count[K.num_steps]) - self.num_steps
        self.num_steps += new
        if not new:
            return
        (pieces,) = self.decisions._begun(core, 1)
        begin, end = float(core.clock[W.now]), float(core.clock[W.step_end + core.count[K.oldest_step]])
        first = [row for row, *_ in pieces if row not in self.seen]
        self.seen.update(first)
        self.steps.append(
            {
                "t": [round(1e6 * begin), round(1e6 * begin), round(1e6 * end), round(1e6 * end)],
                "s": [[f"r{row}", new, computed] for row, new, computed in pieces],
                "new": [[f"r{row}", computed] for row, _, computed in pieces if row in first],
                "arr": [],
                "fr": int(core.pool.count[FREE]),
                "fr2": int(core.pool.count[FREE]),
                "q": [int(core.count[K.num_running]), int(core.count[K.num_waiting])],
            }
        )

    def document(self, records: dict[str, Any]) -> dict[str, Any]:
        """The recording, once the run has ended."""
        starts = np.array([step["t"][0] for step in self.steps])
        ends = np.array([step["t"][3] for step in self.steps])
        requests = []
        for row in range(len(self.batch.n)):
            stamps = {
                name: round(1e6 * float(records[f"{name}_time"][row]))
                for name in ("arrival", "ready", "scheduled", "first_token", "finish")
            }
            added = self.steps[int(np.searchsorted(starts, stamps["ready"]))]
            added["arr"].append(f"r{row}")
            last = self.steps[int(np.searchsorted(ends, stamps["finish"]))]
            last.setdefault("fin", []).append(f"r{row}")
            if len(last["fin"]) == last["q"][0]:
                last["fr2"] = self.config.num_gpu_blocks - 1
            outputs, prompt = int(records["output_len"][row]), int(records["prompt_len"][row])
            requests.append(
                {
                    "id": f"r{row}", "segs": [[row, prompt]], "np": prompt, "out": outputs, "ngen": outputs,
                    "o_ids": [7] * outputs, "cached": int(records["num_cached_tokens"][row]),
                    "npre": int(records["num_preemptions"][row]),
                    "T": {
                        "sub": stamps["arrival"], "arr": stamps["arrival"], "inq": stamps["ready"],
                        "add": added["t"][0], "sched": stamps["scheduled"], "ftok": stamps["first_token"],
                        "ltok": stamps["finish"], "cfirst": stamps["first_token"], "clast": stamps["finish"],
                    },
                }
            )  # fmt: skip
        config = self.config
        return {
            "schema": "vllm_cpu_truth/1",
            "effective": {
                "block_size": config.block_size, "num_gpu_blocks": config.num_gpu_blocks,
                "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_model_len": config.max_model_len, "policy": "fcfs", "chunked": True, "watermark": 0.0,
                "enable_prefix_caching": True, "async_scheduling": False, "reserve_full_isl": True,
            },
            "free0": list(range(1, config.num_gpu_blocks)),
            "reqs": requests,
            "steps": self.steps,
        }  # fmt: skip


def load(outputs: tuple[int, ...] = (20, 20, 6)) -> Batch:
    """r0 alone; r1 comes 30.5 ms after it, r2 at 60 ms; each has a prompt of two steps at a budget of 64."""
    batch = prompts([[(1, 100)], [(2, 90)], [(3, 80)]], output_len=outputs)
    return batch._replace(arrival_time=np.array([0.0, 0.0305, 0.06]))


def taken(path: Path, cost: StepCost, config: EngineConfig = CONFIG, batch: Batch | None = None) -> None:
    """The recording of a run with this step time."""
    batch = load() if batch is None else batch
    watcher, chunks = Taken(batch, config), []  # type: ignore[var-annotated]
    simulate(
        iter([batch]), config, cost, on_records=chunks.append, horizon=watcher.horizon,
        observe=watcher.observe,
    )  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(watcher.document(in_order(chunks))).encode()))


def compared(
    path: Path, cost: StepCost, config: EngineConfig = CONFIG, batch: Batch | None = None
) -> Decisions:
    """The decisions of a run with this step time, beside the recording."""
    requests = read_requests(path)
    decisions = Decisions(path, requests, np.arange(len(requests.name)))
    simulate(
        iter([load() if batch is None else batch]), config, cost, on_records=lambda _: None,
        horizon=decisions.horizon, observe=decisions.observe,
    )  # fmt: skip
    decisions.finish()
    return decisions


def steps_of(milliseconds: float) -> StepCost:
    return linear(CONFIG, milliseconds / 1e3, 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A recording of steps of 10 ms each: r1 waits from 30.5 to 40 ms."""
    file = tmp_path / "recording.json.gz"
    taken(file, steps_of(10.0))
    return file


def test_the_same_run_parts_nowhere(path: Path) -> None:
    decisions = compared(path, steps_of(10.0))
    assert decisions.parting is None
    assert decisions.num_same == len(read_steps(path).num_tokens) > 20


@pytest.mark.parametrize(
    ("milliseconds", "step", "why"),
    [
        # steps begin at 0, 7.5, ..., 30, where r1 is not yet there; the recording's number 4 at 40
        (7.5, 4, LATE),
        # steps begin at 0, 11, 22, 33, where r1 is there; the recording's number 3 at 30
        (11.0, 3, EARLY),
    ],
)  # fmt: skip
def test_who_came_too_late(path: Path, milliseconds: float, step: int, why: str) -> None:
    decisions = compared(path, steps_of(milliseconds))
    assert decisions.parting is not None and decisions.num_same == step
    assert decisions.parting.step == step and decisions.parting.why == why


@pytest.mark.parametrize(
    ("changes", "step", "why"),
    [
        ({"max_num_seqs": 1}, 4, "the recording scheduled r1, which waited in the simulation; its"),
        ({"max_num_batched_tokens": 32}, 0, SPLIT),
        ({"num_gpu_blocks": 6}, 4, "the recording scheduled r1, which waited in the simulation"),
    ],
)  # fmt: skip
def test_who_was_treated_otherwise(path: Path, changes: dict[str, Any], step: int, why: str) -> None:
    decisions = compared(path, steps_of(10.0), CONFIG._replace(**changes))
    assert decisions.parting is not None and decisions.parting.step == step
    assert decisions.parting.why.startswith(why)


def test_whom_one_side_has_preempted(tmp_path: Path) -> None:
    """Eight blocks hold three prompts and no more: of two sides, one has to let somebody go."""
    roomy, small = tmp_path / "roomy.json.gz", CONFIG._replace(num_gpu_blocks=11, max_model_len=200)
    taken(roomy, steps_of(10.0), CONFIG._replace(max_model_len=200))
    decisions = compared(roomy, steps_of(10.0), small)
    assert decisions.parting is not None
    assert decisions.parting.why.startswith("the recording scheduled r2, which the simulation had preempted")


def test_a_recording_that_is_longer_or_shorter(path: Path) -> None:
    count = len(read_steps(path).num_tokens)
    shorter, longer = (load(outputs=(20, last, 6)) for last in (19, 21))
    parting = compared(path, steps_of(10.0), batch=shorter).parting
    assert parting is not None and (parting.step, parting.why) == (count - 1, "the simulation has ended")
    parting = compared(path, steps_of(10.0), batch=longer).parting
    assert parting is not None and (parting.step, parting.why) == (count, "the simulation has a step more")


def test_both_sides_of_the_same_run_are_alike(path: Path) -> None:
    recorded = read_recorded(path)
    chunks: list[dict[str, Any]] = []
    totals = simulate(iter([load()]), CONFIG, steps_of(10.0), on_records=chunks.append)
    records = in_order(chunks)
    side = measured_side(recorded.requests, "engine")
    for name, stamp in (("ttft_ms", "first_token_time"), ("e2el_ms", "finish_time")):
        expected = 1e3 * (records[stamp] - records["ready_time"])
        np.testing.assert_allclose(getattr(side, name), expected, atol=2e-3)
    assert side.num_cached_tokens.tolist() == records["num_cached_tokens"].tolist()

    end = float(records["finish_time"].max())
    measured = measured_curves(recorded, end)
    simulated = simulated_curves(time_series(totals.samples, CONFIG.num_gpu_blocks - 1), 0.0, end)
    assert measured.running.max() == 3 and measured.waiting.max() == 0
    for name in ("running", "waiting", "kv_cache_usage_perc"):
        one, other = getattr(measured, name), getattr(simulated, name)
        assert abs(one.mean() - other.mean()) <= 0.03 * one.mean(), name
        assert np.mean(one != other) < 0.1, "only where a step begins, by a sample at most"


def test_an_idle_engine_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "recording.json.gz"
    taken(path, steps_of(10.0), batch=load()._replace(arrival_time=np.array([0.0, 5.0, 10.0])))
    curves = measured_curves(read_recorded(path), 10.0)
    for second, running in ((0.1, 1), (3.0, 0), (5.1, 1), (8.0, 0)):
        at = np.searchsorted(curves.time, second)
        assert curves.running[at] == running and curves.waiting[at] == 0
        assert (curves.kv_cache_usage_perc[at] > 0) == (running > 0)
