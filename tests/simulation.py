"""Short runs of the engine for tests: requests from pairs, one call to run, invariants always checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.cache_kinds import APC, CacheKind
from sim.core import EngineConfig
from sim.cost import StepCost, linear_cost
from sim.engine import INT_FIELDS, LOOKED_UP, Records
from sim.request import Batch, Session, make_batch
from sim.simulate import simulate
from sim.totals import Totals

Segments = Sequence[tuple[int, int]]  # (segment id, tokens) of a prompt
APART = 1e6  # seconds between requests that never meet


class Run(NamedTuple):
    """A finished run; each record column is in order of request id."""

    totals: Totals
    records: Records

    @property
    def hits(self) -> list[int]:
        """Hit tokens of each request's first admission."""
        return self.records["num_cached_tokens"].tolist()  # type: ignore[no-any-return]

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens, re-admissions apart."""
        return self.totals.prefix_cache_hits / self.totals.prefix_cache_queries

    @property
    def waits(self) -> npt.NDArray[np.float64]:
        """Seconds from arrival to the first admission."""
        return self.records["scheduled_time"] - self.records["arrival_time"]

    @property
    def ttft(self) -> npt.NDArray[np.float64]:
        """Seconds from arrival to the first token."""
        return self.records["first_token_time"] - self.records["arrival_time"]

    @property
    def e2el(self) -> npt.NDArray[np.float64]:
        """Seconds from arrival to the end."""
        return self.records["finish_time"] - self.records["arrival_time"]

    @property
    def tpot(self) -> npt.NDArray[np.float64]:
        """Seconds for each token after the first; NaN for answers of one token."""
        more = self.records["output_len"] - 1.0
        taken = self.records["finish_time"] - self.records["first_token_time"]
        return np.divide(taken, more, out=np.full(len(more), np.nan), where=more > 0)


def engine(**changes: Any) -> EngineConfig:
    """A roomy synchronous engine with blocks of 16, but for `changes`."""
    roomy = EngineConfig(
        block_size=16, num_gpu_blocks=30_000, max_num_batched_tokens=8192, max_num_seqs=256,
        max_model_len=131_072,
    )  # fmt: skip
    return roomy._replace(**changes)


def prompts(
    tokens: Sequence[Segments], *, output_len: int | Sequence[int] = 1, gap: float = APART, **columns: Any
) -> Batch:
    """Requests `gap` seconds apart, whose answers nobody shares; `columns` as in make_batch."""
    n = len(tokens)
    outputs = np.broadcast_to(output_len, n)
    rows = [[*prompt, (-1 - i, int(outputs[i]))] for i, prompt in enumerate(tokens)]
    flat = [pair for row in rows for pair in row]
    return make_batch(
        gap * np.arange(n),
        [sum(length for _, length in prompt) for prompt in tokens],
        outputs,
        np.cumsum([0] + [len(row) for row in rows]),
        [segment for segment, _ in flat],
        [length for _, length in flat],
        **columns,
    )


def linear(config: EngineConfig, base_s: float = 1e-3, token_s: float = 1e-5) -> StepCost:
    """A step of base + token * tokens seconds."""
    return linear_cost(base_s, token_s, max_num_batched_tokens=config.max_num_batched_tokens)


def run(
    batches: Batch | Iterator[Batch] | Iterator[Session],
    config: EngineConfig,
    cost: StepCost | None = None,
    **options: Any,
) -> Run:
    """Simulate to the end and check what is true of every run; `options` as in simulate."""
    chunks: list[Records] = []
    sent = 0

    def counted(source: Iterator[Any]) -> Iterator[Any]:
        nonlocal sent
        for batch in source:
            sent += len((batch.requests if isinstance(batch, Session) else batch).prompt_len)
            yield batch

    source = iter([batches]) if isinstance(batches, Batch) else batches
    totals = simulate(
        counted(source),
        config,
        linear(config) if cost is None else cost,
        on_records=chunks.append,
        **options,
    )
    result = Run(totals, in_order(chunks))
    check_invariants(result, config, sent, options.get("kind", APC))
    return result


def in_order(chunks: Sequence[Records]) -> Records:
    """The records of all chunks by request id."""
    columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}
    order = np.argsort(columns["request_id"], kind="stable")
    return {name: column[order] for name, column in columns.items()}


def check_invariants(result: Run, config: EngineConfig, sent: int, kind: CacheKind = APC) -> None:
    """What holds after any run that has ended under a cache of `kind`."""
    totals, records = result
    assert records["request_id"].tolist() == list(range(sent)), "requests in = finished + refused"
    served = {name: column[records["refused"] == 0] for name, column in records.items()}
    for earlier, later in (
        ("arrival_time", "ready_time"),
        ("ready_time", "scheduled_time"),
        ("scheduled_time", "first_token_time"),
        ("first_token_time", "finish_time"),
    ):
        assert (served[earlier] <= served[later]).all(), f"{earlier} <= {later}"
    assert (served["finish_time"] <= totals.last_time).all()
    hits = served["num_cached_tokens"]
    n = served["n"] + kind.prompt_first * (served["n"] > 1)  # what the engine has of each
    if kind.groups:
        n = np.ones_like(hits)
    assert (hits % config.block_size == 0).all() and (hits >= 0).all()
    assert (hits <= served["prompt_len"] - 1).all()
    assert totals.prefix_cache_hits == served["prefix_cache_hits"].sum()
    assert (served["prefix_cache_hits"] >= hits).all()
    assert (served["prefix_cache_queries"] == n * served["prompt_len"]).all()
    assert totals.prefix_cache_queries == served["prefix_cache_queries"].sum()
    assert totals.num_admissions == n.sum()
    assert totals.num_preemptions == served["num_preemptions"].sum()
    # async: a preempted request whose last token was in flight ends without another admission
    ended_waiting = totals.num_preemptions - totals.num_readmissions
    assert 0 <= ended_waiting <= (n.sum() if config.async_scheduling else 0)
    assert totals.itl_count == (served["n"] * (served["output_len"] - 1)).sum() == totals.itl_histogram.sum()
    assert totals.max_blocks_used <= config.num_gpu_blocks - 1
    refused = records["refused"] == 1
    assert all((records[name][refused] == 0).all() for name in (*INT_FIELDS[7:], *LOOKED_UP))
