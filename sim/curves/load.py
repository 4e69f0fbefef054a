"""The requests to count, one after the other, and what each leaves in the cache."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sim.errors import InputError
from sim.request import OWN, Batch, Floats, Ints, Session
from sim.samples import samples
from sim.trace.prefix_tree import Runs, add, new_tree
from workloads import AnyWorkload, SessionWorkload, Trace
from workloads.errors import WorkloadWarning, told_by_workload
from workloads.merge import by_arrival, join
from workloads.trace_reader import TraceReader

DEFAULT_BLOCK_SIZE = 16  # tokens, vLLM's, where neither options nor ids of a trace name another


class Load(NamedTuple):
    """A workload, and which of its tokens count."""

    name: str
    workload: AnyWorkload
    seed: int = 0
    whole_ids: bool = False  # a trace's id is a block, also where it stands for a part of one
    outputs: bool = False  # answers stay in the cache too
    max_model_len: int | None = None  # tokens: requests that leave no room for an answer are refused
    room: int | None = None  # tokens: requests that need more are refused


class Passed(NamedTuple):
    """What one pass over a load leaves: an entry a request but in `runs`, a sample being one."""

    runs: Runs
    arrival: Floats  # seconds
    prompt: Ints  # tokens; 0: refused
    computed: Ints  # tokens that stay in the cache
    reader: TraceReader | None  # of a trace: what was learnt of the file
    told: list[str]  # what had to be changed in it

    @property
    def own_block(self) -> int | None:
        """Tokens that an id of the trace stands for; None where there are none."""
        return None if self.reader is None else self.reader.block

    @property
    def refused(self) -> npt.NDArray[np.bool_]:
        """Which requests the engine would refuse."""
        return np.equal(self.prompt, 0)


def one_pass(
    load: Load, block_sizes: Sequence[int] = (), *, progress: Callable[[int], None] | None = None
) -> Passed:
    """Walk through a load once; the result serves every block size.

    `block_sizes` are those that a trace's ids must suit, as for a run. progress(requests read) is
    called now and then. Memory grows with the distinct content and the number of requests. Raises
    WorkloadError for bad data, InputError where whole ids are asked of a load without them.
    """
    reader, batches = _requests(load, block_sizes)
    tree = new_tree(1 << 12)
    found: list[Runs] = []
    columns: list[tuple[Floats, Ints, Ints]] = []
    done = 0
    told: list[str] = []
    with told_by_workload(told):
        for batch in batches:
            batch, prompt, computed = _counted(load, batch, reader)
            tree, runs = add(tree, batch, computed)
            found.append(runs)
            columns.append((batch.arrival_time, prompt, computed))
            done += len(prompt)
            if progress is not None:
                progress(done)
    if done == 0:
        raise InputError(f"{load.name}: the workload has no requests")
    arrival, prompts, left = (np.concatenate(column) for column in zip(*columns, strict=True))
    return Passed(
        runs=Runs(*(np.concatenate(column) for column in zip(*found, strict=True))),
        arrival=arrival,
        prompt=prompts,
        computed=left,
        reader=reader,
        told=told,
    )


def contents(load: Load, block_size: int) -> Iterator[tuple[Batch, Ints]]:
    """Yield the requests of a load again, and how many tokens each leaves in the cache.

    What the pass has told of the load is not told again.
    """
    reader, batches = _requests(load, (block_size,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkloadWarning)
        for batch in batches:
            batch, _, computed = _counted(load, batch, reader)
            yield batch, computed


def _requests(load: Load, block_sizes: Sequence[int]) -> tuple[TraceReader | None, Iterator[Batch]]:
    """The requests in order of arrival; a trace's reader knows its block once the first have come.

    Each sample of a request is one, as it is to the engine.
    """
    reader, batches = _batches(load, block_sizes)
    return reader, _with_samples(batches)


def _with_samples(batches: Iterator[Batch]) -> Iterator[Batch]:
    done = 0
    told = False
    for batch in batches:
        done += len(batch.n)
        if (batch.n > 1).any():
            if not told:
                told = True
                warnings.warn(
                    "requests ask for several answers (n): each counts as a request with their prompt",
                    WorkloadWarning,
                    stacklevel=2,
                )
            batch = samples(batch, done - len(batch.n)).batch
        yield batch


def _batches(load: Load, block_sizes: Sequence[int]) -> tuple[TraceReader | None, Iterator[Batch]]:
    workload, seed = load.workload, np.random.SeedSequence(load.seed)
    if isinstance(workload, Trace):
        reader = workload.reader(seed)
        return reader, workload.read(reader, block_sizes)
    if isinstance(workload, SessionWorkload):
        return None, iter([_without_service(workload.sessions(seed), workload.concurrency)])
    if workload.has_sessions:
        for size in block_sizes[1:]:
            next(workload.sessions(seed, size), None)  # as below
        sessions = workload.sessions(seed, block_sizes[0] if block_sizes else DEFAULT_BLOCK_SIZE)
        return None, iter([_without_service(sessions, None)])
    for size in block_sizes[1:]:
        next(workload.batches(seed, size), None)  # a trace within refuses a size that cuts its ids askew
    return None, workload.batches(seed, block_sizes[0] if block_sizes else DEFAULT_BLOCK_SIZE)


def _without_service(sessions: Iterator[Session], concurrency: int | None) -> Batch:
    """The requests of all sessions in order of arrival, were every answer there at once.

    A user of a closed loop begins a session when all answers of the one before have come.
    """
    parts = []
    users = [0.0] * (concurrency or 0)  # when each is free
    for session in sessions:
        start = heapq.heappop(users) if users else session.start
        times: list[float] = []
        for after, delay in zip(session.after, session.delay.tolist(), strict=True):
            times.append(max((times[i] for i in after), default=start) + delay)
        if concurrency is not None:
            heapq.heappush(users, max(times))
        parts.append(session.requests._replace(arrival_time=np.array(times)))
    return by_arrival(join(parts))


def _counted(load: Load, batch: Batch, reader: TraceReader | None) -> tuple[Batch, Ints, Ints]:
    """The batch, its prompts' tokens, and the tokens that stay; of a refused request, none."""
    prompt = batch.prompt_len
    end = prompt + batch.output_len
    if load.whole_ids:
        block = None if reader is None else reader.block
        if block is None:
            raise InputError(
                f"--count whole-ids: {load.name} has no ids of blocks; leave the option out for vLLM's rule"
            )
        in_file = (batch.segment_id >= 0) & (batch.segment_id < OWN)
        batch = batch._replace(segment_len=np.where(in_file, block, batch.segment_len))
        computed = np.diff(np.concatenate([[0], np.cumsum(in_file)])[batch.segment_start]) * block
    elif load.outputs:
        longest = end if load.max_model_len is None else np.minimum(end, load.max_model_len)
        computed = longest - 1  # the last token of an answer is never computed
    else:
        computed = prompt
    refused = np.zeros(len(prompt), np.bool_)
    if load.max_model_len is not None:
        refused |= prompt >= load.max_model_len
    if load.room is not None:
        refused |= computed > load.room
    return batch, np.where(refused, 0, prompt), np.where(refused, 0, computed)
