# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""From a trace, or a load like it, and a promise on latency to a number of GPUs."""

import marimo

app = marimo.App(width="medium", app_title="Capacity plan", css_file="../sim/explore/page.css")

with app.setup:
    import marimo as mo

    from sim import Scenario, plan, sweep
    from sim.explore.notebook import of_sweep, of_table, with_trace

    REPLICAS = [1, 2, 3, 4, 6, 8]


@app.cell
def _():
    mo.md("""
    # Capacity plan

    How many GPUs keep a promise on the time to the first token? Each replica has a cache of its own, so more
    of them serve more and share less, unless the router sends alike requests to one place.
    **Look for** the row that keeps the promise with the fewest GPUs, and for what would give way next.
    """)
    return


@app.cell
def _():
    rate = mo.ui.slider(10, 200, 10, 80, label="requests a second", show_value=True, full_width=True)
    promise = mo.ui.slider(50, 5000, 50, 200, label="P95 TTFT at most (ms)", show_value=True, full_width=True)
    price = mo.ui.slider(0.5, 10, 0.5, 2.5, label="price of a GPU hour", show_value=True, full_width=True)
    trace = mo.ui.text("", label="your trace instead, at its own times: its path", full_width=True)
    mo.vstack([rate, promise, price, trace])
    return price, promise, rate, trace


@app.cell
def _(rate, trace):
    made = Scenario(
        name="capacity plan",
        workload={
            "kind": "shared_prefix",
            "num_requests": 1500,
            "num_groups": 200,
            "prefix_len": 2048,
            "suffix_len": 256,
            "output_len": 64,
            "request_rate": rate.value,
        },
    )
    scenario = with_trace(made, trace.value)
    return (scenario,)


@app.cell
def _():
    mo.md("""
    ## The plan

    For each router and with caching on and off, the fewest replicas of one GPU that keep the promise. Where
    none is kept, no number up to the last keeps it, and the row is the nearest miss.
    """)
    return


@app.cell
def _(price, promise, scenario):
    vary = [
        f"cluster.replicas=1..{REPLICAS[-1]}",
        "cluster.router=round_robin,prefix_affinity",
        "engine.enable_prefix_caching=true,false",
    ]
    answer = plan(scenario, f"ttft_p95={promise.value}ms", vary=vary, seeds=1, price=price.value, jobs=1)
    names = {
        "cluster.router": "router",
        "engine.enable_prefix_caching": "caching",
        "gpus": "GPUs",
        "kept": "kept",
        "p95_ttft_ms": "P95 TTFT (ms)",
        "prefix_cache_hit_rate": "hit rate",
        "total_cost": "cost of a million tokens",
    }
    shown = answer[list(names)].rename(columns=names)
    shown["kept"] = shown["kept"].map({True: "yes", False: "no"})
    mo.Html(of_table("The fewest replicas of each way", shown))
    return (answer,)


@app.cell
def _(answer):
    best = answer.iloc[0]
    verdict = f"{best.gpus} GPUs keep it" if best.kept else "nothing tried keeps it"
    mo.Html(f'<p class="says">{verdict}: {best.why or "nothing gives way"}</p>')
    return


@app.cell
def _():
    mo.md("""
    ## What each replica brings

    The same load on more and more replicas, a curve for each router. Round robin brings every prefix to every
    replica, and its hit rate falls; prefix affinity keeps most of its hits. Where there are replicas enough,
    even queues matter more than hits. Hollow marks: the cluster did not keep up.
    """)
    return


@app.cell
def _(scenario):
    axes = {"cluster.replicas": REPLICAS, "cluster.router": ["round_robin", "prefix_affinity"]}
    metrics = ["p95_ttft_ms", "prefix_cache_hit_rate"]
    found = sweep(scenario, axes, seeds=1, metrics=metrics, jobs=1)
    mo.Html(of_sweep(found, scenario.name))
    return


@app.cell
def _(answer):
    mo.md("**Assumed**, not measured:\n\n" + "\n".join(f"- {line}" for line in answer.attrs["assumed"]))
    return


if __name__ == "__main__":
    app.run()
