"""`@per_cache`: one name for what each way to share KV does in its own way, chosen at compile time.

The class of `core.cache` says which way it is, and the module of that class has the verbs. So a
compiled engine holds one cache's code and no others', a cache is compiled when it is first used,
and what differs costs no branch.

Handing a named tuple to compiled code costs half a microsecond a call, plain arrays a tenth of that.
So an engine gets its cache `packed`: the arrays, behind an empty one whose number of dimensions,
which a call looks at anyway, says of which kind they are; the first kind's one array goes bare.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from sim._jit import jit_disabled, verb

_OPTIONS: dict[str, Any] = {
    "_nrt": False, "error_model": "numpy", "forceinline": True, "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  # fmt: skip
Packed = Any  # an array, or a tuple of them
F = TypeVar("F", bound=Callable[..., Any])


def per_cache(default: F) -> F:
    """A verb, with `core` first, of which a cache's module may have a version under the same name.

    `default` is what the caches do that have none; it is plain Python, to be compiled as a verb is.
    """
    name = default.__name__

    @functools.cache
    def of(cache: Any) -> Callable[..., Any]:
        own = getattr(importlib.import_module(cache.__module__), name, None)
        return own if own is not None else verb(default)

    if jit_disabled():

        @functools.wraps(default)
        def call(core: Any, *args: Any) -> Any:
            return of(core.cache.__class__)(core, *args)

        return call  # type: ignore[return-value]

    @functools.wraps(default)
    def dispatched(core: Any, *args: Any) -> Any:
        raise TypeError(f"{name} is a verb: call it from a verb")

    _overload(dispatched, of, list(inspect.signature(default).parameters))
    return dispatched  # type: ignore[return-value]


def _overload(dispatched: Callable[..., Any], of: Callable[[type], Any], parameters: list[str]) -> None:
    """Tell numba to call, for `dispatched`, the version of the cache that `core` has."""
    from numba.extending import overload

    names = ", ".join(parameters)

    def choose(core: Any, *args: Any) -> Any:
        cache = core.types[core.fields.index("cache")].instance_class
        space = {"target": of(cache)}
        return eval(f"lambda {names}: target({names})", space)  # numba reads a function's parameters

    chooser = eval(f"lambda {names}: choose({names})", {"choose": choose})
    overload(dispatched, jit_options=_OPTIONS)(chooser)


def constant(function: F) -> F:
    """A verb of `core` alone whose answer the types of core's arrays say: their numbers of dimensions."""
    if jit_disabled():
        return function
    from numba.extending import overload

    @functools.wraps(function)
    def asked(core: Any) -> Any:
        return function(core)

    def choose(core):  # type: ignore[no-untyped-def]  # numba compares the two signatures
        answer = function(SimpleNamespace(**dict(zip(core.fields, core.types, strict=True))))
        return eval(f"lambda core: {answer!r}")

    overload(asked, jit_options=_OPTIONS)(choose)
    return asked  # type: ignore[return-value]


def pack(cache: Any) -> Packed:
    """The arrays of a cache, to be handed to compiled code."""
    from sim.cache_kinds import KINDS

    folder = type(cache).__module__.rpartition(".")[2]
    place = [kind().kind for kind in KINDS].index(folder)
    if place == 0:
        (array,) = cache
        return array
    return (np.empty((0,) * (1 + place), np.int8), *cache)


def unpack(packed: Packed) -> Any:
    """The cache that `pack` has packed."""
    if isinstance(packed, np.ndarray):
        return _class_at(0)(packed)
    return _class_at(packed[0].ndim - 1)(*packed[1:])


def _class_at(place: int) -> Any:
    """The class of the cache at a place of their list; the other caches are not loaded."""
    from sim.cache_kinds import KINDS

    return KINDS[place]().module.Cache


def _overload_unpack() -> None:
    from numba import types
    from numba.extending import overload

    def choose(packed):  # type: ignore[no-untyped-def]  # numba compares the two signatures
        if isinstance(packed, types.Array):
            place, fields = 0, "packed"
        else:
            place = packed.types[0].ndim - 1
            fields = ", ".join(f"packed[{i}]" for i in range(1, len(packed.types)))
        return eval(f"lambda packed: cache({fields})", {"cache": _class_at(place)})

    overload(unpack, jit_options=_OPTIONS)(choose)


if not jit_disabled():
    _overload_unpack()
