"""results/paper.md: what the paper published, what comes out here, and why it differs where it does."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.out_file import replace_text
from sim.pages import rendered
from sim.paper.engine_2023 import engine_2023
from sim.paper.figures import NAMES, figures
from sim.paper.published import ALPACA, NUM_SLOTS, PREFIX_RATIOS, SHAREGPT
from sim.paper.rates import DURATION, ratio
from sim.plots import drawn
from sim.validate.section import table

Row = dict[str, Any]
Tables = Mapping[str, Sequence[Row]]

COMMAND = "python -m sim.paper"
BOUND = 0.5  # seconds a token: where the bars are read
SLOTS = 983 * 16
SHARES = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation", "free")


def write(tables: Tables, page: Path) -> None:
    """Write the page, and tables and figures into the folder beside it of the same stem."""
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        replace_text(folder / f"{name}.csv", _csv(rows))
    for name, (draw, inches) in figures(tables).items():
        with drawn(folder / f"{name}.png", inches) as figure:
            draw(figure.subplots())
    replace_text(page, text(tables))


def text(tables: Tables) -> str:
    """The page itself."""
    rates = tables["prefix_rates"]
    return rendered(
        "paper.md",
        command=COMMAND,
        bars=_table(["figure", "published", "simulated", ""], _bars(tables)),
        slots=SLOTS,
        printed_slots=NUM_SLOTS,
        cpu=engine_2023().cpu,
        duration=DURATION,
        prefixes=[(n, published, _rates(rates, n)) for n, published in PREFIX_RATIOS.items()],
        ours={n: ratio(rates, n, BOUND) for n in PREFIX_RATIOS},
        alone={n: ratio(rates, n, BOUND, step_time="GPU alone") for n in PREFIX_RATIOS},
        cached={n: ratio(rates, n, BOUND, of="paged, prefix read at no cost") for n in PREFIX_RATIOS},
        memory=_memory(tables["memory"]),
        filled=_filled(tables["memory"]),
        sharing=_table(
            ["data", "way", "sequences", "saved %", "published %"],
            (
                [row["data"], row["way"], row["sequences"], f"{row['saved']:.1f}", row["published"] or "-"]
                for row in tables["sharing"]
            ),
        ),
        lineages=_lineages(tables),
        block_sizes=_block_sizes(tables["block_sizes"]),
    )


def _bars(tables: Tables) -> Iterator[list[str]]:
    """What is held against the paper: what, published, simulated, verdict."""
    for prefix_len, published in PREFIX_RATIOS.items():
        found = ratio(tables["prefix_rates"], prefix_len, BOUND)
        met = abs(found / published - 1) <= 0.15
        what = f"6.4: ratio of highest rates, {prefix_len} tokens, below {BOUND:g} s a token"
        yield [what, f"{published:.2f}", f"{found:.2f}", _verdict(met)]
    for row in tables["sharing"]:
        if row["published"] and row["sequences"] in (2, 6):
            met = abs(row["saved"] - row["published"]) <= 5.0
            what = f"6.3: blocks saved, {row['data']}, {row['way']}, {row['sequences']} sequences"
            yield [what, f"{row['published']:.1f} %", f"{row['saved']:.1f} %", _verdict(met)]


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def _rates(rows: Sequence[Row], prefix_len: int) -> str:
    own = [row for row in rows if row["prefix_len"] == prefix_len]
    bounds = sorted({row["bound_s_per_token"] for row in own})
    found: dict[tuple[str, str], dict[float, float]] = {}
    for row in own:
        rates = found.setdefault((row["system"], row["step_time"]), {})
        rates[row["bound_s_per_token"]] = row["highest_rate"]
    lines = []
    for (system, step_time), rates in found.items():
        cells = [
            "-"
            if math.isnan(rates[bound])
            else f"{rates[bound]:.1f} ({ratio(own, prefix_len, bound, of=system, step_time=step_time):.2f})"
            for bound in bounds
        ]
        lines.append([NAMES.get(system, system), step_time, *cells])
    return _table(["system", "step time", *(f"{bound:g} s" for bound in bounds)], lines)


def _filled(rows: Sequence[Row]) -> float:
    """The share of the slots that paged has given away which hold a token, on ShareGPT."""
    (row,) = (row for row in rows if (row["data"], row["system"]) == ("sharegpt", "paged"))
    return float(row["token_states"] / (1.0 - row["free"]))


def _memory(rows: Sequence[Row]) -> str:
    printed = {"sharegpt": SHAREGPT, "alpaca": ALPACA}
    lines = []
    for row in rows:
        published = printed[row["data"]].batched.get(row["system"])
        lines.append(
            [
                row["data"],
                NAMES[row["system"]].split(", prefix")[0],
                f"{row['mean_num_requests_running']:.2f}",
                "-" if published is None else f"{published:.2f}",
                *(f"{100 * row[name]:.1f}" for name in SHARES),
            ]
        )
    names = (f"{name.split('_fragmentation')[0].replace('_', ' ')} %" for name in SHARES)
    return _table(["data", "system", "requests in a batch", "published", *names], lines)


def _lineages(tables: Tables) -> str:
    owns = sorted({row["own"] for row in tables["lineages"]})
    found: dict[tuple[str, int], dict[float, float]] = {}
    for row in tables["lineages"]:
        found.setdefault((row["data"], row["sequences"]), {})[row["own"]] = row["saved"]
    printed = {
        (row["data"], row["sequences"]): row["published"] for row in tables["sharing"] if row["way"] == "beam"
    }
    return _table(
        ["data", "candidates", "published", *(f"own text {own:g}" for own in owns)],
        ([*key, printed[key] or "-", *(f"{of[own]:.1f}" for own in owns)] for key, of in found.items()),
    )


def _block_sizes(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        best = "yes" if row["published_best"] else ""
        needed = "" if math.isnan(row["factor_needed"]) else f"{row['factor_needed']:.2f}"
        lines.append([row["data"], row["block_size"], f"{row['normalized_latency_s']:.3f}", best, needed])
    return _table(["data", "block size", "s per token", "best in the paper", "factor needed"], lines)


def _table(headings: Sequence[str], rows: Any) -> str:
    return "\n".join(table(headings, rows))


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else value

