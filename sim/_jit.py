"""`@verb`: compile a function of the core with numba, and keep the machine code between runs.

numba's disk cache notices a change only in the file of the function itself: edit a callee in
another module and the caller's old code runs on. So all verbs share one folder named by a digest
of every source file of `sim` and `workloads`, and any edit is a new folder. It lies in the user's
cache directory, or in NUMBA_CACHE_DIR where that is set, or else in a temporary folder. A cache
that cannot be read or written costs compile time, never the run.

With NUMBA_DISABLE_JIT=1 a verb is the plain Python function, and numba is not imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Verbs allocate nothing, so reference counting is off: with it, each look at an array in a tuple
# costs two atomic operations, which made taking and releasing a block 17 times slower.
_OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
_WEEK = 7 * 24 * 3600.0  # seconds
_PREFIX = "prefixsim-"
_SOURCES = ("sim", "workloads")


def jit_disabled() -> bool:
    """Whether NUMBA_DISABLE_JIT asks for plain Python."""
    try:
        return int(os.environ.get("NUMBA_DISABLE_JIT") or 0) != 0
    except ValueError:
        return False  # as numba, which warns and ignores it


def verb(function: F) -> F:
    """Compile `function` for other verbs to call, at its first use.

    Bounds are not checked, division by zero does not raise, arrays cannot be made inside; floating
    point is not reordered, so that compiled and plain runs give the same bits. From Python, call
    the `entry` of a verb: compiling every verb's way in from Python would double the time.
    """
    return _inner(function)


def inlined(function: F) -> F:
    """A verb whose statements are copied into its caller: for a verb with one caller, compiled once less."""
    return _inner(function, inline="always")


def hot(function: F) -> F:
    """A verb that LLVM must inline: the work of every step and every block.

    Left alone it calls them, and a call hands over an engine's tables word by word; inlined, the
    speed works ran 1.2 to 1.8 times as fast.
    """
    return _inner(function, forceinline=True)


def _inner(function: F, **options: Any) -> F:
    if jit_disabled():
        return function
    import numba

    inner = numba.njit(function, **_OPTIONS, **options, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    inner.compile = _with_optimizer(1, inner.compile)
    inner.__class__ = _verb_class()
    return inner  # type: ignore[no-any-return]


def entry(function: F) -> F:
    """The verb `function`, to be called from Python: compiled at its first call, or from the cache.

    It contains all verbs below it, so they need no cache of their own.
    """
    if jit_disabled():
        return function
    import numba

    plain: F = function.py_func  # type: ignore[attr-defined]
    compiled = numba.njit(plain, **_OPTIONS)
    has_cache = False
    folder = cache_folder()
    if folder is not None:
        # numba chooses a function's cache file when the cache object is made, and only then.
        users_own = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)
        try:
            compiled._cache = _cache_class()(plain)  # what Dispatcher.enable_caching does
            has_cache = True
        except (OSError, RuntimeError):
            pass  # no place for a cache: compile in every process
        finally:
            numba.config.CACHE_DIR = users_own
    compiled.compile = _with_optimizer(3, compiled.compile, tell=not has_cache)
    return compiled  # type: ignore[no-any-return]


def _with_optimizer(
    level: int, compile_overload: Callable[[Any], Any], *, tell: bool = False
) -> Callable[[Any], Any]:
    """Let a function be compiled at LLVM's optimization `level`, and without garbage collection.

    An entry links in the verbs below it and optimizes the whole, so work on each verb alone is
    mostly lost; a compiler makes millions of objects and hardly a cycle.
    """

    def compiling(signature: Any) -> Any:
        import numba

        if tell:
            _tell()
        users_own, collecting = numba.config.OPT, gc.isenabled()
        numba.config.OPT = type(users_own)(level)
        gc.disable()
        try:
            return compile_overload(signature)
        finally:
            numba.config.OPT = users_own
            if collecting:
                gc.enable()

    return compiling


@functools.cache
def _verb_class() -> Any:
    from numba.core.registry import CPUDispatcher

    class Verb(CPUDispatcher):  # type: ignore[misc]
        """A compiled function without a way in from Python: a call would crash the process."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"{self.__name__} is a verb: from Python, call entry({self.__name__})")

    return Verb


@functools.cache
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    class TolerantCache(FunctionCache):  # type: ignore[misc]
        """numba's cache of a function, where a damaged or unwritable file is a miss."""

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = None
            try:
                found = super().load_overload(sig, target_context)
            except Exception:  # unpickling a damaged file raises anything
                with contextlib.suppress(OSError):
                    self.flush()
            if found is None:
                _tell()
            return found

        def save_overload(self, sig: Any, data: Any) -> None:
            with contextlib.suppress(Exception):
                super().save_overload(sig, data)

    return TolerantCache


_to_tell: list[Callable[[], None]] = []


def before_compiling(tell: Callable[[], None]) -> None:
    """Have `tell` called before the next entry is compiled, if one is: not for what the cache has."""
    _to_tell[:] = [tell]


def _tell() -> None:
    while _to_tell:
        _to_tell.pop()()


@functools.cache
def cache_folder() -> Path | None:
    """The folder of this version's machine code, created and writable; None if there is none.

    Marks it as used now, and removes its siblings that nobody has used for a week.
    """
    name = _PREFIX + _digest()
    for root in _roots():
        folder = root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            os.utime(folder)
        except OSError:
            continue
        _prune(root, keep=name)
        return folder
    return None


def _digest() -> str:
    """Names what compiled code depends on: all sources, where they are, and the compiler."""
    digest = hashlib.sha256()
    home = Path(__file__).resolve().parent.parent
    versions = [importlib.metadata.version(package) for package in ("numba", "numpy", "llvmlite")]
    digest.update(repr((str(home), sys.version_info[:2], versions)).encode())
    for name, source in sources("*.py"):
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.hexdigest()[:16]


def sources(pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files of `sim` and `workloads` that match, in order of their names."""
    home = Path(__file__).resolve().parent.parent
    for package in _SOURCES:
        for path in sorted((home / package).rglob(pattern)):
            yield str(path.relative_to(home)), path.read_bytes()


def _roots() -> Iterator[Path]:
    """Where the cache may live, best first."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen).absolute()
    with contextlib.suppress(RuntimeError):  # no home directory
        yield _user_cache_directory() / "prefixsim"
    # Machine code is loaded by unpickling, so a folder that others may write is not to be trusted.
    with contextlib.suppress(OSError):
        yield _private(Path(tempfile.gettempdir()) / f"prefixsim-{_user()}")
    with contextlib.suppress(OSError):
        scratch = tempfile.mkdtemp(prefix=_PREFIX)
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        yield Path(scratch)


def _user_cache_directory() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    return Path(chosen) if os.path.isabs(chosen) else Path.home() / ".cache"


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _private(folder: Path) -> Path:
    """Create `folder` for this user alone; OSError if it is somebody else's or others may write it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise OSError(f"{folder} is not private")
    return folder


def _prune(root: Path, keep: str) -> None:
    cutoff = time.time() - _WEEK
    with contextlib.suppress(OSError):
        for folder in root.glob(_PREFIX + "?" * 16):
            if folder.name == keep:
                continue
            with contextlib.suppress(OSError):  # another process may be removing it too
                if folder.stat().st_mtime < cutoff:
                    shutil.rmtree(folder, ignore_errors=True)
