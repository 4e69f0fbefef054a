"""Runs that begin with a warm cache: primed by a workload of the scenario, or saved by another run."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.errors import InputError
from sim.html_report import to_html
from sim.report import lines
from sim.resolve import resolve
from sim.scenario import Scenario
from sim.scenario_file import load, to_yaml
from sim.simulation import Result
from sim.simulation import run as simulate
from sim.snapshot_file import read_cache, write_cache
from sim.warm_start import NOTHING, SavedCache

AGAIN, POOLS = "the same prompts again", "pools, by number"
SCAN = {"kind": "scan", "num_requests": 100, "prompt_len": 1024, "output_len": 1, "request_rate": 10.0}
GROUPS = {
    "kind": "shared_prefix", "num_requests": 60, "num_groups": 1000, "prefix_len": 160, "suffix_len": 20,
    "output_len": 2, "request_rate": 20.0,
}  # fmt: skip
CHAT = {
    "kind": "multi_turn", "num_sessions": 10, "num_turns": 3, "num_system_prompts": 2,
    "system_prompt_len": 160, "user_len": 40, "output_len": 8, "think_time": 0.5, "session_rate": 5.0,
}  # fmt: skip


def scenario(**changes: Any) -> Scenario:
    data: dict[str, Any] = {
        "name": "warm",
        "engine": {"block_size": 16, "num_gpu_blocks": 30_000},
        "cost": {"form": "whole_step", "base_us": 1000.0, "token_us": 1.0},
    }
    return Scenario.model_validate(data | changes)


def phases(prime: dict[str, Any], measure: dict[str, Any], **changes: Any) -> Result:
    return simulate(scenario(prime=prime, measure=measure, **changes))


def warm(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = result.summary["warm_start"]
    return told


def fates(result: Result) -> dict[str, int]:
    return {name: tokens for name, tokens in result.summary["token_fates"].items() if tokens}


# known-answers, 11
@pytest.mark.parametrize("pace", [{}, {"request_rate": 3.0, "arrival": "constant"}, {"request_rate": "inf"}])
def test_warm_rerun(pace: dict[str, Any]) -> None:
    result = phases(SCAN, SCAN | pace)
    assert warm(result)["prime_hit_rate"] == 0.0
    assert result.summary["prefix_cache_hit_rate"] == 1008 / 1024
    assert fates(result) == {"hit": 100 * 1008, "last_token": 100 * 16}
    assert warm(result)["in_common"] == AGAIN
    assert warm(result)["share_of_hits"] == 1.0 and warm(result)["hit_tokens"] == 100 * 1008


def test_warm_rerun_after_a_reset() -> None:
    result = phases(SCAN, SCAN, reset_prefix_cache=[0.0])
    assert result.summary["prefix_cache_resets"] == 1
    assert result.summary["prefix_cache_hit_rate"] == 0.0
    assert fates(result) == {"evicted": 100 * 1008, "last_token": 100 * 16}
    assert warm(result)["hit_tokens"] == 0


def test_times_count_from_the_start_of_what_is_measured() -> None:
    result = phases(SCAN, SCAN, reset_prefix_cache=[5.0], measure_from=2.0)
    late = result.records.column("arrival_time")
    hit = result.records.column("num_cached_tokens")
    assert late.min() >= 2.0 and warm(result)["duration"] > 5.0
    assert set(hit[late < 5.0]) == {1008} and set(hit[late >= 5.0]) == {0}
    assert result.summary["num_requests_left_out"] == 100 - len(late) > 0


def test_another_request_more_is_not_the_same_prompts() -> None:
    result = phases(SCAN, SCAN | {"num_requests": 101})
    assert warm(result)["in_common"] == NOTHING
    assert fates(result) == {"cold": 101 * 1024}


def test_measured_requests_are_those_of_a_cold_run() -> None:
    cold = simulate(scenario(workload=GROUPS))
    result = phases(GROUPS | {"num_requests": 500}, GROUPS)
    for name in ("arrival_time", "prompt_len", "prefix_group"):
        np.testing.assert_array_equal(result.records.column(name), cold.records.column(name))
    assert result.summary["prefix_cache_hits"] > cold.summary["prefix_cache_hits"]
    assert result.summary["completed"] == 60 and warm(result)["requests"] == 500
    assert warm(result)["in_common"] == POOLS


def test_the_primes_draws_are_others() -> None:
    """59 of 1000 groups, drawn before, leave hardly one of 60 warm; the same draws again would leave 59."""
    result = phases(GROUPS | {"num_requests": 59}, GROUPS)
    cold = simulate(scenario(workload=GROUPS))
    assert result.summary["prefix_cache_hits"] - cold.summary["prefix_cache_hits"] < 15 * 160
    assert fates(phases(GROUPS, GROUPS))["hit"] > 60 * 160


@pytest.mark.parametrize(
    "load",
    [
        GROUPS | {"num_groups": 3, "prefix_len": {"distribution": "uniform", "low": 100, "high": 900}},
        {
            "kind": "documents", "num_requests": 60, "num_documents": 3, "documents_per_request": 2,
            "document_len": {"distribution": "lognormal", "mean": 300, "sigma": 0.5}, "system_prompt_len": 50,
            "question_len": 20, "output_len": 2,
        },
        {
            "kind": "few_shot", "num_requests": 60, "num_examples": 9, "examples_per_request": 3,
            "example_len": {"distribution": "zipf", "low": 10, "high": 200}, "num_groups": 2,
            "question_len": 20, "output_len": 2,
        },
    ],
    ids=lambda load: load["kind"],
)  # fmt: skip
def test_pools_are_the_same_whatever_their_lengths_were_drawn(load: dict[str, Any]) -> None:
    """After a long prime all that is shared is known to its last token: what is cold is the requests' own."""
    result = phases(load | {"num_requests": 300}, load)
    assert warm(result)["in_common"] == POOLS
    own = load.get("suffix_len", load.get("question_len"))
    assert fates(result)["cold"] == 60 * own
    assert fates(result).get("evicted", 0) == 0


@pytest.mark.parametrize(
    ("change", "common"),
    [
        ({}, AGAIN),
        ({"session_rate": 50.0, "think_time": 2.0}, AGAIN),
        ({"num_sessions": 11}, POOLS),
        ({"user_len": 41}, POOLS),
        ({"system_prompt_len": 161}, NOTHING),
    ],
)
def test_sessions(change: dict[str, Any], common: str) -> None:
    result = phases(CHAT, CHAT | change)
    assert warm(result)["in_common"] == common
    cold = simulate(scenario(workload=CHAT | change))
    more = result.summary["prefix_cache_hits"] - cold.summary["prefix_cache_hits"]
    if common == AGAIN:
        told = fates(result)  # each answer's last token was never computed, and the next prompt has it
        assert set(told) == {"hit", "partial_block", "last_token", "cold"} - ({"cold"} - set(told))
        assert told.get("cold", 0) == 0 and result.summary["prefix_cache_hit_rate"] > 0.9
    elif common == POOLS:
        assert more == 2 * 160  # the first request of either system prompt finds it
    else:
        assert more == 0 and warm(result)["hit_tokens"] == 0


def test_what_one_kind_leaves_another_cannot_hit() -> None:
    """Group i is not system prompt i; what is left only fills the pool."""
    small = {"engine": {"block_size": 16, "num_gpu_blocks": 150}}
    prime = GROUPS | {"num_groups": 2}
    result = phases(prime, CHAT, **small)
    cold = simulate(scenario(workload=CHAT, **small))
    assert warm(result)["in_common"] == NOTHING
    np.testing.assert_array_equal(
        np.sort(result.records.column("num_cached_tokens")), np.sort(cold.records.column("num_cached_tokens"))
    )
    assert result.summary["num_evictions"] > cold.summary["num_evictions"]


def test_evicted_and_cold_are_told_apart() -> None:
    """A pool of 12 prefixes of 10 blocks: priming had all 20, and lost the first."""
    load = GROUPS | {"num_groups": 20, "num_requests": 400}
    result = phases(load, GROUPS | {"num_groups": 20}, engine={"block_size": 16, "num_gpu_blocks": 130})
    assert fates(result)["cold"] == 60 * 20
    assert fates(result)["evicted"] > 0
    assert fates(result)["hit"] + fates(result)["evicted"] == 60 * 160


def test_a_trace_is_the_same_in_the_same_file(tmp_path: Path) -> None:
    same = {"input_length": 64, "output_length": 1}
    rows = [{"timestamp": 1000 * i, **same, "hash_ids": [i % 3, 10 + i, 2**62 + i, 5]} for i in range(20)]
    one, copy, other = (tmp_path / name for name in ("one.jsonl", "copy.jsonl", "other.jsonl"))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    one.write_text(text)
    copy.write_text(text)
    other.write_text(text + text.splitlines()[-1] + "\n")
    trace = {"kind": "trace", "path": str(one), "trace_block_size": 16}
    prompts = 20 * 64
    again = phases(trace, trace | {"path": str(copy), "time_scale": 0.5})
    assert warm(again)["in_common"] == AGAIN
    assert again.summary["prefix_cache_hits"] == 20 * 48
    half = phases(trace | {"limit": 10}, trace)
    assert warm(half)["in_common"] == POOLS
    assert warm(half)["hit_tokens"] == 10 * 48 + 10 * 16
    none = phases(trace, trace | {"path": str(other)})
    assert warm(none)["in_common"] == NOTHING and fates(none)["cold"] > prompts // 2


def mix(**tenants: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "mix", "tenants": tenants}


def test_tenants_keep_what_is_theirs() -> None:
    few = {"workload": GROUPS | {"num_groups": 2}, "cache_salt": "a"}
    many = {"workload": GROUPS | {"num_groups": 2, "num_requests": 90}, "cache_salt": "a"}
    other = {"workload": GROUPS | {"num_groups": 3}, "cache_salt": "a", "lora": "x"}
    result = phases(mix(chat=few), mix(chat=many, more=other))
    by_tenant = {row["tenant"]: row for row in result.summary["by_tenant"]}
    assert warm(result)["in_common"] == POOLS
    assert by_tenant["chat"]["prefix_cache_hit_rate"] == 160 / 180  # all of its requests
    assert fates(result)["cold"] == 90 * 20 + 60 * 20 + 3 * 160
    changed = mix(chat={**few, "workload": GROUPS | {"num_groups": 4}}, more=other)
    result = phases(mix(chat=few, more=other), changed)
    assert warm(result)["in_common"] == POOLS  # those of `more`
    assert fates(result)["cold"] == 60 * 20 + 60 * 20 + 4 * 160
    assert warm(phases(mix(chat=few), mix(scan={"workload": SCAN})))["in_common"] == NOTHING
    assert warm(phases(mix(chat=few, more=other), mix(chat=few, more=other)))["in_common"] == AGAIN


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (mix(b={"workload": SCAN}, a={"workload": SCAN}), "tenant 1 of the mix is a in the run before and b"),
        (mix(a={"workload": SCAN, "cache_salt": "s"}, b={"workload": SCAN}), "tenant a: cache_salt is None"),
        (mix(a={"workload": SCAN}, b={"workload": SCAN, "lora": "l"}), "tenant b: lora is None"),
        (mix(a={"workload": SCAN}, b={"workload": SCAN, "texts": "t"}), "tenant b: texts is None"),
    ],
)
def test_tenants_that_would_be_mistaken(measure: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"^warm: prime: {said}"):
        phases(mix(a={"workload": SCAN}, b={"workload": SCAN | {"num_requests": 3}}), measure)


def test_without_caching_prime_is_skipped() -> None:
    off = {"engine": {"block_size": 16, "num_gpu_blocks": 30_000, "enable_prefix_caching": False}}
    result = phases(SCAN, SCAN, **off)
    assert "warm_start" not in result.summary
    assert any(text.startswith("prime was skipped") for text in result.summary["warnings"])


def test_a_prime_that_cannot_run() -> None:
    with pytest.raises(InputError, match="warm: prime: none of its 100 requests can run"):
        phases(SCAN | {"prompt_len": 10**6}, SCAN)
    some = SCAN | {"prompt_len": {"distribution": "uniform", "low": 64, "high": 200_000}}
    result = phases(some, SCAN)
    assert warm(result)["failed"] > 0
    assert any(text.startswith("prime: ") and "refused" in text for text in result.summary["warnings"])


@pytest.mark.parametrize("router", ["round_robin", "kv_aware"])
def test_each_replica_begins_with_its_own(router: str) -> None:
    two = {"cluster": {"replicas": 2, "router": router}}
    again = phases(SCAN, SCAN, **two)
    assert again.summary["prefix_cache_hit_rate"] == 1008 / 1024
    assert warm(again)["blocks_cached"] == 6400 and warm(again)["share_of_hits"] == 1.0
    with pytest.raises(
        InputError, match="--save-cache: keeps .* of one engine, and cluster.replicas is 2"
    ):
        saved(SCAN, **two)
    with pytest.raises(
        InputError, match="--load-cache warm: is .* of one engine, and cluster.replicas"
    ):
        simulate(scenario(workload=SCAN, **two), cache=saved(SCAN))


def test_progress_counts_both_phases() -> None:
    told: list[int] = []
    simulate(scenario(prime=SCAN, measure=SCAN), progress=lambda done, _: told.append(done))
    assert told == sorted(told) and told[-1] == 200 and 100 in told


def test_the_report() -> None:
    result = phases(SCAN, SCAN)
    text = "\n".join(line for _, line in lines(result))
    assert "Warm Start" in text and "Requests that primed the cache / refused: 100 / 0" in text
    assert "Their share of all hits (%):              100.00" in text
    assert "the same prompts again" in text
    page = " ".join(to_html(result).split())
    assert "6,400 blocks that 100 requests (scan) had filled" in page and "the same prompts again" in page
    cold = simulate(scenario(workload=SCAN))
    assert "Warm Start" not in "\n".join(line for _, line in lines(cold))
    assert "The cache was warm" not in to_html(cold)
    loaded = simulate(scenario(workload=SCAN), cache=saved(SCAN))
    assert "Cache loaded from warm" in "\n".join(line for _, line in lines(loaded))
    assert "loaded from <code>warm</code>" in to_html(loaded)


# the file


def saved(workload: dict[str, Any], **changes: Any) -> SavedCache:
    cache = simulate(scenario(workload=workload, **changes), save_cache=True).cache
    assert cache is not None
    return cache


def through_file(cache: SavedCache, folder: Path) -> SavedCache:
    write_cache(folder / "cache.npz", cache)
    return read_cache(folder / "cache.npz")


@pytest.mark.parametrize("load", [SCAN, GROUPS, CHAT, mix(a={"workload": GROUPS}, b={"workload": SCAN})])
def test_saving_changes_no_figure(load: dict[str, Any]) -> None:
    tight = {"engine": {"block_size": 16, "num_gpu_blocks": 300}}
    whole, kept = (simulate(scenario(workload=load, **tight), save_cache=save) for save in (False, True))
    assert whole.summary == kept.summary and whole.cache is None
    for name in ("request_id", "num_cached_tokens", "finish_time", "fate_evicted", "fate_cold"):
        np.testing.assert_array_equal(whole.records.column(name), kept.records.column(name))


@pytest.mark.parametrize("num_gpu_blocks", [30_000, 2000])
@pytest.mark.parametrize("load", [SCAN, GROUPS, CHAT, mix(a={"workload": GROUPS}, b={"workload": SCAN})])
def test_through_a_file_it_is_the_rerun_of_prime(
    load: dict[str, Any], num_gpu_blocks: int, tmp_path: Path
) -> None:
    pool = {"engine": {"block_size": 16, "num_gpu_blocks": num_gpu_blocks}}
    cache = through_file(saved(load, **pool), tmp_path)
    loaded = simulate(scenario(workload=load, **pool), cache=cache)
    primed = phases(load, load, **pool)
    ours, theirs = dict(loaded.summary), dict(primed.summary)
    told, also = ours.pop("warm_start"), theirs.pop("warm_start")
    assert ours == theirs
    assert told == {"loaded_from": str(tmp_path / "cache.npz")} | {
        name: also[name] for name in ("in_common", "blocks_cached", "hit_tokens", "share_of_hits")
    }
    assert told["in_common"] == AGAIN and (told["hit_tokens"] > 0 or num_gpu_blocks == 2000)


def test_the_same_run_saves_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_cache(tmp_path / name, saved(CHAT, engine={"block_size": 16, "num_gpu_blocks": 60}))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again = read_cache(tmp_path / "a.npz")
    write_cache(tmp_path / "c.npz", again)
    assert (tmp_path / "c.npz").read_bytes() == (tmp_path / "a.npz").read_bytes()


def test_saved_after_a_warm_start() -> None:
    """A third run finds what the second left, and by name what pools the first had too."""
    first = saved(GROUPS | {"num_requests": 300})
    second = simulate(scenario(workload=GROUPS), cache=first, save_cache=True)
    assert second.cache is not None
    third = simulate(scenario(workload=GROUPS | {"num_requests": 200}), cache=second.cache)
    assert third.summary["prefix_cache_hits"] > second.summary["prefix_cache_hits"]
    rerun = simulate(scenario(workload=GROUPS), cache=second.cache)
    assert fates(rerun) == {"hit": 60 * 176, "partial_block": 60 * 3, "last_token": 60}


def test_pools_of_other_sizes() -> None:
    cache = saved(SCAN, engine={"block_size": 16, "num_gpu_blocks": 6601})  # 6400 blocks of prompts
    small = simulate(scenario(workload=SCAN, engine={"block_size": 16, "num_gpu_blocks": 1001}), cache=cache)
    assert warm(small)["blocks_cached"] == 1000
    told = [text for text in small.summary["warnings"] if "--load-cache" in text]
    assert told == [
        "--load-cache warm: comes from a pool of 6601 blocks, and this one has 1001: "
        "the 5400 blocks longest unused were dropped"
    ]
    large = simulate(scenario(workload=SCAN, engine={"block_size": 16, "num_gpu_blocks": 9001}), cache=cache)
    assert warm(large)["blocks_cached"] == 6400 and large.summary["prefix_cache_hit_rate"] == 1008 / 1024
    assert any("the others begin empty" in text for text in large.summary["warnings"])
    alike = simulate(scenario(workload=SCAN, engine={"block_size": 16, "num_gpu_blocks": 6601}), cache=cache)
    assert not any("--load-cache" in text for text in alike.summary["warnings"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"engine": {"block_size": 32}},
            "has blocks of 16 tokens, and engine.block_size is 32: set it to 16",
        ),
        ({"engine": {"block_size": 16, "enable_prefix_caching": False}}, "turn it on, or load no cache"),
        ({"workload": CHAT}, "holds content of a scan workload, of which one of kind multi_turn"),
        ({"model": "qwen3-8b"}, "holds the KV of llama-3.1-8b, and the scenario's model is qwen3-8b"),
        ({"workload": None, "prime": SCAN, "measure": SCAN}, "has a prime phase to fill the cache: drop one"),
    ],
)
def test_a_cache_that_is_not_this_runs(changes: dict[str, Any], said: str) -> None:
    data = {"workload": SCAN, "engine": {"block_size": 16}} | changes
    other = scenario(**{name: value for name, value in data.items() if value is not None})
    with pytest.raises(InputError, match=said) as caught:
        simulate(other, cache=saved(SCAN)._replace(source="cache.npz"))
    assert str(caught.value).startswith("--load-cache cache.npz: ")


def test_what_to_know_of_a_loaded_cache() -> None:
    drawn = GROUPS | {"prefix_len": {"distribution": "uniform", "low": 100, "high": 200}}
    other_seed = simulate(scenario(workload=drawn, seed=1), cache=saved(drawn))
    assert any("nothing of it can be hit" in text for text in other_seed.summary["warnings"])
    assert warm(other_seed)["hit_tokens"] == 0
    alike = simulate(scenario(workload=GROUPS), cache=saved(GROUPS | {"num_requests": 30}))
    assert any("comes from a run of the same seed" in text for text in alike.summary["warnings"])
    constant = simulate(scenario(workload=GROUPS, seed=1), cache=saved(GROUPS | {"num_requests": 900}))
    assert warm(constant)["in_common"] == POOLS and warm(constant)["hit_tokens"] > 0
    assert not any("--load-cache" in text for text in constant.summary["warnings"])


def test_nothing_to_save_without_caching() -> None:
    with pytest.raises(InputError, match="--save-cache: engine.enable_prefix_caching is false"):
        saved(SCAN, engine={"block_size": 16, "enable_prefix_caching": False})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def _text(path: Path) -> None:
    path.write_text("name: warm\n")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_npz(path: Path) -> None:
    np.savez(path, ids=np.arange(3))


def _other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("head", "x")


def _larger_than_memory(path: Path) -> None:
    """Its blocks, by their header, take 32 TB."""
    with np.load(path) as archive:
        arrays = dict(archive)
    del arrays["blocks"]
    np.savez_compressed(path, **arrays)
    header = {"descr": "<i8", "fortran_order": False, "shape": (10**12, 4)}
    with zipfile.ZipFile(path, "a") as archive, archive.open("blocks.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)


def _with(**changes: Any) -> Callable[[Path], None]:
    """A file with other arrays, or another head; None: left out."""

    def change(path: Path) -> None:
        with np.load(path) as archive:
            arrays = dict(archive)
        head = json.loads(arrays["head"].tobytes())
        for name, value in changes.items():
            if name not in arrays:
                head[name] = value
            elif value is None:
                del arrays[name]
            else:
                arrays[name] = value(arrays[name].copy())
        arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        np.savez_compressed(path, **arrays)

    return change


def _cell(row: int, column: int, value: int) -> Callable[[Any], Any]:
    def put(table: Any) -> Any:
        table[row, column] = value
        return table

    return put


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "is damaged: save it again"),
        (_flip, "is damaged: save it again"),
        (_text, "is no cache that prefixsim has saved"),
        (_empty, "is no cache that prefixsim has saved"),
        (_other_npz, "is no cache that prefixsim has saved"),
        (_other_zip, "is no cache that prefixsim has saved|is damaged"),
        (Path.unlink, "cannot be read: No such file or directory"),
        (_with(format="other"), "is no cache that prefixsim has saved"),
        (_with(version=2), "has version 2 of its format, and this prefixsim reads 1: save it again"),
        (_with(block_size="16"), "is damaged"),
        (_with(block_size=0), "is damaged"),
        (_with(content={"seed": 0}), "is damaged"),
        (_with(content={"seed": 0, "workload": {"kind": "mix"}}), "is damaged"),
        (_with(content={"seed": 0, "workload": {"kind": "mix", "tenants": []}}), "is damaged"),
        (_with(content={"seed": 0, "workload": {"kind": "mix", "tenants": {"a": 3}}}), "is damaged"),
        (_with(content={"seed": 0, "workload": {"kind": "mix", "tenants": {"a": {}}}}), "is damaged"),
        (_with(content={"seed": 0, "workload": {"kind": "multi_turn"}}), "is damaged"),
        (_with(model=None), "is damaged"),
        (_larger_than_memory, "holds more than fits in memory"),
        (_with(nodes=None), "is damaged"),
        (_with(nodes=lambda table: table.astype(np.float64)), "is damaged"),
        (_with(nodes=lambda table: table[:, :4]), "is damaged"),
        (_with(nodes=lambda table: table[:0]), "is damaged"),
        (_with(nodes=_cell(0, 4, 1)), "is damaged"),
        (_with(nodes=_cell(1, 0, 1)), "is damaged"),  # its own parent
        (_with(nodes=_cell(1, 0, -1)), "is damaged"),
        (_with(nodes=_cell(1, 1, 99)), "is damaged"),  # branches off behind the root's end
        (_with(nodes=_cell(1, 3, -2)), "is damaged"),
        (_with(nodes=_cell(1, 3, -1)), "is damaged"),  # a namespace has no tokens
        (_with(nodes=_cell(1, 4, 0)), "is damaged"),
        (_with(nodes=_cell(1, 4, 16 * 64 + 1)), "is damaged"),
        (_with(blocks=lambda table: table[1:]), "is damaged"),
        (_with(blocks=lambda table: table[:0]), "is damaged"),
        (_with(blocks=_cell(0, 0, 0)), "is damaged"),
        (_with(blocks=_cell(-1, 1, 10**6)), "is damaged"),
        (_with(blocks=_cell(-1, 1, -1)), "is damaged"),
        (_with(blocks=_cell(-1, 2, 64)), "is damaged"),
        (_with(blocks=_cell(-1, 2, -1)), "is damaged"),
        (_with(blocks=_cell(-1, 3, -1)), "is damaged"),
        (_with(history=lambda table: table[:0]), "is damaged"),
        (_with(history=_cell(1, 0, 1)), "is damaged"),
        (_with(history=_cell(1, 3, -1)), "is damaged"),
        (_with(history=_cell(1, 4, 10**6)), "is damaged"),
    ],
)  # fmt: skip
def test_files_that_are_no_cache(spoil: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.npz"
    write_cache(path, saved_scan())
    read_cache(path)
    spoil(path)
    with pytest.raises(InputError, match=said) as caught:
        read_cache(path)
    assert str(caught.value).startswith(f"--load-cache {path}: ") and "\n" not in str(caught.value)


_kept: list[SavedCache] = []


def saved_scan() -> SavedCache:
    """A small cache, made once."""
    if not _kept:
        _kept.append(saved(SCAN | {"num_requests": 3}, engine={"block_size": 16, "num_gpu_blocks": 400}))
    return _kept[0]


def test_interrupted_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.npz"
    path.write_bytes(b"former")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_cache(path, saved_scan())
    assert path.read_bytes() == b"former" and os.listdir(tmp_path) == ["cache.npz"]


# the command and the scenario

YAML = """\
name: small
engine:
  block_size: 16
  num_gpu_blocks: 1000
prime:
  kind: scan
  num_requests: 5
  prompt_len: 100
  output_len: 1
measure:
  kind: scan
  num_requests: 5
  prompt_len: 100
  output_len: 1
cost: {form: whole_step, base_us: 5000}
"""


def write(folder: Path, text: str = YAML) -> Path:
    path = folder / "small.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def command(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def test_the_command(tmp_path: Path) -> None:
    head, tail = YAML[: YAML.index("prime")], YAML[YAML.index("measure") :]
    single = write(tmp_path, head + tail.replace("measure", "workload"))
    cache = tmp_path / "cache.npz"
    assert command(single, "--save-cache", cache).exit_code == 0
    outcome = command(single, "--load-cache", cache, "--format", "json")
    assert outcome.exit_code == 0
    summary = json.loads(outcome.stdout)
    assert summary["prefix_cache_hits"] == 5 * 96 and summary["warm_start"]["loaded_from"] == str(cache)
    before = cache.read_bytes()
    assert command(single, "--load-cache", cache, "--save-cache", tmp_path / "next.npz").exit_code == 0
    for arguments, said in (
        (["--save-cache", tmp_path / "cache.txt"], "should end in .npz"),
        (["--save-cache", cache, "--load-cache", cache], "is a file that is read"),
        (["--save-cache", tmp_path / "out" / "cache.npz", "--out", tmp_path / "out"], "lies in --out"),
        (["--save-cache", cache, "--compare", "seed=1,2"], "--save-cache and --load-cache are of one run"),
        (["--load-cache", single], "is no cache"),
        (["--load-cache", cache, "--set", "engine.block_size=32"], "has blocks of 16 tokens"),
    ):
        outcome = command(single, *arguments)
        assert outcome.exit_code == 2 and said in outcome.output, outcome.output
    assert cache.read_bytes() == before


def test_written_out_it_reads_back_equal(tmp_path: Path) -> None:
    scenario = load(write(tmp_path), ["measure.num_requests=7", "prime.request_rate=2"])
    assert scenario.workload.expected_requests == 7
    assert scenario.prime is not None and scenario.prime.expected_requests == 5
    text = to_yaml(scenario)
    assert "\nprime:\n  kind: scan" in text and "\nmeasure:\n  kind: scan" in text and "workload" not in text
    again = load(write(tmp_path, text))
    assert again == scenario and to_yaml(again) == text
    assert Scenario.model_validate(scenario.model_dump()) == scenario
    one, other = simulate(scenario), simulate(again)
    assert one.summary == other.summary
    assert resolve(scenario).config == resolve(again).config


@pytest.mark.parametrize(
    ("old", "new", "override", "said"),
    [
        ("measure:", "workload:", "", "small.yaml:5: prime: stands beside workload: give workload alone, or"),
        ("prime:", "workload:", "", "small.yaml:10: measure: stands beside workload"),
        ("measure:", "slo: null\\nx:", "", "small.yaml:5: prime: only warms the cache: give measure"),
        ("prime:", "y:", "", "small.yaml:10: measure: has no prime before it: give prime, or call it"),
        ("", "", "prime=null", "small.yaml:10: measure: has no prime before it"),
        ("", "", "workload.num_requests=3", "small.yaml:10: measure: stands beside workload"),
        ("", "", "measure.num_request=3", "measure.num_request: unknown field; did you mean num_requests?"),
        ("", "", "prime.num_request=3", "prime.num_request: unknown field; did you mean num_requests?"),
        ("", "", "measure.kind=scam", "measure.kind: unknown value 'scam'; did you mean scan?"),
        ("", "", "measure.prompt_len=0", "measure.prompt_len: a length of 0 is possible"),
        ("", "", "mesure.kind=scan", "mesure: unknown field; did you mean measure?"),
        ("", "", "prime={kind: trace, path: nowhere}", "prime.path: no file nowhere"),
        ("", "", "measure={kind: trace, path: nowhere}", "measure.path: no file nowhere"),
    ],
)  # fmt: skip
def test_scenarios_that_are_none(old: str, new: str, override: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, YAML.replace(old, new.replace("\\n", "\n")) if old else YAML)
    with pytest.raises(InputError) as caught:
        load(path, [override] if override else [])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_schema_knows_the_phases() -> None:
    schema = Scenario.model_json_schema()
    fields = schema["properties"]
    assert fields["measure"]["oneOf"] == fields["workload"]["oneOf"] == fields["prime"]["oneOf"]
    assert "workload" not in schema.get("required", [])
    assert {"required": ["workload"]} in schema["oneOf"]
    assert {"required": ["prime", "measure"]} in schema["oneOf"]


def test_explain_draws_no_phases(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["explain", str(write(tmp_path))])
    assert outcome.exit_code == 2 and "drop prime" in outcome.output
