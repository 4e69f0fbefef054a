# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""What a block size costs, from both sides: what is looked up, and what is cut off."""

import marimo

app = marimo.App(width="medium", app_title="Block size", css_file="../sim/explore/page.css")

with app.setup:
    import marimo as mo
    import pandas as pd

    from sim import Scenario, mrc, sweep
    from sim.explore.notebook import of_curves, of_runs, of_sweep, of_table, with_trace

    METRICS = [
        "prefix_cache_hit_rate",
        "token_fates.partial_block",
        "mean_front_end_time_ms",
        "mean_ttft_ms",
    ]


@app.cell
def _():
    mo.md("""
    # Block size

    The tax has two sides. Small blocks are hashed and looked up one by one; large blocks cut the tail off
    every shared prefix, and all of one that is shorter than a block.
    **Look for** the hit rate that falls, the front end's time that falls too, and the TTFT lowest between.
    """)
    return


@app.cell
def _():
    longest = mo.ui.slider(200, 4000, 200, 2000, label="longest prefix", show_value=True, full_width=True)
    groups = mo.ui.slider(8, 128, 8, 64, label="shared prefixes", show_value=True, full_width=True)
    rate = mo.ui.slider(2, 24, 2, 12, label="requests a second", show_value=True, full_width=True)
    trace = mo.ui.text("", label="your trace instead: its path", full_width=True)
    mo.vstack([longest, groups, rate, trace])
    return groups, longest, rate, trace


@app.cell
def _(groups, longest, rate, trace):
    made = Scenario(
        name="block size",
        workload={
            "kind": "shared_prefix",
            "num_requests": 600,
            "num_groups": groups.value,
            "prefix_len": {"distribution": "uniform", "low": 100, "high": longest.value},
            "suffix_len": 300,
            "output_len": 100,
            "request_rate": rate.value,
        },
    )
    scenario = with_trace(made, trace.value)
    return (scenario,)


@app.cell
def _():
    mo.md("""
    ## Both sides under load

    One run at each block size, in the same memory. The front end's time is that of hashing a prompt:
    it is paid for each block. The tokens in partial blocks are shared and computed all the same.
    """)
    return


@app.cell
def _(scenario):
    sizes = {"engine.block_size": [1, 4, 16, 64, 256, 512]}
    found = sweep(scenario, sizes, seeds=1, metrics=METRICS, jobs=1)
    mo.Html(of_sweep(found, scenario.name))
    return (found,)


@app.cell
def _(found):
    mo.Html(of_runs(found, "Both sides by block size"))
    return


@app.cell
def _():
    mo.md("""
    ## The ceiling of each

    No pool hits more than the ceiling, whatever its size. **Look for** the height of the dotted lines:
    what lies between two of them is lost to the block size alone.
    """)
    return


@app.cell
def _(scenario):
    facts = mrc(scenario, [16, 64, 256]).attrs["curves"].values()
    rows = [
        {
            "block size (tokens)": one["block_size"],
            "ceiling (%)": 100 * one["ceiling"],
            "knee (tokens)": one["knee_tokens"],
            "different blocks": one["distinct_blocks"],
        }
        for one in facts
    ]
    mo.Html(of_table("What each block size could hit", pd.DataFrame(rows)))
    return


@app.cell
def _(scenario):
    from sim.curves.study import study
    from sim.curves.subject import of_scenario

    load, asked, scale = of_scenario(scenario, [16, 64, 256])
    mo.Html(of_curves(study(load, asked), scale))
    return


if __name__ == "__main__":
    app.run()
