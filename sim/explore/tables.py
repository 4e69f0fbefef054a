"""The tables that stand beside the page's figures, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from sim.explore.at_scale import PROMPT_LEN, SHARED_LEN
from sim.explore.drawing import shares
from sim.explore.two_prompts import TwoPrompts, hit_length
from sim.explore.under_load import Answer
from sim.report import FATE_MEANINGS

COMPUTED = "not shared"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """A table; its columns after the first are numbers, or text."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(one)}</td>" for one in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(title)}"><table class="{kind}">'
        f"<caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def blocks(two: TwoPrompts) -> str:
    """The second prompt's blocks, and what becomes of each."""
    rows = [(str(one.number), " ".join(one.text), one.verdict) for one in two.blocks()]
    return table("Blocks of the second prompt", ("block", "tokens", "fate"), rows, "text")


def staircase(two: TwoPrompts) -> str:
    """The shared lengths at which the hit length jumps."""
    hits = [hit_length(one, two.prompt_len, two.block_size) for one in range(two.prompt_len + 1)]
    jumps = [one for one in range(len(hits)) if one == 0 or hits[one] > hits[one - 1]]
    ends = [*(one - 1 for one in jumps[1:]), two.prompt_len]
    rows = [(f"{a} to {b}" if b > a else str(a), f"{hits[a]}") for a, b in zip(jumps, ends, strict=True)]
    return table("Hit length by shared prefix", ("shared tokens", "tokens hit"), rows)


def by_block_size(rates: dict[int, float]) -> str:
    """The hit rate by block size, and how much of what is shared a block cuts off."""
    rows = [
        (str(size), f"{100 * rate:.2f} %", str(SHARED_LEN - hit_length(SHARED_LEN, PROMPT_LEN, size)))
        for size, rate in rates.items()
    ]
    return table("Hit rate by block size", ("block size", "hit rate", "tokens lost a request"), rows)


def fates(answer: Answer) -> str:
    """Prompt tokens by fate."""
    meanings = FATE_MEANINGS | {"computed": COMPUTED}
    rows = [
        (f"{name.replace('_', ' ')}: {meanings[name]}", f"{number:,}", f"{100 * share:.1f} %")
        for name, number, share in shares(answer)
    ]
    return table("Prompt tokens by fate", ("fate", "tokens", "share"), rows)


def ttft(answer: Answer) -> str:
    """Percentiles of TTFT and of its queueing part."""
    quantiles = {"P50": 50, "P90": 90, "P95": 95, "P99": 99}
    known = ~np.isnan(answer.ttft)
    rows = [("mean", f"{answer.ttft[known].mean():,.1f}", f"{answer.queueing[known].mean():,.1f}")]
    for name, level in quantiles.items():
        times = (np.percentile(column[known], level) for column in (answer.ttft, answer.queueing))
        rows.append((name, *(f"{one:,.1f}" for one in times)))  # type: ignore[arg-type]  # two of them
    return table("Time to first token (ms)", ("", "TTFT", "of it queueing"), rows)


def curve(answer: Answer) -> str:
    """The one-pass hit rate at some capacities, the knee and the ceiling."""
    found, s = answer.study.curve, answer.summary
    here = s["num_gpu_blocks"] - 1
    marks = {blocks: "" for blocks in (here // 4, here // 2, here * 2, here * 4)} | {here: "this pool, "}
    if found.knee is not None:
        marks[found.knee] = "knee, "
    rows = []
    for capacity, name in sorted(marks.items()):
        hits = int(found.hit_tokens(np.array([capacity]))[0])
        rows.append((f"{name}{capacity * found.block_size:,}", f"{100 * found.hit_rate(hits):.1f} %"))
    rows.append(("any: the ceiling", f"{100 * found.hit_rate(found.ceiling):.1f} %"))
    return table(
        "Hit rate by pool capacity: one pass, vLLM's blocks", ("tokens in the pool", "hit rate"), rows
    )
