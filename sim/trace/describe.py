"""A trace in numbers: load, lengths, and what a prefix cache could do with it. One pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sim.request import Batch, Floats, Ints
from sim.stack import blocks_above
from sim.trace.prefix_tree import Runs, add, new_tree
from workloads import Trace
from workloads.trace_reader import TraceReader

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
BLOCK_SIZES = (16, 32, 64, 128, 256, 512)  # tokens


def describe(
    trace: Trace,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    *,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Read a trace once and return its figures, ready for JSON.

    Hit rates are those of an infinite pool that serves one request after the other, by vLLM's rule:
    only full blocks of `block_sizes` tokens, and never the last token of a prompt. Gaps and
    distances count prompt tokens that were used before: how long before, how many requests before,
    and how many distinct tokens the requests between used. `seed` draws what the file does not say
    (session starts, a prefix model's groups). progress(requests read) is called now and then.

    A prompt counts once, however many samples or beams of it are asked for; output tokens are of all.

    Memory grows with the distinct content and the number of requests. Raises WorkloadError.
    """
    reader = trace.reader(np.random.SeedSequence(seed))
    tree = new_tree(1 << 12)
    columns: list[tuple[Floats, Ints, Ints, Ints]] = []
    found: list[Runs] = []
    sessions: set[int] = set()
    done = mm_tokens = 0
    for _, batch in reader:
        tree, runs = add(tree, batch, batch.prompt_len + batch.output_len - 1)
        columns.append((batch.arrival_time, batch.prompt_len, batch.output_len, batch.n * batch.beam_width))
        mm_tokens += _item_tokens(batch, reader)
        found.append(runs)
        sessions.update(np.unique(batch.session_id[batch.session_id >= 0]).tolist())
        done += len(batch.prompt_len)
        if progress is not None:
            progress(done)
    time, prompt, output, sequences = (np.concatenate(column) for column in zip(*columns, strict=True))
    runs = Runs(*(np.concatenate(column) for column in zip(*found, strict=True)))
    computed = prompt + output - 1  # the last token of an answer is never computed
    distance = blocks_above(runs, computed, 1)
    request, user = runs.request, runs.user
    # Of an answer that is the same as before, no prompt token is used again.
    tokens = np.maximum(np.minimum(runs.end, prompt[request]) - runs.begin, 0)
    shared = np.bincount(request, tokens, len(prompt)).astype(np.int64)
    gaps = np.diff(time)
    span = float(time[-1] - time[0])
    return {
        "path": trace.path,
        "format": reader.format,
        "trace_block_size": reader.block,
        "requests": len(time),
        "sessions": len(sessions) or None,
        "span_s": span,
        "request_rate": (len(time) - 1) / span if span > 0 else None,
        "arrival_cv": float(gaps.std() / gaps.mean()) if span > 0 else None,
        "prompt_len": _lengths(prompt),
        "output_len": _lengths(output),
        "total_input_tokens": int(prompt.sum()),
        "total_output_tokens": int((output * sequences).sum()),
        "sequences": int(sequences.sum()),
        "mm_items": reader.num_items,
        "distinct_mm_items": len(reader.contents.items),
        "mm_tokens": mm_tokens,
        "distinct_tokens": int(computed.sum() - (runs.end - runs.begin).sum()),
        "ideal_hit_rate": {
            str(size): float(hit_tokens(shared, prompt, size).sum() / prompt.sum()) for size in block_sizes
        },
        "ideal_hit_rate_whole_ids": float(shared.sum() / prompt.sum()) if reader.partial else None,
        "requests_that_share": float((shared > 0).mean()),
        "shared_prefix_len": _quantiles(shared, np.ones(len(shared), np.int64)),
        "reuse_gap_s": _quantiles(time[request] - time[user], tokens),
        "reuse_distance_requests": _quantiles(request - user, tokens),
        "reuse_distance_tokens": _quantiles(distance, tokens),
        "skipped": reader.skipped.count,
        "first_skipped": reader.skipped.first,
        "notes": [*_notes(reader, block_sizes), *_note_of_sequences(sequences)],
    }


def hit_tokens(shared: Ints, prompt_len: Ints, block_size: int) -> Ints:
    """Tokens of each prompt that hit, when its first `shared` are those of an earlier request.

    v1/core/kv_cache_manager.KVCacheManager.get_computed_blocks: full blocks of at most the prompt
    less its last token.
    """
    return np.minimum(shared // block_size, (prompt_len - 1) // block_size) * block_size


def _item_tokens(batch: Batch, reader: TraceReader) -> int:
    """Placeholder tokens of the multimodal items of a batch."""
    items = reader.contents.items
    if not items:
        return 0
    return int(batch.segment_len[np.isin(batch.segment_id, list(items))].sum())


def _lengths(lens: Ints) -> dict[str, float]:
    figures = _quantiles(lens, np.ones(len(lens), np.int64))
    assert figures is not None
    return {"mean": float(lens.mean()), "min": float(lens.min())} | figures


def _quantiles(values: npt.NDArray[Any], weights: Ints) -> dict[str, float] | None:
    """The smallest value up to which a share of the weight lies; None where there is no weight."""
    total = int(weights.sum())
    if total == 0:
        return None
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weights[order])
    return {
        name: float(values[order[np.searchsorted(upto, max(share * total, 1))]])
        for name, share in QUANTILES.items()
    }


def _note_of_sequences(sequences: Ints) -> list[str]:
    several = int((sequences > 1).sum())
    if several == 0:
        return []
    return [
        f"{several} requests ask for several answers or beams (n, beam_width): each prompt counts once here,"
        " and an engine looks it up once for each of n"
    ]


def unknowns(reader: TraceReader, block_sizes: Sequence[int]) -> list[str]:
    """What the file of a reader that has been read does not tell of hits at these block sizes."""
    notes = []
    block, trace = reader.block, reader.trace
    askew = [size for size in block_sizes if block is not None and size % block]
    if askew:
        notes.append(
            f"blocks of {', '.join(map(str, askew))}: an id stands for {block} tokens, and what two "
            "different ids share is unknown, so these rates are lower bounds"
        )
    if reader.format in ("azure", "csv"):
        notes.append(
            "the file names no prefixes: what is shared is the prefix_model's"
            if trace.prefix_model
            else "the file names no prefixes and no prefix_model is given: nothing is shared"
        )
    if reader.format in ("delta", "npz") and np.isinf(trace.session_rate):
        notes.append("sessions have clocks of their own; here all start at 0 (set a session rate)")
    return notes


def _notes(reader: TraceReader, block_sizes: Sequence[int]) -> list[str]:
    """What the figures do not say of themselves."""
    notes = unknowns(reader, block_sizes)
    if reader.partial:
        notes.append(
            "ideal_hit_rate_whole_ids counts an id as a block even where it stands for a part, as trace "
            "tools do; ideal_hit_rate counts full blocks and never the last token, as vLLM does"
        )
    if reader.empty_outputs:
        notes.append(f"{reader.empty_outputs} requests have an output length of 0 and count as 1")
    return notes
