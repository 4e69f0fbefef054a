# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""The hit rate at every pool capacity from one pass, and what timed runs add."""

import marimo

app = marimo.App(width="medium", app_title="Pool capacity", css_file="../sim/explore/page.css")

with app.setup:
    import marimo as mo
    import pandas as pd

    from sim import Scenario, mrc
    from sim.curves.report import timed_rows
    from sim.curves.study import study
    from sim.curves.subject import of_scenario
    from sim.curves.timed import capacities, timed_point
    from sim.explore.notebook import of_curves, of_table, with_trace


@app.cell
def _():
    mo.md("""
    # Pool capacity

    One pass over the requests gives the hit rate at every capacity. It ends at a ceiling: what the load
    shares. The knee is the smallest pool with 99 % of its hits.
    **Look for** the knee, and for how near the timed runs come to the curve.
    """)
    return


@app.cell
def _():
    groups = mo.ui.slider(20, 400, 20, 200, label="shared prefixes", show_value=True, full_width=True)
    prefix = mo.ui.slider(256, 4096, 256, 2048, label="tokens of each", show_value=True, full_width=True)
    rate = mo.ui.slider(1, 12, 1, 6, label="requests a second", show_value=True, full_width=True)
    trace = mo.ui.text("", label="your trace instead: its path", full_width=True)
    mo.vstack([groups, prefix, rate, trace])
    return groups, prefix, rate, trace


@app.cell
def _(groups, prefix, rate, trace):
    made = Scenario(
        name="pool capacity",
        workload={
            "kind": "shared_prefix",
            "num_requests": 2000,
            "num_groups": groups.value,
            "group_popularity": "zipf",
            "prefix_len": prefix.value,
            "suffix_len": 128,
            "output_len": 128,
            "request_rate": rate.value,
        },
    )
    scenario = with_trace(made, trace.value)
    return (scenario,)


@app.cell
def _():
    mo.md("""
    ## Every capacity in one pass

    The curve is of LRU, one request after the other, and needs no clock. The table says where it ends.
    """)
    return


@app.cell
def _(scenario):
    curve = mrc(scenario, outputs=True)
    (facts,) = curve.attrs["curves"].values()
    shown = {
        "block size (tokens)": facts["block_size"],
        "ceiling (%)": 100 * facts["ceiling"],
        "knee (blocks)": facts["knee"],
        "knee (tokens)": facts["knee_tokens"],
        "knee (GiB of KV)": facts["knee_gib"],
        "different blocks": facts["distinct_blocks"],
        "blocks of the longest request": facts["longest_request"],
    }
    ends = pd.DataFrame(shown.items(), columns=["", "figure"], dtype=object)
    mo.Html(of_table("Where the curve ends", ends))
    return (facts,)


@app.cell
def _():
    mo.md("""
    ## The clock's part

    Whole timed runs at some capacities, over the curve. Requests that run at once hold blocks, and in a
    small pool less is left for what is cached: that is the gap, in points of hit rate in the table. With
    the first settings it is below 0.2. In the figure the runs are joined by straight lines, so between two
    of them the shade is no measured gap.
    """)
    return


@app.cell
def _(facts, scenario):
    load, asked, scale = of_scenario(scenario, [facts["block_size"]])
    (one,) = study(load._replace(outputs=True), asked)
    points = [timed_point(scenario, one.curve, blocks) for blocks in capacities(one.curve, 6)]
    timed = one._replace(timed=points)
    mo.Html(of_curves([timed], scale))
    return scale, timed


@app.cell
def _(scale, timed):
    rows = timed_rows(timed, scale)
    rows[["curve_hit_rate", "hit_rate"]] *= 100
    names = {
        "blocks": "blocks",
        "curve_hit_rate": "one pass (%)",
        "hit_rate": "timed (%)",
        "gap": "gap (points)",
        "saturation": "engine",
    }
    mo.Html(of_table("Timed runs beside the curve", rows[list(names)].rename(columns=names)))
    return


if __name__ == "__main__":
    app.run()
