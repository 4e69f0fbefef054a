"""The notebooks run as scripts, and their pictures of the library's tables are the commands' own."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import pytest

pytest.importorskip("marimo")

from sim import Scenario, run, sweep
from sim.explore.notebook import of_runs, of_sweep, of_table, records_of, results_of, with_trace
from sim.plots import GRID, GROUND, INK, SOFT, svg
from sim.sweeps.execute import run_sweep
from sim.sweeps.figures import panels_of
from sim.sweeps.processes import on_processes
from sim.sweeps.schema import plan_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 180_000  # ms: a first run compiles
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
SLOW = ("04_ttft_under_load", "05_prefix_lengths", "06_three_systems", "07_capacity_plan")
TINY = Scenario(name="tiny", workload={"kind": "fourteen_tokens", "num_requests": 20, "request_rate": 8})


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else [])
        for path in sorted(NOTEBOOKS.glob("*.py"))
    ],
)
def test_a_notebook_runs_as_a_script(path: Path) -> None:
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr


def test_each_notebook_says_what_to_look_for_and_stands_in_the_list() -> None:
    listed = (NOTEBOOKS / "README.md").read_text()
    for path in NOTEBOOKS.glob("*.py"):
        assert "**Look for**" in path.read_text(), path
        assert f"[{path.name}]({path.name})" in listed


def test_the_panels_of_a_table_are_those_of_the_sweep(tmp_path: Path) -> None:
    axes = {"engine.enable_prefix_caching": [True, False], "engine.block_size": [2, 4, 16]}
    metrics = ["prefix_cache_hit_rate", "lost_tail_tokens"]  # None without caching
    data = {"name": "tiny", "base": TINY.model_dump(), "axes": axes, "seeds": 2, "metrics": metrics}
    ran = run_sweep(plan_of(data, tmp_path), tmp_path / "out", partial(on_processes, jobs=1))
    assert ran.errors == []
    frame = sweep(TINY, axes, seeds=2, metrics=metrics, jobs=1)
    panels, own = panels_of(ran), panels_of(results_of(frame, "tiny"))
    assert list(panels) == list(own) == metrics
    for metric in metrics:
        assert svg(panels[metric], (5, 3), metric) == svg(own[metric], (5, 3), metric)
    html = of_sweep(frame, "tiny")
    assert html.count("<figure>") == 2 and 'aria-label="Hit rate (%), tiny"' in html
    assert "var(--grid)" in html and "currentColor" in html, "in the page's colours"
    assert not any(colour in html for colour in (INK, SOFT, GRID, GROUND))


def test_a_table_of_runs_has_names_units_and_digits() -> None:
    axes = {"engine.enable_prefix_caching": [True, False]}
    metrics = ["prefix_cache_hit_rate", "mean_ttft_ms"]
    html = of_runs(sweep(TINY.changed("engine.block_size=4"), axes, seeds=1, metrics=metrics, jobs=1), "t")
    heads = re.findall(r'<th scope="col">(.*?)</th>', html)
    assert heads == ["prefix caching", "Hit rate (%)", "Mean TTFT (ms)"]
    rows = re.findall(r"<tr><th scope=\"row\">(on|off)</th><td>([\d.]+)</td><td>([\d.]+)</td></tr>", html)
    assert [row[:2] for row in rows] == [("on", f"{100 * 19 / 20 * 8 / 14:.1f}"), ("off", "0.000")]
    numbers = pd.DataFrame({"x": [0.12345, 2.06412, 26.438, 129.24, 12345.678, float("nan")]})
    assert re.findall(r'<th scope="row">(.*?)</th>', of_table("n", numbers)) == [
        "0.123", "2.06", "26.4", "129", "12,346", "-",
    ]  # fmt: skip


def test_a_trace_of_the_users_takes_the_workloads_place(tmp_path: Path) -> None:
    path = tmp_path / 'my "trace".jsonl'
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n')
    found = with_trace(TINY, str(path))
    assert (found.workload.kind, found.workload.path) == ("trace", str(path))
    assert found.engine == TINY.engine
    assert with_trace(TINY, "") is TINY
    assert with_trace(TINY, None) is TINY


def test_requests_are_read_by_column() -> None:
    requests = run(TINY).requests
    assert (records_of(requests).column("ttft_ms") == requests["ttft_ms"]).all()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_fits_a_phone_and_asks_no_other_host(path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "marimo", "run", "--headless", "--no-token", "--host", "127.0.0.1"]
    server = subprocess.Popen([*command, "--port", str(port), path], stdout=subprocess.DEVNULL)
    try:
        with playwright.sync_playwright() as engine:
            chromium = engine.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 390, "height": 900}, color_scheme="dark")
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            page.on("websocket", lambda one: asked.append(one.url))
            opened(page, f"http://127.0.0.1:{port}/")
            shown = "document.querySelectorAll('.says, .panels, .pair, .wide:not(.pair .wide)').length"
            page.wait_for_function(f"{shown} >= {path.read_text().count('mo.Html(')}", timeout=PATIENCE)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            seen = "[...document.querySelectorAll('figure svg, h1, h2, .says, .wide, marimo-slider')]"
            boxes = page.evaluate(f"{seen}.map(x => x.getBoundingClientRect()).map(b => [b.left, b.right])")
            assert len(boxes) > 7 and all(left >= 0 and right <= 391 for left, right in boxes)
            drawn = "[...document.querySelectorAll('figure svg')]"
            grounds = page.evaluate(f"{drawn}.map(one => getComputedStyle(one).backgroundColor)")
            assert set(grounds) == {"rgba(0, 0, 0, 0)"}
            assert page.locator("img").count() == 0, "pictures have a ground of their own"
            hosts = {urlsplit(url).hostname for url in asked if url.startswith(("http", "ws"))}
            assert hosts == {"127.0.0.1"}
            chromium.close()
    finally:
        server.terminate()
        server.wait(30)


def opened(page: Any, url: str) -> None:
    """Go to a page once its server is there."""
    begin = time.monotonic()
    while True:
        try:
            page.goto(url)
            break
        except Exception:
            if time.monotonic() - begin > 60:
                raise
            time.sleep(0.5)
