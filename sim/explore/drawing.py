"""The page's figures, as SVG in the page's colours; each says in words what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from sim import plots
from sim.curves.curve import Curve
from sim.curves.figure import draw_curve
from sim.curves.report import Scale
from sim.explore.at_scale import PROMPT_LEN, SHARED_LEN
from sim.explore.two_prompts import Block, TwoPrompts, hit_length
from sim.explore.under_load import Answer

INCHES = (5.0, 3.0)  # of a figure: about the width of a phone, so that its text keeps its size
MARGINS = (0.13, 0.17, 0.97, 0.9)  # left, bottom, right, top: a layout that is not computed is quick
CELL, HIGH = 18, 30  # pixels of a token's box
FILLS = {column.removeprefix("fate_"): fill for column, (_, fill) in plots.FATES.items()}
FILLS |= {"hit": "var(--blue)", "computed": plots.GREY}
IN_WORDS = {
    "hit": "hit",
    "partial_block": "shared, but in no full block",
    "last_token": "shared, but in the last token's block",
    "cold": "not shared",
}


def in_blocks(two: TwoPrompts) -> str:
    """Both prompts as rows of blocks; the second's tokens in the colours of their fates."""
    first = [
        Block(i // two.block_size, text, ("first",) * len(text), len(text) == two.block_size)
        for i in range(0, two.prompt_len, two.block_size)
        for text in (two.first[i : i + two.block_size],)
    ]
    rows = (("first prompt, in the cache", first), ("second prompt", list(two.blocks())))
    drawn = "".join(
        f'<p class="row">{name}</p><div class="blocks">{"".join(_block(one) for one in blocks)}</div>'
        for name, blocks in rows
    )
    return drawn + _legend(IN_WORDS, hollow="cold")


def _legend(words: dict[str, str], hollow: str = "") -> str:
    """What the colours of the fates mean; one of them is a frame only."""
    items = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect x="1" y="1" width="8" height="8" '
        f'fill="{"none" if name == hollow else FILLS[name]}" stroke="currentColor"/></svg>{escape(text)}</li>'
        for name, text in words.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _block(block: Block) -> str:
    """A block as an SVG element: a frame, dashed if the block is not full, around its tokens."""
    wide = CELL * len(block.text) + 4
    known = block.fates[0] == "first"
    said = "held" if block.full else "not full"
    title = f"block {block.number}, tokens {' '.join(block.text)}: {said if known else block.verdict}"
    dashes = "" if block.full else ' stroke-dasharray="4 3"'
    cells = "".join(
        f'<rect fill="{"none" if fate in ("first", "cold") else FILLS[fate]}" x="{2 + CELL * i}" y="2" '
        f'width="{CELL}" height="{HIGH - 4}"/><text class="{_on(fate)}" x="{2 + CELL * (i + 0.5):g}" y="20">'
        f"{letter}</text>"
        for i, (letter, fate) in enumerate(zip(block.text, block.fates, strict=True))
    )
    return (
        f'<svg role="img" aria-label="{escape(title)}" width="{wide}" height="{HIGH}" '
        f'viewBox="0 0 {wide} {HIGH}">{cells}'
        f'<rect class="frame" x="1" y="1" width="{wide - 2}" height="{HIGH - 2}" rx="4"{dashes}/></svg>'
    )


def _on(fate: str) -> str:
    """The class of a letter by what it stands on: blue, another colour, or the page."""
    return {"hit": "hit", "first": "", "cold": ""}.get(fate, "on")


def staircase(two: TwoPrompts) -> str:
    """Hit length by shared prefix length: flat within a block, a jump at its end."""
    shared = np.arange(two.prompt_len + 1)
    hits = [hit_length(int(one), two.prompt_len, two.block_size) for one in shared]

    def draw(axes: Axes) -> None:
        axes.plot(shared, shared, color=plots.GREY, ls=":", lw=1.4, label="all that is shared")
        axes.plot(shared, hits, color=plots.BLUE, lw=2, drawstyle="steps-post", label="hit")
        axes.plot([two.shared], [two.hit], "o", color=plots.ORANGE, ms=9, label="here")
        axes.set(xlabel="shared prefix (tokens)", ylabel="hit (tokens)", title="Hit length by shared prefix")
        axes.set(xlim=(0, two.prompt_len * 1.02), ylim=(0, two.prompt_len * 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper left")

    said = f"Hit length rises by {two.block_size} at every {two.block_size} shared tokens; here {two.hit}"
    return named(plots.svg(draw, INCHES, "staircase", MARGINS), said)


def by_block_size(rates: dict[int, float]) -> str:
    """The hit rate by block size, and what all requests share."""
    sizes = list(rates)

    def draw(axes: Axes) -> None:
        axes.axhline(100 * SHARED_LEN / PROMPT_LEN, color=plots.GREY, ls=":", lw=1.4, label="shared")
        axes.plot(sizes, [100 * rate for rate in rates.values()], "o-", color=plots.BLUE, label="hit")
        axes.set(xscale="log", xlabel="block size (tokens)", ylabel="hit rate (%)")
        axes.set(title="Hit rate by block size", ylim=(0, 100))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
        axes.legend(loc="lower left")

    said = "Hit rate by block size; it falls where a block cuts off more of what is shared"
    return named(plots.svg(draw, INCHES, "block sizes", MARGINS), said)


def ttft(answer: Answer) -> str:
    """The distribution of TTFT and of its queueing part."""

    def draw(axes: Axes) -> None:
        queueing, times = answer.queueing.copy(), answer.ttft.copy()
        plots.distributions(axes, ((queueing, "queueing", plots.GREY), (times, "TTFT", plots.BLUE)))

    return named(plots.svg(draw, INCHES, "ttft", MARGINS), "Cumulative distribution of time to first token")


def curve(answer: Answer) -> str:
    """The hit rate at every capacity in one pass, and the run's own pool and hit rate in it."""
    found, s = answer.study.curve, answer.summary
    pool = (s["num_gpu_blocks"] - 1) * s["block_size"]
    rate = 100 * (answer.hit_rate or 0.0)

    def draw(axes: Axes) -> None:
        draw_curve(axes, answer.study, Scale(), plots.BLUE, single=False)
        axes.lines[0].set_label("one pass")
        if found.knee is not None:
            axes.lines[-1].set_label("its knee")
        axes.axvline(pool, color=plots.GREY, lw=0.9, ls="--")
        axes.plot([pool], [rate], "s", color=plots.ORANGE, ms=8, label="this run")
        axes.set(xscale="log", xlabel="tokens in the pool", ylabel="hit rate (%)")
        axes.set(title="Hit rate by pool capacity (vLLM's blocks)", ylim=(0.0, 108.0))
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, _useful(found) / 50), max(high, 1.3 * pool))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(_thousands)
        axes.legend(loc="lower right")

    said = f"Hit rate by pool capacity; the ceiling is {100 * found.hit_rate(found.ceiling):.1f} %"
    return named(plots.svg(draw, INCHES, "mrc", MARGINS), said)


def _useful(found: Curve) -> int:
    """Tokens at the curve's knee, or at its end."""
    return (found.knee or len(found.hits)) * found.block_size


def _thousands(tokens: float, _: object = None) -> str:
    return f"{tokens / 1000:,g}k" if tokens >= 1000 else f"{tokens:g}"


def fates(answer: Answer) -> str:
    """All prompt tokens as one bar, by fate."""
    parts = list(shares(answer))
    left = 0.0
    bars = []
    for name, _, share in parts:
        bars.append(f'<rect fill="{FILLS[name]}" x="{left:.2f}" y="0" width="{100 * share:.2f}" height="8"/>')
        left += 100 * share
    said = "Prompt tokens: " + ", ".join(f"{name} {100 * share:.1f} %" for name, _, share in parts)
    bar = (
        f'<svg role="img" aria-label="{said}" class="bar" viewBox="0 0 100 8" '
        f'preserveAspectRatio="none">{"".join(bars)}</svg>'
    )
    return bar + _legend({name: name.replace("_", " ") for name, *_ in parts})


def shares(answer: Answer) -> Iterator[tuple[str, int, float]]:
    """Each fate that some prompt token had, the tokens, and their share."""
    total = sum(answer.fates.values())
    for name, number in answer.fates.items():
        if number:
            yield name, number, number / total


def named(svg: str, said: str) -> str:
    """The SVG element with a name for those who do not see it."""
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(said)}" ', 1)
