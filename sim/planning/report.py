"""What a plan leaves: the console table, the JSON object, plan.csv, and each winner as a scenario."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.compare import folder_names
from sim.planning.cost import cost
from sim.planning.evaluate import Bench, Evaluation, Point, Run, shown
from sim.planning.objective import GOOD, KEYS
from sim.planning.winners import Plan, Winner
from sim.report import to_json
from sim.scenario_file import to_yaml

WIDTH = 64
CELL = 13  # columns between two figures of the table
RULE = "kept by a point if each of its seeds keeps it; an OVERLOADED run never does, a BACKLOGGED one may"
CSV_FIGURES = (
    "saturation", "prefix_cache_hit_rate", "request_throughput", "output_throughput", "queueing_share",
    "max_kv_cache_usage_perc", "mean_num_requests_running", "max_num_requests_running", "num_preemptions",
    "num_evictions", "completed", "failed", "duration",
)  # fmt: skip


def lines(plan: Plan, bench: Bench, price: float | None) -> Iterator[tuple[str, str]]:
    """The console block as (style, text) lines."""
    scenario = plan.scenario
    yield "bold", " Plan ".center(WIDTH, "=")
    yield "", f"{scenario.name}: {scenario.model} on {scenario.gpu}, seeds {', '.join(map(str, bench.seeds))}"
    yield "", f"Sought: {plan.sought}"
    yield "", f"Promise: {', '.join(map(str, bench.limits))}"
    yield "dim", f"  {RULE}"
    yield from _table(plan, bench)
    best = plan.best
    if best is None:
        yield "bold red", "None of these keeps the promise."
        yield from _miss_lines(plan.winners[0])
    else:
        yield "cyan", "Best".center(WIDTH, "-")
        yield from _best_lines(best, bench, price)
    yield "bold", "=" * WIDTH
    for text in _assumed(plan):
        yield "dim", f"assumed: {text}"
    for text in _warnings(plan):
        yield "yellow", f"warning: {text}"


def to_object(plan: Plan, bench: Bench, price: float | None) -> dict[str, Any]:
    """What `--format json` prints, and plan.json holds: winners best first, `best` the first if it is one."""
    winners = [_winner_object(winner, bench, price) for winner in plan.winners]
    return {
        "name": plan.scenario.name,
        "sought": plan.sought,
        "promise": {limit.name: limit.text for limit in bench.limits},
        "kept_if": RULE,
        "seeds": list(bench.seeds),
        "price_per_gpu_hour": price,
        "best": winners[0] if plan.best is not None else None,
        "winners": winners,
        "num_points": len(plan.evaluations),
        "num_runs": sum(len(one.runs) for one in plan.evaluations),
        "warnings": _warnings(plan),
        "assumed": _assumed(plan),
    }


def to_csv(plan: Plan, bench: Bench) -> str:
    """One row a run, points in the order they were looked at: values, verdict, figures."""
    names = list(dict.fromkeys(name for one in plan.evaluations for name, _ in one.point.values))
    keys = [key_of(limit.name) for limit in bench.limits]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, "seed", "kept", "point_kept", "why", *keys, *CSV_FIGURES])
    for one in plan.evaluations:
        values = dict(one.point.values)
        for run in one.runs:
            figures = [run.figures.get(key) for key in (*keys, *CSV_FIGURES)]
            verdict = [_word(not run.broken), _word(one.kept), run.broken]
            writer.writerow([*(values.get(name) for name in names), run.seed, *verdict, *figures])
    return text.getvalue()


def write(plan: Plan, bench: Bench, price: float | None, folder: Path) -> None:
    """Write plan.csv, plan.json, winner.yaml for the best, and winner_….yaml for each choice that has one."""
    (folder / "plan.csv").write_text(to_csv(plan, bench), encoding="utf-8")
    (folder / "plan.json").write_text(to_json(to_object(plan, bench, price)), encoding="utf-8")
    kept = [winner for winner in plan.winners if winner.best is not None]
    texts = [to_yaml(bench.scenario(winner.best.point)) for winner in kept if winner.best is not None]
    choices = [",".join(f"{path.rpartition('.')[2]}={value}" for path, value in one.choice) for one in kept]
    if texts:
        (folder / "winner.yaml").write_text(texts[0], encoding="utf-8")
    if any(choices):
        for name, yaml in zip(folder_names("winner", choices), texts, strict=True):
            (folder / f"{name.replace('winner=', 'winner_')}.yaml").write_text(yaml, encoding="utf-8")


def command(bench: Bench, point: Point) -> str:
    """What runs a point, as a shell reads it; the figures are those of the first seed."""
    last = {override.partition("=")[0]: override for override in (*bench.overrides, *point.overrides)}
    sets = [part for override in last.values() for part in ("--set", override)]
    return shlex.join(["prefixsim", "run", bench.base.source, *sets])


def told(one: Evaluation) -> str:
    """A point in one line, for those who wait."""
    worst = one.worst
    verdict = "kept" if one.kept else f"broken: seed {worst.seed}: {worst.broken}"
    return f"{one.point}: {verdict}" + (f" ({worst.ratio:.0%} of the tightest limit)" if one.kept else "")


def _table(plan: Plan, bench: Bench) -> Iterator[tuple[str, str]]:
    """A line for each choice: its values, the worst seed's figures, what gives way next."""
    names = [name for name, _ in (plan.winners[0].best or plan.evaluations[0]).point.values]
    heads = (
        [name.rpartition(".")[2] for name in names]
        + [limit.name for limit in bench.limits]
        + ["hit %", "limited by"]
    )
    rows = [heads]
    for winner in plan.winners:
        if winner.best is not None:
            cells = [shown(value) for _, value in winner.best.point.values]
            cells += [limit.show(worst(winner.best, limit.name)) for limit in bench.limits]
            cells.append(f"{100 * winner.best.mean('prefix_cache_hit_rate'):.1f}")
        else:
            cells = [value for _, value in winner.choice]
            cells += ["none"] + ["-"] * (len(heads) - len(cells) - 2)
        cells.append(winner.limiting.by if winner.limiting is not None else "-")
        rows.append(cells)
    widths = [max(CELL, *(len(cell) + 2 for cell in column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        line = "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "" if i else "cyan", line


def _best_lines(winner: Winner, bench: Bench, price: float | None) -> Iterator[tuple[str, str]]:
    best = winner.best
    assert best is not None
    scenario = bench.scenario(best.point)
    yield "bold green", str(best.point)
    for limit in bench.limits:
        value = limit.show(worst(best, limit.name))
        yield "", f"{limit.name + ', worst seed:':<42}{value} of {limit.text}"
    loads = sorted({run.figures["saturation"] for run in best.runs})
    yield "", f"{'Load:':<42}{', '.join(loads)}"
    yield "", f"{'Request throughput (req/s):':<42}{best.mean('request_throughput'):.4g}"
    yield "", f"{'Hit rate / ceiling (%):':<42}{_percent(best)}"
    replicas, tp = scenario.cluster.replicas, scenario.engine.tensor_parallel_size
    yield "", f"{'GPUs:':<42}{winner.gpus} ({replicas} x tp {tp})"
    if price is not None:
        found = cost(best, price, winner.gpus)
        yield "", f"{'Cost of a million output / all tokens:':<42}{found.output:.4g} / {found.total:.4g}"
        yield "dim", f"  at {price:g} a GPU hour, throughput of whole runs"
    if winner.broken is not None and winner.limiting is not None:
        yield "", f"Breaks at {winner.broken.point}: {_why(winner.broken)}"
        yield "", f"Limited by {winner.limiting.by}: {winner.limiting.text}"
    yield "dim", f"run it: {command(bench, best.point)}"


def _miss_lines(winner: Winner) -> Iterator[tuple[str, str]]:
    assert winner.broken is not None and winner.limiting is not None
    yield "", f"Nearest: {winner.broken.point or 'the scenario'}: {_why(winner.broken)}"
    worst = winner.broken.worst
    if 1.0 < worst.ratio < math.inf:
        yield "", f"  {worst.ratio:.3g} times its limit"
    yield "", f"Limited by {winner.limiting.by}: {winner.limiting.text}"


def _assumed(plan: Plan) -> list[str]:
    """What the best, or the nearest miss, assumes and did not measure."""
    return list(_shown_run(plan).figures.get("assumed", ()))


def _warnings(plan: Plan) -> list[str]:
    """What to beware of: in every search, and in the run of the best."""
    searches = [
        f"{Point(winner.choice)}: {text}" if winner.choice else text
        for winner in plan.winners
        for text in winner.notes
    ]
    return [*searches, *_shown_run(plan).figures.get("warnings", ())]


def _shown_run(plan: Plan) -> Run:
    """The worst run of the best winner, or of its nearest miss."""
    first = plan.winners[0]
    shown_point = first.best or first.broken
    assert shown_point is not None
    return shown_point.worst


def _winner_object(winner: Winner, bench: Bench, price: float | None) -> dict[str, Any]:
    best = winner.best
    found: dict[str, Any] = {"choice": dict(winner.choice), "values": None, "runs": []}
    if best is not None:
        found |= {
            "values": dict(best.point.values),
            "runs": [_run_object(run, bench) for run in best.runs],
            "gpus": winner.gpus,
            "command": command(bench, best.point),
        }
        if price is not None:
            found["cost_per_million_tokens"] = cost(best, price, winner.gpus)._asdict()
    if winner.broken is not None:
        broken = winner.broken
        found["breaks_at" if best is not None else "nearest_miss"] = {
            "values": dict(broken.point.values),
            "why": _why(broken),
            "ratio": broken.worst.ratio if math.isfinite(broken.worst.ratio) else None,
            "runs": [_run_object(run, bench) for run in broken.runs],
        }
    if winner.limiting is not None:
        found["limited_by"] = winner.limiting._asdict()
    return found | {"notes": winner.notes}


def _run_object(run: Run, bench: Bench) -> dict[str, Any]:
    keys = [key_of(limit.name) for limit in bench.limits]
    figures = {key: run.figures[key] for key in (*keys, *CSV_FIGURES)} if run.figures else {}
    return {"seed": run.seed, "kept": not run.broken, "why": run.broken} | figures


def _why(one: Evaluation) -> str:
    return f"seed {one.worst.seed}: {one.worst.broken}"


def worst(one: Evaluation, name: str) -> float | None:
    values = [run.figures[key_of(name)] for run in one.runs if run.figures[key_of(name)] is not None]
    return (min if name == GOOD else max)(values, default=None)


def key_of(name: str) -> str:
    return "good_share" if name == GOOD else KEYS[name]


def _percent(best: Evaluation) -> str:
    if best.runs[0].figures["prefix_cache_ceiling"] is None:
        return "prefix caching is off"
    return " / ".join(
        f"{100 * best.mean(name):.2f}" for name in ("prefix_cache_hit_rate", "prefix_cache_ceiling")
    )


def _word(value: bool) -> str:
    return "yes" if value else "no"
