"""What a run says: the console block, the JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sim.cache_figures import own_figures
from sim.cache_kinds import APC
from sim.metrics import HIT_RATE_DEFINITION, QUANTILES

if TYPE_CHECKING:
    from rich.console import Console

    from sim.simulation import Result

WIDTH = 64
LABEL = 42
SHOWN_TENANTS = 20  # on the console
HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
PART_NAMES = {"front_end_time": "Front end", "queue_time": "Queueing", "prefill_time": "Prefill"}
DURATION_NAMES = {
    "kv_block_lifetime_seconds": "Their lifetime",
    "kv_block_idle_before_evict_seconds": "Idle before eviction",
    "kv_block_reuse_gap_seconds": "Gap between two hits",
}
FATE_MEANINGS = {
    "hit": "found in the cache",
    "evicted": "was in the cache, lost",
    "last_token": "in a last block that is always computed",
    "partial_block": "computed before, not in a full block",
    "isolated": "only under another LoRA or salt",
    "cold": "never computed before",
}
STATE_MEANINGS = {
    "token_states": "hold a token",
    "reserved": "will, of their request",
    "internal_fragmentation": "never will, of their request",
    "external_fragmentation": "cannot be given away",
    "free": "nobody asks for",
}
OF_REPLICAS = (  # what fates and ceiling mean with several of them
    "each at the replica its request went to: what only others hold is cold",
    "the ceiling: pools that never evict, one a replica, requests where they went",
)
_COLOURS = {"STABLE": "green", "BACKLOGGED": "yellow", "OVERLOADED": "red"}
VERDICTS = {
    "STABLE": "the engine kept up with its arrivals",
    "BACKLOGGED": "in the last third, queueing is more than half of TTFT",
    "OVERLOADED": "waiting work grew to the end: latencies depend on the length of the run",
}


def to_json(summary: dict[str, Any]) -> str:
    """The summary as JSON text in ASCII, the same bytes for the same summary."""
    return json.dumps(summary, indent=2, allow_nan=False) + "\n"


def lines(result: Result) -> Iterator[tuple[str, str]]:
    """The console block as (style, text) lines, headed as `vllm bench serve` heads its own."""
    s = result.summary
    scenario = result.resolved.scenario
    yield "bold", " Serving Benchmark Result ".center(WIDTH, "=")
    yield "", f"{s['name']}: {s['model']} on {s['gpu']}, {_setting(result)}"
    yield _line("Successful requests:", s["completed"])
    yield _line("Failed requests:", s["failed"])
    yield _line("Benchmark duration (s), simulated:", s["duration"])
    yield _line("Total input tokens:", s["total_input_tokens"])
    yield _line("Total generated tokens:", s["total_output_tokens"])
    if "num_sequences" in s:
        yield _line("Their sequences (n, beam_width):", s["num_sequences"])
        yield "dim", "  counts of the engine are of each sample; latencies, fates and rows are of requests"
    yield _line("Request throughput (req/s):", s["request_throughput"])
    if "request_goodput" in s:
        yield _line("Request goodput (req/s):", s["request_goodput"])
        limits = scenario.slo.model_dump(exclude_none=True) if scenario.slo else {}
        yield "dim", f"  within {', '.join(f'{name} {limit:g} ms' for name, limit in limits.items())}"
    yield _line("Output token throughput (tok/s):", s["output_throughput"])
    yield _line("Total token throughput (tok/s):", s["total_token_throughput"])
    yield _line("Peak concurrent requests:", s["max_concurrent_requests"])
    for name, heading in HEADINGS.items():
        yield _heading(heading)
        short = name.upper()
        yield _line(f"Mean {short} (ms):", s[f"mean_{name}_ms"])
        yield _line(f"Median {short} (ms):", s[f"median_{name}_ms"])
        for quantile in QUANTILES[1:]:
            yield _line(f"P{quantile} {short} (ms):", s[f"p{quantile}_{name}_ms"])
    yield from _warm_start_lines(s)
    yield from _warm_up_lines(result)
    yield from _ttft_lines(result)
    yield from _cache_lines(result)
    yield from _memory_lines(s)
    yield from _fate_lines(result)
    yield from _tenant_lines(s["by_tenant"], s["num_evictions"])
    yield from _replica_lines(s, scenario.cluster.router)
    yield _heading("Load")
    verdict = s["saturation"]
    yield f"bold {_COLOURS[verdict]}", f"{verdict}: {VERDICTS[verdict]}"
    if (users := scenario.workload.concurrency) is not None:
        yield "dim", f"  closed loop: {users} users set the pace; all send their first request at time 0"
    yield _line("Queueing share of TTFT, last third:", s["queueing_share"])
    yield _line("Completed within the arrival span:", s["completion_ratio"])
    yield _line("Engine steps:", s["num_steps"])
    yield _line(
        "Mean / peak running requests:", s["mean_num_requests_running"], s["max_num_requests_running"]
    )
    yield from _recording_lines(s)
    yield _heading("Step time")
    yield "", f"Calibration: {s['calibration']}"
    if "steps_as_recorded" in s:
        yield _line("Steps as recorded / all:", s["steps_as_recorded"], s["num_steps"])
    if s["calibration_mape"]:
        off = ", ".join(f"{name} {mape:g}" for name, mape in s["calibration_mape"].items())
        yield "dim", f"its fits are off by, mean %: {off}"
    yield "dim", "how far simulated servers were from measured ones: results/validation.md"
    for text in s["assumed"]:
        yield "dim", f"assumed: {text}"
    yield "bold", "=" * WIDTH
    for text in s["warnings"]:
        yield "yellow", f"warning: {text}"


def _recording_lines(s: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Which settings are those of the recorded server, and which are not; nothing without one."""
    if (server := s.get("recording")) is None:
        return
    yield _heading("Recorded server")
    yield "", f"Requests of {server['path']}"
    same = ", ".join(f"{field} {value}" for field, value in server["as_recorded"].items())
    yield "dim", f"as recorded: {same}"
    for field, values in server["changed"].items():
        yield "", f"changed: {field} {values['here']}, recorded {values['recorded']}"


def _warm_start_lines(s: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Which cache the run began with, and what came of it; nothing for a cold one."""
    if (warm := s.get("warm_start")) is None:
        return
    yield _heading("Warm Start")
    if "primed_with" in warm:
        yield _line("Requests that primed the cache / refused:", warm["requests"], warm["failed"])
        yield _line("Their tokens, input / generated:", warm["input_tokens"], warm["output_tokens"])
        yield _line("Their hit rate (%):", _percent(warm["prime_hit_rate"]))
        yield _line("Duration of priming (s), simulated:", warm["duration"])
    else:
        yield "", f"Cache loaded from {warm['loaded_from']}"
    yield _line("Blocks cached at the start:", warm["blocks_cached"])
    yield _line("Prompt tokens hit in them:", warm["hit_tokens"])
    yield _line("Their share of all hits (%):", _percent(warm["share_of_hits"]))
    yield "dim", f"  in common with the requests before: {warm['in_common']}"
    yield "dim", "  all other figures are of the requests that found this cache"


def _warm_up_lines(result: Result) -> Iterator[tuple[str, str]]:
    """What `measure_from` leaves out, and what it changes; nothing where nobody asked."""
    s = result.summary
    if "measure_from" not in s:
        return
    yield _heading("Warm-up")
    yield _line("Measured from (s), simulated:", s["measure_from"])
    yield _line("Requests left out, having arrived before:", s["num_requests_left_out"])
    if result.resolved.config.enable_prefix_caching:
        both = s["prefix_cache_hit_rate"], s["prefix_cache_hit_rate_with_warm_up"]
        yield _line("Hit rate without / with them (%):", *map(_percent, both))
    yield "dim", "  counts of the engine are from then on; its peaks are the whole run's"


def _ttft_lines(result: Result) -> Iterator[tuple[str, str]]:
    s = result.summary
    yield _heading("Parts of TTFT")
    for name, part in PART_NAMES.items():
        values = (s[f"{figure}_{name}_ms"] for figure in ("mean", "median", "p99"))
        yield _line(f"{part}, mean / median / P99 (ms):", *values)
    hashing = "no hashing charged"
    if result.resolved.config.enable_prefix_caching and s["hash_us_per_block"] > 0:
        hashing = f"{s['prefix_caching_hash_algo']} {s['hash_us_per_block']:.2f} us a block"
    yield "dim", f"  front end: one thread, in order of arrival; {hashing}"


def _cache_lines(result: Result) -> Iterator[tuple[str, str]]:
    s = result.summary
    yield _heading("Prefix Cache")
    if result.resolved.config.enable_prefix_caching:
        yield _line("Hit rate (%):", _percent(s["prefix_cache_hit_rate"]))
        for text in HIT_RATE_DEFINITION:
            yield "dim", f"  {text}"
        each = "pools that never evict" if s["num_replicas"] > 1 else "a pool that never evicts"
        yield _line(f"Ceiling, {each} (%):", _percent(s["prefix_cache_ceiling"]))
        yield _line("Prompt tokens hit:", s["prefix_cache_hits"])
        yield _line("Prompt tokens looked up:", s["prefix_cache_queries"])
    elif result.resolved.scenario.cache.looks_up:
        yield "", "off: enable_prefix_caching is false"
    else:
        yield "", f"none: cache {result.resolved.scenario.cache.kind} looks nothing up"
        if s["prefix_cache_hits"]:
            yield _line("Hit rate in reserved prefixes (%):", _percent(s["prefix_cache_hit_rate"]))
            yield _line("Prompt tokens hit there:", s["prefix_cache_hits"])
    yield _line("Tokens computed, all:", s["num_computed_tokens"])
    yield _line("Evicted blocks:", s["num_evictions"])
    for name, text in DURATION_NAMES.items():
        if (durations := s[name]) is not None:
            yield _line(f"{text}, P50 / P99 (s):", durations["p50"], durations["p99"])
    if "prefix_cache_resets" in s:
        yield _line("Resets, done / asked for:", s["prefix_cache_resets"], s["prefix_cache_resets_asked"])
    for label, value in own_figures(result.resolved.scenario.cache, s):
        yield _line(f"{label}:", value)
    yield _line("Preemptions:", s["num_preemptions"])
    yield _line("Re-admissions:", s["num_readmissions"])
    yield _line("Re-admissions: tokens hit / looked up:", s["preempted_hits"], s["preempted_queries"])
    yield _line("Block size (tokens):", s["block_size"])
    pool = s["num_gpu_blocks"]
    each = " of each" if s["num_replicas"] > 1 else ""
    yield _line(f"KV pool{each} (blocks / tokens):", pool, pool * s["block_size"])
    if result.resolved.kv_bytes_per_token is not None:
        gib = pool * s["block_size"] * result.resolved.kv_bytes_per_token / 2**30
        yield _line("KV pool (GiB per GPU):", gib)
    yield _line(
        "KV usage, mean / peak (%):",
        _percent(s["mean_kv_cache_usage_perc"]),
        _percent(s["max_kv_cache_usage_perc"]),
    )


def _memory_lines(s: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Shares of the KV memory by what it holds; nothing where no step ran."""
    if (mean := s["kv_memory_shares"]) is None:
        return
    fullest = s["kv_memory_shares_when_fullest"]
    yield _heading("KV Memory, Mean over Busy Time / Fullest Step (%)")
    for name, meaning in STATE_MEANINGS.items():
        yield "", f"{name:<24}{100 * mean[name]:>8.2f}{100 * fullest[name]:>8.2f}  {meaning}"


def _fate_lines(result: Result) -> Iterator[tuple[str, str]]:
    """Where the prompt tokens went, each of them once; nothing where nobody asked."""
    fates = result.summary["token_fates"]
    if fates is None:
        return
    yield _heading("Prompt Tokens by Fate")
    total = sum(fates.values())
    for name, meaning in FATE_MEANINGS.items():
        share = f"{100 * fates[name] / total:6.2f} %" if total else "-"
        yield "", f"{name:<15}{fates[name]:>16}  {share}  {meaning}"
    if result.summary["num_replicas"] > 1:
        for text in OF_REPLICAS:
            yield "dim", f"  {text}"
    if result.resolved.scenario.workload.kind == "trace":
        yield "dim", "  sharing below a trace's own block is unknown: it counts as cold"


def _tenant_lines(rows: list[dict[str, Any]], num_evictions: int) -> Iterator[tuple[str, str]]:
    """The SHOWN_TENANTS largest tenants, a line each; nothing where there are none.

    The last two figures are shares of all evictions: those that a tenant's requests made, and those
    of blocks that were its own.
    """
    if not rows:
        return
    yield _heading("Tenants")
    yield "dim", f"{'':<14}{'requests':>8} {'hit %':>6}  {'mean, P95 TTFT ms':^20}  {'evicts, evicted %':>10}"
    for row in rows[:SHOWN_TENANTS]:
        caused, suffered = (row[f"num_evictions_{side}"] for side in ("caused", "suffered"))
        rate, mean, p95, caused, suffered = map(
            _number,
            (
                _percent(row["prefix_cache_hit_rate"]),
                row["mean_ttft_ms"],
                row["p95_ttft_ms"],
                _percent(caused / num_evictions if num_evictions else None),
                _percent(suffered / num_evictions if num_evictions else None),
            ),
        )
        figures = f"{row['requests']:>8}{rate:>7}{mean:>11}{p95:>11}{caused:>9}{suffered:>9}"
        yield "", f"{row['tenant'][:13]:<14}{figures}"
    if len(rows) > SHOWN_TENANTS:
        yield "dim", f"  and {len(rows) - SHOWN_TENANTS} smaller ones: by_tenant in the summary"


def _replica_lines(s: dict[str, Any], router: str) -> Iterator[tuple[str, str]]:
    """The first SHOWN_TENANTS replicas, a line each, and how even they are; nothing for a lone engine."""
    rows = s["by_replica"]
    if not rows:
        return
    yield _heading("Replicas")
    yield "", f"{len(rows)} replicas, {router.replace('_', ' ')}; engine figures above are sums over them"
    yield "dim", f"{'':<8}{'requests':>12}{'hit %':>9}{'TTFT ms: mean':>15}{'P95':>10}{'busy s':>10}"
    for row in rows[:SHOWN_TENANTS]:
        figures = row["prefix_cache_hit_rate"], row["mean_ttft_ms"], row["p95_ttft_ms"], row["busy_time"]
        rate, mean, p95, busy = map(_number, (_percent(figures[0]), *figures[1:]))
        yield "", f"{row['replica']:<8}{row['requests']:>12}{rate:>9}{mean:>15}{p95:>10}{busy:>10}"
    if len(rows) > SHOWN_TENANTS:
        yield "dim", f"  and {len(rows) - SHOWN_TENANTS} more: by_replica in the summary"
    even = s["imbalance"]
    most = (even["requests"], even["num_computed_tokens"], even["busy_time"])
    yield _line("Most over mean: requests / tokens / time", *most)


def _setting(result: Result) -> str:
    """What tells this run from its neighbours, in a few words."""
    engine = result.resolved.scenario.engine
    replicas = result.resolved.scenario.cluster.replicas
    words = [f"{replicas} replicas"] if replicas > 1 else []
    words += [f"tp {engine.tensor_parallel_size}", f"blocks of {engine.block_size}"]
    cache = result.resolved.scenario.cache
    if cache != APC:
        default = type(cache)()
        options = ", ".join(f"{name} {value}" for name, value in cache if value != getattr(default, name))
        words.append(f"cache {cache.kind}" + (f" ({options})" if options else ""))
    if cache.looks_up:
        words.append("prefix caching " + ("on" if engine.enable_prefix_caching else "off"))
    words.append("async" if engine.async_scheduling else "sync")
    return ", ".join(words)


def show(result: Result, console: Console) -> None:
    """Print the console block."""
    print_lines(lines(result), console)


def print_lines(styled: Iterable[tuple[str, str]], console: Console) -> None:
    """Print (style, text) lines as they are, however wide the terminal."""
    for style, text in styled:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _heading(text: str) -> tuple[str, str]:
    return "cyan", text.center(WIDTH, "-")


def _line(label: str, *values: float | None) -> tuple[str, str]:
    return "", f"{label:<{LABEL}}{' / '.join(map(_number, values))}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100.0 * value
