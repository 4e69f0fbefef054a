"""Which content of two workloads is the same: the rule, kind by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import TypeAdapter

from sim.request import make_batch
from workloads import AnyWorkload, SessionWorkload, WorkloadError
from workloads.arrivals import Arrivals
from workloads.same_content import OWN, PACE, POOLS, Shared, description, shared, with_names
from workloads.trace import Trace

KINDS = {kind.model_fields["kind"].default: kind for kind in get_args(get_args(AnyWorkload)[0])}
ALL = ((0, 2**63 - 1),)
DRAWN = {"distribution": "uniform", "low": 10, "high": 20}
OTHER = {"distribution": "uniform", "low": 10, "high": 21}

EXAMPLES: dict[str, dict[str, Any]] = {
    "agent": {"num_sessions": 2, "num_turns": 2, "system_prompt_len": 9, "task_len": 5, "tool_len": 5},
    "documents": {"num_requests": 9, "num_documents": 3, "document_len": DRAWN, "question_len": 5},
    "few_shot": {
        "num_requests": 9, "num_examples": 3, "examples_per_request": 2, "example_len": DRAWN,
        "question_len": 5,
    },
    "fourteen_tokens": {},
    "multi_turn": {"num_sessions": 2, "num_turns": 2, "num_system_prompts": 3, "user_len": 5},
    "scan": {"num_requests": 9, "prompt_len": 9},
    "shared_prefix": {"num_requests": 9, "prefix_len": DRAWN, "suffix_len": 5},
    "tree": {"num_sessions": 2, "branch": 2, "depth": 2, "question_len": 5, "step_len": 5},
}  # fmt: skip
# what defines the pool, and what does not
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "agent": ({"system_prompt_len": 8}, {"num_turns": 3}),
    "documents": ({"document_len": OTHER}, {"document_popularity": "zipf"}),
    "few_shot": ({"num_examples": 4}, {"examples_per_request": 1}),
    "fourteen_tokens": ({"shared_len": 9}, {"prompt_len": 15}),
    "multi_turn": ({"num_system_prompts": 4}, {"user_len": 6}),
    "shared_prefix": ({"prefix_len": OTHER}, {"suffix_len": 6}),
}
ENDS = {"agent": 1, "multi_turn": 3}


def workload(kind: str, **fields: Any) -> Any:
    data: dict[str, Any] = {"kind": kind, **EXAMPLES.get(kind, {}), "output_len": 4} | fields
    return TypeAdapter[Any](AnyWorkload).validate_python(data)


def common(one: Any, other: Any, seeds: tuple[int, int] = (0, 0)) -> Shared:
    return shared(description(one, seeds[0]), description(other, seeds[1]))


def test_every_kind_is_described() -> None:
    assert set(POOLS) == set(KINDS) - {"mix"}
    for kind, fields in POOLS.items():
        assert set(fields) <= set(KINDS[kind].model_fields)
    known = {name for kind in KINDS.values() for name in kind.model_fields}
    assert known >= PACE >= set(Arrivals.model_fields)
    assert set(SessionWorkload.model_fields) - PACE == {"num_sessions"}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_same_prompts_again(kind: str) -> None:
    one = workload(kind)
    assert common(one, workload(kind)) == Shared(True, ALL)
    rate = "session_rate" if "session_rate" in KINDS[kind].model_fields else "request_rate"
    assert common(one, workload(kind, **{rate: 3.0})) == Shared(True, ALL)
    assert common(one, workload(kind, concurrency=2)) == Shared(True, ALL)
    assert not common(one, workload(kind, output_len=5)).again
    assert not common(one, workload(kind), (0, 1)).again


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_same_pools(kind: str) -> None:
    one = workload(kind)
    count = "num_sessions" if "num_sessions" in KINDS[kind].model_fields else "num_requests"
    more = common(one, workload(kind, **{count: 20}))
    if kind not in CHANGES:
        assert more == Shared(False, ())
        return
    assert more == Shared(False, ((0, ENDS.get(kind, OWN)),))
    of_pool, of_requests = CHANGES[kind]
    assert common(one, workload(kind, **of_pool)) == Shared(False, ())
    assert common(one, workload(kind, **of_requests)) == more
    drawn = kind in ("documents", "few_shot", "shared_prefix")
    assert common(one, workload(kind), (0, 1)) == Shared(False, () if drawn else more.ids)


def test_kinds_share_nothing() -> None:
    for one in EXAMPLES:
        for other in EXAMPLES:
            if one != other:
                assert common(workload(one), workload(other)) == Shared(False, ())


def test_recorded_sessions_are_numbered_in_order_of_their_start(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")

    def trace(**fields: Any) -> Trace:
        return Trace(path=str(path), **fields)

    assert common(trace(), trace(time_scale=2.0, output_len=None)).again
    assert common(trace(), trace(limit=5)) == Shared(False, ((0, OWN),))
    assert common(trace(), trace(limit=5), (0, 1)) == Shared(False, ((0, OWN),))
    assert common(trace(session_rate=1.0), trace(session_rate=2.0)) == Shared(False, ())
    assert common(trace(session_rate=1.0), trace(session_rate=1.0, limit=5), (0, 1)) == Shared(False, ())
    assert common(trace(), trace(trace_block_size=16)) == Shared(False, ())
    before = description(trace(), 0)
    path.write_text("{ }\n")
    assert shared(before, description(trace(), 0)) == Shared(False, ())
    path.unlink()
    with pytest.raises(WorkloadError, match="cannot read it: no such file"):
        description(trace(), 0)


def test_tenants_of_one_texts_share_only_if_all_agree() -> None:
    def mix(**tenants: Any) -> Any:
        return TypeAdapter[Any](AnyWorkload).validate_python({"kind": "mix", "tenants": tenants})

    def groups(**fields: Any) -> dict[str, Any]:
        return workload("shared_prefix", prefix_len=5, **fields).model_dump()

    a = {"texts": "x", "workload": groups()}
    more = {"texts": "x", "workload": groups(num_requests=20)}
    other = {"texts": "x", "workload": groups(num_groups=3)}
    own = {"workload": groups(num_requests=20)}
    of = [((first << 48, (first + 1) << 48),) for first in range(3)]
    assert common(mix(a=a, b=a), mix(a=more, b=a)).ids == of[0]
    assert common(mix(a=a, b=a), mix(a=more, b=other)).ids == ()
    assert common(mix(a=a, b=own), mix(a=other, b=own)).ids == of[1]
    assert common(mix(a=a, b=a, c=own), mix(a=a, b=a, c=own)) == Shared(True, ALL)
    faster = {"workload": groups(request_rate=9.0)}
    assert common(mix(a={"workload": groups()}), mix(a=faster)).again
    assert not common(mix(a=a), mix(a=a, b=own)).again


def test_names_for_what_requests_have_of_their_own() -> None:
    ids = [5, -1, 2**62, -2, 7, -(2**58)]
    batch = make_batch([0, 0, 0], [2, 2, 2], [1, 1, 1], [0, 2, 4, 6], ids, [1, 2, 1, 2, 1, 2])
    assert with_names(batch).segment_id.tolist() == [5, OWN, 2**62, OWN + 1, 7, OWN + 2**58 - 1]
    assert batch.segment_id.tolist() == ids
    assert with_names(batch).segment_id.dtype == np.int64
