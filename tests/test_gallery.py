"""results/: what stands in the gallery, what its folders hold, and that the same bytes come out again."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pandas as pd
import PIL
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from sim.cli import app
from sim.gallery import bench, fourteen_tokens
from workloads import FourteenTokens

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
GALLERY = (RESULTS / "README.md").read_text(encoding="utf-8")
FOLDERS = re.findall(r"^!results/(\w+)/$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
SECTIONS = dict(re.findall(r"^## \[(\w+)\]\(\1\): .+\n((?:(?!## ).*\n)*)", GALLERY, re.MULTILINE))
LEFT_OUT = ("journal.jsonl", "scenarios")  # of a sweep's folder
LARGEST = 3_000_000  # bytes, of all
VERSIONS = dict(re.findall(r"(matplotlib|Pillow) ([\d.]+\d)", GALLERY))
SAME_PIXELS = {"matplotlib": matplotlib.__version__, "Pillow": PIL.__version__} == VERSIONS


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def files(folder: str) -> list[Path]:
    """What is committed of a folder."""
    return [path for path in sorted((RESULTS / folder).iterdir()) if path.name not in LEFT_OUT]


def commands(folder: str) -> Iterator[list[str]]:
    """The commands of a folder's section, in words."""
    for line in re.findall(r"^\$ (.+)$", SECTIONS[folder], re.MULTILINE):
        yield shlex.split(line, comments=True)


def test_every_folder_stands_in_the_gallery() -> None:
    assert len(FOLDERS) == 11 and sorted(SECTIONS) == sorted(FOLDERS)
    assert set(VERSIONS) == {"matplotlib", "Pillow"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_section_has_its_picture_and_a_command_that_exists(folder: str) -> None:
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", SECTIONS[folder], re.MULTILINE)
    assert pictures and all((RESULTS / one).is_file() and one.startswith(f"{folder}/") for one in pictures)
    known = typer.main.get_command(app)
    recipes = (ROOT / "Makefile").read_text().replace("\\\n", " ").replace("$(MADE)/", "")
    recipes = re.sub(r"[ \t]{2,}", " ", recipes)
    assert re.search(rf"^results/{folder}:", recipes, re.MULTILINE)
    found = list(commands(folder))
    assert found
    for first, *words in found:
        if first == "prefixsim":
            assert words[0] in known.commands  # type: ignore[attr-defined]
            words = words[: words.index("--out")] if "--out" in words else words
            words = words[: words.index("--data")] if "--data" in words else words
            assert all((ROOT / word).is_file() for word in words if re.fullmatch(r"[^=]+\.(yaml|gz)", word))
        else:
            assert first == "python" and importlib.util.find_spec(f"{words[1]}.__main__")
        assert re.search(rf"^\t.*{re.escape(' '.join([first, *words]))}\b", recipes, re.MULTILINE)


def test_results_are_small_tables_and_pictures() -> None:
    found = [path for folder in FOLDERS for path in files(folder)]
    assert {path.suffix for path in found} <= {".csv", ".png", ".svg", ".yaml"}
    assert sum(path.stat().st_size for path in [*found, *RESULTS.glob("*.md")]) < LARGEST


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_picture_or_table_tells_of_a_machine(folder: str) -> None:
    for path in files(folder):
        if path.suffix == ".png":
            assert Image.open(path).info == {}, path
        else:
            assert not re.search(r"(^|[\s,'\"])(/\w|[A-Z]:\\)", path.read_text(), re.MULTILINE), path


def test_the_hit_rates_at_scale_are_those_of_arithmetic() -> None:
    """14 block sizes, 10,000 requests each: simulated and computed alike to the last bit but one."""
    load = FourteenTokens(num_requests=10_000, prompt_len=1400, shared_len=1000, request_rate=8)
    table = pd.read_csv(RESULTS / "fourteen_tokens/curves.csv").query("metric == 'prefix_cache_hit_rate'")
    assert len(table) == 14
    for size, mean, low, high in zip(table["engine.block_size"], table["mean"], table["low"], table["high"],
                                     strict=True):  # fmt: skip
        assert mean == pytest.approx(fourteen_tokens.closed_form(load, size), rel=1e-12)
        assert low == pytest.approx(high, rel=1e-12)
    assert fourteen_tokens.closed_form(load, 512) == pytest.approx(512 / 1400 * 0.9999)
    assert fourteen_tokens.closed_form(load, 1000) == pytest.approx(1000 / 1400 * 0.9999)
    assert fourteen_tokens.closed_form(load, 1001) == 0.0


@pytest.mark.parametrize("draw", [fourteen_tokens.draw, bench.draw])
def test_a_picture_is_drawn_again_from_its_table(draw: object, tmp_path: Path) -> None:
    assert callable(draw)
    name = draw.__module__.rpartition(".")[2]
    there = tmp_path / name
    shutil.copytree(RESULTS / name, there, ignore=shutil.ignore_patterns("*.png", *LEFT_OUT))
    picture = draw(there)
    if SAME_PIXELS:
        assert picture.read_bytes() == (RESULTS / name / picture.name).read_bytes()


def test_the_speeds_drawn_are_those_of_the_page() -> None:
    page = (RESULTS / "bench.md").read_text(encoding="utf-8")
    table = pd.read_csv(RESULTS / "bench/bench.csv").set_index(["work", "block_size", "simulator"])
    rows = re.findall(
        r"^\| (\w) \| (\d+) \| ([\d,]+) \|.*\| ([\d,]+) \| (\d+) \| [\d.]+ \|$", page, re.MULTILINE
    )
    assert len(rows) == 4
    for work, size, ours, theirs, _ in rows:
        for simulator, rate in (("prefixsim", ours), ("Dynamo mocker", theirs)):
            assert table.loc[(work, int(size), simulator), "requests_per_s"] == int(rate.replace(",", ""))


def test_one_run_with_and_without_caching_is_made_again(tmp_path: Path) -> None:
    ((_, *words),) = commands("shared_prefix")
    same(words, tmp_path / "out", "shared_prefix", {"run.png": "enable_prefix_caching=true/run.png"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", ["fourteen_tokens", "block_size", "pool", "prefix_lengths", "ttft_under_load"]
)
def test_a_sweep_is_made_again(folder: str, tmp_path: Path) -> None:
    for number, (first, *words) in enumerate(commands(folder)):
        if first == "prefixsim":
            same(words, tmp_path / str(number), folder, {})


def same(words: list[str], out: Path, folder: str, moved: dict[str, str]) -> None:
    """Run a command into `out`: its tables, and pictures drawn by the same versions, are those committed."""
    words = words[: words.index("--out")] if "--out" in words else words
    result = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    compared = 0
    for path in files(folder):
        made = out / moved.get(path.name, path.name)
        if made.is_file() and (SAME_PIXELS or path.suffix != ".png"):
            assert made.read_bytes() == path.read_bytes(), path
            compared += 1
    assert compared
