"""The library: a scenario run, swept, its curve and its plan, as pandas tables.

Each function does what the command of its name does and leaves no file. `from sim import run` and so
on; what is slow to load waits for the first call. Errors are ValueErrors of one line: InputError for
settings, WorkloadError for data in a workload's files.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import InputError
from sim.scenario import Scenario

if TYPE_CHECKING:
    import pandas as pd

YAML = (".yaml", ".yml")
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """A finished run.

    `summary` holds what `prefixsim run --format json` prints, by the keys of `vllm bench serve` and of
    vLLM's counters: finite numbers, None for a figure that is not defined, texts (`saturation`,
    `assumed`, `warnings`) and breakdowns (`token_fates`, `by_tenant`, `by_replica`). Names that end in
    `_ms` are milliseconds, other times seconds, throughputs are per second, shares are of 1.

    `requests` has a row a request, in the order of finishing: `arrival_time`, `ready_time` (hashed and
    queued), `scheduled_time`, `first_token_time` and `finish_time` in seconds; `prompt_len`,
    `output_len`, `num_cached_tokens`, `prefix_cache_queries` and `prefix_cache_hits` in tokens;
    `front_end_time_ms`, `queue_time_ms` and `prefill_time_ms`, which add up to `ttft_ms`; `tpot_ms`,
    `itl_mean_ms`, `e2el_ms`; who it was (`request_id`, `session_id`, `tenant`, `prefix_group`,
    `replica`, -1 where there is none) and what befell it (`num_preemptions`, `num_evictions`,
    `refused`). Where prefixes are looked up, six columns `fate_*` in tokens add up to `prompt_len`, and
    `prefix_cache_evicted` are tokens that a pool that never evicts would have hit besides.
    NaN: a time that never came. Requests before `measure_from` are left out.

    `timeseries` has a row a sample at even intervals: `time` in seconds; `num_requests_running`,
    `num_requests_waiting` and `kv_cache_usage_perc` (a share of 1) at that instant; all others counts
    since the start of the run.

    `report` is what `prefixsim run` prints. docs/metrics.md defines each figure in symbols.
    """

    scenario: Scenario
    summary: dict[str, Any]
    requests: pd.DataFrame
    timeseries: pd.DataFrame
    report: str

    @property
    def fates(self) -> pd.Series[int]:
        """Prompt tokens of all requests by their fate; empty where no prefix was looked up."""
        import pandas as pd

        return pd.Series(self.summary["token_fates"] or {}, dtype="int64", name="tokens")

    def __repr__(self) -> str:
        s = self.summary
        caching = s["token_fates"] is not None
        hits = f"hit rate {100 * s['prefix_cache_hit_rate']:.2f} %" if caching else "no prefix caching"
        ttft = f"mean TTFT {s['mean_ttft_ms']:.2f} ms"
        return f"<Run {s['name']}: {s['completed']} requests, {hits}, {ttft}, {s['saturation']}>"


def run(scenario: Scenario) -> Run:
    """Simulate a scenario, as `prefixsim run` does; the same scenario gives the same bits.

    >>> from sim import Scenario, run
    >>> found = run(Scenario(workload={"kind": "fourteen_tokens"}, engine={"block_size": 4}))
    >>> found.requests[["prompt_len", "num_cached_tokens"]].values.tolist()
    [[14, 0], [14, 8]]
    >>> found.fates["partial_block"]
    np.int64(2)

    Raises InputError if the scenario has no numbers or no request can run, WorkloadError for bad data
    in the workload's files.
    """
    import pandas as pd

    from sim.report import lines
    from sim.simulation import run as simulate

    result = simulate(scenario)
    summary, records = result.summary, result.records
    try:
        requests = pd.DataFrame({name: records.column(name) for name in records.names})
        report = "\n".join(text for _, text in lines(result))
    finally:
        records.discard()
    return Run(scenario, summary, requests, pd.DataFrame(result.timeseries), report)


def sweep(
    base: Scenario | StrPath,
    axes: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    *,
    zip: Sequence[Sequence[str]] = (),
    seeds: int | Sequence[int] = 5,
    metrics: Sequence[str] | None = None,
    jobs: int | None = None,
) -> pd.DataFrame:
    """Run a scenario at every point of a grid with several seeds, as `prefixsim sweep` does.

    base: a scenario, with `axes`; or the path of a sweep's YAML file, which says all but `jobs`.
    axes: by field, as "engine.block_size": a list of values, or {"range": [first, last, step]}, or
        {"log_range": [first, last, number]}; all are crossed, but for those that `zip` lists together.
    seeds: how many, from the scenario's own on, or which.
    metrics: keys of `Run.summary`, as "token_fates.evicted"; None: the hit rate, mean and P95 TTFT.
    jobs: processes; None: one for each processor.

    Returns a row a run, seeds fastest, the last axis next: `point`, the axes, `seed`, the metrics,
    `saturation`, `completed`, `failed` and `error`, empty but for a run that failed. Raises InputError,
    before the first run, for what is no field, no value or no metric.

    >>> from sim import Scenario, sweep
    >>> tiny = Scenario(workload={"kind": "fourteen_tokens"})
    >>> found = sweep(tiny, {"engine.block_size": [2, 4]}, seeds=1, metrics=["prefix_cache_hits"], jobs=1)
    >>> found[["engine.block_size", "prefix_cache_hits"]].values.tolist()
    [[2, 10], [4, 8]]
    """
    from sim.sweeps.execute import run_sweep
    from sim.sweeps.frame import to_frame
    from sim.sweeps.processes import on_processes
    from sim.sweeps.schema import METRICS, load_sweep, plan_of

    if isinstance(base, Scenario):
        data = {
            "name": "sweep",
            "base": base.model_dump(mode="python"),
            "axes": {path: _values(written) for path, written in (axes or {}).items()},
            "zip": [list(paths) for paths in zip],
            "seeds": seeds if isinstance(seeds, int) else _values(seeds),
            "metrics": METRICS if metrics is None else list(metrics),
        }
        planned = plan_of(data, Path("sweep"), large=True)
    elif axes is None:
        planned = load_sweep(Path(base), large=True)
    else:
        raise InputError(f"{base}: a sweep's file has its axes; with others give Scenario.load of one")
    with tempfile.TemporaryDirectory(prefix="prefixsim-") as folder:
        results = run_sweep(planned, Path(folder), functools.partial(on_processes, jobs=jobs))
    return to_frame(results)


def mrc(
    load: Scenario | StrPath,
    block_sizes: Sequence[int] = (),
    *,
    at: Sequence[int] = (),
    outputs: bool = False,
) -> pd.DataFrame:
    """The hit rate at every pool capacity from one pass over the requests, as `prefixsim mrc` does.

    load: a scenario, or the path of a trace's file.
    block_sizes: tokens in a block; none: the scenario's, of a trace what its ids stand for, else 16.
    at: capacities in blocks: only there, with FIFO and Belady, who knows the future, for scale.
    outputs: whether answers stay in the cache too.

    Returns a row for each block size and capacity at which the curve changes: `block_size`, `blocks`
    (usable ones: `num_gpu_blocks` less the null block), `tokens`, `gib` on each GPU where the model is
    known, `hit_tokens` and `hit_rate` (of all prompt tokens, a share of 1). `attrs["curves"]` has by
    block size the `ceiling`, the `knee` (the fewest blocks with 99 % of its hits), `distinct_blocks`,
    `working_set` (blocks, by seconds), the scenario's own `pool`, and what is `assumed`. The curve is
    of block LRU, requests served one after the other. Raises InputError for what cannot be counted,
    WorkloadError for bad data.

    >>> from sim import Scenario, mrc
    >>> curve = mrc(Scenario(workload={"kind": "fourteen_tokens"}), [4])
    >>> curve[["blocks", "hit_tokens"]].values.tolist()
    [[0, 0], [1, 4], [2, 8]]
    >>> round(curve.attrs["curves"][4]["ceiling"], 3)
    0.286
    """
    import pandas as pd

    from sim.curves.report import asked_for, figures, whole_curve
    from sim.curves.study import study
    from sim.curves.subject import check, of_scenario, of_trace
    from workloads import Trace

    sizes = _values(block_sizes)
    if isinstance(load, Scenario):
        check(load, load.name)
        what, asked, scale = of_scenario(load, sizes)
    elif str(load).endswith(YAML):
        raise InputError(f"{load}: is no trace; give Scenario.load of a scenario")
    else:
        what, asked, scale = of_trace(Trace(path=str(load)), str(load), sizes)
    studies = study(what._replace(outputs=outputs), asked._replace(at=_values(at)))
    rows_of = asked_for if at else whole_curve
    tables = [rows_of(one, scale).assign(block_size=one.curve.block_size) for one in studies]
    found = pd.concat(tables, ignore_index=True)
    found.insert(0, "block_size", found.pop("block_size"))
    found.attrs["curves"] = {one.curve.block_size: figures(one, scale) for one in studies}
    return found


def plan(
    scenario: Scenario,
    *promises: str,
    vary: Sequence[str] = (),
    seeds: int = 3,
    price: float | None = None,
    jobs: int | None = None,
) -> pd.DataFrame:
    """Search for what keeps a promise on latency, as `prefixsim plan` does.

    promises: as "ttft_p95=2s", "tpot_mean=50ms", "good=0.95"; each seed of a point must keep all.
    vary: "cluster.replicas=1..16" seeks the smallest that keeps them, "engine.block_size=16,64" tries
        each; without a range, the highest rate is sought.
    seeds: runs at each point, from the scenario's seed on.
    price: of an hour of one GPU; adds `output_cost` and `total_cost` of a million tokens.
    jobs: processes; None: one for each processor.

    Returns a row for each combination of the lists, the best first: its values, `kept`, `gpus`, the
    worst seed's figure of each promise (ms), the means over seeds of `prefix_cache_hit_rate`,
    `request_throughput` and `output_throughput`, `limited_by` (what gives way next: sequences, kv,
    compute or slo) and `why`, and `overrides`: `scenario.changed(*overrides)` is the answer. Where
    nothing keeps the promise, `kept` is False and the row is the nearest miss. `attrs` has `sought`,
    `num_runs`, `warnings` and `assumed`. Raises InputError for what is no promise and no scenario.

    >>> from sim import Scenario, plan
    >>> load = {"kind": "scan", "prompt_len": 512, "output_len": 2, "request_rate": 4, "num_requests": 30}
    >>> slow = {"base_us": 100_000.0}
    >>> found = plan(Scenario(workload=load, cost=slow), "ttft_p95=1s", seeds=1, jobs=1)
    >>> found[["kept", "limited_by"]].values.tolist()
    [[True, 'compute']]
    """
    from sim.planning.cost import check_price
    from sim.planning.evaluate import Bench
    from sim.planning.frame import to_frame
    from sim.planning.objective import parse_limits
    from sim.planning.vary import parse_vary
    from sim.planning.winners import make_plan
    from sim.scenario_file import draft_of
    from sim.sweeps.processes import on_processes

    check_price(price)
    limits, varied = parse_limits(promises), parse_vary(vary)
    numbers = tuple(range(scenario.seed, scenario.seed + seeds))
    everywhere = functools.partial(on_processes, jobs=jobs)
    bench = Bench(draft_of(scenario), (), limits, numbers, everywhere, {}, lambda one: None)
    return to_frame(make_plan(bench, varied), bench, price)


def _values(written: Any) -> Any:
    """Values as a file would have them: lists, and Python's own numbers."""
    if isinstance(written, Mapping):
        return dict(written)
    return [one.item() if isinstance(one, np.generic) else one for one in written]
