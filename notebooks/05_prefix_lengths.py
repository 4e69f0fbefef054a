# /// script
# requires-python = ">=3.11"
# dependencies = ["prefixsim[notebooks]"]
#
# [tool.marimo.display]
# theme = "system"
# ///
"""Prefixes of equal mean length, of different distributions: what the spread does."""

import marimo

app = marimo.App(width="medium", app_title="Prefix lengths", css_file="../sim/explore/page.css")

with app.setup:
    import tempfile
    from pathlib import Path

    import marimo as mo
    import pandas as pd

    from sim import Scenario, mrc, sweep
    from sim.explore.notebook import of_sweep, of_table

    PATH = "workload.prefix_len"


@app.cell
def _():
    mo.md("""
    # Prefix lengths

    Four distributions of the shared prefix with one mean: is what a cache gives a matter of the mean alone?
    **Look for** hit rates that part in pools that hold some of the prefixes, and meet in one that holds all.
    TTFT parts more: a long prefix that misses is long in the making, and others wait for it.
    """)
    return


@app.cell
def _():
    mean = mo.ui.slider(256, 4096, 256, 2048, label="mean prefix (tokens)", show_value=True, full_width=True)
    groups = mo.ui.slider(50, 800, 50, 200, label="shared prefixes", show_value=True, full_width=True)
    block = mo.ui.dropdown({"16": 16, "64": 64, "256": 256}, value="64", label="block size (tokens)")
    mo.vstack([mean, groups, block])
    return block, groups, mean


@app.cell
def _(block, groups, mean):
    scenario = Scenario(
        name="prefix lengths",
        engine={"block_size": block.value},
        workload={
            "kind": "shared_prefix",
            "num_requests": 2000,
            "num_groups": groups.value,
            "prefix_len": mean.value,
            "suffix_len": 128,
            "output_len": 128,
            "request_rate": 6,
        },
    )

    def distributions(folder: str) -> list[dict[str, object]]:
        """The four; of the last, three in four are a quarter of the mean and one is 13 quarters."""
        quarter = mean.value // 4
        file = Path(folder, "bimodal.csv")
        file.write_text("tokens\n" + f"{quarter}\n" * 3 + f"{13 * quarter}\n")
        uniform = {"distribution": "uniform", "low": 1, "high": 2 * mean.value - 1}
        lognormal = {"distribution": "lognormal", "mean": mean.value, "sigma": 1}
        bimodal = {"distribution": "empirical", "path": str(file), "column": "tokens"}
        return [
            {"label": "constant", "value": mean.value},
            {"label": "uniform", "value": uniform},
            {"label": "lognormal", "value": lognormal},
            {"label": "bimodal", "value": bimodal},
        ]

    return distributions, scenario


@app.cell
def _():
    mo.md("""
    ## In pools of growing size

    A run of each distribution in pools of an eighth of the prefixes' tokens up to twice as many. Shared
    tokens in partial blocks depend on the lengths and the block size, and on no pool: lengths of whole blocks
    have none.
    """)
    return


@app.cell
def _(block, distributions, groups, mean, scenario):
    whole = groups.value * mean.value // block.value  # blocks of all prefixes
    pools = [max(whole * share // 8, 128) + 1 for share in (1, 2, 4, 8, 16)]
    with tempfile.TemporaryDirectory() as folder:
        axes = {PATH: distributions(folder), "engine.num_gpu_blocks": pools}
        metrics = ["prefix_cache_hit_rate", "mean_ttft_ms", "token_fates.partial_block"]
        found = sweep(scenario, axes, seeds=1, metrics=metrics, jobs=1)
    mo.Html(of_sweep(found, scenario.name))
    return


@app.cell
def _():
    mo.md("""
    ## What each could hit

    The ceiling of each, the knee, and the blocks that its load has in all. Lengths are drawn once for each
    prefix, so the last column, the mean over the requests, is near the slider's and not equal to it: with
    the lognormal's long tail it may be a fifth away. More prefixes bring it nearer.
    """)
    return


@app.cell
def _(block, distributions, scenario):
    rows = []
    with tempfile.TemporaryDirectory() as there:
        for one in distributions(there):
            drawn = Scenario(
                engine={"block_size": block.value},
                workload=scenario.workload.model_dump() | {"prefix_len": one["value"]},
            )
            curve = mrc(drawn)
            (facts,) = curve.attrs["curves"].values()
            row = {
                "prefixes": one["label"],
                "ceiling (%)": 100 * facts["ceiling"],
                "knee (blocks)": facts["knee"],
                "different blocks": facts["distinct_blocks"],
                "mean prefix (tokens)": round(facts["prompt_tokens"] / facts["requests"] - 128),
            }
            rows.append(row)
    mo.Html(of_table("What each could hit", pd.DataFrame(rows)))
    return


if __name__ == "__main__":
    app.run()
