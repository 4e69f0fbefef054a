"""The compile cache, in a copy of the package that has one caller and one callee."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import sim._jit

CALLER = """
from sim._jit import verb
from sim.callee import callee

@verb
def caller(x):
    return callee(x) + 1
"""
CALLEE = """
from sim._jit import verb

@verb
def callee(x):
    return x * {factor}
"""
CALL = "from sim._jit import entry; from sim.caller import caller; caller = entry(caller); print(caller(10))"
HITS = "; s = caller.stats; print(sum(s.cache_hits.values()), sum(s.cache_misses.values()))"


class Copy:
    """A package `sim` in its own directory, run in processes of their own with their own cache."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.cache = home / "cache"
        package = home / "sim"
        package.mkdir()
        (package / "__init__.py").touch()
        shutil.copy(sim._jit.__file__, package / "_jit.py")
        (package / "caller.py").write_text(CALLER)
        self.write_callee(2)

    def write_callee(self, factor: int) -> None:
        (self.home / "sim" / "callee.py").write_text(CALLEE.format(factor=factor))

    def run(self, code: str, **environment: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
        clean |= {
            "PYTHONPATH": str(self.home),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(self.cache),
            "HOME": str(self.home),
        }
        process = subprocess.run(
            [sys.executable, "-c", code],
            env=clean | environment, cwd=self.home, text=True, capture_output=True,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def folders(self) -> list[Path]:
        return sorted((self.cache / "prefixsim").glob("prefixsim-*"))


pytestmark = pytest.mark.skipif(
    sys.platform in ("win32", "darwin"), reason="the user's cache directory does not follow XDG_CACHE_HOME"
)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_second_run_loads_and_an_edited_callee_is_seen(copy: Copy) -> None:
    assert copy.run(CALL + HITS) == "21\n0 1"
    assert copy.run(CALL + HITS) == "21\n1 0"
    copy.write_callee(3)
    assert copy.run(CALL + HITS) == "31\n0 1"
    assert len(copy.folders()) == 2


def test_a_compilation_is_told_once_before_it_and_a_load_is_not(copy: Copy) -> None:
    told = "from sim._jit import before_compiling; before_compiling(lambda: print('compiling')); "
    assert copy.run(told + "print('nothing yet'); " + CALL + "; print(caller(2.5))").split("\n") == [
        "nothing yet", "compiling", "21", "6.0",
    ]  # fmt: skip
    assert copy.run(told + CALL).split() == ["21"]
    nowhere = {"XDG_CACHE_HOME": "/dev/null/x", "HOME": "/dev/null/y", "TMPDIR": "/dev/null/z"}
    assert copy.run(told + CALL, **nowhere).split() == ["compiling", "21"]
    assert copy.run(told + CALL, NUMBA_DISABLE_JIT="1").split()[-1] == "21"


def test_numba_cache_dir_wins_and_still_sees_edits(copy: Copy) -> None:
    chosen = copy.home / "chosen"
    assert copy.run(CALL, NUMBA_CACHE_DIR=str(chosen)) == "21"
    assert list(chosen.rglob("*.nbi")) and not copy.cache.exists()
    copy.write_callee(3)
    assert copy.run(CALL, NUMBA_CACHE_DIR=str(chosen)) == "31"


def test_an_unwritable_home_falls_back_to_a_private_temporary_folder(copy: Copy) -> None:
    (copy.home / "file").touch()
    (copy.home / "tmp").mkdir()
    environment = {
        "XDG_CACHE_HOME": str(copy.home / "file" / "cache"),  # below a file: not even root can write it
        "TMPDIR": str(copy.home / "tmp"),
    }
    assert copy.run(CALL + HITS, **environment) == "21\n0 1"
    assert copy.run(CALL + HITS, **environment) == "21\n1 0"
    (private,) = (copy.home / "tmp").iterdir()
    assert private.stat().st_mode & 0o077 == 0
    private.chmod(0o777)  # others could plant code here
    assert copy.run(CALL + HITS, **environment) == "21\n0 1"


def test_the_users_own_numba_setting_is_restored(copy: Copy) -> None:
    code = "import numba; numba.config.CACHE_DIR = '/mine'; " + CALL + "; print(numba.config.CACHE_DIR)"
    assert copy.run(code).split() == ["21", "/mine"]


def test_damaged_cache_files_are_compiled_anew(copy: Copy) -> None:
    for suffix in ("nbi", "nbc"):
        assert copy.run(CALL) == "21"
        for path in copy.cache.rglob(f"*.{suffix}"):
            path.write_bytes(b"damaged")
        assert copy.run(CALL + HITS) == "21\n0 1"
        assert copy.run(CALL + HITS) == "21\n1 0"


def test_folders_unused_for_a_week_are_pruned(copy: Copy) -> None:
    root = copy.cache / "prefixsim"
    old, recent, foreign = root / f"prefixsim-{'0' * 16}", root / f"prefixsim-{'1' * 16}", root / "mine"
    for folder, days in ((old, 8), (recent, 6), (foreign, 8)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - days * 86400,) * 2)
    assert copy.run(CALL) == "21"
    assert not old.exists() and recent.exists() and foreign.exists()


def test_without_jit_a_verb_is_the_function_and_numba_stays_unimported(copy: Copy) -> None:
    code = CALL + "; import sys, types; print(type(caller) is types.FunctionType, 'numba' in sys.modules)"
    assert copy.run(code, NUMBA_DISABLE_JIT="1").split() == ["21", "True", "False"]
    assert not copy.cache.exists()


def test_the_package_imports_without_numba_and_simpy() -> None:
    code = (
        "import sys; sys.modules.update(numba=None, simpy=None); import sim; print(sim.__version__, "
        "'numpy' in sys.modules, 'sweep' in dir(sim)); sim.InputError"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(sim.__path__[0]).parent, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert process.stdout.split() == [sim.__version__, "False", "True"]
    with pytest.raises(AttributeError, match="nonsense"):
        _ = sim.nonsense


def test_a_verb_called_from_python_says_what_to_call(copy: Copy) -> None:
    code = "from sim.callee import callee\ntry: callee(1)\nexcept TypeError as error: print(error)"
    assert "entry(callee)" in copy.run(code)
