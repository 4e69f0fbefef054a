"""`prefixsim measure`: time kernels on a device."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sim.cli.app import app
from sim.cli.messages import one_line_errors, say
from sim.cli.types import WeightType
from sim.errors import InputError


class Device(StrEnum):
    cuda = "cuda"
    cpu = "cpu"


@app.command()
def measure(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Append to this CSV what it does not hold yet.")],
    model: Annotated[
        str | None, typer.Option(help="The model whose shapes are timed: a name, or a YAML file.")
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Where; a CPU gets small shapes. Default: cuda.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor-parallel size: the shapes of one of so many ranks. Default: 1.")
    ] = None,
    weights: Annotated[
        WeightType | None, typer.Option(help="Type of the weights. Default: bf16.")
    ] = None,
    kv: Annotated[WeightType | None, typer.Option(help="Type of the KV cache. Default: bf16.")] = None,
    cpu_hash: Annotated[
        bool, typer.Option("--cpu-hash", help="Time block hashes on this CPU instead; needs no torch.")
    ] = False,
) -> None:
    """Time kernels on this device, for `calibrate --from-csv`; the same command goes on where it ended."""
    with one_line_errors():
        from sim.measure import measure as time_kernels
        from sim.measure import measure_hashes
        from sim.measure.timing import NOISY

        if cpu_hash == (model is not None):
            raise InputError("measure: give either --model, as in --model llama-3.1-8b, or --cpu-hash")
        if cpu_hash and any(one is not None for one in (device, tp, weights, kv)):
            raise InputError("measure: --cpu-hash goes with --out only; leave the other options out")
        try:
            if model is None:
                result = measure_hashes(out, tell=say)
            else:
                result = time_kernels(
                    out,
                    device=(device or Device.cuda).value,
                    model=model,
                    tp=1 if tp is None else tp,
                    weights=(weights or WeightType.bf16).value,
                    kv_dtype=(kv or WeightType.bf16).value,
                    tell=say,
                )
        except KeyboardInterrupt:
            if not out.exists():
                raise
            say(f"interrupted; {out} keeps what was measured, and the same command goes on from there")
            raise typer.Exit(130) from None
        say(f"{out}: {result.timed} points timed, {result.kept} there before, {result.skipped} skipped")
        if result.noisy:
            much = f"too noisy to trust (p90 above {NOISY:g} times p10)"
            say(f"{result.noisy} of {result.timed} points are {much}; a quiet machine helps, and a new --out")
