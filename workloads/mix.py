"""Several workloads at once: tenants with arrivals, salts, adapters and priorities of their own."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, StringConstraints, model_validator

from sim.request import Batch, Ints, Session
from workloads.agent import Agent
from workloads.base import Spec, Workload
from workloads.content import Numbering
from workloads.documents import Documents
from workloads.few_shot import FewShot
from workloads.fourteen_tokens import FourteenTokens
from workloads.merge import merged
from workloads.multi_turn import MultiTurn
from workloads.recording import Recording
from workloads.scan import Scan
from workloads.session import SessionWorkload, lone_requests
from workloads.shared_prefix import SharedPrefix
from workloads.streams import Stream
from workloads.trace import Trace
from workloads.trace_batches import Contents
from workloads.tree import Tree

OpenLoop = (
    Agent
    | Documents
    | FewShot
    | FourteenTokens
    | MultiTurn
    | Recording
    | Scan
    | SharedPrefix
    | Trace
    | Tree
)
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
MOST_TENANTS = 1024  # a batch of each is in memory

# A tenant's number goes above the numbers that its workload gives to segments, and to sessions,
# groups and the like. Trace ids that reach so high are numbered anew from PLAIN_IDS on.
SEGMENT_BITS, LABEL_BITS = 48, 32
PLAIN_IDS = 2**47
SESSION_IDS = 2**46  # from here on, up to PLAIN_IDS: what sessions have of their own


class Tenant(Spec):
    """One workload of a mix, and what all its requests bear."""

    cache_salt: Name | None = Field(None, description="shares the cache only with the same salt")
    lora: Name | None = Field(None, description="adapter, instead of the workload's own")
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="smaller is more urgent; instead of the workload's own"
    )
    texts: Name | None = Field(
        None, description="tenants of one name have the same prefixes, documents, examples, trace ids"
    )
    workload: Annotated[OpenLoop, Field(discriminator="kind")]

    @model_validator(mode="after")
    def _open_loop(self) -> Self:
        if self.workload.concurrency is not None:
            rate = "session_rate" if isinstance(self.workload, SessionWorkload) else "request_rate"
            raise ValueError(f"a mix has no closed loops: drop concurrency, and set {rate}")
        return self


class Mix(Workload):
    """The workloads of named tenants, merged by arrival; of one instant, in the tenants' order.

    Where a tenant has sessions, all are told as sessions, a lone request as one of its own.

    Each draws from a seed of its own that only its name decides: another tenant more or less, or
    in another place, changes no other's requests. Tenants share no content unless they have the
    same `texts`; then equal group, document or example numbers are equal content, and only salts
    and adapters keep them apart. Salts and adapters in a trace are that tenant's own.
    """

    kind: Literal["mix"] = "mix"
    tenants: dict[Name, Tenant] = Field(min_length=1, max_length=MOST_TENANTS)

    concurrency: ClassVar[None] = None  # an open loop

    @model_validator(mode="after")
    def _texts_of_one_kind(self) -> Self:
        kinds: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            kind = tenant.workload.kind
            if tenant.texts is not None and kinds.setdefault(tenant.texts, kind) != kind:
                raise ValueError(
                    f"tenant {name} has the texts {tenant.texts!r} of a {kinds[tenant.texts]} workload,"
                    f" but is of kind {kind}: name other texts"
                )
        return self

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(self.tenants)

    @property
    def expected_requests(self) -> int | None:
        counts = [tenant.workload.expected_requests for tenant in self.tenants.values()]
        return None if None in counts else sum(count for count in counts if count is not None)

    def think_times(self, seed: np.random.SeedSequence) -> Iterator[float]:
        """Yield nothing: nobody waits for an answer."""
        return iter(())

    @property
    def has_sessions(self) -> bool:
        return any(tenant.workload.has_sessions for tenant in self.tenants.values())

    def batches(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Batch]:
        assert not self.has_sessions, "sessions have no times"
        sources = [map(apart, source) for source, apart in self._sources(seed, block_size)]
        return merged(sources, self.chunk_size)

    def sessions(self, seed: np.random.SeedSequence, block_size: int) -> Iterator[Session]:
        """Yield the sessions of all tenants in order of their start, lazily. Does not modify `seed`."""
        told = zip(self.tenants.values(), self._sources(seed, block_size), strict=True)
        sources = [
            _apart(source if tenant.workload.has_sessions else lone_requests(source), apart)
            for tenant, (source, apart) in told
        ]
        return heapq.merge(*sources, key=lambda session: session.start)

    def _sources(
        self, seed: np.random.SeedSequence, block_size: int
    ) -> Iterator[tuple[Iterator[Any], Callable[[Batch], Batch]]]:
        """Yield each tenant's batches or sessions, and what gives them numbers that no other tenant has."""
        loras, namespaces = Numbering(1), Numbering(1)
        texts: dict[tuple[str, str], int] = {}
        traced: dict[int, Contents] = {}  # by texts: the contents that traces have named
        high_ids: dict[int, Numbering] = {}  # by texts
        for number, (name, tenant) in enumerate(self.tenants.items()):
            own = ("texts", tenant.texts) if tenant.texts is not None else ("tenant", name)
            first = texts.setdefault(own, number)
            lora = 0 if tenant.lora is None else loras(tenant.lora)
            common = (lora, tenant.cache_salt)
            namespace = 0 if common == (0, None) else namespaces(common)
            own_seed = _seed_of(name, seed)
            source: Iterator[Any]
            if isinstance(tenant.workload, Trace):
                contents = traced.setdefault(first, Contents())
                source = tenant.workload.batches(own_seed, block_size, contents)
            elif tenant.workload.has_sessions:
                source = tenant.workload.sessions(own_seed, block_size)
            else:
                source = tenant.workload.batches(own_seed, block_size)
            high = high_ids.setdefault(first, Numbering(PLAIN_IDS))
            apart = functools.partial(
                _told_apart,
                tenant=tenant,
                number=number,
                texts=first,
                lora=lora,
                namespace=namespace,
                high_ids=high,
            )
            yield source, apart


def _seed_of(name: str, seed: np.random.SeedSequence) -> np.random.SeedSequence:
    """Return the tenant's seed: a child of `seed`, which it does not modify."""
    key = (*seed.spawn_key, int(Stream.TENANTS), int.from_bytes(name.encode()))
    return np.random.SeedSequence(seed.entropy, spawn_key=key, pool_size=seed.pool_size)


def _apart(source: Iterator[Session], apart: Callable[[Batch], Batch]) -> Iterator[Session]:
    """Yield a tenant's sessions with the numbers that they have in the mix."""
    for session in source:
        yield session._replace(requests=apart(session.requests))


def _told_apart(
    batch: Batch,
    *,
    tenant: Tenant,
    number: int,
    texts: int,
    lora: int,
    namespace: int,
    high_ids: Numbering,
) -> Batch:
    """Return a tenant's requests with the numbers that they have in the mix.

    `texts` is the number of the first tenant with the same texts, `high_ids` are these texts' ids
    from PLAIN_IDS on, numbered anew; `lora` and `namespace` are what the tenant gives to all its
    requests, 0: nothing.
    """
    own_lora = _above(batch.lora, number + 1, LABEL_BITS)
    own_namespace = _above(batch.namespace, number + 1, LABEL_BITS)
    given = tenant.priority is not None
    shared_end = tenant.workload.pool_end
    return batch._replace(
        tenant=np.full(len(batch.tenant), number),
        priority=np.full(len(batch.priority), tenant.priority) if given else batch.priority,
        lora=np.full(len(batch.lora), lora) if lora else np.where(batch.lora == 0, 0, own_lora),
        namespace=np.where(batch.namespace == 0, namespace, own_namespace),
        session_id=_above(batch.session_id, number, LABEL_BITS),
        prefix_group=_above(batch.prefix_group, texts, LABEL_BITS),
        segment_id=_segments(batch.segment_id, high_ids, number, texts, shared_end),
    )


def _above(numbers: Ints, tenant: int, bits: int) -> Ints:
    """Return the numbers with the tenant's above them; those below 0, which say none, as they are."""
    return np.where(numbers < 0, numbers, numbers + (tenant << bits))


def _segments(ids: Ints, high_ids: Numbering, number: int, texts: int, shared_end: int | None) -> Ints:
    """Return the ids with a number above them: the texts' if they name shared content, else the tenant's.

    Content is shared below `shared_end`, and what is not goes above SESSION_IDS, where no pool of the
    same texts reaches; None: all is shared that is not below 0.
    """
    high = np.flatnonzero(ids >= (PLAIN_IDS if shared_end is None else SESSION_IDS))
    if len(high):
        ids = ids.copy()
        ids[high] = [high_ids(one) for one in ids[high].tolist()]
    if shared_end is not None:
        own = np.where(ids < SESSION_IDS, ids + SESSION_IDS, ids) + (number << SEGMENT_BITS)
        return np.where(ids < shared_end, ids + (texts << SEGMENT_BITS), own)
    return np.where(ids < 0, ids - (number << SEGMENT_BITS), ids + (texts << SEGMENT_BITS))
