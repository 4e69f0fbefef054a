# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""What prefix caching does to the time to the first token as the rate grows, and when it does nothing."""

import marimo

app = marimo.App(width="medium", app_title="TTFT under load", css_file="../sim/explore/page.css")

with app.setup:
    import marimo as mo
    import pandas as pd

    from sim import Run, Scenario, run, sweep
    from sim.explore.notebook import of_panels, of_sweep, of_table, records_of, with_trace
    from sim.plots import latency_breakdown, ttft_cdfs

    METRICS = ["mean_ttft_ms", "p95_ttft_ms", "mean_tpot_ms"]
    CACHING = {"caching on": "true", "caching off": "false"}

    def both(scenario: Scenario) -> dict[str, Run]:
        """The scenario run with prefix caching and without."""
        return {
            name: run(scenario.changed(f"engine.enable_prefix_caching={switch}"))
            for name, switch in CACHING.items()
        }

    def ttfts(found: dict[str, Run]) -> dict[str, object]:
        return {name: one.requests["ttft_ms"].to_numpy() for name, one in found.items()}


@app.cell
def _():
    mo.md("""
    # TTFT under load

    A hit saves prefill. Under load it saves more: the prefill of others that a request would wait for.
    **Look for** the rate at which TTFT without caching leaves the floor: first between 12 and 16 a second,
    while with caching 32 are served at ease. The last section has three loads that caching does not save.
    Of a trace the rate is its own, times a factor: its times are stretched and squeezed.
    """)
    return


@app.cell
def _():
    rate = mo.ui.slider(1, 40, 1, 12, label="requests a second", show_value=True, full_width=True)
    prefix = mo.ui.slider(0, 4096, 256, 2048, label="shared tokens", show_value=True, full_width=True)
    output = mo.ui.slider(16, 512, 16, 128, label="answer (tokens)", show_value=True, full_width=True)
    trace = mo.ui.text("", label="your trace instead, at its own times: its path", full_width=True)
    mo.vstack([rate, prefix, output, trace])
    return output, prefix, rate, trace


@app.cell
def _(output, prefix, rate, trace):
    made = Scenario(
        name="TTFT under load",
        workload={
            "kind": "shared_prefix",
            "num_requests": 1000,
            "num_groups": 32,
            "prefix_len": prefix.value,
            "suffix_len": 128,
            "output_len": output.value,
            "request_rate": rate.value,
        },
    )
    scenario = with_trace(made, trace.value)
    return made, scenario


@app.cell
def _():
    mo.md("""
    ## By request rate

    A run at each rate, with caching and without; of a trace, with its times multiplied by 4 (a quarter of its
    rate) to 0.25. **Look for** where the curves part. Hollow marks: the engine did not keep up, and TTFT
    there is a matter of how long the run lasts. The last panel is the time between two tokens of an answer.
    """)
    return


@app.cell
def _(scenario):
    if scenario.workload.kind == "trace":
        rates = {"workload.time_scale": [4, 3, 2, 1.5, 1, 0.5, 0.25]}
    else:
        rates = {"workload.request_rate": [1, 4, 8, 12, 16, 24, 32]}
    axes = rates | {"engine.enable_prefix_caching": [True, False]}
    found = sweep(scenario, axes, seeds=1, metrics=METRICS, jobs=1)
    mo.Html(of_sweep(found, scenario.name))
    return


@app.cell
def _():
    mo.md("""
    ## Queueing, prefill, decode

    At the rate of the slider, or on your trace as it is: where the time of a request goes, in means.
    Queueing and prefill are TTFT; decode is all after the first token. **Look for** the part that caching
    takes away: prefill, and of queueing what others' prefill had made.
    """)
    return


@app.cell
def _(scenario):
    pair = both(scenario)

    def parts(one: Run) -> dict[str, float]:
        means = one.requests.mean(numeric_only=True)
        names = {"front_end_time_ms": "front end", "queue_time_ms": "queueing", "prefill_time_ms": "prefill"}
        shown = {label: means[name] for name, label in names.items()}
        return shown | {"decode": means["e2el_ms"] - means["ttft_ms"], "all": means["e2el_ms"]}

    means = pd.DataFrame({name: parts(one) for name, one in pair.items()}).T
    mo.Html(of_table("A request's time, in means", means.rename_axis("ms").reset_index()))
    return (pair,)


@app.cell
def _(pair):
    draws = {
        f"Parts of TTFT, {name}": lambda axes, name=name, one=one: latency_breakdown(
            axes, records_of(one.requests)
        ).set_title(f"Parts of TTFT, {name}")
        for name, one in pair.items()
    }
    mo.Html(of_panels(draws))
    return


@app.cell
def _():
    mo.md("""
    ## When caching does not save it

    **Long answers**: most of a request is decode, so TTFT falls and the request is hardly shorter.
    **No sharing**: nothing hits. **Overload**: more comes than can be served even with hits; requests wait
    less long than without, but for seconds, and TTFT grows for as long as the load lasts. These three are
    generated, also where the sections above show a trace. **Look for** curves that lie close together, or
    both far to the right.
    """)
    return


@app.cell
def _(made):
    loads = {
        "long answers": ["workload.output_len=1500", "workload.request_rate=1", "workload.num_requests=200"],
        "no sharing": ["workload.num_groups=100000", "workload.request_rate=4", "workload.num_requests=400"],
        "overload": ["workload.request_rate=200"],
    }
    hard = {name: both(made.changed(*changes)) for name, changes in loads.items()}
    panels = {
        f"TTFT: {name}": lambda axes, name=name, found=found: ttft_cdfs(axes, ttfts(found)).set_title(
            f"TTFT: {name}"
        )
        for name, found in hard.items()
    }
    mo.Html(of_panels(panels))
    return (hard,)


@app.cell
def _(hard):
    figures = {
        "prefix_cache_hit_rate": "hit rate",
        "mean_ttft_ms": "mean TTFT (ms)",
        "mean_e2el_ms": "mean whole request (ms)",
        "saturation": "engine",
    }
    rows = [
        {"load": f"{load}, {name}"} | {label: one.summary[key] for key, label in figures.items()}
        for load, found in hard.items()
        for name, one in found.items()
    ]
    mo.Html(of_table("Three loads, with caching and without", pd.DataFrame(rows)))
    return


if __name__ == "__main__":
    app.run()
