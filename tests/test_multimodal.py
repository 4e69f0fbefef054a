"""Multimodal items on segments: as the real block hashes have it, from the trace's line to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulation import APART, engine, run
from test_workloads_trace import Row, batches, contents, hit_tokens, write

from sim.hashing import MultimodalItem, block_hashes, none_hash
from sim.scenario_file import load
from sim.simulation import run as run_scenario
from sim.trace.convert import convert
from sim.trace.describe import describe
from workloads import Mix, Trace, WorkloadError, WorkloadWarning
from workloads.base import Workload
from workloads.jsonl import Parser

pytestmark = pytest.mark.filterwarnings("ignore:.*multimodal items:workloads.WorkloadWarning")

PLACEHOLDER = 7  # the segment of every item, whatever it shows: its tokens are all the same one
Piece = tuple[int, int] | tuple[int, int, str | int]  # (segment, tokens), or with an item's identifier
Prompt = list[Piece]


def image(name: str | int, length: int) -> Piece:
    return (PLACEHOLDER, length, name)


def row(prompt: Prompt, at: float = 0.0, **fields: Any) -> Row:
    """A line of a segments trace; the answer of one token is the last segment's."""
    pieces = [*prompt, (10**6 + int(at), 1)]
    names = [piece[2] if len(piece) == 3 else None for piece in pieces]
    return {
        "arrival_time": at,
        "input_length": sum(piece[1] for piece in prompt),
        "output_length": 1,
        "segments": [piece[:2] for piece in pieces],
        "mm": names,
        **fields,
    }


def one_after_the_other(prompts: list[Prompt]) -> list[Row]:
    return [row(prompt, APART * i) for i, prompt in enumerate(prompts)]


def hits(path: str, block_size: int) -> list[int]:
    """Hit tokens of each request in a timed run with an ample pool."""
    return run(iter(batches(path, block_size)), engine(block_size=block_size, num_gpu_blocks=5000)).hits


def tokens_and_items(prompt: Prompt) -> tuple[list[int], list[MultimodalItem]]:
    """A prompt as vLLM has it: all placeholders are one token, whatever stands behind them."""
    tokens: list[int] = []
    items = []
    for segment, length, *name in prompt:
        if name:
            items.append(MultimodalItem(str(name[0]), len(tokens), length))
            tokens += [0] * length
        else:
            tokens += range(1000 * segment + 1, 1000 * segment + 1 + length)
    return tokens, items


def hits_by_hashes(prompts: list[Prompt], block_size: int) -> list[int]:
    """Leading blocks whose real hashes an earlier prompt left, never the last token's."""
    found, cached = [], set[bytes]()
    root = none_hash("sha256_cbor")
    for prompt in prompts:
        tokens, items = tokens_and_items(prompt)
        hashes = block_hashes(tokens, block_size, algo="sha256_cbor", none_hash=root, mm=items)
        most = (len(tokens) - 1) // block_size
        known = next((i for i, one in enumerate(hashes[:most]) if one not in cached), most)
        found.append(min(known, len(hashes)) * block_size)
        cached.update(hashes)
    return found


ITEM_LENGTHS = {"cat": 5, "dog": 5, "owl": 12, "ant": 1}  # what a picture shows decides its tokens
piece = st.one_of(
    st.builds(lambda segment, length: (segment, length), st.integers(1, 2), st.integers(1, 9)),
    st.builds(lambda name: image(name, ITEM_LENGTHS[name]), st.sampled_from(sorted(ITEM_LENGTHS))),
)


@given(
    st.lists(st.lists(piece, min_size=1, max_size=5), min_size=2, max_size=8),
    st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_timed_run_hits_what_the_real_hashes_hit(
    tmp_path: Path, drawn: list[Prompt], block_size: int
) -> None:
    path = write(tmp_path, *one_after_the_other([*drawn, *drawn]))
    assert hits(path, block_size) == hits_by_hashes([*drawn, *drawn], block_size)


@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("offset", [0, 1, 15, 16, 17, 40, 64])
def test_another_image_hits_the_blocks_before_it(tmp_path: Path, offset: int, block_size: int) -> None:
    """A block that the item touches with one token is the item's; the same item hits to the end."""

    def prompt(name: str) -> Prompt:
        text: Prompt = [(1, offset)] if offset else []
        return [*text, image(name, 100), (2, 30)]

    loads = [prompt("cat"), prompt("dog"), prompt("cat")]
    found = hits(write(tmp_path, *one_after_the_other(loads)), block_size)
    before, whole = offset // block_size * block_size, (offset + 129) // block_size * block_size
    assert found == [0, before, whole] == hits_by_hashes(loads, block_size)


def test_the_block_in_which_an_item_ends_is_the_items(tmp_path: Path) -> None:
    loads: list[Prompt] = [[image(name, 17), (1, 60)] for name in ("cat", "dog", "cat")]
    assert hits(write(tmp_path, *one_after_the_other(loads)), 16) == [0, 0, 64]
    moved: list[Prompt] = [[(1, 16), image("cat", 32), (2, 9)], [(3, 16), image("cat", 32), (2, 9)]]
    assert hits(write(tmp_path, *one_after_the_other(moved)), 16) == [0, 0], "other tokens before it"


def test_what_tells_items_apart(tmp_path: Path) -> None:
    """No item, "1" and 1 are three, and so is "1" behind other placeholder tokens."""
    loads: list[Prompt] = [[(PLACEHOLDER, 40)], [image("1", 40)], [image(1, 40)], [(8, 40, "1")]]
    path = write(tmp_path, *one_after_the_other([*loads, *loads]))
    assert hits(path, 16) == [0, 0, 0, 0, 32, 32, 32, 32]


def test_tokens_of_another_image_are_cold(tmp_path: Path) -> None:
    """Only a salt or an adapter isolates; and the report says what of images is not simulated."""
    loads: list[Prompt] = [[(1, 32), image(name, 64), (2, 4)] for name in ("cat", "dog")]
    trace = write(tmp_path, *one_after_the_other(loads))
    scenario = tmp_path / "s.yaml"
    scenario.write_text(
        f"cost: {{base_us: 1000}}\nengine: {{block_size: 16, num_gpu_blocks: 100, max_model_len: 900}}\n"
        f"workload: {{kind: trace, path: {trace}}}\n"
    )
    summary = run_scenario(load(scenario)).summary
    fates = summary["token_fates"]
    assert (fates["hit"], fates["cold"], fates["isolated"]) == (32, 100 + 68, 0)
    (told,) = [text for text in summary["warnings"] if "multimodal" in text]
    assert "of its 2 multimodal items" in told and "not their encoder" in told


@pytest.mark.parametrize(("texts", "expected"), [("t", 3 * 32), (None, 32)])
def test_tenants_of_one_text_share_images_by_name(tmp_path: Path, texts: Any, expected: int) -> None:
    """Though each trace meets the images in another order."""
    tenants = {}
    for tenant, names in {"a": ("cat", "dog"), "b": ("owl", "dog", "cat", "owl")}.items():
        (tmp_path / tenant).mkdir()
        start = 0.0 if tenant == "a" else 10 * APART
        rows = [row([image(name, 33)], start + APART * i) for i, name in enumerate(names)]
        trace = {"kind": "trace", "path": write(tmp_path / tenant, *rows)}
        tenants[tenant] = {"workload": trace, "texts": texts}
    mix = Mix.model_validate({"kind": "mix", "tenants": tenants})
    parts = list(mix.batches(np.random.SeedSequence(0), 16))
    assert hit_tokens(parts, 16, outputs=False) == expected


NAMED = [
    row([(1, 20), image("cat", 30)]),
    row([(1, 20), image(3, 30), (2, 4)], 1),
    {name: value for name, value in row([(5, 9)], 2).items() if name != "mm"},
    row([(1, 20), (-4, 6, "dog"), image("cat", 30)], 3, session_id="x"),
]


def test_items_stay_on_their_segments(tmp_path: Path) -> None:
    path, out = write(tmp_path, *NAMED), tmp_path / "out.jsonl"
    convert(Trace(path=path), out, "segments")
    assert [json.loads(line) for line in out.read_bytes().splitlines()] == json.loads(json.dumps(NAMED))


@pytest.mark.parametrize("block", [4, 16])
def test_ids_of_blocks_know_their_images(tmp_path: Path, block: int) -> None:
    rows = [row([(1, 20), image(name, 30), (2, 9)], at) for at, name in enumerate(("cat", "dog", "cat"))]
    path, out = write(tmp_path, *rows), tmp_path / "out.jsonl"
    convert(Trace(path=path), out, "mooncake", block_size=block)
    assert b'"mm"' not in out.read_bytes()
    expected = hit_tokens(batches(path, block), block, outputs=False)
    assert hit_tokens(batches(str(out), block), block, outputs=False) == expected
    assert expected == 20 // block * block + 58 // block * block


def test_described(tmp_path: Path) -> None:
    found = describe(Trace(path=write(tmp_path, *NAMED)), (4,))
    assert (found["mm_items"], found["distinct_mm_items"], found["mm_tokens"]) == (4, 3, 30 + 30 + 6 + 30)
    assert found["ideal_hit_rate"]["4"] == (20 + 20) / found["total_input_tokens"]
    assert describe(Trace(path=write(tmp_path, NAMED[2])), (4,))["mm_items"] == 0


@pytest.mark.parametrize(
    ("mm", "says"),
    [
        ("cat", "mm is 'cat': it must be a list that has a name"),
        ([None, 1.5, None], r"mm is \[None, 1.5, None\]: it must be"),
        ([None, ["cat"], None], "mm is "),
        ([None, True, None], "mm is "),
        ([None, "cat"], "mm has 2 entries for 3 segments: it must have a name or null for each"),
        ([], "mm has 0 entries for 3 segments"),
        ([None, "", None], "mm has an empty name: write null where"),
        ([None, "cat", "dog"], "mm names an item that ends 1 tokens after the prompt"),
    ],
)
@pytest.mark.parametrize("before", [None, "cat"])
def test_a_bad_item_names_its_line(tmp_path: Path, mm: Any, says: str, before: str | None) -> None:
    good = row([(1, 20), (7, 30) if before is None else image(before, 30)])
    path = write(tmp_path, good, good | {"arrival_time": 1}, good | {"arrival_time": 2, "mm": mm})
    with pytest.raises(WorkloadError, match=f"line 3: {says}"):
        batches(path)
    with pytest.warns(WorkloadWarning, match="1 bad lines were skipped"):
        assert len(contents(batches(path, skip_bad_lines=True))) == 2


def test_no_items_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    batches(write(tmp_path, row([(1, 20)]), row([(1, 20)], mm=None)))
    assert not recwarn


def test_chunks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *NAMED)
    whole = contents(batches(path))
    for size in (1, 2, 3):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert contents(batches(path)) == whole


@pytest.mark.parametrize("names", [("cat", "dog"), (1, 2), ("cat", None)])
def test_fast_and_slow_parsing_agree(names: tuple[Any, Any]) -> None:
    rows = [row([(1, 20), (7, 30) if name is None else image(name, 30)], at) for at, name in enumerate(names)]
    lines = [json.dumps(one).encode() + b"\n" for one in [*rows, {**rows[0], "mm": None}]]
    parser = Parser("trace", "segments")
    slow = parser.parse(0, lines) and parser._parse_slowly(0, lines)
    fast = parser._parse_fast(0, lines)
    assert fast is not None and fast.optional == slow.optional
    assert fast.optional["mm"] == [[None, names[0], None], [None, names[1], None], None]
    assert np.array_equal(fast.ids, slow.ids)
