"""Time an engine's kernels on the device at hand, and block hashes on its CPU, into a CSV.

`prefixsim calibrate --from-csv` turns the CSV into a calibration. torch is needed for all but the
hashes; it is imported here only, and only when asked for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.errors import InputError
from sim.hardware import Dtype, ModelSpec, load_model
from sim.kernels import kernels_of
from sim.measure.cpu import cpu_name
from sim.measure.csv_file import append, begin, measured, open_to_append
from sim.measure.grid import GRIDS, Point, check_dense, points
from sim.measure.hash import hash_points, hash_versions, time_hash
from sim.measure.timing import Timing
from sim.out_file import check_out

if TYPE_CHECKING:
    from sim.measure.attention import Kernel
    from sim.measure.device import Device

SILENT = 50  # points between two messages, where no bar can be drawn
Tell = Callable[[str], None]
Call = Callable[[], Any]


class Measured(NamedTuple):
    """What a run did: points it timed, points that were there before, points it had to leave out."""

    timed: int
    kept: int
    skipped: int
    noisy: int  # of those timed


class Skip(Exception):
    """A point that cannot be timed here. The text is one line."""


def measure(
    out: Path, *, device: str, model: str, tp: int, weights: Dtype, kv_dtype: Dtype, tell: Tell
) -> Measured:
    """Time the matrix products, attention and whole steps of one rank of a model on `device`.

    Appends to `out` what it does not hold yet. device is "cuda" or "cpu"; `tell` is given a line for
    each point that is left out. Raises InputError where torch, the device or the model will not do.
    """
    check_out(out, inputs=[Path(model)])
    spec = load_model(model)
    check_dense(spec)
    kernels_of(spec, tp)  # refuses a tp that does not divide the heads
    if device == "cpu" and "fp8" in (weights, kv_dtype):
        raise InputError("a CPU has no fp8 kernels: leave out --weights and --kv, or use --device cuda")
    if importlib.util.find_spec("torch") is None:
        raise InputError("measure needs torch: pip install 'prefixsim[measure]'")
    from sim.measure.attention import kernels, unpaged
    from sim.measure.device import open_device
    from sim.measure.step import layers_that_fit

    opened = open_device(device)
    there = kernels(opened, kv_dtype)
    num_layers = layers_that_fit(spec, weights, opened)
    wanted = points(
        spec,
        GRIDS[device],
        tp=tp,
        weights=weights,
        kv_dtype=kv_dtype,
        kernels=[(kernel.name, kernel.block_sizes) for kernel in there],
        step_kernel=unpaged(opened).name,
        num_layers=num_layers,
    )
    time_point = _timer(opened, spec, weights, there, num_layers)
    return _fill(out, wanted, opened.name, opened.versions, time_point, tell)


def measure_hashes(out: Path, *, tell: Tell) -> Measured:
    """Time block hashes by algorithm and block size on this machine's CPU; else as `measure`."""
    check_out(out)
    return _fill(out, hash_points(), cpu_name(), hash_versions(), time_hash, tell)


def _timer(
    device: Device, model: ModelSpec, weights: Dtype, kernels: Sequence[Kernel], num_layers: int
) -> Callable[[Point], Timing]:
    """The function that times a point; the decoder of whole steps is built when first needed."""
    from sim.measure.attention import attention, unpaged
    from sim.measure.device import release, synchronize, time_call
    from sim.measure.gemm import gemm
    from sim.measure.step import random_decoder, step

    by_name = {kernel.name: kernel for kernel in kernels}
    decoder = functools.cache(lambda: random_decoder(model, weights, num_layers, device))
    builders: Mapping[str, Callable[[Point], Call]] = {
        "gemm": lambda point: gemm(device, point),
        "prefill_attention": lambda point: attention(device, point, by_name[str(point.kernel)]),
        "decode_attention": lambda point: attention(device, point, by_name[str(point.kernel)]),
        "step": lambda point: step(device, point, decoder(), unpaged(device)),
    }

    def time_point(point: Point) -> Timing:
        try:
            return time_call(device, builders[point.op](point))
        except (RuntimeError, ValueError) as error:  # too little memory, or a shape the kernel refuses
            reason = str(error).strip().splitlines() or [type(error).__name__]
        release(device)
        try:
            synchronize(device)
        except RuntimeError as error:
            raise InputError(f"the device failed at {_name(point)}: {str(error).splitlines()[0]}") from None
        raise Skip(reason[0])

    return time_point


def _fill(
    out: Path,
    wanted: Sequence[Point],
    device: str,
    versions: str,
    time_point: Callable[[Point], Timing],
    tell: Tell,
) -> Measured:
    """Time the points that `out` lacks, and append each as soon as it is known."""
    about = {"device": device, "versions": versions, "date": datetime.now(UTC).date().isoformat()}
    timed = skipped = noisy = 0
    with open_to_append(out) as file:
        there = measured(out, wanted, device)
        begin(file)
        missing = [point for point in wanted if point not in there]
        with _progress(len(wanted), len(wanted) - len(missing)) as advance:
            for done, point in enumerate(missing):
                advance(point.op)
                if done % SILENT == SILENT - 1 and not sys.stderr.isatty():
                    tell(f"{done + 1} of {len(missing)} points")
                try:
                    timing = time_point(point)
                except Skip as reason:
                    skipped += 1
                    tell(f"skipped: {_name(point)}: {reason}")
                    continue
                append(file, point, timing, about)
                timed += 1
                noisy += timing.is_noisy
    return Measured(timed, len(wanted) - len(missing), skipped, noisy)


def _name(point: Point) -> str:
    """The point in words: its operation and what is set of its shape."""
    shape = ", ".join(f"{name} {value}" for name, value in point._asdict().items() if value is not None)
    return shape.removeprefix("op ")


@contextlib.contextmanager
def _progress(total: int, done: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, told what is timed next; none where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda op: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total, completed=done - 1)
        yield lambda op: bar.update(task, description=op.replace("_", " "), advance=1)
