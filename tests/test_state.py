"""The arrays of an engine: which requests are refused, and what growing keeps."""

from __future__ import annotations

import numpy as np
import pytest

from sim.columns import R, T
from sim.core import REFUSED, WAITING, EngineConfig
from sim.engine import FLOAT_FIELDS, INT_FIELDS
from sim.request import Batch, make_batch
from sim.state import State


def batch(prompts: list[int], output: int) -> Batch:
    n = len(prompts)
    lengths = [p + output for p in prompts]
    return make_batch([0.0] * n, prompts, output, range(n + 1), range(n), lengths)


@pytest.mark.parametrize(
    ("prompt", "output", "status"),
    [
        # 9 usable blocks of 4: the last sampled token's KV is never computed, so 37 tokens fit
        (30, 7, WAITING),
        (30, 8, REFUSED),
        (36, 1, WAITING),
        (37, 1, REFUSED),
        # max_model_len 50: room for one token must be left, and outputs beyond it do not count
        (12, 1000, REFUSED),
    ],
)
def test_what_can_never_fit_the_pool_is_refused(prompt: int, output: int, status: int) -> None:
    state = State(EngineConfig(4, 10, 64, 4, 50))
    (slot,) = state.arena.load(batch([prompt], output))
    assert state.core.requests[R.status, slot] == status


@pytest.mark.parametrize(("prompt", "status"), [(48, WAITING), (49, WAITING), (50, REFUSED), (51, REFUSED)])
def test_a_prompt_must_leave_room_within_max_model_len(prompt: int, status: int) -> None:
    state = State(EngineConfig(4, 100, 64, 4, 50))
    (slot,) = state.arena.load(batch([prompt], 10))
    assert state.core.requests[R.status, slot] == status


def test_outputs_beyond_max_model_len_need_no_blocks() -> None:
    state = State(EngineConfig(4, 14, 64, 4, 50))  # 13 usable blocks: 52 tokens
    (slot,) = state.arena.load(batch([20], 1000))
    assert state.core.requests[R.status, slot] == WAITING


def test_growing_keeps_requests_and_their_segments_and_marks_new_slots_vacant() -> None:
    state = State(EngineConfig(4, 1000, 64, 4, 5000))
    width = state.core.requests.shape[1]
    first = state.arena.load(batch([5, 6, 7], 3))
    more = state.arena.load(batch([9] * (2 * width), 3))
    core = state.core
    assert core.requests.shape[1] > width
    assert core.requests[R.prompt_len, first].tolist() == [5, 6, 7]
    assert core.requests[R.request_id, more].tolist() == list(range(3, 3 + 2 * width))
    assert len(set(first.tolist()) | set(more.tolist())) == 3 + 2 * width
    vacant = state.arena.vacant[: state.arena.num_vacant]
    assert (core.requests[R.request_id, vacant] == -1).all()
    assert not set(vacant.tolist()) & (set(first.tolist()) | set(more.tolist()))


def test_compaction_drops_the_segments_of_vacant_slots_only() -> None:
    state = State(EngineConfig(4, 1000, 64, 4, 5000))
    slots = state.arena.load(batch([5, 6, 7], 3))
    state.arena.vacate(int(slots[1]))
    state.arena.compact_segments(0)
    requests, segments = state.core.requests, state.core.segments
    kept = [segments[:, requests[R.first_segment, slot]].tolist() for slot in slots[[0, 2]]]
    assert kept == [[0, 8], [2, 10]]
    assert state.arena.segments_used == 2
    assert np.array_equal(requests[R.num_segments, slots[[0, 2]]], [1, 1])


def test_a_records_fields_are_the_first_columns_in_order() -> None:
    assert [getattr(R, name) for name in INT_FIELDS[: R.RECORDED]] == list(range(R.RECORDED))
    assert [getattr(T, name) for name in FLOAT_FIELDS[:4]] == [0, 1, 2, 3]
    assert T.last_token_time == FLOAT_FIELDS.index("finish_time") == T.RECORDED - 1
