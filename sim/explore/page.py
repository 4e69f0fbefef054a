# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""The page of `prefixsim explore`. Each cell is one idea; what it shows comes from sim/explore/."""

import marimo

app = marimo.App(width="medium", app_title="prefixsim", css_file="page.css", html_head_file="head.html")

with app.setup:
    from contextlib import nullcontext
    from html import escape

    import marimo as mo

    from sim.errors import InputError
    from sim.explore import address, drawing, tables, words
    from sim.explore.controls import of_prompts, of_server
    from sim.explore.two_prompts import two_prompts
    from sim.explore.under_load import answer, answered


@app.cell
def _():
    mo.md("""
    # What a prefix cache can share

    Two prompts begin with the same tokens. A server that still has the first one's work in its cache need
    not do it again for the second, but a cache shares **blocks**, and only full ones.
    """)
    return


@app.cell
def _():
    start = address.from_address(mo.query_params().to_dict())
    return (start,)


@app.cell
def _(start):
    shared, prompt, block = of_prompts(start)
    mo.vstack([mo.md("## Fourteen tokens"), shared, prompt, block])
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
def _(two):
    mo.Html(f'<div class="pair"><figure>{drawing.staircase(two)}</figure>{tables.staircase(two)}</div>')
    return


@app.cell
def _():
    mo.md("""
    ## A server under load

    The same at the size of a service: 2,000 requests to Llama 3.1 8B on one H100, simulated step by step.
    Drag the shared prefix across a block's end, with blocks of 16 and of 256 tokens.
    """)
    return


@app.cell
def _(start):
    server = of_server(start)
    server
    return (server,)


@app.cell
def _(block, prompt, server, shared):
    told = address.to_address(address.Controls(shared.value, prompt.value, block.value, **server.value))
    _query = mo.query_params()
    for _name in address.Controls._fields:
        if _name in told:
            _query.set(_name, told[_name])
        elif _name in _query:
            _query.remove(_name)
    return


@app.cell
def _(server):
    controls = address.Controls(**server.value)
    waits = f"{controls.cache} is compiled for its first run, which takes up to a minute"
    with nullcontext() if controls.cache in answered else mo.status.spinner(waits, remove_on_exit=True):
        try:
            found, refused = answer(controls), None
        except InputError as problem:
            found, refused = None, str(problem)
    return found, refused


@app.cell
def _(found, refused):
    mo.Html(f'<p class="says" id="server">{escape(words.status(found) if found else refused)}</p>')
    return


@app.cell
def _(found):
    mo.stop(found is None)
    mo.Html(
        f'<p class="soft">{words.verdict(found)}</p>{words.cards(words.figures(found))}'
        f'<div class="pair"><figure>{drawing.fates(found)}</figure>{tables.fates(found)}</div>'
        f'<div class="pair"><figure>{drawing.ttft(found)}</figure>{tables.ttft(found)}</div>'
        f'<div class="pair"><figure>{drawing.curve(found)}</figure>{tables.curve(found)}</div>'
    )
    return


if __name__ == "__main__":
    app.run()
