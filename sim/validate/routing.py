"""Routing by cache against routing at random, as llm-d measured it on 16 H100s, and as simulated.

The measured figures are those of llm-d's blog of 2025-09-24 and of the report behind it,
benchmarking/73-capacity of llm-d-kv-cache (Apache-2.0). scenarios/routing.yaml is that load.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sim.plots import BLUE, GREY, ORANGE, drawn
from sim.request import Floats
from sim.scenario import Scenario
from sim.scenario_file import load
from sim.simulation import run
from sim.validate.section import Check, Section, skipped, table

TITLE = "Routing on eight replicas"
SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "routing.yaml"
COMMAND = "prefixsim run scenarios/routing.yaml --compare cluster.router=random,kv_aware,prefix_affinity"
ROUTERS = ("random", "kv_aware", "prefix_affinity")
BAR = "routing by cache, mean TTFT better than at random"
LEAST_GAIN = 10.0  # times
# Mean TTFT in seconds at each rate in requests a second: at random, by precise prefix-cache scheduling.
MEASURED_TTFT = {
    3: (0.622, 0.291), 10: (0.826, 0.335), 15: (1.278, 0.249), 20: (25.073, 0.363),
    22: (28.185, 0.300), 25: (30.689, 0.303), 30: (32.212, 0.296), 35: (34.043, 0.275),
    40: (54.196, 0.269), 43: (53.247, 0.281), 46: (53.572, 0.293), 49: (56.130, 0.311),
    52: (56.035, 0.288), 55: (54.844, 0.308), 57: (56.803, 0.319), 60: (57.426, 0.283),
}  # fmt: skip


class Figures(NamedTuple):
    """Of a router over all stages: TTFT in seconds, and the mean of the stages' output tokens a second."""

    mean_ttft: float
    p90_ttft: float
    output_throughput: float


MEASURED = {
    "random-scheduling": Figures(45.281, 92.551, 4428.7),
    "precise-scheduling": Figures(0.298, 0.542, 8730.0),
}


class Routed(NamedTuple):
    """A router's run: over all stages, and the mean TTFT of each, in seconds."""

    figures: Figures
    stage_ttft: Floats


def route(router: str) -> Routed:
    """Run the scenario with a router."""
    scenario = load(SCENARIO, [f"cluster.router={router}"])
    starts = stage_starts(scenario)
    result = run(scenario)
    names = ("arrival_time", "finish_time", "output_len", "ttft_ms")
    arrival, finish, tokens, ttft = (result.records.column(name) for name in names)
    result.records.discard()
    ttft = ttft / 1e3
    stage = np.searchsorted(starts, arrival, side="right") - 1
    num_stages = len(starts)
    last = np.zeros(num_stages)
    np.maximum.at(last, stage, finish)
    throughput = np.bincount(stage, tokens, num_stages) / (last - starts)
    means = np.bincount(stage, ttft, num_stages) / np.bincount(stage, minlength=num_stages)
    over_all = (ttft.mean(), np.percentile(ttft, 90), throughput.mean())
    return Routed(Figures(*map(float, over_all)), means)


def stage_starts(scenario: Scenario) -> Floats:
    """When each measured stage begins, seconds: those of the schedule with arrivals, but the warm-up."""
    schedule, begin = scenario.workload.schedule, scenario.measure_from  # type: ignore[union-attr]
    assert schedule is not None and begin is not None
    stages = [(start, rate) for start, rate in schedule if start >= begin and rate > 0]
    assert [rate for _, rate in stages] == list(MEASURED_TTFT), "the scenario has the measured rates"
    return np.array([start for start, _ in stages])


def section() -> Section:
    """Measured and simulated side by side."""
    if not SCENARIO.is_file():
        return skipped(TITLE, [BAR], "no scenarios/routing.yaml beside the package")
    routed = {router: route(router) for router in ROUTERS}
    gain = routed["random"].figures.mean_ttft / routed["kv_aware"].figures.mean_ttft
    check = Check(BAR, f"{gain:.0f} x", f">= {LEAST_GAIN:g} x (measured: 152)", gain >= LEAST_GAIN)
    figures = [("measured", name, one) for name, one in MEASURED.items()]
    figures += [("simulated", name, one.figures) for name, one in routed.items()]
    over_all = [
        (how, name, f"{one.mean_ttft:.3f}", f"{one.p90_ttft:.3f}", f"{one.output_throughput:,.0f}")
        for how, name, one in figures
    ]
    stages = [
        (rate, *(f"{value:.2f}" for value in (*measured, *(one.stage_ttft[i] for one in routed.values()))))
        for i, (rate, measured) in enumerate(MEASURED_TTFT.items())
    ]
    lines = [
        "150 customers, each with a context of 6,000 tokens and five questions of 1,200, on 8 vLLM pods of "
        "two H100 with Qwen3-32B and a KV cache of 307,328 tokens each: llm-d's measurement "
        "([blog](https://llm-d.ai/blog/kvcache-wins-you-can-see), "
        "[report](https://github.com/llm-d/llm-d-kv-cache/tree/main/benchmarking/73-capacity)), a warm-up "
        f"and 16 stages of 3 to 60 requests a second. Simulated by `{COMMAND}`.",
        "",
        "**Assumed**: answers of 400 tokens, of five lengths tried (300 to 1,000) the one with which "
        "`prefix_affinity` has the throughput measured by cache, so that one checks nothing. "
        "The load generator was told 1,000; its report speaks of 200 to 230 tokens of a running request. "
        "Also pauses of 120 s between stages, in which all work ends (they waited for it); questions drawn "
        "instead of taken in turn; vLLM's max_num_seqs of 256 and max_num_batched_tokens of 8192. Nothing "
        "stands for the network, the gateway or the server's own time a request.",
        "",
        "`kv_aware` scores with the weights of llm-d's precise scheduling; that an overlap counts as its "
        "share of the prompt is **assumed**. `prefix_affinity` knows no cache: it sends equal beginnings to "
        "one replica within its share of the load.",
        "",
        *table(["", "router", "mean TTFT, s", "P90 TTFT, s", "output tokens a second"], over_all),
        "",
        "Mean TTFT by stage, seconds:",
        "",
        *table(
            ["requests a second", "measured, random", "measured, precise", *(f"`{one}`" for one in routed)],
            stages,
        ),
    ]
    return Section(TITLE, [check], lines, {"routing.png": lambda path: draw(routed, path)})


def draw(routed: dict[str, Routed], path: Path) -> None:
    """Mean TTFT over the rate, measured and simulated."""
    rates = list(MEASURED_TTFT)
    measured = np.array(list(MEASURED_TTFT.values()))
    colours = {"random": ORANGE, "kv_aware": BLUE, "prefix_affinity": GREY}
    with drawn(path, (7.0, 4.4)) as figure:
        axes = figure.subplots()
        axes.plot(rates, measured[:, 0], "o--", color=ORANGE, ms=4.0, label="random, measured")
        axes.plot(rates, measured[:, 1], "o--", color=BLUE, ms=4.0, label="precise, measured")
        for router, one in routed.items():
            axes.plot(rates, one.stage_ttft, color=colours[router], label=f"{router}, simulated")
        axes.set(yscale="log", title="Time to first token by rate")
        axes.set(xlabel="requests a second", ylabel="mean, s")
        figure.legend(loc="outside right center")
