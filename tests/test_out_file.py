"""Where a command writes one file: refused before the work, whole or not at all, through links."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app as cli_app
from sim.errors import InputError
from sim.out_file import check_out, replace_text

YAML = (".yaml", ".yml")


def folder(path: Path) -> Path:
    (path / "folder.yaml").mkdir()
    return path / "folder.yaml"


def fifo(path: Path) -> Path:
    os.mkfifo(path / "fifo.yaml")
    return path / "fifo.yaml"


def link(path: Path) -> Path:
    (path / "link.yaml").symlink_to("input.csv")
    return path / "link.yaml"


def hard_link(path: Path) -> Path:
    (path / "hard.yaml").hardlink_to(path / "input.csv")
    return path / "hard.yaml"


def loop(path: Path) -> Path:
    (path / "loop.yaml").symlink_to("loop.yaml")
    return path / "loop.yaml"


def device(path: Path) -> Path:
    (path / "null.yaml").symlink_to("/dev/null")
    return path / "null.yaml"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (folder, "is a folder"),
        (fifo, "is no regular file"),
        (device, "is no regular file"),
        (link, "is a file that is read"),
        (hard_link, "is a file that is read"),
        (loop, "symbolic links"),
        (lambda path: path / "none" / "a.yaml", "there is no folder .*none; make it first"),
        (lambda path: path / "input.csv" / "a.yaml", "there is no folder|Not a directory"),
        (lambda path: path / ("a" * 300 + ".yaml"), "File name too long"),
        (lambda path: path / "a.csv", r"should end in \.yaml or \.yml"),
        (lambda path: path / "a", r"should end in \.yaml or \.yml"),
    ],
)
def test_where_no_file_can_be(tmp_path: Path, place: Callable[[Path], Path], said: str) -> None:
    source = tmp_path / "input.csv"
    source.write_text("kept")
    out = place(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=said) as caught:
        check_out(out, inputs=[source, Path("h100-sxm")], endings=YAML)
    assert f"--out {out}: " in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before and source.read_text() == "kept"


def test_where_a_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("old")
    (tmp_path / "dangling.yml").symlink_to("new.txt")
    for name in ("new.yaml", "old.yaml", "dangling.yml"):
        check_out(tmp_path / name, inputs=[tmp_path / "input.csv"], endings=YAML)
    check_out(tmp_path / "any.ending")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, out = tmp_path / "there" / "target.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    out.symlink_to(target)
    replace_text(out, "new")
    assert out.is_symlink() and target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["target.yaml"]


@pytest.mark.parametrize("broken", ["fdopen", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), ".a.yaml.x7f")

    out = tmp_path / "a.yaml"
    out.write_text("old")
    monkeypatch.setattr(os, broken, full)
    with pytest.raises(InputError, match=r"a\.yaml: cannot be written: No space left .*; free") as caught:
        replace_text(out, "new")
    assert "x7f" not in str(caught.value)
    assert out.read_text() == "old" and list(tmp_path.iterdir()) == [out]


# Options of `calibrate` that would do nothing, and what it may not write over


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "aiconfigurator", "--assume-kappa"], "--assume-kappa would do nothing with --from aic"),
        (["--from-run", "r", "--load", "l", "--tp", "1"], "--tp would do nothing with --from-run"),
        (["--from-run", "r", "--load", "l", "--weights", "bf16"], "--weights would do nothing"),
        (["--from-run", "r", "--load", "l", "--kv", "bf16"], "--kv would do nothing"),
        (["--from-run", "r", "--load", "l", "--assume-kappa"], "--assume-kappa would do nothing"),
        (["--from-csv", "t.csv", "--load", "l"], "--from-run and --load go together"),
        (["--from-csv", "t.csv", "--out", "t.csv"], "should end in .yaml or .yml"),
        (["--from-csv", "t.yaml", "--out", "t.yaml"], "is a file that is read"),
        (["--from-csv", "t.csv", "--out", "none/a.yaml"], "there is no folder"),
    ],
)
def test_calibrate_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("t.csv", "t.yaml"):
        (tmp_path / name).write_text("op,latency_us\n")
    command = ["calibrate", "--gpu", "h100-sxm", "--model", "llama-3.1-8b", *words]
    result = CliRunner().invoke(cli_app, command)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"t.csv", "t.yaml"}


def test_calibrate_does_not_write_over_its_gpu(tmp_path: Path) -> None:
    gpu = tmp_path / "gpu.yaml"
    gpu.write_text("name: mine\n")
    words = ["calibrate", "--gpu", gpu, "--model", "llama-3.1-8b", "--from-csv", "t.csv", "--out", gpu]
    result = CliRunner().invoke(cli_app, [str(word) for word in words])
    assert result.exit_code == 2 and "is a file that is read" in result.stderr
    assert gpu.read_text() == "name: mine\n"


def test_help_shows_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert "prefixsim[calibrate]" in CliRunner().invoke(cli_app, ["calibrate", "--help"]).stdout


# Ctrl-C

WAIT = "import time\nprint('here', flush=True)\ntime.sleep(60)\n"


MEASURE = ["measure", "--model", "llama-3.1-8b", "--out", "t.csv"]


def start_waiting(folder: Path, module: str, words: list[str]) -> subprocess.Popen[str]:
    """`prefixsim WORDS`, as it stands in the import of `module`."""
    (folder / f"{module}.py").write_text(WAIT)
    search = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    process = subprocess.Popen(
        [sys.executable, "-m", "sim.cli", *words], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": search},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize(
    ("module", "words"),
    [("typer", MEASURE), ("numpy", MEASURE), ("torch", MEASURE), ("rich", ["calibrate", "--help"])],
)
def test_ctrl_c_while_importing(tmp_path: Path, module: str, words: list[str]) -> None:
    process = start_waiting(tmp_path, module, words)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "prefixsim: interrupted; nothing was written\n")
    assert not (tmp_path / "t.csv").exists()


def test_sigterm_is_not_ctrl_c(tmp_path: Path) -> None:
    process = start_waiting(tmp_path, "torch", MEASURE)
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and "interrupted" not in said
