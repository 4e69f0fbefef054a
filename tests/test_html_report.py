"""The HTML report: complete in itself, the same each time, with the run's numbers and figures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from test_cli import prefixsim, refused
from test_groups import MIX, labelled
from test_metrics import closed, make_chunk

from sim import cache_plots, plots
from sim.html_report import SHOWN_ROWS, to_html
from sim.scenario_file import load
from sim.simulation import Result, run

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(HTMLParser):
    """The open tags, which must match; the texts; what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.references: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mix") / "mix.yaml"
    path.write_text(MIX)
    return path


@pytest.fixture(scope="module")
def mixed(scenario: Path) -> Result:
    return run(load(scenario))


@pytest.fixture(scope="module")
def page(mixed: Result) -> str:
    return to_html(mixed)


def figures(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_asks_the_network_for_nothing(page: str) -> None:
    parsed = Page(page)
    assert not re.search(r"https?:|url\((?!#)|@import", page)
    assert all(reference.startswith("#") for reference in parsed.references)
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "embed"}
    assert "default-src 'none'" in page


def test_the_page_has_the_numbers(page: str, mixed: Result) -> None:
    texts, s = Page(page).texts, mixed.summary
    assert f"{100 * s['prefix_cache_hit_rate']:.1f} %" in texts
    assert f"{s['p95_ttft_ms']:,.1f} ms" in texts
    assert f"{s['token_fates']['evicted']:,}" in texts
    assert s["saturation"] in texts
    rag = next(row for row in s["by_tenant"] if row["tenant"] == "rag")
    at = texts.index("rag")
    assert f"{rag['prefix_cache_hits']:,}" in texts[at : at + 20]
    assert s["warnings"]  # of the requests that never fit
    for text in (*s["assumed"], *s["warnings"]):
        assert any(text in shown for shown in texts)
    assert any("block_size: 16" in text for text in texts)


def test_the_page_has_the_figures(page: str) -> None:
    drawn = figures(page)
    titles = [" ".join(figure.itertext()) for figure in drawn]
    names = (
        "Time to first", "Parts of TTFT", "Prompt tokens by fate", "Prefix cache", "Blocks evicted",
        "Requests in the", "Cached blocks",
    )  # fmt: skip
    assert len(drawn) == len(names)
    assert all(name in title for name, title in zip(names, titles, strict=True))
    for figure in drawn:  # they keep their shape at any width, and refer to themselves only
        assert figure.get("viewBox")
        own = {element.get("id") for element in figure.iter()} - {None}
        used = {element.get("href", "#")[1:] for element in figure.iter("use")}
        assert used <= own
    ids = [element.get("id") for figure in drawn for element in figure.iter() if element.get("id")]
    assert len(ids) == len(set(ids))


def test_figures_take_the_pages_colours(page: str) -> None:
    for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert "currentColor" in text and "var(--grid)" in text
        assert not any(colour in text for colour in (plots.INK, plots.SOFT, plots.GRID, plots.BLUE.lower()))
    rules = page[: page.index("</style>")]
    light, dark = rules.split("prefers-color-scheme: dark")
    for name in ("--ink", "--ground", "--grid", "--soft", "--blue"):
        value = rf"{name}: (#\w+)"
        assert re.findall(value, light) != re.findall(value, dark) != []


def test_the_same_run_gives_the_same_bytes(page: str, mixed: Result) -> None:
    assert to_html(mixed) == page
    assert to_html(run(mixed.resolved.scenario)) == page


def test_text_from_outside_stays_text(mixed: Result) -> None:
    evil = "<script>alert(1)</script>"
    rows = [mixed.summary["by_tenant"][0] | {"tenant": evil}]
    page = to_html(mixed._replace(summary=mixed.summary | {"name": evil, "by_tenant": rows}))
    assert "script" not in Page(page).tags
    assert evil in Page(page).texts


def test_tenants_that_are_not_shown_are_counted(mixed: Result) -> None:
    rows = mixed.summary["by_tenant"] * 50
    page = to_html(mixed._replace(summary=mixed.summary | {"by_tenant": rows}))
    assert f"And {len(rows) - SHOWN_ROWS} smaller ones: by_tenant in the summary." in Page(page).texts
    assert Page(page).texts.count("rag") == sum(row["tenant"] == "rag" for row in rows[:SHOWN_ROWS])


def test_without_a_prefix_cache(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "cost: {form: whole_step, base_us: 1000}\n"
        "engine: {block_size: 16, num_gpu_blocks: 100, enable_prefix_caching: false}\n"
        "workload: {kind: fourteen_tokens, num_requests: 3, request_rate: 5}\n"
    )
    page = to_html(run(load(path)))
    assert "prefix caching is off" in page
    assert "Prompt tokens by fate" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)


def test_hit_rate_in_a_span_is_what_the_counters_grew_by() -> None:
    series = {
        "time": np.array([10.0, 11, 12, 13]),
        "prefix_cache_queries": np.array([0, 100, 100, 300]),
        "prefix_cache_hits": np.array([0, 20, 20, 180]),
        "kv_cache_usage_perc": np.array([0.0, 0.5, 0.25, 0.75]),
    }
    use, rate = cache_plots.cache_over_time(Figure().subplots(), series, 10.0, 3.0).get_lines()
    np.testing.assert_array_equal(use.get_ydata(), [0, 50, 25, 75])
    np.testing.assert_array_equal(rate.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(rate.get_ydata(), [20, np.nan, 80])


def test_no_samples_no_lines() -> None:
    series = {name: np.empty(0) for name in ("time", "prefix_cache_queries", "prefix_cache_hits")}
    series["kv_cache_usage_perc"] = np.empty(0)
    assert not cache_plots.cache_over_time(Figure().subplots(), series, 0.0, 1.0).get_lines()


def test_churn_is_what_the_counters_grew_by() -> None:
    time = np.array([10.0, 11.0, 13.0])
    series: Any = {"time": time, "num_evictions": np.array([5, 9, 13])}
    series["num_preemptions"] = np.array([0, 0, 3])
    evictions, preemptions = cache_plots.churn_over_time(Figure().subplots(), series, 10.0, 3.0).get_lines()
    assert evictions.get_xydata().tolist() == [[1.0, 4.0], [3.0, 2.0]]
    assert preemptions.get_xydata().tolist() == [[1.0, 0.0], [3.0, 1.5]]


def test_no_churn_has_no_two_ticks_of_one_name() -> None:
    series: Any = {name: np.zeros(3) for name in ("num_evictions", "num_preemptions")}
    axes = cache_plots.churn_over_time(Figure().subplots(), {"time": np.arange(3.0)} | series, 0.0, 3.0)
    axes.figure.draw_without_rendering()
    names = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(set(names)) == len(names)


def test_durations_are_shares_by_powers_of_two() -> None:
    counted: Any = {"count": 4, "buckets": [[4.0, 3], [16.0, 1]]}
    none = dict.fromkeys(("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"))
    axes = cache_plots.block_durations(Figure().subplots(), none | {"kv_block_reuse_gap_seconds": counted})
    (stairs,) = axes.patches
    shares, edges, _ = stairs.get_data()
    assert shares.tolist() == [75.0, 0.0, 25.0] and edges.tolist() == [2.0, 4.0, 8.0, 16.0]



def test_parts_of_ttft_are_stacked_from_the_fastest_to_the_slowest() -> None:
    n = 40
    wait = np.arange(n, dtype=float)[::-1]  # the last to arrive is the fastest
    arrival = np.zeros(n)
    chunk = make_chunk(arrival, 1 + wait, 3 + wait, 4 + wait, ready=np.full(n, 0.5))
    chunk["first_token_time"][0] = chunk["scheduled_time"][0] = np.nan  # refused
    chunk["refused"] = np.eye(1, n, dtype=np.int64)[0]
    axes = plots.latency_breakdown(Figure().subplots(), closed(chunk))
    front, queue, prefill = (patch.get_data() for patch in axes.patches)
    assert (front.values == 0.5).all()
    np.testing.assert_allclose(queue.baseline, front.values)
    assert len(prefill.values) == 20
    np.testing.assert_allclose(prefill.values - queue.values, 2.0)
    assert prefill.values[0] == pytest.approx(3.5) and (np.diff(prefill.values) > 0).all()
    assert prefill.values[-1] == pytest.approx(41.0)  # the refused one, slowest of all, is left out


def test_few_requests_have_few_bars() -> None:
    axes = plots.latency_breakdown(Figure().subplots(), closed(labelled([0.0, 1.0, 2.0])))
    assert [len(patch.get_data().values) for patch in axes.patches] == [3, 3, 3]


def test_the_command_writes_the_page(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = prefixsim("run", scenario, "--report", out)
    assert result.exit_code == 0, result.output
    assert f"written: {out}" in result.stderr
    Page(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("report.txt", "--report * should end in .html; give another name"),
        ("no/report.html", "--report * there is no folder * make it first"),
        ("out/report.html", "--report * lies in --out *, which is replaced; name a file elsewhere"),
    ],
)
def test_a_bad_place_is_refused_before_the_run(scenario: Path, tmp_path: Path, name: str, said: str) -> None:
    line = refused("run", scenario, "--report", tmp_path / name, "--out", tmp_path / "out")
    assert re.search(re.escape(said).replace(r"\*", ".*"), line), line
    assert not list(tmp_path.iterdir())
