"""The list of caches, and what a scenario may say of each: `cache: apc`, or a mapping with options.

`kind` names the folder of `sim/caches` that has the cache. Nothing here needs the compiler, so that
a scenario is checked before that is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from sim.section import Section

if TYPE_CHECKING:
    from sim.core import EngineConfig
    from sim.request import Batch, Ints
    from sim.scenario import Scenario

RESERVATIONS = ("oracle", "pow2", "max")


class CacheKind(Section):
    """A way to share KV. Written as its name where all options have their defaults."""

    kind: str = ""
    looks_up: ClassVar[bool] = True  # whether it searches for prefixes that are cached
    groups: ClassVar[bool] = False  # whether all sequences of a request are one to the engine
    hashes: ClassVar[bool] = False  # whether it hashes every full block
    prompt_first: ClassVar[bool] = False  # whether a request with the prompt alone goes ahead of samples
    metadata: ClassVar[str]  # what it keeps to find KV: see `metadata` in its file

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        return self.kind if self.__class__.model_validate({"kind": self.kind}) == self else data

    @property
    def module(self) -> ModuleType:
        """The file that has its verbs."""
        return importlib.import_module(f"sim.caches.{self.kind}")

    def misfit(self, scenario: Scenario) -> str | None:
        """What of a scenario this cache cannot do, and the remedy; None: it can do all."""
        if not self.looks_up and (scenario.prime is not None or scenario.reset_prefix_cache):
            what = "prime" if scenario.prime is not None else "reset_prefix_cache"
            return f"cache: {self.kind} keeps no KV of ended requests, so {what} has no effect: leave it out"
        return None

    def beyond_tokens(self, config: EngineConfig) -> str:
        """What a request must fit into the pool beside the KV of its tokens, to say why none can run."""
        return ""

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """The blocks that each request needs to run to its end, alone in the pool."""
        tokens = np.minimum(batch.prompt_len + batch.output_len, config.max_model_len) - 1
        return np.asarray(-(-tokens // config.block_size))


class ApcKind(CacheKind):
    """vLLM V1's Automatic Prefix Caching."""

    kind: Literal["apc"] = "apc"
    hashes: ClassVar[bool] = True
    metadata: ClassVar[str] = "cached blocks"


class RadixKind(CacheKind):
    """SGLang's RadixAttention and the admission that goes with it, by SGLang's names and defaults."""

    kind: Literal["radix"] = "radix"
    prompt_first: ClassVar[bool] = True
    metadata: ClassVar[str] = "tree nodes"
    schedule_policy: Literal["fcfs", "lpm"] = Field(
        "fcfs", description="order of the waiting requests; lpm: longest cached prefix first"
    )
    schedule_conservativeness: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="scales the share of the tokens asked for that an admission leaves to the running"
    )

    def misfit(self, scenario: Scenario) -> str | None:
        """SGLang has rules of its own for these."""
        engine = scenario.engine
        if engine.scheduling_policy != "fcfs":
            return "engine.scheduling_policy: radix knows no priorities: leave it out"
        if engine.watermark > 0.0 or not engine.scheduler_reserve_full_isl:
            field = "watermark" if engine.watermark > 0.0 else "scheduler_reserve_full_isl"
            return f"engine.{field}: radix admits by SGLang's estimate, which has no such thing: leave it out"
        if engine.free_order != "hashed_last":
            return "engine.free_order: radix has no queue of cached blocks, it evicts leaves: leave it out"
        if scenario.prime is not None:
            return "prime: only cache apc begins warm; with radix, measure_from leaves a ramp out"
        return None


class PagedKind(CacheKind):
    """PagedAttention of 2023: block tables with copy-on-write, groups of sequences, reserved prefixes."""

    kind: Literal["paged"] = "paged"
    looks_up: ClassVar[bool] = False
    groups: ClassVar[bool] = True
    metadata: ClassVar[str] = "block-table entries"
    preemption_mode: Literal["recompute", "swap"] | None = Field(
        None, description="of a preempted group's KV; none: swapped where it has several sequences"
    )
    reserve_prefixes: bool | None = Field(
        None,
        description="blocks hold the KV of the workload's prefix groups before the run begins; none: where "
        "the workload knows them",
    )

    def misfit(self, scenario: Scenario) -> str | None:
        engine = scenario.engine
        if engine.async_scheduling:
            return "cache: paged schedules step by step, as vLLM 0.2: set engine.async_scheduling to false"
        if engine.scheduling_policy != "fcfs":
            return "cache: paged knows no priorities, as vLLM 0.2: set engine.scheduling_policy to fcfs"
        if engine.max_loras is not None:
            return "cache: paged knows no places for adapters, as vLLM 0.2: leave engine.max_loras out"
        return super().misfit(scenario)

    def beyond_tokens(self, config: EngineConfig) -> str:
        """The blocks of a group, and what is kept from it."""
        share = config.watermark
        kept = f", and engine.watermark keeps {share:g} of the pool free" if share > 0.0 else ""
        return f"; {_whole_groups(config)} and what a preempted one needs to return{kept}; {_REMEDY}"

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """With what its last return after a preemption would ask for; too many sequences fit nowhere."""
        width = batch.n * batch.beam_width
        tokens = np.minimum(batch.prompt_len + batch.output_len, config.max_model_len) - 1
        shared = batch.prompt_len // config.block_size
        spare = int(config.watermark * config.num_gpu_blocks)

        def grown(tokens: Ints) -> Ints:
            return np.asarray(shared + width * (-(-tokens // config.block_size) - shared))

        swapped = (width > 1) if self.preemption_mode is None else (self.preemption_mode == "swap")
        needed = np.where(swapped, grown(tokens - 1) + width, grown(tokens)) + spare
        return np.where(width > min(config.max_num_seqs, config.max_num_batched_tokens), 2**62, needed)


class EquippedPaged(PagedKind):
    """The same with what a run knows of its machine and its load: no scenario can say this."""

    prefix_lens: tuple[int, ...] = ()  # tokens reserved for each prefix group
    copy_seconds: float = 0.0  # of a block, within the GPU's memory
    swap_seconds: float = 0.0  # of a block, between GPU and host
    seed: int = 0  # of the parents that beams draw, below 2**32

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """With the blocks that are reserved, those of its own prefix once."""
        lens = np.array([*self.prefix_lens, 0], np.int64)  # the last: of no group
        known = (batch.prefix_group >= 0) & (batch.prefix_group < len(self.prefix_lens))
        hit = lens[np.where(known & (batch.namespace == 0), batch.prefix_group, -1)]
        own = np.minimum(hit, batch.prompt_len - 1) // config.block_size
        reserved = int((-(-lens // config.block_size)).sum())
        return np.asarray(super().blocks_needed(batch, config) + reserved - own)


class ContiguousKind(CacheKind):
    """A region of adjacent blocks for each sequence, by buddy allocation, as Orca's baselines have it."""

    kind: Literal["contiguous"] = "contiguous"
    looks_up: ClassVar[bool] = False
    groups: ClassVar[bool] = True
    metadata: ClassVar[str] = "regions"
    reservation: Literal["oracle", "pow2", "max"] = Field(
        "oracle", description="output tokens it holds room for: the true number, the next power of two, all"
    )

    def beyond_tokens(self, config: EngineConfig) -> str:
        """The regions of a group, and how long they are."""
        region = f"a region, of 2**k blocks, for prompt and outputs (reservation: {self.reservation})"
        return f"; {_whole_groups(config)}, each in {region}; {_REMEDY}"

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """Those of a region for each sequence; a power of two, so that they fit if their sum does."""
        reserved = {
            "oracle": batch.output_len,
            "pow2": _power_of_two(batch.output_len),
            "max": np.full(len(batch.output_len), config.max_model_len),
        }[self.reservation]
        wanted = np.minimum(batch.prompt_len + reserved, config.max_model_len)
        width = batch.n * batch.beam_width
        needed = width * _power_of_two(-(-wanted // config.block_size))
        return np.where(width > min(config.max_num_seqs, config.max_num_batched_tokens), 2**62, needed)


_AnyKind = ApcKind | RadixKind | PagedKind | ContiguousKind  # the list
KINDS: tuple[type[CacheKind], ...] = get_args(_AnyKind)
APC = ApcKind()


_REMEDY = "raise what is too small, or ask for fewer sequences"


def _whole_groups(config: EngineConfig) -> str:
    """What the pool must have room for where the sequences of a request run together."""
    most = min(config.max_num_seqs, config.max_num_batched_tokens)
    fields = "engine.max_num_seqs and engine.max_num_batched_tokens"
    return f"there must be room for all sequences of a request, of which {fields} allow {most}"


def _power_of_two(numbers: Ints) -> Ints:
    """The least powers of two that are no less."""
    return np.left_shift(1, np.frexp(numbers - 1)[1].astype(np.int64))


def _by_name(value: Any) -> Any:
    if isinstance(value, str):
        return {"kind": value}
    if not isinstance(value, Mapping | CacheKind):
        names = ", ".join(kind().kind for kind in KINDS)
        raise ValueError(f"should be a cache's name ({names}) or a mapping of its options, not {value!r}")
    return value


_Name: Any = Literal[tuple(kind().kind for kind in KINDS)]
_Section = Annotated[_AnyKind, Field(discriminator="kind")]
AnyCache = Annotated[_Section, BeforeValidator(_by_name, json_schema_input_type=_Name | _Section)]
