"""Sections of the page about whole engines: the pool they start with, and a load that one of them ran."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sim.validate import pool_sizes, rtx4090
from sim.validate.section import Section, at_most, skipped, table

POOL_TITLE = "Size of the KV pool"
RUN_TITLE = "ShareGPT on an RTX 4090, overloaded"
TRACES = "traces"  # in the data folder
_BARRED = ("TTFT", "TPOT", "makespan")
_RUN_BARS = ("RTX 4090, TTFT, TPOT and makespan", "RTX 4090, KV use over time")


def pool_section() -> Section:
    """Every recorded block count beside the formula's; no bar was set."""
    rows = []
    for row in pool_sizes.rows():
        blocks = (str(row.block_size), f"{row.measured:,}", f"{row.computed:,}", f"{row.difference:+.1f} %")
        rows.append((row.configuration, row.vllm, *blocks, row.source))
    heads = ["configuration", "vLLM", "block size", "measured blocks", "computed", "difference", "source"]
    lines = [
        "No bar was set. Computed with what each release held while it profiled its sampler, where `run` "
        "takes that of the newest; the rows of vLLM 0.11 helped to choose that term, so do not check it.",
        "",
        *table(heads, rows),
    ]
    return Section(POOL_TITLE, [], lines)


def rtx4090_section(data: Path) -> Section:
    """The measured run, simulated with a calibration fitted to its first fifth. Raises InputError."""
    traces = data / TRACES
    if not all((traces / name).is_file() for name in (rtx4090.LOAD, rtx4090.RUN)):
        return skipped(RUN_TITLE, _RUN_BARS, f"no {TRACES}/{rtx4090.RUN} in the data folder")
    retold = rtx4090.retell_run(traces)
    rows, curves = rtx4090.rows(retold), rtx4090.curves(retold)
    checks = [
        at_most(f"RTX 4090, {row.name}", abs(row.difference), rtx4090.LIMIT)
        for row in rows
        if row.name.endswith(_BARRED)
    ]
    checks += [
        at_most(f"RTX 4090, {curve.name}, mean difference", curve.difference, rtx4090.KV_LIMIT, "points")
        for curve in curves
        if curve.name.startswith("KV")
    ]
    figures = [
        (f"{row.name}, {row.unit}", f"{row.measured:.3f}", f"{row.simulated:.3f}", f"{row.difference:+.2f} %")
        for row in rows
    ]
    over_time = [
        (curve.name, f"{curve.measured:.1f}", f"{curve.simulated:.1f}", f"{curve.difference:.2f}")
        for curve in curves
    ]
    return Section(
        RUN_TITLE,
        checks,
        [
            "300 requests on vLLM 0.19. The step time was fitted to the first 20 % of them; decisions are "
            "not fitted.",
            "",
            *table(["", "measured", "simulated", "difference"], figures),
            "",
            *table(["over time", "measured mean", "simulated mean", "mean difference"], over_time),
        ],
        {
            "rtx4090_ttft.png": partial(rtx4090.ttft_figure, retold),
            "rtx4090_curves.png": partial(rtx4090.curves_figure, retold),
        },
    )
