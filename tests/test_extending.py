"""The worked examples of docs/extending.md, made on a copy of the code as the page says, and run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WHERE = re.compile(r"# (\S+\.py)(?:, before `(.+)`)?\n")
EXPECTED = {
    "faq": r"Prompt tokens hit: +4608\n",  # 36 of 40 ask again, and hit two blocks of 64 of their 130 tokens
    "first_fit": r"\n1 +0 +-",  # nothing for the second replica
    "whole": r"Hit rate \(%\): +28\.57 +0\.00\n",
}


def write(root: Path, text: str) -> None:
    """A new file, or a piece before a line of one that is there."""
    place = WHERE.match(text)
    assert place is not None, text
    path, before = root / place[1], place[2]
    piece = text[place.end() :]
    if before is None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(piece, encoding="utf-8")
        return
    code = path.read_text(encoding="utf-8")
    assert code.count(f"\n{before}") == 1, before
    path.write_text(code.replace(f"\n{before}", f"\n{piece}\n\n{before}".replace("\n\n\n\n", "\n\n\n")))


def change(root: Path, text: str) -> None:
    """Lines taken away and put in their place; added ones alone go behind the file's first import."""
    path, removed = root, None
    for line in text.splitlines():
        kind, rest = line[0], line[1:]
        if kind == "#":
            path = root / rest.strip()
            continue
        code = path.read_text(encoding="utf-8")
        if kind == "-":
            assert code.count(rest) == 1, rest
            removed = rest
        elif removed is None:
            path.write_text(re.sub(r"^(from workloads)", rf"{rest}\n\1", code, count=1, flags=re.MULTILINE))
        else:
            path.write_text(code.replace(removed, rest))
            removed = None


@pytest.mark.slow
def test_the_examples_work_as_written(tmp_path: Path) -> None:
    for folder in ("sim", "workloads", "scenarios"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shown: dict[str, str] = {}
    for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            write(tmp_path, text)
        elif language == "diff":
            change(tmp_path, text)
        else:
            assert language == "console"
            name, *arguments = shlex.split(text.removeprefix("$ "))
            assert name == "prefixsim"
            ran = subprocess.run(
                [sys.executable, "-c", "from sim.cli import main; main()", *arguments],
                cwd=tmp_path,
                env=os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(tmp_path), "COLUMNS": "100"},
                capture_output=True,
                text=True,
                timeout=600,
            )
            assert ran.returncode == 0, ran.stderr
            shown[next(key for key in EXPECTED if key in text)] = ran.stdout
    assert shown.keys() == EXPECTED.keys()
    for key, pattern in EXPECTED.items():
        assert re.search(pattern, shown[key]), shown[key]
