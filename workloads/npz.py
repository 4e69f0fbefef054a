"""Sessions as NumPy arrays in one npz file: the compact form for millions of block references."""

from __future__ import annotations

import zipfile
import zlib

import numpy as np

from workloads.errors import WorkloadError
from workloads.sessions import Sessions
from workloads.trace_rows import Layout

LAYOUT = Layout("ts", "il", "ol", 1.0, place="row")
_KINDS = {"ids": "iu", "off": "iu", "il": "iu", "ol": "iu", "tr": "iu", "ts": "iuf"}
_TIMES = ("think", "api")  # seconds, optional


def read_npz(path: str) -> Sessions:
    """Read `ids` (flat), `off` (row starts into it), `il`, `ol` (prompt and output tokens), `ts`
    (seconds on the session's clock), `tr` (session number), and `think`, `api` (seconds) if there.

    Ids stand for the same tokens in all sessions. Raises: WorkloadError for a file that cannot be
    read, an array that is missing, or arrays that do not belong together.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in (*_KINDS, *_TIMES) if name in archive.files}
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read the trace: {error}: check workload.path") from None
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise WorkloadError(f"{path}: the npz is damaged ({error}): fetch the file again") from None
    for name, kinds in _KINDS.items():
        if name not in arrays:
            raise WorkloadError(f"{path}: array {name} is missing: it holds {', '.join(_KINDS)}")
        if arrays[name].ndim != 1 or arrays[name].dtype.kind not in kinds:
            array = arrays[name]
            raise WorkloadError(
                f"{path}: array {name} is {array.dtype}{list(array.shape)}: it must be a flat list of"
                f" {'numbers' if 'f' in kinds else 'whole numbers'}"
            )
    n = len(arrays["il"])
    nowhere = np.full(n, np.nan)
    for name, wanted in (("off", n + 1), ("ol", n), ("tr", n), ("ts", n), *((name, n) for name in _TIMES)):
        if len(arrays.get(name, nowhere)) != wanted:
            raise WorkloadError(
                f"{path}: array {name} has {len(arrays[name])} entries for {n} of il: it needs {wanted}"
            )
    off = arrays["off"].astype(np.int64, copy=False)
    if off[0] != 0 or off[-1] != len(arrays["ids"]) or (np.diff(off) < 0).any():
        raise WorkloadError(
            f"{path}: off must rise from 0 to the number of ids, {len(arrays['ids'])}: make the file again"
        )
    session = np.unique(arrays["tr"], return_inverse=True)[1].astype(np.int64)
    return Sessions(
        line=np.arange(1, n + 1),
        session=session,
        time=arrays["ts"].astype(np.float64, copy=False),
        prompt_len=arrays["il"].astype(np.int64, copy=False),
        output_len=arrays["ol"].astype(np.int64, copy=False),
        think_time=arrays.get("think", nowhere),
        service_time=arrays.get("api", nowhere),
        pieces=np.column_stack([off[:-1], off[1:]]),
        first_piece=np.arange(n + 1),
        ids=arrays["ids"],
        own_ids=False,
        names=None,
        layout=LAYOUT,
    )
