"""`@per_cache`: one name for what each way to share KV does in its own way, chosen at compile time.

The class of `core.cache` says which way it is, and the module of that class has the verbs. So a
compiled engine holds one cache's code and no others', a cache is compiled when it is first used,
and what differs costs no branch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from sim._jit import jit_disabled, verb

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
    options = {"_nrt": False, "error_model": "numpy", "forceinline": True}
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    overload(dispatched, jit_options=options)(chooser)
