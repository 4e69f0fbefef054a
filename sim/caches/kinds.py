"""The list of caches, and what a scenario may say of each: `cache: apc`, or a mapping with options.

`kind` names the file beside this one that has the cache. Nothing here needs the compiler, so that
a scenario is checked before that is loaded.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, model_serializer

from sim.section import Section


class CacheKind(Section):
    """A way to share KV. Written as its name where all options have their defaults."""

    kind: str = ""

    groups: ClassVar[bool] = False  # whether all sequences of a request are one to the engine

    @model_serializer(mode="wrap")
    def _short(self, serialize: SerializerFunctionWrapHandler) -> str | dict[str, Any]:
        data: dict[str, Any] = serialize(self)
        return self.kind if self.__class__.model_validate({"kind": self.kind}) == self else data

    @property
    def module(self) -> ModuleType:
        """The file that has its verbs."""
        return importlib.import_module(f"sim.caches.{self.kind}")


class ApcKind(CacheKind):
    """vLLM V1's Automatic Prefix Caching."""

    kind: Literal["apc"] = "apc"


KINDS: tuple[type[CacheKind], ...] = (ApcKind,)
APC = ApcKind()


def _by_name(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


AnyCache = Annotated[ApcKind, BeforeValidator(_by_name)]
