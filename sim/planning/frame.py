"""A plan as a pandas DataFrame."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sim.planning.cost import cost
from sim.planning.evaluate import Bench
from sim.planning.report import key_of, to_object, worst
from sim.planning.winners import Plan, Winner
from sim.yaml_lines import parse

MEANS = ("prefix_cache_hit_rate", "request_throughput", "output_throughput")
OF_ALL = ("sought", "promise", "seeds", "num_points", "num_runs", "warnings", "assumed")


def to_frame(plan: Plan, bench: Bench, price: float | None) -> pd.DataFrame:
    """A row a choice, the best first, of its answer or else its nearest miss; attrs say OF_ALL."""
    found = pd.DataFrame([_row(winner, bench, price) for winner in plan.winners])
    told = to_object(plan, bench, price)
    found.attrs.update({name: told[name] for name in OF_ALL})
    return found


def _row(winner: Winner, bench: Bench, price: float | None) -> dict[str, Any]:
    shown = winner.best or winner.broken
    assert shown is not None
    ran = all(run.figures for run in shown.runs)
    row = {path: _plain(value) for path, value in shown.point.values}
    row |= {"kept": winner.best is not None, "gpus": winner.gpus}
    row |= {key_of(limit.name): worst(shown, limit.name) if ran else None for limit in bench.limits}
    for name in MEANS:
        known = ran and all(run.figures[name] is not None for run in shown.runs)
        row[name] = shown.mean(name) if known else None
    if price is not None:
        paid = cost(shown, price, winner.gpus) if winner.best is not None else None
        row |= {"output_cost": paid and paid.output, "total_cost": paid and paid.total}
    limiting = winner.limiting
    row |= {"limited_by": limiting and limiting.by, "why": limiting and limiting.text}
    return row | {"overrides": list(shown.point.overrides)}


def _plain(value: Any) -> Any:
    """A value of a list, which is text, as YAML reads it; what is a mapping stays text."""
    read = parse(f"value: {value}", "", {})["value"] if isinstance(value, str) else value
    return value if isinstance(read, dict | list) else read
