"""Documents, few-shot examples and scans: what is drawn, in which order, and what a cache makes of it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from batches import SEED, chi_square, make, peak_memory, rows, same, whole
from pydantic import ValidationError
from simulation import engine, run

from sim.request import Batch
from workloads.base import Workload
from workloads.popularity import draw_distinct, draw_ranks, zipf_bounds

POISSON = {"request_rate": 8.0}
VARIED = {"distribution": "uniform", "low": 5, "high": 90}
DOCUMENTS: dict[str, Any] = {
    "kind": "documents", "num_requests": 3000, "num_documents": 12, "documents_per_request": 3,
    "document_popularity": "zipf", "zipf_alpha": 0.9, "system_prompt_len": 33, "document_len": VARIED,
    "question_len": VARIED, "output_len": VARIED, "document_order": "fixed", **POISSON,
}  # fmt: skip
FEW_SHOT: dict[str, Any] = {
    "kind": "few_shot", "num_requests": 3000, "num_examples": 12, "examples_per_request": 3,
    "num_groups": 6, "system_prompt_len": 33, "example_len": VARIED, "question_len": VARIED,
    "output_len": VARIED, **POISSON,
}  # fmt: skip
SCAN: dict[str, Any] = {
    "kind": "scan", "num_requests": 3000, "prompt_len": VARIED, "output_len": VARIED, **POISSON,
}  # fmt: skip
ALL = {
    "documents": DOCUMENTS,
    "shuffled": {**DOCUMENTS, "document_order": "shuffled"},
    "few_shot of groups": {**FEW_SHOT, "group_popularity": "zipf"},
    "few_shot of requests": {**FEW_SHOT, "num_groups": None},
    "scan": SCAN,
}
each = pytest.mark.parametrize("spec", ALL.values(), ids=ALL.keys())


def chosen(batch: Batch) -> list[tuple[int, ...]]:
    """The document or example numbers of each request, in the prompt's order."""
    found = rows(batch)
    assert all(row[0] == (0, 33) and row[-1][0] < 0 for row in found), "system prompt first, question last"
    return [tuple(number - 1 for number, _ in row[1:-1]) for row in found]


def documents(**fields: Any) -> Any:
    return make({**DOCUMENTS, **fields})


def few_shot(**fields: Any) -> Any:
    return make({**FEW_SHOT, **fields})


def hits(workload: Any) -> float:
    return run(workload.batches(SEED, 16), engine()).hit_rate


# What is drawn


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.4])
def test_ranks_have_zipf_weights(alpha: float) -> None:
    counts = np.bincount(draw_ranks(np.random.default_rng(5), zipf_bounds(50, alpha), 100_000), minlength=50)
    assert chi_square(counts, np.arange(1, 51) ** -alpha) < 3
    assert chi_square(counts, np.arange(1, 51) ** -(alpha + 0.05)) > 3


@pytest.mark.parametrize("alpha", [0.0, 1.1])
def test_distinct_ranks_are_drawn_one_after_the_other(alpha: float) -> None:
    drawn = draw_distinct(np.random.default_rng(5), zipf_bounds(5, alpha), 60_000, 3)
    assert drawn.shape == (60_000, 3)
    weights = np.arange(1, 6) ** -alpha
    share = weights / weights.sum()
    expected = {
        (a, b, c): share[a] * share[b] / (1 - share[a]) * share[c] / (1 - share[a] - share[b])
        for a, b, c in permutations(range(5), 3)
    }
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    assert list(map(tuple, found.tolist())) == sorted(expected)
    assert chi_square(counts, [expected[row] for row in sorted(expected)]) < 3


@pytest.mark.parametrize("alpha", [0.0, 3.0, 60.0, 400.0])
def test_all_ranks_of_a_row_differ_even_where_almost_nothing_is_left(alpha: float) -> None:
    drawn = draw_distinct(np.random.default_rng(5), zipf_bounds(40, alpha), 200, 40)
    assert (np.sort(drawn, axis=1) == np.arange(40)).all()
    if alpha >= 60:
        assert (drawn[:, :3] == [0, 1, 2]).all()


def test_where_nothing_is_left_the_first_free_rank_is_taken() -> None:
    drawn = draw_distinct(np.random.default_rng(5), np.array([0.5, 0.5, 1.0]), 50, 3)
    assert (drawn[:, 2] == 1).all()


def test_documents_are_popular_by_their_weights() -> None:
    batch = whole(documents(num_requests=30_000, documents_per_request=1))
    assert chi_square(np.bincount(batch.prefix_group), np.arange(1, 13) ** -0.9) < 3
    assert [(number,) for number in batch.prefix_group] == chosen(batch)
    even = documents(
        num_requests=30_000, documents_per_request=1, document_popularity="uniform", zipf_alpha=1.0
    )
    assert chi_square(np.bincount(whole(even).prefix_group), np.ones(12)) < 3


def test_fixed_and_shuffled_order_draw_the_same_documents() -> None:
    fixed, shuffled = whole(documents()), whole(documents(document_order="shuffled"))
    sets = chosen(fixed)
    assert all(tuple(sorted(set(row))) == row and len(row) == 3 for row in sets)
    assert [tuple(sorted(row)) for row in chosen(shuffled)] == sets
    assert shuffled.prefix_group.tolist() == [row[0] for row in chosen(shuffled)]
    assert same(fixed, shuffled, ("segment_id", "segment_len", "prefix_group"))
    orders = [tuple(np.argsort(row).tolist()) for row in chosen(shuffled)]
    assert chi_square([orders.count(order) for order in permutations(range(3))], np.ones(6)) < 3


def test_a_group_keeps_its_examples() -> None:
    batch = whole(few_shot(group_popularity="zipf", num_requests=20_000))
    of_group: dict[int, tuple[int, ...]] = {}
    for group, row in zip(batch.prefix_group.tolist(), chosen(batch), strict=True):
        assert of_group.setdefault(group, row) == row
        assert len(set(row)) == 3
    assert sorted(of_group) == list(range(6))
    assert len(set(of_group.values())) == 6
    assert chi_square(np.bincount(batch.prefix_group), 1 / np.arange(1, 7)) < 3


def test_a_request_draws_its_examples() -> None:
    batch = whole(few_shot(num_groups=None, num_requests=20_000))
    found = np.array(chosen(batch))
    assert (batch.prefix_group == -1).all()
    for place in found.T:
        assert chi_square(np.bincount(place), np.ones(12)) < 3
    assert len(np.unique(found, axis=0)) == 12 * 11 * 10


def test_a_document_or_example_has_one_length() -> None:
    for spec in (DOCUMENTS, FEW_SHOT):
        of_segment: dict[int, int] = {}
        for row in rows(whole(make(spec))):
            for number, length in row[:-1]:
                assert of_segment.setdefault(number, length) == length
        assert len(set(of_segment.values())) > 3


# What holds of each


@each
def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any]) -> None:
    base = whole(make(spec))
    for size in (7, 999):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert same(base, whole(make(spec)))


@each
def test_more_requests_leave_the_earlier_ones(spec: dict[str, Any]) -> None:
    few, many = whole(make({**spec, "num_requests": 2500})), whole(make(spec))
    for name in Batch._fields:
        column: npt.NDArray[Any] = getattr(few, name)
        assert np.array_equal(column, getattr(many, name)[: len(column)])


@each
def test_own_content_is_named_once_and_below_zero(spec: dict[str, Any]) -> None:
    batch = whole(make(spec))
    own = batch.segment_id[batch.segment_id < 0]
    assert len(np.unique(own)) == len(own) == 3000
    assert (batch.segment_id[batch.segment_start[1:] - 1] < 0).all()


@each
def test_streams_stand_apart(spec: dict[str, Any]) -> None:
    base = whole(make(spec))
    assert same(base, whole(make({**spec, "output_len": 9})), ("output_len", "max_tokens", "segment_len"))
    assert same(base, whole(make({**spec, "arrival": "constant"})), ("arrival_time",))
    longer = {"prompt_len": 9} if spec["kind"] == "scan" else {"question_len": 9}
    assert same(base, whole(make({**spec, **longer})), ("prompt_len", "segment_len"))


@each
def test_memory_does_not_grow(spec: dict[str, Any]) -> None:
    peak_memory(make({**spec, "num_requests": 10_000}))
    few, many = make({**spec, "num_requests": 10_000}), make({**spec, "num_requests": 50_000})
    assert peak_memory(many) < 1.1 * peak_memory(few)


# What a cache makes of it


def test_questions_about_one_document_hit_all_of_it() -> None:
    load = documents(
        num_requests=9, num_documents=1, documents_per_request=1, document_popularity="uniform",
        zipf_alpha=1.0, system_prompt_len=100, document_len=1000, question_len=50, output_len=1,
    )  # fmt: skip
    assert run(load.batches(SEED, 16), engine()).hits == [0] + 8 * [1100 // 16 * 16]


def test_a_fixed_order_of_documents_hits_more_than_a_shuffled_one() -> None:
    fixed, shuffled = hits(documents()), hits(documents(document_order="shuffled"))
    alone = hits(documents(num_documents=12_000, document_popularity="uniform", zipf_alpha=1.0))
    assert fixed > shuffled + 0.02 > alone + 0.02


def test_examples_of_groups_hit_more_than_those_of_requests() -> None:
    sizes = {"num_examples": 400, "num_requests": 1000}
    assert hits(few_shot(**sizes)) > hits(few_shot(num_groups=None, **sizes)) + 0.2


def test_a_scan_hits_nothing() -> None:
    assert hits(make({**SCAN, "prompt_len": 100})) == 0


# Known answer 12: the ceiling of shared groups, here with their very numbers


@pytest.mark.parametrize(("suffix_len", "hit"), [(128, 2048), (0, 2032), (16, 2048)])
def test_shared_groups_reach_their_ceiling(suffix_len: int, hit: int) -> None:
    spec = {"kind": "shared_prefix", "prefix_len": 2048, "suffix_len": suffix_len, "output_len": 1}
    one = run(make({**spec, "num_requests": 16}).batches(SEED, 16), engine())
    assert one.hit_rate == pytest.approx(15 / 16 * hit / (2048 + suffix_len), abs=1e-12)
    if suffix_len == 128:
        assert one.hit_rate == pytest.approx(0.882353, abs=5e-7)
    load = make({**spec, "num_requests": 128, "num_groups": 8})
    groups = len(np.unique(whole(load).prefix_group))
    many = run(load.batches(SEED, 16), engine())
    assert many.totals.prefix_cache_hits == (128 - groups) * hit


# Known answer 14: the shared length's last, partial block is lost


@pytest.mark.parametrize("block_size", [16, 64])
def test_block_size_tax(block_size: int) -> None:
    load = make({
        "kind": "shared_prefix", "num_requests": 6000, "num_groups": 2000, "suffix_len": block_size,
        "prefix_len": {"distribution": "uniform", "low": block_size, "high": 2 * block_size - 1},
        "output_len": 1, "request_rate": 100,
    })  # fmt: skip
    batch = whole(load)
    found = run(load.batches(SEED, 16), engine(block_size=block_size))
    _, first = np.unique(batch.prefix_group, return_index=True)
    lost = np.delete(batch.segment_len[::2] - np.array(found.hits), first)
    by_group = np.delete(batch.prefix_group, first)
    means = [lost[by_group == group].mean() for group in np.unique(by_group)]
    error = np.sqrt((block_size**2 - 1) / 12 / len(means))
    assert abs(np.mean(means) - (block_size - 1) / 2) <= 3 * error


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({**DOCUMENTS, "documents_per_request": 13}, "above num_documents 12.*lower it"),
        ({**DOCUMENTS, "documents_per_request": 0}, "greater than or equal to 1"),
        ({**DOCUMENTS, "documents_per_request": 1, "document_order": "shuffled"}, "no effect on one"),
        ({**DOCUMENTS, "document_popularity": "uniform"}, "set document_popularity: zipf"),
        ({**DOCUMENTS, "document_len": 0}, "at least 1 token"),
        ({**DOCUMENTS, "system_prompt_len": -1}, "greater than or equal to 0"),
        ({**DOCUMENTS, "num_documents": 10**9}, "less than or equal to"),
        ({**FEW_SHOT, "examples_per_request": 13}, "above num_examples 12.*lower it"),
        ({**FEW_SHOT, "num_groups": None, "group_popularity": "zipf"}, "set num_groups"),
        ({**FEW_SHOT, "zipf_alpha": 2.0}, "set group_popularity: zipf"),
        ({**FEW_SHOT, "example_len": 0}, "at least 1 token"),
        ({**SCAN, "prompt_len": 0}, "at least 1 token"),
        ({**SCAN, "prefix_len": 3}, "not permitted"),
    ],
)
def test_bad_fields(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        make(spec)


@pytest.mark.parametrize("kind", ["documents", "few_shot", "scan", "mix"])
def test_each_kind_has_a_scenario(kind: str) -> None:
    text = (Path(__file__).parents[1] / "scenarios" / f"{kind}.yaml").read_text()
    assert f"\n  kind: {kind}\n" in text
