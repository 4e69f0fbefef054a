"""A request that asks for n answers, as n requests of the engine with one prompt.

As vLLM V1 has it (v1/engine/parallel_sampling.ParentRequest, AsyncLLM.add_request): all arrive at once,
in order, and share the prompt's full blocks as any two requests do, for those of the first can be
found. The first sample is the answer that the workload tells of; what the others say is their own and
nobody asks with it. All are as long as the workload says.

SGLang 0.5.9 (srt/managers/tokenizer_manager.TokenizerManager._handle_batch_request) first sends one more,
with the prompt alone and max_new_tokens 0. It prefills, samples a token that nobody sees, and ends, which
puts the prompt into the cache; only then do the samples arrive. It is the sample of number n here.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from sim.request import ROWS, Batch, Ints, named

MOST_SEQUENCES = 16_384  # of a request: the default of VLLM_MAX_N_SEQUENCES
REQUEST_BITS = 40  # of an engine's request id; above them the number of the sample, which is 0 for most
ANSWERS = -(2**59)  # from here down: answers of samples but the first; workloads stay above


Ids = TypeVar("Ids", int, Ints)


class Samples(NamedTuple):
    """The samples of some requests, those of one request in a row."""

    batch: Batch  # a row a sample
    row: Ints  # its request's row in the batch it came from
    number: Ints  # of the sample in its request, from 0; n: its prompt goes ahead with it


def request_of(request_id: Ids) -> Ids:
    """The number of a request, from the engine's id of one of its samples."""
    return request_id & ((1 << REQUEST_BITS) - 1)


def sample_of(request_id: Ids) -> Ids:
    """The number of a sample in its request, from its id."""
    return request_id >> REQUEST_BITS


def goes_ahead(request_id: Ints, n: Ints) -> npt.NDArray[np.bool_]:
    """Whether this, of a request's n samples, is the one that computes the prompt for the others."""
    ahead: npt.NDArray[np.bool_] = sample_of(request_id) == n
    return ahead


def samples(batch: Batch, first: int = 0, prompt_first: bool = False) -> Samples:
    """The samples of a batch's requests, of which the first has the number `first`. Modifies nothing.

    A prompt that several samples have is nobody's own, so its segments below 0 get names. With
    `prompt_first` it goes ahead of its samples, in a row before theirs.
    """
    ahead = (batch.n > 1) & prompt_first
    rows = batch.n + ahead
    row = np.repeat(np.arange(len(rows)), rows)
    number = np.arange(len(row)) - np.repeat(np.cumsum(rows) - batch.n, rows)
    is_ahead = number < 0
    number = np.where(is_ahead, batch.n[row], number)
    columns = {name: getattr(batch, name)[row] for name in ROWS}
    columns["output_len"][is_ahead] = 1
    columns["max_tokens"][is_ahead] = 0
    counts = np.diff(batch.segment_start)
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(batch.segment_len)
    begin = ends - batch.segment_len  # tokens of the request before the segment
    begin -= begin[batch.segment_start[:-1]][owner]
    of_prompt = np.minimum(batch.segment_len, batch.prompt_len[owner] - begin)
    in_prompt = begin < batch.prompt_len[owner]
    num_of_prompt = np.bincount(owner[in_prompt], minlength=len(counts))
    # The first sample has its request's segments, another those of the prompt and one more.
    width = np.where(number == 0, counts[row], num_of_prompt[row] + 1)
    start = np.concatenate([[0], np.cumsum(width)])
    source = np.arange(start[-1]) + np.repeat(batch.segment_start[row] - start[:-1], width)
    source = np.minimum(source, len(batch.segment_id) - 1)  # of an answer there is none
    shared = in_prompt & (batch.n[owner] > 1)
    ids = np.where(shared, named(batch.segment_id), batch.segment_id)[source]
    lens = batch.segment_len[source]
    others = np.flatnonzero(number > 0)
    last = start[1:][others] - 1
    ids[last] = ANSWERS - request_ids(first + row[others], number[others])
    lens[last] = columns["output_len"][others]
    lens[last - 1] = of_prompt[source[last - 1]]
    return Samples(Batch(**columns, segment_start=start, segment_id=ids, segment_len=lens), row, number)


def request_ids(request: Ints, number: Ints) -> Ints:
    """The engine's ids of samples: those of a request's first are the request's own."""
    return request + (number << REQUEST_BITS)
