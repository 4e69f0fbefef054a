"""The pages in docs/: what they name exists, what they compute comes out, their commands run."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Iterator
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
WITH_EXAMPLES = [ROOT / "README.md", ROOT / "docs" / "metrics.md", ROOT / "docs" / "recordings.md"]
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"`([\w/]+\.(?:py|yaml))(?::(\w+))?`")
TEST = re.compile(r"`(test_\w+)`")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language on a page."""
    return [text for name, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page's console blocks, and the lines shown below it."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, [line for line in shown if line.strip()]


ALL_COMMANDS = [(command, shown) for page in PAGES for command, shown in commands(page)]


def test_there_are_pages() -> None:
    assert {page.stem for page in PAGES} >= {
        "caches", "calibration", "design", "metrics", "recordings", "rules", "validation", "workloads"
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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


@pytest.mark.parametrize(("command", "shown"), ALL_COMMANDS, ids=[command for command, _ in ALL_COMMANDS])
def test_a_command_of_a_page_prints_what_it_says(command: str, shown: list[str]) -> None:
    name, *arguments = shlex.split(command, comments=True)
    assert name == "prefixsim"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    for line in shown:
        assert line.strip() in result.stdout, line


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
    for example in examples:
        scenario = Scenario.model_validate({"engine": {"num_gpu_blocks": 2000}, **yaml.safe_load(example)})
        assert scenario.workload.kind == kind and run(scenario).summary["completed"] > 0
