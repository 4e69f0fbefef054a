"""The list of caches, and what a scenario may say of each: `cache: apc`, or a mapping with options.

`kind` names the file beside this one that has the cache. Nothing here needs the compiler, so that
a scenario is checked before that is loaded.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from sim.section import Section

if TYPE_CHECKING:
    from sim.core import EngineConfig
    from sim.request import Batch, Ints

RESERVATIONS = ("oracle", "pow2", "max")


class CacheKind(Section):
    """A way to share KV. Written as its name where all options have their defaults."""

    kind: str = ""
    looks_up: ClassVar[bool] = True  # whether it searches for prefixes that are cached

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        return self.kind if self.__class__.model_validate({"kind": self.kind}) == self else data

    @property
    def module(self) -> ModuleType:
        """The file that has its verbs."""
        return importlib.import_module(f"sim.caches.{self.kind}")

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """The blocks that each request needs to run to its end, alone in the pool."""
        tokens = np.minimum(batch.prompt_len + batch.output_len, config.max_model_len) - 1
        return np.asarray(-(-tokens // config.block_size))


class ApcKind(CacheKind):
    """vLLM V1's Automatic Prefix Caching."""

    kind: Literal["apc"] = "apc"


class ContiguousKind(CacheKind):
    """One region of adjacent blocks for each request, by buddy allocation, as Orca's baseline has it."""

    kind: Literal["contiguous"] = "contiguous"
    looks_up: ClassVar[bool] = False
    reservation: Literal["oracle", "pow2", "max"] = Field(
        "oracle", description="output tokens it holds room for: the true number, the next power of two, all"
    )

    def blocks_needed(self, batch: Batch, config: EngineConfig) -> Ints:
        """The blocks of a region, a power of two: none larger than the pool's largest fits."""
        reserved = {
            "oracle": batch.output_len,
            "pow2": _power_of_two(batch.output_len),
            "max": np.full(len(batch.output_len), config.max_model_len),
        }[self.reservation]
        wanted = np.minimum(batch.prompt_len + reserved, config.max_model_len)
        return _power_of_two(-(-wanted // config.block_size))


KINDS: tuple[type[CacheKind], ...] = (ApcKind, ContiguousKind)
APC = ApcKind()


def _power_of_two(numbers: Ints) -> Ints:
    """The least powers of two that are no less."""
    return np.left_shift(1, np.frexp(numbers - 1)[1].astype(np.int64))


def _by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AnyCache = Annotated[
    Annotated[ApcKind | ContiguousKind, Field(discriminator="kind")], BeforeValidator(_by_name)
]
