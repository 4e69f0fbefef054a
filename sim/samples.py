"""A request that asks for n answers, as n requests of the engine with one prompt.

As vLLM V1 has it (v1/engine/parallel_sampling.ParentRequest, AsyncLLM.add_request): all arrive at once,
in order, and share the prompt's full blocks as any two requests do, for those of the first can be
found. The first sample is the answer that the workload tells of; what the others say is their own and
nobody asks with it. All are as long as the workload says.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from sim.request import ROWS, Batch, Ints, named

MOST_SEQUENCES = 16_384  # of a request
REQUEST_BITS = 40  # of an engine's request id; above them the number of the sample, which is 0 for most
ANSWERS = -(2**59)  # from here down: answers of samples but the first; workloads stay above


Ids = TypeVar("Ids", int, Ints)


class Samples(NamedTuple):
    """The samples of some requests, those of one request in a row."""

    batch: Batch  # a row a sample
    row: Ints  # its request's row in the batch it came from
    number: Ints  # of the sample in its request, from 0


def request_of(request_id: Ids) -> Ids:
    """The number of a request, from the engine's id of one of its samples."""
    return request_id & ((1 << REQUEST_BITS) - 1)


def sample_of(request_id: Ids) -> Ids:
    """The number of a sample in its request, from its id."""
    return request_id >> REQUEST_BITS


def samples(batch: Batch, first: int = 0) -> Samples:
    """The samples of a batch's requests, of which the first has the number `first`. Modifies nothing.

    A prompt that several samples have is nobody's own, so its segments below 0 get names.
    """
    row = np.repeat(np.arange(len(batch.n)), batch.n)
    number = np.arange(len(row)) - np.repeat(np.cumsum(batch.n) - batch.n, batch.n)
    counts = np.diff(batch.segment_start)
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(batch.segment_len)
    begin = ends - batch.segment_len  # tokens of the request before the segment
    begin -= begin[batch.segment_start[:-1]][owner]
    of_prompt = np.minimum(batch.segment_len, batch.prompt_len[owner] - begin)
    num_of_prompt = np.bincount(owner[begin < batch.prompt_len[owner]], minlength=len(counts))
    # The first sample has its request's segments, another those of the prompt and one more.
    width = np.where(number == 0, counts[row], num_of_prompt[row] + 1)
    start = np.concatenate([[0], np.cumsum(width)])
    source = np.arange(start[-1]) + np.repeat(batch.segment_start[row] - start[:-1], width)
    source = np.minimum(source, len(batch.segment_id) - 1)  # of an answer there is none
    ids = np.where(batch.n[owner] > 1, named(batch.segment_id), batch.segment_id)[source]
    lens = batch.segment_len[source]
    others = np.flatnonzero(number > 0)
    last = start[1:][others] - 1
    ids[last] = ANSWERS - request_ids(first + row[others], number[others])
    lens[last] = batch.output_len[row[others]]
    lens[last - 1] = of_prompt[source[last - 1]]
    columns = {name: getattr(batch, name)[row] for name in ROWS}
    return Samples(Batch(**columns, segment_start=start, segment_id=ids, segment_len=lens), row, number)


def request_ids(request: Ints, number: Ints) -> Ints:
    """The engine's ids of samples: those of a request's first are the request's own."""
    return request + (number << REQUEST_BITS)
