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
    device: Annotated[Device, typer.Option(help="Where; a CPU gets small shapes.")] = Device.cuda,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size: the shapes of one of so many ranks.")] = 1,
    weights: Annotated[WeightType, typer.Option(help="Type of the weights.")] = WeightType.bf16,
    kv: Annotated[WeightType, typer.Option(help="Type of the KV cache.")] = WeightType.bf16,
    cpu_hash: Annotated[
        bool, typer.Option("--cpu-hash", help="Time block hashes on this CPU instead; needs no torch.")
    ] = False,
) -> None:
    """Time kernels on this device, for `calibrate --from-csv`; the same command goes on where it ended."""
    with one_line_errors():
        from sim.measure import measure as time_kernels
        from sim.measure import measure_hashes

        if cpu_hash == (model is not None):
            raise InputError("measure: give either --model, as in --model llama-3.1-8b, or --cpu-hash")
        try:
            if model is None:
                result = measure_hashes(out, tell=say)
            else:
                result = time_kernels(
                    out, device=device.value, model=model, tp=tp, weights=weights.value, kv_dtype=kv.value,
                    tell=say,
                )  # fmt: skip
        except KeyboardInterrupt:
            say(f"interrupted; {out} keeps what was measured, and the same command goes on from there")
            raise typer.Exit(130) from None
        say(f"{out}: {result.timed} points timed, {result.kept} there before, {result.skipped} skipped")
