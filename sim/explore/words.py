"""What the page says of its answers in words and in a few large numbers."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from sim.explore.two_prompts import TwoPrompts
from sim.explore.under_load import Answer
from sim.report import VERDICTS

WITHOUT_LOOKUP = "Nothing is shared, so every prompt is computed whole"


def sentence(two: TwoPrompts) -> str:
    """Hit length and lost tail, and why."""
    hit = f"{two.hit} of {two.prompt_len} tokens hit, {two.prompt_len - two.hit} are computed"
    if not two.shared:
        return f"{hit}: the prompts share nothing."
    if not two.lost_tail:
        return f"{hit}: what they share, {_tokens(two.shared)}, ends where a block ends."
    lost = f"{two.lost_tail} of the {_tokens(two.shared)} that both share {_are(two.lost_tail)} lost"
    why = f"only full blocks of {two.block_size} are shared"
    if two.fates["last_token"]:
        why += ", and the last token of a prompt is always computed"
    return f"{hit}. {lost}: {why}."


def status(answer: Answer) -> str:
    """The server's answer in a sentence."""
    s = answer.summary
    hits = WITHOUT_LOOKUP
    if answer.hit_rate is not None:
        hits = f"Hit rate {_percent(answer.hit_rate)}, a usual hit is {_tokens(answer.usual_hit)}"
    mean, tail = (f"{s[name]:,.0f} ms" for name in ("mean_ttft_ms", "p95_ttft_ms"))
    return f"{hits}; mean time to first token {mean}, P95 {tail}; {s['saturation']}."


def figures(answer: Answer) -> list[tuple[str, str]]:
    """The numbers that are read first, with their names."""
    s = answer.summary
    return [
        ("hit rate", _percent(answer.hit_rate)),
        ("a pool that never evicts", _percent(s["prefix_cache_ceiling"] if s["token_fates"] else None)),
        ("tokens, a usual hit", f"{answer.usual_hit:,}"),
        ("mean TTFT", f"{s['mean_ttft_ms']:,.1f} ms"),
        ("P95 TTFT", f"{s['p95_ttft_ms']:,.1f} ms"),
        ("requests a second", f"{s['request_throughput']:.2f}"),
    ]


def cards(numbers: Iterable[tuple[str, str]]) -> str:
    """Large numbers over their names, as HTML."""
    cells = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in numbers)
    return f'<dl class="cards">{cells}</dl>'


def verdict(answer: Answer) -> str:
    """What the load was to the engine."""
    s = answer.summary
    return f"{s['saturation']}: {VERDICTS[s['saturation']]}."


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
