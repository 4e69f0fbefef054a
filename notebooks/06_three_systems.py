# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""vLLM's hashed blocks, SGLang's radix tree, reserved prefixes and no caching, side by side."""

import marimo

app = marimo.App(width="medium", app_title="Three systems", css_file="../sim/explore/page.css")

with app.setup:
    import tempfile
    from pathlib import Path

    import marimo as mo

    from sim import Scenario, run, sweep
    from sim.explore.notebook import of_panels, of_runs, records_of
    from sim.memory_plots import memory_by_state
    from sim.plots import ttft_cdfs
    from sim.three_systems.figures import hit_rate, metadata, ttft
    from sim.three_systems.means import read

    SIZES = [1, 16, 64, 256]
    CACHES = {
        "none": ("apc", False),
        "apc": ("apc", True),
        "radix": ("radix", True),
        "paged": ("paged", True),
    }
    METRICS = ["prefix_cache_hit_rate", "mean_ttft_ms", "metadata_entries_per_1k_slots", "lost_tail_tokens"]


@app.cell
def _():
    mo.md("""
    # Three systems

    One engine, one pool, the same requests; the way to share prefixes differs: vLLM's hashed blocks (apc),
    SGLang's radix tree (radix), prefixes that vLLM 0.2 was told ahead (paged), and no caching (none).
    **Look for** apc and radix, which hit alike and differ in metadata; and for paged in a chat.
    """)
    return


@app.cell
def _():
    rate = mo.ui.slider(2, 48, 2, 24, label="requests a second", show_value=True, full_width=True)
    groups = mo.ui.slider(4, 128, 4, 16, label="system prompts", show_value=True, full_width=True)
    pool = mo.ui.dropdown(
        {"32 Ki": 32_768, "64 Ki": 65_536, "128 Ki": 131_072}, value="128 Ki", label="pool (tokens)"
    )
    mo.vstack([rate, groups, pool])
    return groups, pool, rate


@app.cell
def _(groups, pool, rate):
    prompts = {
        "kind": "shared_prefix",
        "num_requests": 500,
        "request_rate": rate.value,
        "num_groups": groups.value,
        "prefix_len": {"distribution": "uniform", "low": 500, "high": 1500},
        "suffix_len": {"distribution": "uniform", "low": 20, "high": 300},
        "output_len": {"distribution": "uniform", "low": 50, "high": 250},
    }
    chat = {
        "kind": "multi_turn",
        "num_sessions": 100,
        "session_rate": 0.5,
        "num_turns": 5,
        "num_system_prompts": 4,
        "system_prompt_len": 500,
        "user_len": {"distribution": "uniform", "low": 20, "high": 200},
        "output_len": {"distribution": "uniform", "low": 100, "high": 400},
        "think_time": 15,
    }
    loads = {"system prompts": prompts, "chat": chat}
    scenario = Scenario(
        name="three systems",
        engine={"block_size": 16, "num_gpu_blocks": pool.value // 16 + 1, "async_scheduling": False},
        workload=prompts,
    )
    return loads, scenario


@app.cell
def _():
    mo.md("""
    ## By block size

    Each way on two loads. In paged the system prompts are there before the first request, so that no request
    computes them, and blocks cut off nothing. In a chat the prefixes are earlier turns, which nobody tells
    ahead: it hits nothing. Metadata are the entries in a cache's tables.
    """)
    return


@app.cell
def _(loads, pool, scenario):
    axes = {
        "workload": [{"label": name, "value": load} for name, load in loads.items()],
        "cache": [{"label": name, "value": kind} for name, (kind, _) in CACHES.items()],
        "engine.enable_prefix_caching": [
            {"label": f"caching of {name}", "value": caching} for name, (_, caching) in CACHES.items()
        ],
        "engine.block_size": SIZES,
        "engine.num_gpu_blocks": [pool.value // size + 1 for size in SIZES],  # with the null block
    }
    together = [["cache", "engine.enable_prefix_caching"], ["engine.block_size", "engine.num_gpu_blocks"]]
    runs = sweep(scenario, axes, zip=together, seeds=1, metrics=METRICS, jobs=1)
    with tempfile.TemporaryDirectory() as folder:
        runs.to_csv(Path(folder, "sweep.csv"), index=False)
        means = read(Path(folder, "sweep.csv"))
    return means, runs


@app.cell
def _(loads, means):
    def panel(name, draw, load):
        def draws(axes):
            draw(axes, means, load)
            axes.set_xscale("log", base=2)
            axes.set_xticks(SIZES, [str(size) for size in SIZES])
            axes.set(title=f"{name}, {load}", xlabel="block size (tokens)")
            axes.legend(fontsize=8)

        return draws

    views = {"Hit rate": hit_rate, "Metadata": metadata, "TTFT": ttft}
    panels = {
        f"{name} by block size, {load}": panel(name, draw, load)
        for name, draw in views.items()
        for load in loads
    }
    mo.Html(of_panels(panels))
    return


@app.cell
def _(runs):
    names = ["point", "workload", "cache", "seed", *METRICS[:3], "error"]
    mo.Html(of_runs(runs.loc[runs["engine.block_size"] == 16, names], "In blocks of 16"))
    return


@app.cell
def _():
    mo.md("""
    ## Side by side in blocks of 16

    The distribution of TTFT on the system prompts, and what the KV memory holds, as a mean over the run.
    A prefix that several running requests share is held once, where without caching each holds its own. What
    is cached and used by nobody counts as free.
    """)
    return


@app.cell
def _(scenario):
    found = {
        name: run(scenario.changed(f"cache={kind}", f"engine.enable_prefix_caching={str(caching).lower()}"))
        for name, (kind, caching) in CACHES.items()
    }
    times = {name: records_of(one.requests).column("ttft_ms") for name, one in found.items()}
    shares = {name: one.summary["kv_memory_shares"] for name, one in found.items()}
    beside = {
        "TTFT of each way": lambda axes: ttft_cdfs(axes, times).set_title("Time to first token"),
        "KV memory by what it holds": lambda axes: memory_by_state(axes, shares),
    }
    mo.Html(of_panels(beside))
    return


if __name__ == "__main__":
    app.run()
