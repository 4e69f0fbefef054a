"""Mixes: tenants merged by arrival, whose draws, contents and salts stand apart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import SEED, make, peak_memory, rows, same, whole
from pydantic import ValidationError
from simulation import engine, run

from sim.errors import InputError
from sim.request import Batch, Ints, Session
from sim.scenario_file import load
from sim.traffic import requests
from workloads import Mix, WorkloadWarning, same_content
from workloads.base import Workload
from workloads.mix import _seed_of

VARIED = {"distribution": "uniform", "low": 5, "high": 90}
CHAT = {
    "kind": "shared_prefix", "num_requests": 700, "num_groups": 9, "prefix_len": 64, "suffix_len": VARIED,
    "output_len": VARIED, "request_rate": 7.0,
}  # fmt: skip
RAG = {
    "kind": "documents", "num_requests": 300, "num_documents": 5, "document_len": VARIED,
    "system_prompt_len": 20, "question_len": 5, "output_len": 3, "request_rate": 3.0,
}  # fmt: skip
SCAN = {
    "kind": "scan", "num_requests": 400, "prompt_len": VARIED, "output_len": 1,
    "arrival": "constant", "request_rate": 4.0,
}  # fmt: skip
THREE: dict[str, dict[str, Any]] = {
    "chat": {"workload": CHAT},
    "rag": {"workload": RAG},
    "scan": {"workload": SCAN},
}


def mix(**tenants: dict[str, Any]) -> Any:
    return make({"kind": "mix", "tenants": tenants})


def of_tenant(batch: Batch, number: int) -> dict[str, Any]:
    """A tenant's requests: columns, and segments as rows."""
    mine = np.flatnonzero(batch.tenant == number)
    columns = {name: getattr(batch, name)[mine].tolist() for name in Batch._fields if "segment" not in name}
    content = rows(batch)
    return {**columns, "segments": [content[i] for i in mine]}


def shared_ids(batch: Batch, number: int) -> set[int]:
    return {one for row in of_tenant(batch, number)["segments"] for one, _ in row if one >= 0}


def renumbered(batch: Batch, number: int) -> dict[str, Any]:
    """A tenant's requests without its number, with contents and groups numbered as they are first seen."""
    found = of_tenant(batch, number)
    del found["tenant"]
    names: dict[int, int] = {}
    found["segments"] = [
        [(names.setdefault(one, len(names)), length) for one, length in row] for row in found["segments"]
    ]
    groups: dict[int, int] = {}
    found["prefix_group"] = [groups.setdefault(group, len(groups)) for group in found["prefix_group"]]
    return found


def test_requests_come_by_arrival_each_with_its_tenant() -> None:
    load = mix(**THREE)
    batch = whole(load)
    assert (np.diff(batch.arrival_time) >= 0).all()
    assert np.bincount(batch.tenant).tolist() == [700, 300, 400]
    assert load.tenant_names == ("chat", "rag", "scan")
    assert load.expected_requests == 1400
    assert of_tenant(batch, 2)["arrival_time"] == (np.arange(400) / 4).tolist()
    assert make(CHAT).tenant_names == ()


def test_another_tenant_changes_no_others_requests() -> None:
    batch = whole(mix(**THREE))
    more = whole(mix(**THREE, late={"workload": {**CHAT, "num_requests": 500}}))
    for number in range(3):
        assert of_tenant(more, number) == of_tenant(batch, number)
    elsewhere = whole(mix(first={"workload": SCAN}, scan=THREE["scan"], chat=THREE["chat"]))
    assert renumbered(elsewhere, 1) == renumbered(batch, 2)
    assert renumbered(elsewhere, 2) == renumbered(batch, 0)
    assert renumbered(elsewhere, 0) != renumbered(elsewhere, 1), "another name is another seed"


def test_a_tenant_has_what_its_workload_makes() -> None:
    batch = whole(mix(other={"workload": SCAN}, chat={"workload": CHAT}))
    mine, alone = of_tenant(batch, 1), whole(mix(chat={"workload": CHAT}))
    assert [len(row) for row in mine["segments"]] == [2] * 700
    for group, row, prompt, output in zip(
        mine["prefix_group"], mine["segments"], mine["prompt_len"], mine["output_len"], strict=True
    ):
        assert row[0][0] & 0xFFFF == group & 0xFFFF < 9
        assert row[0][1] == 64
        assert sum(length for _, length in row) == prompt + output
    assert mine["arrival_time"] == alone.arrival_time.tolist()
    assert (np.diff(mine["arrival_time"])).mean() == pytest.approx(1 / 7, rel=0.12)


def test_contents_stand_apart() -> None:
    batch = whole(mix(a={"workload": CHAT}, b={"workload": CHAT}, c={"workload": RAG}))
    ids = [shared_ids(batch, number) for number in range(3)]
    assert [len(one) for one in ids] == [9, 9, 6]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    own = batch.segment_id[batch.segment_id < 0]
    assert len(np.unique(own)) == len(own) == len(batch.prompt_len)
    groups = [set(of_tenant(batch, number)["prefix_group"]) for number in range(3)]
    assert not (groups[0] & groups[1] or groups[1] & groups[2])


def test_the_same_texts_are_shared_but_for_own_content() -> None:
    batch = whole(mix(
        x={"workload": CHAT},
        a={"workload": CHAT, "texts": "t"},
        y={"workload": CHAT, "texts": "u"},
        b={"workload": CHAT, "texts": "t"},
    ))  # fmt: skip
    assert shared_ids(batch, 1) == shared_ids(batch, 3)
    assert not shared_ids(batch, 1) & (shared_ids(batch, 0) | shared_ids(batch, 2))
    assert set(of_tenant(batch, 1)["prefix_group"]) == set(of_tenant(batch, 3)["prefix_group"])
    own = batch.segment_id[batch.segment_id < 0]
    assert len(np.unique(own)) == len(own) == 2800
    assert of_tenant(batch, 1)["arrival_time"] != of_tenant(batch, 3)["arrival_time"]


def test_namespaces_are_the_distinct_pairs_of_salt_and_adapter() -> None:
    small = {"workload": {**SCAN, "num_requests": 2}}
    batch = whole(mix(
        none=small, s={"cache_salt": "s", **small}, t={"cache_salt": "t", **small},
        s_again={"cache_salt": "s", **small}, l={"lora": "l", **small},
        both={"lora": "l", "cache_salt": "s", **small}, m={"lora": "m", "priority": -3, **small},
    ))  # fmt: skip

    def by_tenant(column: Ints) -> list[int]:
        assert all(len(set(column[batch.tenant == number].tolist())) == 1 for number in range(7))
        return [int(column[batch.tenant == number][0]) for number in range(7)]

    assert by_tenant(batch.namespace) == [0, 1, 2, 1, 3, 4, 5]
    assert by_tenant(batch.lora) == [0, 0, 0, 0, 1, 1, 2]
    assert by_tenant(batch.priority) == [0, 0, 0, 0, 0, 0, -3]


# Known answer 8
@pytest.mark.parametrize("high", [1 << 47, 1 << 50, 1 << 62, -(1 << 40)])
def test_traces_of_the_same_texts_share_ids_however_high(tmp_path: Path, high: int) -> None:
    """Whatever else each trace names before."""
    tenants = {}
    for tenant, ids in {"a": (high, high + 1), "b": (high + 2, high + 1, high + 2)}.items():
        path = tmp_path / f"{tenant}.jsonl"
        row = {"timestamp": 0, "input_length": 512, "output_length": 1}
        path.write_text("".join(json.dumps(row | {"hash_ids": [one]}) + "\n" for one in ids))
        tenants[tenant] = {"workload": {"kind": "trace", "path": str(path)}, "texts": "t"}
    batch = whole(mix(**tenants))
    both = shared_ids(batch, 0) & shared_ids(batch, 1)
    assert (len(shared_ids(batch, 0)), len(shared_ids(batch, 1)), len(both)) == (2, 2, 1)


@pytest.mark.parametrize(
    ("salts", "texts", "hits"),
    [
        ([f"s{i}" for i in range(256)], ["system"] * 256, 0),
        ([None] * 256, ["system"] * 256, 261_120),
        (["one"] * 256, ["system"] * 256, 261_120),
        ([None] * 256, [None] * 256, 0),
    ],
    ids=["a salt each", "no salt", "one salt", "other texts"],
)
@pytest.mark.parametrize("rate", ["inf", 0.01])
def test_a_salt_isolates_a_tenant(salts: list[Any], texts: list[Any], hits: int, rate: Any) -> None:
    one = {
        "kind": "shared_prefix", "num_requests": 1, "prefix_len": 1024, "suffix_len": 64,
        "output_len": 1, "request_rate": rate,
    }  # fmt: skip
    tenants = {
        f"tenant {i}": {"workload": one, "cache_salt": salt, "texts": text}
        for i, (salt, text) in enumerate(zip(salts, texts, strict=True))
    }
    totals = run(mix(**tenants).batches(SEED, 16), engine()).totals
    assert (totals.prefix_cache_hits, totals.prefix_cache_queries) == (hits, 278_528)


def test_at_one_instant_tenants_come_in_their_order_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    even, at_once = {"arrival": "constant", "request_rate": 4.0}, {"request_rate": "inf"}
    load = mix(
        a={"workload": {**CHAT, **even}},
        b={"workload": {**SCAN, **even}},
        c={"workload": {**RAG, **at_once}},
        d={"workload": {**SCAN, **at_once}},
    )
    base = whole(load)
    for (time, tenant), (later, next_tenant) in pairwise(zip(base.arrival_time, base.tenant, strict=True)):
        assert (time, tenant) <= (later, next_tenant)
    for size in (1, 7, 299, 400):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert same(base, whole(load))


def test_traces_keep_their_ids_salts_adapters_and_sessions_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = [2**48 + i for i in range(15)] + list(range(15))
    lines = [
        {"timestamp": 10 * i, "input_length": 600, "output_length": 4, "hash_ids": [2**62 + 5, second[i]],
         "session_id": i % 3, "cache_salt": [None, "s", "t"][i % 3], "lora": [None, "x"][i % 2],
         "priority": 2}
        for i in range(30)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = {"kind": "trace", "path": str(path)}
    load = mix(
        a={"workload": trace},
        b={"workload": trace},
        c={"workload": trace, "lora": "y", "priority": 0},
        scan={"cache_salt": "s", "lora": "x", "workload": {**SCAN, "request_rate": 100.0}},
    )
    batch, alone = whole(load), whole(make(trace))
    tenants = [of_tenant(batch, number) for number in range(4)]
    for mine in tenants[:3]:
        assert [row[0][1] for row in mine["segments"]] == [512] * 30
        assert len({row[0][0] for row in mine["segments"]}) == 1
        assert len({row[1][0] for row in mine["segments"]}) == 30
        pairs = set(zip(mine["namespace"], alone.namespace.tolist(), strict=True))
        assert len({one for one, _ in pairs}) == len(pairs) == len(set(alone.namespace.tolist())) == 6
        assert len(set(mine["session_id"])) == 3

    def nothing_in_common(sets: list[set[int]]) -> bool:
        return len(set.union(*sets)) == sum(map(len, sets))

    assert nothing_in_common([shared_ids(batch, number) for number in range(3)])
    assert nothing_in_common([set(mine["session_id"]) for mine in tenants[:3]])
    # A salt or an adapter of a trace is the trace's own, whatever others call theirs.
    assert nothing_in_common([set(mine["namespace"]) - {0} for mine in tenants])
    assert nothing_in_common([set(mine["lora"]) - {0} for mine in tenants])
    assert [len(set(mine["lora"])) for mine in tenants] == [2, 2, 1, 1]
    assert [set(mine["priority"]) for mine in tenants] == [{2}, {2}, {0}, {0}]
    assert load.expected_requests is None
    monkeypatch.setattr(Workload, "chunk_size", 4)
    assert same(batch, whole(load))


def test_memory_does_not_grow() -> None:
    def sized(n: int) -> Mix:
        return mix(  # type: ignore[no-any-return]
            a={"workload": {**CHAT, "num_requests": n}},
            b={"workload": {**SCAN, "num_requests": n, "request_rate": 9.0}},
            c={"workload": {**RAG, "num_requests": n, "request_rate": "inf"}},
        )

    peak_memory(sized(5000))
    assert peak_memory(sized(40_000)) < 1.1 * peak_memory(sized(8000))


def test_as_written_it_reads_back() -> None:
    load = mix(**THREE, d={"workload": SCAN, "cache_salt": "s", "lora": "l", "priority": 1, "texts": "t"})
    assert make(load.model_dump()) == load
    assert Mix.model_validate_json(load.model_dump_json()) == load


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ({}, "at least 1"),
        ({"": THREE["chat"]}, "at least 1 character"),
        ({"a": {"workload": {**CHAT, "request_rate": "inf", "concurrency": 3}}}, "no closed loops"),
        ({"a": {"workload": {"kind": "mix", "tenants": THREE}}}, "does not match any of the expected tags"),
        ({"a": {"workload": CHAT, "cache_salt": ""}}, "at least 1 character"),
        ({"a": {"workload": CHAT, "salt": "s"}}, "not permitted"),
        ({"a": {"workload": CHAT, "texts": "t"}, "b": {"workload": SCAN, "texts": "t"}}, "name other texts"),
        ({"a": {}}, "required"),
    ],
)
def test_bad_fields(tenants: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        mix(**tenants)


def test_a_tenants_field_can_be_set_by_its_name() -> None:
    path = Path(__file__).parents[1] / "scenarios" / "mix.yaml"
    scenario = load(path, ["workload.tenants.chat.workload.num_requests=5"])
    assert isinstance(scenario.workload, Mix)
    assert scenario.workload.tenants["chat"].workload.expected_requests == 5
    with pytest.raises(InputError, match="workload.tenants.chat.workload.num_requests: .*'x'"):
        load(path, ["workload.tenants.chat.workload.num_requests=x"])


DIALOGUE: dict[str, Any] = {
    "kind": "multi_turn", "num_sessions": 6, "session_rate": 3.0, "num_turns": 3, "num_system_prompts": 2,
    "system_prompt_len": 64, "user_len": 20, "output_len": 5, "think_time": 0.5,
}  # fmt: skip


def sessions_of(tenants: dict[str, Any]) -> list[Session]:
    return list(make({"kind": "mix", "tenants": tenants}).sessions(SEED, 16))


def ids_by_tenant(tenants: dict[str, Any]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for session in sessions_of(tenants):
        found.setdefault(int(session.requests.tenant[0]), set()).update(session.requests.segment_id.tolist())
    return found


def test_sessions_and_lone_requests_come_by_their_start() -> None:
    scan = {"kind": "scan", "num_requests": 10, "prompt_len": 30, "output_len": 2, "request_rate": 5.0}
    told = sessions_of({"chat": {"workload": DIALOGUE}, "scan": {"workload": scan}})
    starts = [session.start for session in told]
    assert starts == sorted(starts) and len(told) == 16
    own = make(DIALOGUE)
    alone = list(own.sessions(_seed_of("chat", SEED)))
    mine = [session for session in told if session.requests.tenant[0] == 0]
    assert [session.start for session in mine] == [session.start for session in alone]
    assert [session.after for session in mine] == [session.after for session in alone]
    lone = [session for session in told if session.requests.tenant[0] == 1]
    assert all(session.after == ((),) and session.delay.tolist() == [0.0] for session in lone)
    assert [session.start for session in lone] == [float(s.requests.arrival_time[0]) for s in lone]


def test_sessions_of_one_text_share_its_pool_and_nothing_else() -> None:
    """Also where one has more system prompts than the other, so that both have content of one number."""
    one, other = {**DIALOGUE, "num_system_prompts": 1}, {**DIALOGUE, "num_system_prompts": 5}
    apart = ids_by_tenant({"a": {"workload": one}, "b": {"workload": one}})
    assert not apart[0] & apart[1]
    alike = ids_by_tenant({"a": {"texts": "t", "workload": one}, "b": {"texts": "t", "workload": one}})
    assert len(alike[0] & alike[1]) == 1  # the system prompt
    unlike = ids_by_tenant({"a": {"texts": "t", "workload": one}, "b": {"texts": "t", "workload": other}})
    assert len(unlike[0] & unlike[1]) <= 1 and len(unlike[0]) == 7 and len(unlike[1]) > 7


def test_chats_in_a_mix_are_the_chats_alone() -> None:
    """In an engine with room, one tenant's turns hit and end as they do without the other."""
    config = engine(num_gpu_blocks=20_000)
    mixed = run(iter(sessions_of({"chat": {"workload": DIALOGUE}})), config)
    alone = run(make(DIALOGUE).sessions(_seed_of("chat", SEED)), config)
    assert mixed.hits == alone.hits and sum(mixed.hits) > 0
    np.testing.assert_array_equal(mixed.records["finish_time"], alone.records["finish_time"])
    salted = {"a": {"texts": "t", "cache_salt": "x"}, "b": {"texts": "t", "cache_salt": "y"}}
    tenants = {name: {**tenant, "workload": DIALOGUE} for name, tenant in salted.items()}
    unsalted = {name: {"texts": "t", "workload": DIALOGUE} for name in tenants}
    together = run(iter(sessions_of(unsalted)), config).totals.prefix_cache_hits
    assert run(iter(sessions_of(tenants)), config).totals.prefix_cache_hits < together


def test_pool_ends_are_those_of_warm_starts() -> None:
    thoughts = {"question_len": 9, "step_len": 5, "output_len": 2}
    kinds: list[dict[str, Any]] = [
        DIALOGUE,
        {"kind": "agent", "num_sessions": 1, "num_turns": 2, "task_len": 9, "tool_len": 9, "output_len": 2},
        {"kind": "tree", "num_sessions": 1, "branch": 2, "depth": 2, **thoughts},
    ]
    for spec in kinds:
        workload = make(spec)
        assert workload.pool_end == same_content._pool_end(workload.model_dump(mode="json"))


def test_priorities_that_nobody_reads_are_told_of_sessions_too() -> None:
    tenants = {"chat": {"priority": 3, "workload": DIALOGUE}, "other": {"workload": DIALOGUE}}
    mix = make({"kind": "mix", "tenants": tenants})
    with pytest.warns(WorkloadWarning, match="fcfs does not read") as warned:
        told = list(requests(mix, SEED, 16, priorities=False))
    assert len(warned) == 1
    plain = list(mix.sessions(SEED, 16))
    assert len(told) == len(plain)
    assert all(same(one.requests, other.requests) for one, other in zip(told, plain, strict=True))


def test_a_later_mix_has_the_system_prompts_of_its_chats_and_not_their_dialogues() -> None:
    former, latter = (
        make({"kind": "mix", "tenants": {"chat": {"workload": {**DIALOGUE, "num_turns": turns}}}})
        for turns in (3, 4)
    )
    found = same_content.shared(
        same_content.description(former, 0), same_content.description(latter, 0)
    )
    ((begin, end),) = found.ids
    ids = np.concatenate([session.requests.segment_id for session in latter.sessions(SEED, 16)])
    inside = set(ids[(ids >= begin) & (ids < end)].tolist())
    assert not found.again and inside == {begin, begin + 1}  # two system prompts, of six dialogues none
