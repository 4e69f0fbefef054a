"""The pages in docs/: what they name exists, what they compute comes out, their commands run."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sim import Scenario, run
from sim.cli import app
from workloads import AnyWorkload

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "notebooks" / "README.md"]
WITH_EXAMPLES = [ROOT / "README.md", ROOT / "docs" / "metrics.md", ROOT / "docs" / "recordings.md"]
MADE_ELSEWHERE = ("extending.md",)  # whose commands tests/test_extending.py runs
TRACES = {"conversation_trace.jsonl": "mooncake_conversation_trace.jsonl.gz"}  # fetched, so not always there
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^(<!-- slow -->\n)?```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"`(\w+/[\w/]+\.(?:py|yaml))(?::(\w+))?`")
TEST = re.compile(r"`(test_\w+)`")
# a page that is served until somebody ends it: tests/test_explore_page.py
NOT_RUN = [["explore"]]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def consoles() -> Iterator[Any]:
    """Each different console block once; what `<!-- slow -->` stands before takes more than a few seconds."""
    seen = set()
    for page in [*READMES, *PAGES]:
        for slow, block in CONSOLE.findall(page.read_text(encoding="utf-8")):
            if page.name not in MADE_ELSEWHERE and block not in seen:
                seen.add(block)
                marks = [pytest.mark.slow] if slow or any(trace in block for trace in TRACES) else []
                yield pytest.param(block, id=f"{page.name}: {block.splitlines()[0][2:]}", marks=marks)


def commands(block: str) -> Iterator[tuple[list[str], list[str]]]:
    """The words of each command of a block, and the lines shown below it."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield shlex.split(line, comments=True), [line for line in shown if line.strip()]


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {
        "caches", "calibration", "curves", "design", "extending", "metrics", "planning", "recordings",
        "replicas", "rules", "running", "samples", "sweeps", "validation", "warm_starts", "workloads",
    }  # fmt: skip


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        assert link.startswith("https://") or (page.parent / link).exists(), link
    for path, name in PLACE.findall(text):
        assert (ROOT / path).is_file(), path
        if name:
            assert re.search(rf"^(def|class) {name}\b|    def {name}\b", (ROOT / path).read_text(), re.M), (
                name
            )
    if page.stem == "rules":
        rules = (ROOT / "tests" / "test_rules.py").read_text()
        for test in TEST.findall(text):
            assert f"def {test}(" in rules, test


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_give_what_it_says(page: Path) -> None:
    text = "\n".join(blocks(page, "python"))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failed, attempted = runner.run(test)
    assert attempted > 0 and failed == 0


@pytest.mark.parametrize("block", list(consoles()))
def test_the_commands_of_a_page_print_what_it_says(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("scenarios", "tests", "notebooks"):  # what a command leaves is not to lie in the checkout
        (tmp_path / folder).symlink_to(ROOT / folder)
    for name, stored in TRACES.items():
        trace = ROOT.parent / "shared" / "traces" / stored
        if name in block and not trace.exists():
            pytest.skip(f"{stored} is not there")
        (tmp_path / name).symlink_to(trace)
    monkeypatch.chdir(tmp_path)
    for (name, *words), shown in commands(block):
        if name != "prefixsim" or words in NOT_RUN:
            check_another(name, words)
            continue
        result = CliRunner().invoke(app, [each for word in words for each in files(word)])
        assert result.exit_code == 0, result.stderr or result.exception
        for line in shown:
            assert line.strip() in result.stdout, line


def files(word: str) -> list[str]:
    """A word as the shell hands it on: the files that a pattern means."""
    return sorted(glob(word)) if "*" in word else [word]


def check_another(name: str, words: list[str]) -> None:
    """What other tests run, or nobody should: at least what it names is there."""
    if name == "make":
        assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
    elif name == "pip":
        (extras,) = re.findall(r"\[(\w+)\]", words[-1])
        assert f"\n{extras} = " in (ROOT / "pyproject.toml").read_text()
    elif name == "python" and words[0] == "-m":
        assert importlib.util.find_spec(words[1] + ".__main__") is not None
    elif name in ("python", "marimo"):
        assert (ROOT / words[-1]).is_file()
    else:
        assert words in NOT_RUN


def test_the_map_of_the_code_has_every_file_and_folder() -> None:
    here = {path.name if path.is_file() else f"{path.name}/" for path in (ROOT / "sim").glob("[!_]*")}
    house = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## The house")[2]
    there = {name.removeprefix("sim/") for name in re.findall(r"`([\w./]+)`", house)}
    assert here - there == set()
    assert {name for name in there if name.endswith(".py") and "/" not in name} - here == {
        "_dispatch.py",
        "_jit.py",
    }


def test_every_figure_of_a_run_is_defined() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = run(Scenario.load("scenarios/shared_prefix.yaml", "workload.num_requests=50"))
    known = set(re.findall(r"`(\w+)`", text))
    latencies = (
        r"(mean|median|std|p90|p50|p95|p99)_(ttft|tpot|itl|e2el|front_end_time|queue_time|prefill_time)_ms"
    )
    missing = {
        name for name in [*found.summary, *found.requests] if not re.fullmatch(latencies, name)
    } - known
    assert not missing


def kinds() -> dict[str, Any]:
    """The workloads by kind."""
    union = AnyWorkload.__origin__  # type: ignore[attr-defined]
    return {one.model_fields["kind"].default: one for one in union.__args__}


def sections(page: Path) -> dict[str, str]:
    """The parts of a page by their heading."""
    parts = re.split(r"^## (.+)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("kind", kinds())
def test_every_field_of_a_workload_is_explained_and_its_example_runs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = sections(ROOT / "docs" / "workloads.md")
    text, shared = page[kind], " ".join(text for name, text in page.items() if name not in kinds())
    known = set(re.findall(r"`(\w+)`", text + shared))
    assert set(kinds()[kind].model_fields) - known - {"kind"} == set()
    examples = [found for name, found in FENCE.findall(text) if name == "yaml"]
    assert examples
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text("".join(blocks(ROOT / "docs" / "workloads.md", "json")))
    shutil.copy(ROOT / "tests" / "recordings" / "turns.jsonl.gz", tmp_path / "recording.jsonl.gz")
    for example in examples:
        scenario = Scenario.model_validate({"engine": {"num_gpu_blocks": 2000}, **yaml.safe_load(example)})
        assert scenario.workload.kind == kind and run(scenario).summary["completed"] > 0
