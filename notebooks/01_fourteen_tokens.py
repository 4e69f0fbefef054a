# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""The 14-token example block by block, and the same at the size of a service."""

import marimo

app = marimo.App(
    width="medium",
    app_title="Fourteen tokens",
    css_file="../sim/explore/page.css",
    html_head_file="../sim/explore/head.html",
)

with app.setup:
    import marimo as mo

    from sim.explore import address, at_scale, drawing, tables, words
    from sim.explore.controls import of_prompts
    from sim.explore.two_prompts import two_prompts


@app.cell
def _():
    mo.md("""
    # Fourteen tokens

    A prompt of 14 tokens is in the cache. A second one begins with the same 10. With blocks of 4, how much
    of it need not be computed? **Look for** the place where the hit length jumps: drag the shared prefix
    from 7 to 8, then from 11 to 12.
    """)
    return


@app.cell
def _():
    shared, prompt, block = of_prompts(address.Controls())
    mo.vstack([shared, prompt, block])
    return block, prompt, shared


@app.cell
def _(block, prompt, shared):
    two = two_prompts(shared.value, prompt.value, block.value)
    mo.Html(f'<p class="says" id="two">{words.sentence(two)}</p>')
    return (two,)


@app.cell
def _(two):
    mo.Html(f'<div class="pair"><div>{drawing.in_blocks(two)}</div>{tables.blocks(two)}</div>')
    return


@app.cell
def _():
    mo.md("""
    ## The lost tail

    What both prompts share past the last full block is computed again. **Look for** the distance between
    the dotted line and the steps: at most a block less one token. At the right end a second rule shows when
    prompts are equal and end with a block (a shared prefix of 8 in a prompt of 8): the last token is always
    computed, because its output is what comes next, and with it its whole block.
    """)
    return


@app.cell
def _(two):
    mo.Html(f'<div class="pair"><figure>{drawing.staircase(two)}</figure>{tables.staircase(two)}</div>')
    return


@app.cell
def _():
    mo.md("""
    ## The same at scale

    Prompts of 1,400 tokens of which 1,000 are the same, with blocks of 1 to 1,024 tokens: **look for** the
    steps down. A block size loses 1,000 modulo its length, and no block larger than what is shared hits.
    """)
    return


@app.cell
def _():
    requests = mo.ui.slider(100, 2000, 100, 500, label="requests", show_value=True, full_width=True)
    requests
    return (requests,)


@app.cell
def _(requests):
    rates = at_scale.hit_rates(requests.value)
    figure = drawing.by_block_size(rates)
    mo.Html(f'<div class="pair"><figure>{figure}</figure>{tables.by_block_size(rates)}</div>')
    return


if __name__ == "__main__":
    app.run()
