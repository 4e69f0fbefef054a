"""Recordings that are cut off, damaged or of another engine: read as far as they go, or refused in a line."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded
from recorded import Line
from recordings_made import (
    MEASURED,
    refused,
    small_header,
    small_recording,
    two_steps,
    verify,
)

from sim.errors import InputError
from sim.recording import (
    RecordingWarning,
    calls,
    read_header,
    read_requests,
    read_steps,
)


@pytest.fixture(scope="module")
def small() -> list[Line]:
    return small_recording()


# what cannot be used


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "prefixsim_recording/3"}, ["'prefixsim_recording/3'", "reads prefixsim_recording/2 and"]),
        ({"kv_groups": ["FullAttentionSpec(a)", "SlidingWindowSpec(b)"]}, ["2 KV cache groups"]),
        ({"kv_groups": ["SlidingWindowSpec(sliding_window=128)"]}, ["SlidingWindowSpec", "not modelled"]),
        ({"num_spec_tokens": 3}, ["speculative decoding"]),
        ({"kv_connector": "NixlConnector"}, ["NixlConnector"]),
        ({"pipeline_parallel_size": 2}, ["pipeline_parallel_size 2"]),
        ({"prefill_schedule_interval": 4}, ["prefill_schedule_interval 4"]),
        ({"long_prefill_token_threshold_adaptive": True}, ["adaptive"]),
        ({"hash_block_size": 4}, ["hashes blocks of 4", "allocates 8"]),
        ({"block_size": None}, ["header: effective.block_size: ", "not None"]),
        ({"block_size": 0}, ["effective.block_size"]),
        ({"num_gpu_blocks": 2**60}, ["effective.num_gpu_blocks"]),
        ({"policy": "lifo"}, ["effective.policy", "fcfs"]),
        ({"max_num_seqs": True}, ["effective.max_num_seqs"]),
        ({"free0": [1, 2, 3]}, ["free0", "each block"]),
        ({"content": {"form": "words"}}, ["content.form"]),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_used(change: Line, words: list[str], tmp_path: Path) -> None:
    header = small_header()
    for field, value in change.items():
        (header if field in ("schema", "free0", "content") else header["effective"])[field] = value
    path = recorded.write(tmp_path / "r.jsonl", [header, *two_steps()])
    refused(path, *words)
    for read in (read_header, read_requests, read_steps, lambda path: list(calls(path))):
        with pytest.raises(InputError):
            read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a[:2] + a[4:], "line 3: step 1 where 0 is due"),
        (lambda a: a[:3] + a[4:], "line 4: 2 steps in flight, at most 1 can be"),
        (lambda a: a[:4] + a[5:], "line 5: the update of step 1, which is not due"),
        (lambda a: a[:6] + a[7:], "line 7: the end of request 0 is not there"),
        (lambda a: [*a[:2], a[6], *a[2:]], "line 3: the end of request 0, which is not due"),
        (lambda a: a[:1] + a[2:], "line 2: request 0, which does not live then"),
        (lambda a: [*a[:1], a[1] | {"add": 4}], "line 2: adds request 4 where 0 is due"),
        (lambda a: [*a[:2], a[2] | {"new": [[3, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:2], a[2] | {"res": [[3, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:2], a[2] | {"pre": [[3, 0, 0]]}], "line 3: request 3, which does not live then"),
        (lambda a: [*a[:3], a[3] | {"stop": [3]}], "line 4: request 3, which does not live then"),
        (lambda a: [*a[:4], {"reset": True, "t": 25, "pre": [[3, 0, 0]]}], "line 5: request 3, which"),
        (lambda a: [*a[:2], a[2] | {"t": [11, 10]}], "line 3: t: [11, 10]: time goes back"),
        (lambda a: [*a[:3], a[3] | {"t": [10, 21]}], "line 4: t: [10, 21]: time goes back"),
        (lambda a: [*a[:2], a[2] | {"s": [[0, 2**29, 0]]}], "line 3: s.0.1: should be"),
        (lambda a: [*a[:1], {"end": True, "t": 90, "steps": 2}], "line 2: ends after 2 steps, 0 are there"),
        (lambda a: [*a[:2], {"t": 3}, *a[2:]], "line 3: begins with none of the fields add, s, u"),
        (lambda a: [*a[:2], [1], *a[2:]], "line 3: should be an object, not [1]"),
        (lambda a: [*a[:2], a[1]], "line 3: adds request 0 where 1 is due"),
        (lambda a: [a[0], a[1] | {"c": "x" * 48}], "line 2: request 0: c should be text of 16 hexadecimal"),
        (lambda a: [a[0], a[1] | {"c": 16 * "0"}], "line 2: request 0: c has 1 chunks of a prompt of 12"),
        (lambda a: [a[0], a[1] | {"np": 401, "c": ""}], "line 2: request 0: 401 prompt tokens"),
        (lambda a: [*a[:6], a[6] | {"n": 9}], "line 2: request 0: 12 prompt tokens, 9 in all"),
        (lambda a: [a[0], a[1] | {"uses": ["grammar"]}], "request 0 (a) uses grammar, which is not"),
        (lambda a: [*a[:4], {"pause": "PAUSED_ALL", "t": 25}], "PAUSED_ALL), which is not"),
        (lambda a: [*a[:2], a[2] | {"throttle": True}], "prefills back, which is not modelled"),
        (lambda a: [*a[:4], {"reset": True, "t": 25, "pre": [[0, 12, 1]]}], "preempted what ran, which is"),
    ],
)  # fmt: skip
def test_lines_that_cannot_be_used(change: Any, words: str, tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl", change([small_header(), *two_steps()]))
    refused(path, words)


@pytest.mark.parametrize(
    "content", [b"not json\n", b'{"add": 1\n', b"\xff\xfe\n", b"[" * 50_000 + b"\n", b"\n"]
)
def test_a_line_of_garbage(content: bytes, tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl", [small_header(), *two_steps()])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], content, *lines[3:]]))
    refused(path, "line 4: ")
    path.write_bytes(content + b"".join(lines[1:]))
    refused(path)


def test_more_steps_in_flight_than_the_engine_has(tmp_path: Path) -> None:
    """Two under async scheduling: pipeline parallelism would have more."""
    step = {"s": [], "fr": 49, "q": [0, 0]}
    lines = [small_header(async_scheduling=True), *(step | {"i": i, "t": [i, i]} for i in range(3))]
    refused(recorded.write(tmp_path / "r.jsonl", lines), "line 4: 3 steps in flight, at most 2 can be")
    lines[3:] = [{"u": 1, "t": [9, 9], "fr2": 49}]
    refused(recorded.write(tmp_path / "r.jsonl", lines), "line 4: the update of step 1, which is not due")


def mutations(value: Any, generator: random.Random) -> Iterator[Any]:
    """A value with one part of it changed for one of another kind."""
    others: tuple[Any, ...] = (
        None, True, -1, 0, 1, 2**31, 2**53, 10**30, 1.5, 1e308, float("nan"), "", "x", 40 * "0", [], {}, [[]],
        [None], {"a": 1},
    )  # fmt: skip
    if isinstance(value, dict) and value:
        key = generator.choice(list(value))
        yield {k: v for k, v in value.items() if k != key}
        yield from (value | {key: one} for one in mutations(value[key], generator))
    elif isinstance(value, list) and value:
        place = generator.randrange(len(value))
        yield value[:place] + value[place + 1 :]
        yield [*value, *value]
        yield from ([*value[:place], one, *value[place + 1 :]] for one in mutations(value[place], generator))
    yield generator.choice(others)
    yield generator.choice(others)


def said_in_one_line(path: Path) -> int:
    """The exit status of verify, which must not fail, and the readers agree."""
    result = verify(path)
    assert result.exit_code in (0, 1, 2), (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert len([line for line in result.stderr.splitlines() if "compiling" not in line]) <= 1 + (
        "cut off" in result.stderr
    ), result.stderr
    for read in (read_header, read_requests, read_steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordingWarning)
            try:
                read(path)
            except InputError as error:
                assert "\n" not in str(error)
                assert result.exit_code != 0  # 1: a difference came first
    return result.exit_code


def test_mutated_fields(small: list[Line], tmp_path: Path, seeds: range = range(150)) -> None:
    """Any field may be of any kind: what comes of it is one line."""
    statuses = []
    for seed in seeds:
        generator = random.Random(seed)
        lines = list(recorded.delta_coded(iter(small))) if seed % 2 else list(small)
        number = generator.choice([0, generator.randrange(len(lines)), generator.randrange(len(lines))])
        changed = generator.choice(list(mutations(lines[number], generator)))
        path = recorded.write(tmp_path / "r.jsonl", [*lines[:number], changed, *lines[number + 1 :]])
        statuses.append(said_in_one_line(path))
    assert {0, 1, 2} == {*statuses}, "some are harmless, some are differences, some cannot be used"


@pytest.mark.slow
def test_many_mutated_fields(small: list[Line], tmp_path: Path) -> None:
    test_mutated_fields(small, tmp_path, range(150, 6000))


def test_mutated_fields_of_version_1(tmp_path: Path, seeds: range = range(40)) -> None:
    run = json.loads(gzip.decompress(MEASURED["overload_preempt"].read_bytes()))
    names = {request["id"] for request in run["reqs"][:20]}
    run["steps"] = [step for step in run["steps"][:60] if not {name for name, *_ in step["s"]} - names]
    run["reqs"] = run["reqs"][:40]
    del run["end_free"]
    for seed in seeds:
        generator = random.Random(seed)
        key = generator.choice(["effective", "reqs", "steps", "steps", "free0"])
        changed = generator.choice(list(mutations(run[key], generator)))
        path = tmp_path / "r.json"
        path.write_text(json.dumps(run | {key: changed}))
        said_in_one_line(path)


# what was cut off


def positions(size: int, count: int) -> list[int]:
    return sorted({round(1 + (size - 2) * i / count) for i in range(count + 1)})


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_recording_cut_anywhere(suffix: str, small: list[Line], tmp_path: Path) -> None:
    whole = recorded.write(tmp_path / f"whole{suffix}", list(recorded.delta_coded(iter(small))))
    data = whole.read_bytes()
    num_steps = len(read_steps(whole).running)
    path, read = tmp_path / f"cut{suffix}", []
    for at in positions(len(data), 60):
        path.write_bytes(data[:at])
        result = verify(path)
        assert result.exit_code in (0, 2), result.output
        if result.exit_code == 2:
            refused(path)
            continue
        told = [line for line in result.stderr.splitlines() if "compiling" not in line]
        if at > len(data) - 10 and not told:
            continue  # the last line's end or gzip's trailer: nothing is missing
        (warning,) = told
        assert f"{path}: cut off" in warning
        steps = int(re.findall(r"(\d+) steps in all", warning)[0])
        assert result.stdout.startswith(f"{path}: ")
        with pytest.warns(RecordingWarning, match="cut off"):
            assert len(read_steps(path).running) == steps
        with pytest.warns(RecordingWarning, match="cut off"):
            read_requests(path)
        read.append(steps)
    assert read == sorted(read) and read[-1] >= num_steps - 3
    assert len({*read}) > (20 if suffix == ".jsonl" else 1)


def test_a_killed_recorder_leaves_what_was_flushed(small: list[Line], tmp_path: Path) -> None:
    """A stream flushed as the recorder flushes it, cut within what came after the flush."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, 31)
    text = [(json.dumps(line) + "\n").encode() for line in small]
    data, flushed = b"", []
    for start in range(0, len(text), 20):
        data += deflate.compress(b"".join(text[start : start + 20])) + deflate.flush(zlib.Z_SYNC_FLUSH)
        flushed.append((len(data), sum(line.startswith(b'{"u"') for line in text[: start + 20])))
    path = tmp_path / "cut.jsonl.gz"
    for (size, steps), (following, _) in itertools.pairwise(flushed):
        for at in (size, (size + following) // 2):
            path.write_bytes(data[:at])
            with pytest.warns(RecordingWarning, match="cut off"):
                assert len(read_steps(path).running) >= steps


def test_a_recorder_that_gave_up(small: list[Line], tmp_path: Path) -> None:
    failed = {"failed": "OSError: no space left on device", "t": 9}
    path = recorded.write(tmp_path / "r.jsonl", [*small[:40], failed])
    result = verify(path)
    assert result.exit_code == 0
    assert "cut off (the recorder gave up: OSError: no space left on device)" in result.stderr


def test_version_1_cut_anywhere(tmp_path: Path) -> None:
    data = MEASURED["overload_preempt"].read_bytes()
    text = gzip.decompress(data)
    path, read = tmp_path / "cut", []
    for cut in [
        *(data[:at] for at in positions(len(data), 4)),
        *(text[:at] for at in positions(len(text), 6)),
    ]:
        path.write_bytes(cut)
        result = verify(path)
        if result.exit_code == 2:
            refused(path)
            continue
        assert result.exit_code == 0, result.output
        assert f"{path}: cut off" in result.stderr or len(cut) == len(data) - 1  # of gzip's trailer
        read.append(int(re.findall(r"(\d+) steps, 0 differences", result.stdout)[0]))
    assert max(read) > 2000 and len({*read}) >= 4


def test_a_damaged_stream(small: list[Line], tmp_path: Path) -> None:
    path = recorded.write(tmp_path / "r.jsonl.gz", small)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(50) + data[len(data) // 2 + 50 :])
    refused(path)
    path.write_bytes(b"\x1f\x8bnothing")
    refused(path, "damaged")
    assert verify(tmp_path).exit_code == 2
