"""A saved prefix cache as a file: arrays in an npz, and JSON for what they mean.

Equal runs write equal bytes. Whatever a file holds, reading it ends in a snapshot that an engine can
begin with, or in one line.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sim.chains import MAX_RUN, NAMESPACE_ROOT
from sim.columns import H
from sim.errors import InputError
from sim.out_file import reason, replace_bytes
from sim.request import Ints
from sim.snapshot import (
    BLOCK,
    BRANCH,
    COPY,
    HISTORY_COLUMNS,
    LENGTH,
    NODE,
    PARENT,
    PLACE,
    SKIP,
    Snapshot,
)  # fmt: skip
from sim.warm_start import SavedCache
from workloads.same_content import is_description

FORMAT = "prefixsim cache"
VERSION = 1  # of the format; a file of another is refused
_TABLES = {"nodes": LENGTH + 1, "blocks": COPY + 1, "history": HISTORY_COLUMNS}  # columns
_MOST = 2**31  # tokens, blocks and rows stay below


def write_cache(path: Path, cache: SavedCache) -> None:
    """Write a cache, whole or not at all. Raises InputError, one line, where it cannot."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "model": cache.model,
        "block_size": cache.snapshot.block_size,
        "content": cache.content,
    }
    tables = {name: getattr(cache.snapshot, name) for name in _TABLES}
    text = np.frombuffer(json.dumps(head, sort_keys=True).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, head=text, **tables)
    replace_bytes(path, file.getvalue())


def read_cache(path: Path) -> SavedCache:
    """Read a cache. Raises InputError, one line, for a file that is none, damaged, or of another version."""
    where = f"--load-cache {path}"
    try:
        with path.open("rb") as file:
            if file.read(4) != b"PK\x03\x04":  # what a zip archive begins with
                raise _foreign(where)
        with np.load(path, allow_pickle=False) as archive:
            if "head" not in archive.files:
                raise _foreign(where)
            head = _head(where, archive["head"])
            tables = {name: archive[name] for name in _TABLES if name in archive.files}
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {reason(error)}") from None
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{where}: holds more than fits in memory: save a cache of a smaller pool") from None
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError):
        raise _damaged(where) from None
    for name, columns in _TABLES.items():
        table = tables.get(name)
        if not isinstance(table, np.ndarray) or table.dtype != np.int64 or table.shape[1:] != (columns,):
            raise _damaged(where)
    snapshot = Snapshot(head["block_size"], **tables)
    if not (_sound_nodes(snapshot) and _sound_blocks(snapshot) and _sound_history(snapshot.history)):
        raise _damaged(where)
    return SavedCache(str(path), head["model"], head["content"], snapshot)


def _head(where: str, text: Any) -> dict[str, Any]:
    try:
        head = json.loads(text.tobytes())
    except (AttributeError, ValueError, RecursionError):  # no array, or not of text
        raise _foreign(where) from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _foreign(where)
    if head.get("version") != VERSION:
        raise InputError(
            f"{where}: has version {head.get('version')} of its format, and this prefixsim reads {VERSION}: "
            "save it again"
        )
    is_complete = (
        isinstance(head.get("model"), str)
        and type(head.get("block_size")) is int
        and 1 <= head["block_size"] < _MOST
        and is_description(head.get("content"))
    )
    if not is_complete:
        raise _damaged(where)
    return head


def _sound_nodes(snapshot: Snapshot) -> bool:
    """Whether the paths begin at the root and their pieces follow each other. A parent comes first."""
    nodes = snapshot.nodes
    if not (1 <= len(nodes) < _MOST) or nodes[0].any():
        return False
    parent, branch, skip, length = nodes[1:, PARENT], nodes[1:, BRANCH], nodes[1:, SKIP], nodes[1:, LENGTH]
    if not ((parent >= 0) & (parent <= np.arange(len(parent)))).all():
        return False
    is_namespace = skip == NAMESPACE_ROOT
    pieces = is_namespace | ((skip >= 0) & (skip < _MOST) & (length >= 1))
    fitting = (branch >= 0) & (branch <= nodes[parent, LENGTH])
    bounded = (length >= 0) & (length <= MAX_RUN * snapshot.block_size)
    empty = ~is_namespace | ((parent == 0) & (length == 0))
    return bool((pieces & fitting & bounded & empty).all())


def _sound_blocks(snapshot: Snapshot) -> bool:
    """Whether every block stands in the free queue once, and content of its own node in it."""
    blocks = snapshot.blocks
    n = len(blocks)
    if not 1 <= n < _MOST or not np.array_equal(np.sort(blocks[:, BLOCK]), np.arange(1, n + 1)):
        return False
    node, place, copy = blocks[:, NODE], blocks[:, PLACE], blocks[:, COPY]
    if not ((node >= 0) & (node < len(snapshot.nodes)) & (copy >= 0)).all():
        return False
    return bool(((place >= 0) & (place < np.where(node > 0, _full_blocks(snapshot)[node], 1))).all())


def _full_blocks(snapshot: Snapshot) -> Ints:
    """How many full blocks end in each node's piece."""
    nodes, size = snapshot.nodes, snapshot.block_size
    depth = np.zeros(len(nodes), np.int64)
    for i, (parent, branch) in enumerate(nodes[1:, [PARENT, BRANCH]].tolist(), 1):
        depth[i] = depth[parent] + branch
    return np.asarray((depth + nodes[:, LENGTH]) // size - depth // size)


def _sound_history(history: Ints) -> bool:
    if not 1 <= len(history) < _MOST or history[0].any():
        return False
    parent, computed, plain = history[1:, H.parent], history[1:, H.computed], history[1:, H.plain]
    in_order = (parent >= 0) & (parent <= np.arange(len(parent)))
    return bool((in_order & (computed >= 0) & (plain >= 0) & (plain <= computed)).all())


def _foreign(where: str) -> InputError:
    return InputError(f"{where}: is no cache that prefixsim has saved: name one that --save-cache wrote")


def _damaged(where: str) -> InputError:
    return InputError(f"{where}: is damaged: save it again")
