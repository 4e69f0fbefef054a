"""What the page of `prefixsim explore` shows: its answers, words, tables, figures and address."""

from __future__ import annotations

import socket
import xml.etree.ElementTree as ElementTree
from itertools import product

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.errors import InputError
from sim.explore import address, at_scale, drawing, serve, tables, words
from sim.explore.address import Controls, from_address, to_address
from sim.explore.two_prompts import hit_length, two_prompts
from sim.explore.under_load import REQUESTS, Answer, answer, scenario_of
from sim.resolve import resolve
from sim.simulation import run


@pytest.fixture(scope="module")
def served() -> Answer:
    return answer(Controls())


def test_ten_of_fourteen_tokens_shared_hit_eight() -> None:
    two = two_prompts(shared=10, prompt_len=14, block_size=4)
    assert (two.hit, two.lost_tail) == (8, 2)
    assert [one.verdict for one in two.blocks()] == [
        "hit", "hit", "recomputed: only its first 2 shared", "recomputed: not full, so it has no hash",
    ]  # fmt: skip
    assert words.sentence(two) == (
        "8 of 14 tokens hit, 6 are computed. 2 of the 10 tokens that both share are lost: "
        "only full blocks of 4 are shared."
    )


def test_equal_prompts_that_end_with_a_block_recompute_it_for_its_last_token() -> None:
    two = two_prompts(shared=8, prompt_len=8, block_size=4)
    assert two.hit == 4
    assert [one.verdict for one in two.blocks()] == ["hit", "recomputed: it holds the prompt's last token"]
    assert "the last token of a prompt is always computed" in words.sentence(two)


def test_what_ends_with_a_block_is_not_lost() -> None:
    assert words.sentence(two_prompts(8)) == (
        "8 of 14 tokens hit, 6 are computed: what they share, 8 tokens, ends where a block ends."
    )
    assert words.sentence(two_prompts(0)).endswith("the prompts share nothing.")


@pytest.mark.parametrize(("prompt_len", "block_size"), [(1, 1), (14, 4), (16, 4), (13, 13), (32, 16)])
def test_the_rule_is_the_engines(prompt_len: int, block_size: int) -> None:
    for shared in {0, 1, block_size - 1, block_size, prompt_len - 1, prompt_len}:
        two = two_prompts(shared, prompt_len, block_size)
        assert two.hit == hit_length(two.shared, prompt_len, block_size)
        assert sum(two.fates.values()) == prompt_len == len(two.second) == len(two.first)
        assert two.first[: two.shared] == two.second[: two.shared]
        assert set(two.second[two.shared :]).isdisjoint(two.first)
        assert "".join(one.text for one in two.blocks()) == two.second


def test_more_cannot_be_shared_than_there_is() -> None:
    assert two_prompts(20, 14, 4).shared == 14


def test_an_address_restores_the_controls() -> None:
    moved = Controls(11, 20, 8, "multi_turn", 512, 12, 64, 131_072, "radix", False)
    assert from_address(to_address(moved)) == moved
    assert to_address(Controls()) == {}
    assert to_address(Controls(caching=False, rate=9)) == {"caching": "off", "rate": "9"}


def test_an_address_that_no_control_can_be_is_left_aside() -> None:
    bad = {"shared": "99", "block": "x", "cache": "<b>", "rate": ["3", "7"], "unknown": "1", "caching": "no"}
    assert from_address(bad) == Controls(rate=7)


def test_every_default_is_one_of_its_choices() -> None:
    for name, value in Controls()._asdict().items():
        assert name == "caching" or value in address.CHOICES[name]


@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_a_usual_hit_is_the_full_blocks_of_the_prefix(block_size: int) -> None:
    found = answer(Controls(block_size=block_size, rate=4, pool=address.POOLS[-1]))
    assert found.usual_hit == hit_length(1000, 1128, block_size) == 1000 // block_size * block_size
    assert f"a usual hit is {found.usual_hit:,} tokens;" in words.status(found)


def test_the_answer_is_what_a_run_of_the_scenario_says(served: Answer) -> None:
    result = run(served.scenario)
    result.records.discard()
    assert result.summary == served.summary
    assert served.summary["completed"] == REQUESTS == len(served.ttft)
    assert f"{served.summary['mean_ttft_ms']:,.1f}" in tables.ttft(served)


def test_the_curve_in_the_pool_of_the_run_is_near_it(served: Answer) -> None:
    found = served.study.curve
    hits = found.hits[min(4096, len(found.hits) - 1)]
    assert found.hit_rate(int(hits)) == pytest.approx(served.summary["prefix_cache_hit_rate"], abs=0.01)
    assert f"{100 * found.hit_rate(found.ceiling):.1f} %" in tables.curve(served)


def test_each_workload_and_cache_can_run() -> None:
    kinds = product(address.WORKLOADS.values(), address.CACHES.values(), (True, False))
    for workload, cache, caching in kinds:
        scenario = scenario_of(Controls(workload=workload, cache=cache, caching=caching))
        assert resolve(scenario).config.block_size == 16
    chat = answer(Controls(workload="multi_turn"))
    assert chat.summary["completed"] == REQUESTS
    assert chat.study.asked.block_sizes == [16]


def test_without_caching_all_is_computed() -> None:
    off = answer(Controls(caching=False))
    assert words.status(off).startswith("Nothing is shared, so every prompt is computed whole; mean")
    assert [name for name, *_ in drawing.shares(off)] == ["computed"]
    assert words.figures(off)[0] == ("hit rate", "-")
    for draw in (drawing.fates, drawing.curve, drawing.ttft, tables.fates, tables.curve, tables.ttft):
        assert draw(off)


def test_hits_in_reserved_prefixes_are_told_where_fates_are_not(served: Answer) -> None:
    reserved = served._replace(summary=served.summary | {"token_fates": None})
    assert reserved.hit_rate == served.hit_rate
    hits = served.summary["token_fates"]["hit"]
    assert [part[:2] for part in drawing.shares(reserved)] == [
        ("hit", hits), ("computed", served.summary["total_input_tokens"] - hits),
    ]  # fmt: skip


def test_figures_take_the_colours_of_the_page_and_say_what_they_show(served: Answer) -> None:
    two = two_prompts(10)
    for figure in (drawing.ttft(served), drawing.curve(served), drawing.staircase(two)):
        svg = ElementTree.fromstring(figure)
        assert svg.get("role") == "img" and svg.get("aria-label")
        assert "currentColor" in figure and "var(--blue)" in figure and "var(--grid)" in figure
        assert "#ffffff" not in figure and "<image" not in figure
    for html in (drawing.in_blocks(two), drawing.fates(served)):
        page = ElementTree.fromstring(f"<div>{html}</div>")
        assert all(one.get("aria-label") or one.get("aria-hidden") for one in page.iter("svg"))


def test_drawing_leaves_an_answer_as_it_was(served: Answer) -> None:
    before = served.ttft.copy(), drawing.ttft(served)
    assert (served.ttft == before[0]).all()
    assert drawing.ttft(served) == before[1]


def test_tables_say_what_the_figures_show(served: Answer) -> None:
    rows = _cells(tables.staircase(two_prompts(10)))
    assert rows[1:] == [["0 to 3", "0"], ["4 to 7", "4"], ["8 to 11", "8"], ["12 to 14", "12"]]
    fates = {row[0].split(":")[0]: row[1] for row in _cells(tables.fates(served))[1:]}
    assert fates["hit"] == f"{served.summary['token_fates']['hit']:,}"


def _cells(html: str) -> list[list[str]]:
    rows = ElementTree.fromstring(html).iter("tr")
    return [[cell.text or "" for cell in row] for row in rows]


def test_block_sizes_at_scale_lose_the_tail() -> None:
    rates = at_scale.hit_rates(100)
    assert rates[1] == pytest.approx(99 * 1000 / (100 * 1400))
    assert rates[64] == pytest.approx(99 * 960 / (100 * 1400))
    assert rates[1024] == 0
    assert ["64", f"{100 * rates[64]:.2f} %", "40"] in _cells(tables.by_block_size(rates))
    assert ElementTree.fromstring(drawing.by_block_size(rates)).get("role") == "img"


def test_without_marimo_explore_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["explore", "--no-browser"])
    assert result.exit_code == 2
    assert result.stderr == "prefixsim: explore needs marimo: pip install 'prefixsim[notebooks]'\n"


def test_a_port_that_is_taken_is_told() -> None:
    with socket.socket() as other:
        other.bind((serve.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"^--port {port}: address already in use; try another, or 0"):
            serve.listening(port)
