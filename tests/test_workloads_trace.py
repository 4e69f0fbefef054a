"""Traces: rows become requests, block sizes change nothing but the granularity, bad input is named."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sim.request import Batch
from workloads import Trace, WorkloadError, WorkloadWarning
from workloads.base import Workload
from workloads.jsonl import Parser

SEED = np.random.SeedSequence(0)
TRACES = Path(os.environ.get("PREFIXSIM_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
CONVERSATION = "mooncake_conversation_trace.jsonl.gz"
Row = dict[str, Any]
Content = list[tuple[int, int]]


def shipped(name: str) -> str:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is absent: set PREFIXSIM_TRACES to the folder of traces")
    return str(path)


def mooncake(**fields: Any) -> Row:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **fields}


def twice(name: str, *values: Any) -> str:
    """A Mooncake row with a field given again, or with two of a name."""
    more = "".join(f', "{name}": {json.dumps(value)}' for value in values)
    return json.dumps(mooncake())[:-1] + more + "}"


def segments(**fields: Any) -> Row:
    return {
        "arrival_time": 0.5,
        "input_length": 6,
        "output_length": 4,
        "segments": [[1, 3], [2, 7]],
        **fields,
    }


def write(folder: Path, *rows: Row | str | bytes) -> str:
    path = folder / "trace.jsonl"
    lines = [
        row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
        for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def batches(path: str, block_size: int = 64, **fields: Any) -> list[Batch]:
    return list(Trace(path=path, **fields).batches(SEED, block_size))


def contents(parts: list[Batch]) -> list[tuple[int, Content]]:
    """Each request's (prompt tokens, segments)."""
    found = []
    for part in parts:
        pairs = list(zip(part.segment_id.tolist(), part.segment_len.tolist(), strict=True))
        rows = [pairs[a:b] for a, b in pairwise(part.segment_start.tolist())]
        found += list(zip(part.prompt_len.tolist(), rows, strict=True))
    return found


def hit_tokens(parts: list[Batch], block: int, *, outputs: bool) -> int:
    """vLLM's rule, nothing forgotten: leading full blocks seen before, at most (prompt - 1) // block."""
    chains: dict[tuple[int, tuple[Any, ...]], int] = {}
    seen: set[int] = set()
    total = 0
    for prompt, row in contents(parts):
        keys, parent, piece, room = [], -1, [], block
        for one, length in row:
            begin = 0
            while length - begin >= room:
                piece.append((one, begin, room))
                parent = chains.setdefault((parent, tuple(piece)), len(chains))
                keys.append(parent)
                begin, piece, room = begin + room, [], block
            if length > begin:
                piece.append((one, begin, length - begin))
                room -= length - begin
        for key in keys[: (prompt - 1) // block]:
            if key not in seen:
                break
            total += block
        # The last token of an answer is never computed.
        computed = sum(length for _, length in row) - 1 if outputs else prompt
        seen.update(keys[: computed // block])
    return total


def test_conversation_trace() -> None:
    parts = batches(shipped(CONVERSATION), 512)
    assert sum(len(part.prompt_len) for part in parts) == 12_031
    prompts = np.concatenate([part.prompt_len for part in parts])
    assert prompts.max() == 126_195
    assert round(prompts.mean()) == 12_035
    arrivals = np.concatenate([part.arrival_time for part in parts])
    assert len(np.unique(arrivals)) == 1_180
    assert (np.diff(arrivals) >= 0).all()
    assert arrivals[-1] == pytest.approx(3_537, abs=1)
    assert hit_tokens(parts, 512, outputs=False) == 54_063_104  # by an independent count, infinite cache
    # A chain id names what came before it too, so smaller blocks only find more of the partial ends.
    assert hit_tokens(parts, 256, outputs=False) >= 54_063_104


def test_last_requests_of_the_conversation_trace() -> None:
    path = shipped(CONVERSATION)
    prompts = np.concatenate([part.prompt_len for part in batches(path)])
    assert prompts[-6016:].sum() == 67_915_607
    limited = batches(path, limit=5000)
    assert np.array_equal(np.concatenate([part.prompt_len for part in limited]), prompts[:5000])


@pytest.mark.parametrize(("block", "rate"), [(1, 0.0780), (16, 0.0759), (64, 0.0734), (512, 0.0438)])
def test_sharegpt_segments(block: int, rate: float) -> None:
    parts = batches(shipped("sharegpt_llama31_8b_segments.jsonl.gz"), block)
    prompts = sum(int(part.prompt_len.sum()) for part in parts)
    assert sum(len(part.prompt_len) for part in parts) == 300
    assert hit_tokens(parts, block, outputs=True) / prompts == pytest.approx(rate, abs=5e-5)


def test_mooncake_rows(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(), mooncake(timestamp=1500, input_length=512, hash_ids=[1]))
    (batch,) = batches(path, time_scale=2.0)
    assert batch.arrival_time.tolist() == [0.0, 3.0]
    assert batch.output_len.tolist() == batch.max_tokens.tolist() == [5, 5]
    (_, first), (_, second) = contents([batch])
    assert first[:2] == [(1, 512), (2, 88)]
    assert second[0] == (1, 512)
    assert first[2][1] == second[1][1] == 5
    assert len({1, 2, first[2][0], second[1][0]}) == 4  # answers are their own


def test_segment_rows(tmp_path: Path) -> None:
    path = write(tmp_path, segments(), segments(arrival_time=1, segments=[[1, 10]]))
    (batch,) = batches(path)
    assert batch.arrival_time.tolist() == [0.5, 1.0]
    assert contents([batch]) == [(6, [(1, 3), (2, 7)]), (6, [(1, 10)])]


@pytest.mark.parametrize("output_len", [1, 3, 4, 9])
def test_output_override(tmp_path: Path, output_len: int) -> None:
    (batch,) = batches(write(tmp_path, segments(segments=[[1, 3], [2, 5], [3, 2]])), output_len=output_len)
    ((_, row),) = contents([batch])
    assert batch.output_len.tolist() == [output_len]
    cut = {1: [(1, 3), (2, 4)], 3: [(1, 3), (2, 5), (3, 1)], 4: [(1, 3), (2, 5), (3, 2)]}
    if output_len == 9:
        assert row[:3] == cut[4]
        assert row[3][1] == 5
        assert row[3][0] not in (1, 2, 3)
    else:
        assert row == cut[output_len]
    (batch,) = batches(write(tmp_path, mooncake()), output_len=output_len)
    assert contents([batch])[0][1][-1][1] == output_len


def test_arrival_constant_spreads_ties_and_forgives_disorder(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(timestamp=9), mooncake(timestamp=3), mooncake(timestamp=3))
    (batch,) = batches(path, arrival="constant", request_rate=0.5)
    assert batch.arrival_time.tolist() == [0.0, 2.0, 4.0]
    (batch,) = batches(path, concurrency=2)
    assert not batch.arrival_time.any()


def test_ties_keep_file_order(tmp_path: Path) -> None:
    rows = [mooncake(timestamp=7, output_length=i + 1) for i in range(50)]
    (batch,) = batches(write(tmp_path, *rows))
    assert batch.output_len.tolist() == list(range(1, 51))


def test_names_become_numbers(tmp_path: Path) -> None:
    rows = [
        mooncake(session_id="b", cache_salt="x", lora="sql", priority=3),
        mooncake(session_id="a", cache_salt=None, lora="sql"),
        mooncake(lora=None, cache_salt="x"),
        mooncake(session_id="b", cache_salt="x", lora="sql", priority=-1),
        mooncake(lora=0),
    ]
    for chunk in (rows[:4], rows):  # the last mixes types: read line by line
        (batch,) = batches(write(tmp_path, *chunk))
        assert batch.session_id.tolist()[:4] == [0, 1, -1, 0]
        assert batch.lora.tolist()[:4] == [1, 1, 0, 1]
        assert batch.namespace.tolist()[:4] == [1, 2, 3, 1]
        assert batch.priority.tolist()[:4] == [3, 0, 0, -1]
    assert (batch.lora[4], batch.namespace[4]) == (0, 0)
    (batch,) = batches(write(tmp_path, mooncake(cache_salt=1), mooncake(cache_salt="1")))
    assert batch.namespace.tolist() == [1, 2]


def test_ids_of_any_64_bits_stay_apart(tmp_path: Path) -> None:
    ids = [0, -1, -2, 2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1, -(2**63)]
    for used in (ids, [*ids, 2**63, 2**64 - 1]):
        rows = [mooncake(input_length=512, hash_ids=[one]) for one in used]
        prompts = [row[0][0] for _, row in contents(batches(write(tmp_path, *rows, *rows)))]
        answers = [row[1][0] for _, row in contents(batches(write(tmp_path, *rows, *rows)))]
        assert prompts[: len(used)] == prompts[len(used) :]
        assert len({*prompts, *answers}) == len(used) + len(answers)


def test_blocks_of_the_rows(tmp_path: Path) -> None:
    row = mooncake(input_length=40, block_size=16, hash_ids=[5, 6, 7])
    ((_, found),) = contents(batches(write(tmp_path, row), 16))
    assert found[:3] == [(5, 16), (6, 16), (7, 8)]
    path = write(tmp_path, mooncake(input_length=40, hash_ids=[5, 6, 7]))
    assert contents(batches(path, 8, trace_block_size=16))[0][1][:3] == found[:3]


def test_output_of_zero_runs_as_one_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(output_length=0), mooncake(output_length=0))
    with pytest.warns(WorkloadWarning, match="2 requests have output_length 0") as seen:
        (batch,) = batches(path)
    assert len(seen) == 1
    assert batch.output_len.tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches(path, output_len=3)


@pytest.mark.parametrize("compress", [False, True])
def test_gzip_is_known_by_its_content(tmp_path: Path, compress: bool) -> None:
    path = Path(write(tmp_path, mooncake(), "", mooncake(timestamp=1)))  # a blank line is skipped
    if compress:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert len(contents(batches(str(path)))) == 2


def test_chunks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [mooncake(timestamp=i, cache_salt=f"s{i % 3}", hash_ids=[-i, i]) for i in range(20)]
    path = write(tmp_path, *rows)
    base, names = contents(batches(path)), batches(path)[0].namespace
    for size in (1, 3, 19):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert contents(batches(path)) == base
        assert np.array_equal(np.concatenate([part.namespace for part in batches(path)]), names)
        assert contents(batches(path, limit=7)) == base[:7]


BAD_ROWS: list[tuple[Row | str | bytes, str]] = [
    ('{"timestamp": 1, "input', "not JSON"),
    ("[1, 2]", r"not a JSON object but \[1, 2\]"),
    (b"\x00\xff\x10junk", "not JSON"),
    ("{" * 100_000, "not JSON"),
    ("[" * 100_000, "not JSON"),
    ("{}", "timestamp is missing"),
    ({"timestamp": 0, "input_length": 5}, "output_length is missing"),
    (segments(), "timestamp is missing"),
    (mooncake(timestamp="5"), "timestamp is '5': it must be a finite number"),
    (mooncake(timestamp=True), "timestamp is True"),
    (mooncake(timestamp=None), "timestamp is None"),
    (mooncake(timestamp=float("nan")), "timestamp is nan: it must be a number of ms from 0 to 1e[+]15"),
    (mooncake(timestamp=float("inf")), "timestamp is inf"),
    (mooncake(timestamp=-3), "timestamp is -3"),
    (mooncake(input_length=600.0), "input_length is 600.0: it must be a whole number"),
    (mooncake(input_length=float("nan")), "input_length is nan"),
    (mooncake(input_length=-600), "input_length is -600: .* from 1"),
    (mooncake(input_length=0, hash_ids=[]), "input_length is 0"),
    (mooncake(input_length=10**30), "input_length is 10"),
    (mooncake(output_length=-1), "output_length is -1: .* from 0"),
    (mooncake(output_length=2**40), "output_length is 1099511627776"),
    (mooncake(output_length=[1]), r"output_length is \[1\]"),
    (mooncake(hash_ids=[1]), "hash_ids has 1 ids, but 600 tokens at 512 an id need 2"),
    (mooncake(hash_ids=[1, 2, 3]), "hash_ids has 3 ids"),
    (mooncake(hash_ids=["a", "b"]), "hash_ids is .*64 bits"),
    (mooncake(hash_ids=[1, True]), "hash_ids is "),
    (mooncake(hash_ids=[1, None]), "hash_ids is "),
    (mooncake(hash_ids=[1, 2**64]), "hash_ids is "),
    (mooncake(hash_ids=3), "hash_ids is 3"),
    (b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1], "\xff": 1}', "not JSON"),
    (mooncake(cache_salt=""), "cache_salt is empty"),
    (mooncake(cache_salt=1.5), "cache_salt is 1.5: it must be a string or a whole number"),
    (mooncake(session_id=[1]), "session_id is "),
    (mooncake(priority="high"), "priority is 'high': it must be a whole number"),
    (mooncake(block_size=64), "block_size is 64, not 512"),
    (twice("timestamp", 7), "timestamp is given twice: keep one of the two"),
    (twice("hash_ids", [1, 2]), "hash_ids is given twice"),
    (twice("cache_salt", "a", "b"), "cache_salt is given twice"),
    (f"{json.dumps(mooncake())} {json.dumps(mooncake())}", "not JSON"),
]


@pytest.mark.parametrize("bad", BAD_ROWS, ids=lambda bad: bad[1])
@pytest.mark.parametrize("before", [1, 30])
def test_a_bad_row_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, before: int
) -> None:
    monkeypatch.setattr(Workload, "chunk_size", 20)
    path = write(tmp_path, *[mooncake()] * before, bad[0], mooncake(timestamp=1))
    with pytest.raises(WorkloadError, match=bad[1]) as raised:
        batches(path)
    text = str(raised.value)
    assert text.startswith(f"{path}, line {before + 1}: ")
    assert "\n" not in text
    assert len(text) < len(path) + 250
    assert len(contents(batches(path, limit=before))) == before  # what is not taken is not read


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (segments(segments=[[1, 3]]), "segments has 3 tokens, not input_length [+] output_length = 10"),
        (segments(segments=[[1, 3, 7]]), "segments is .*a list of pairs"),
        (segments(segments=[[1, "x"]]), "segments is .*a list of pairs"),
        (segments(segments=[[1, 0], [2, 10]]), r"segments has lengths \[0, 10\]: .* from 1"),
        (segments(segments=[[1, -5], [2, 15]]), r"segments has lengths \[-5, 15\]"),
        (segments(segments=[]), "segments has 0 tokens"),
        (segments(arrival_time=float("nan")), "arrival_time is nan"),
        (mooncake(), "arrival_time is missing"),
    ],
)
def test_a_bad_segment_row_names_its_line(tmp_path: Path, bad: Row, says: str) -> None:
    path = write(tmp_path, segments(), segments(), bad)
    with pytest.raises(WorkloadError, match=f"line 3: {says}"):
        batches(path)


def test_a_segment_row_that_says_a_thing_twice(tmp_path: Path) -> None:
    for field in ("segments", "arrival_time", "mm", "output_length"):
        good = segments(mm=[None, None])
        bad = json.dumps(good)[:-1] + f', "{field}": {json.dumps(good[field])}}}'
        with pytest.raises(WorkloadError, match=f"line 2: {field} is given twice"):
            batches(write(tmp_path, segments(), bad))


def test_what_is_ignored_may_be_said_twice(tmp_path: Path) -> None:
    """Also where a line goes the slow way, and within other fields."""
    inner = '{"timestamp": 1, "timestamp": 2}'
    for extra in ('"x": 1, "x": 2', f'"x": {inner}'):
        row = json.dumps(mooncake())[:-1] + f", {extra}}}"
        assert len(contents(batches(write(tmp_path, row, row)))) == 2
        assert len(contents(batches(write(tmp_path, row, row, mooncake(session_id=2**62, lora="y"))))) == 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"time_scale": 1e300}, "line 2: arrives after 1e[+]300 s.* check workload.time_scale"),
        ({"time_scale": 1.7e308}, "line 2: arrives after .* check workload.time_scale"),
        ({"arrival": "constant", "request_rate": 1e-320}, "arrives after inf s.* check workload.req"),
    ],
)
def test_arrivals_beyond_all_clocks(
    tmp_path: Path, fields: dict[str, Any], says: str, recwarn: pytest.WarningsRecorder
) -> None:
    path = write(tmp_path, mooncake(), mooncake(timestamp=1000))
    with pytest.raises(WorkloadError, match=says):
        batches(path, **fields)
    assert not recwarn


def test_disorder_names_the_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *[mooncake(timestamp=t) for t in (1, 5, 5, 4, 6, 2)])
    for size in (2, 3, 6):
        monkeypatch.setattr(Workload, "chunk_size", size)
        with pytest.raises(WorkloadError, match="line 4: timestamp 4 comes after 5: sort"):
            batches(path)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        batches(str(tmp_path / "none.jsonl"))
    with pytest.raises(WorkloadError, match="is a directory"):
        batches(str(tmp_path))
    for text in ("", "\n", "\n \n\n"):
        (tmp_path / "empty").write_text(text)
        with pytest.raises(WorkloadError, match="holds no requests"):
            batches(str(tmp_path / "empty"))
        (tmp_path / "empty").write_bytes(gzip.compress(text.encode()))
        with pytest.raises(WorkloadError, match="holds no requests"):
            batches(str(tmp_path / "empty"))
    with pytest.raises(WorkloadError, match=r"line 1: the format is unknown \(fields: 'a'\)"):
        batches(write(tmp_path, {"a": 1}))
    for junk in (b"\x00\x01\x02\xff" * 1000, b"\xfe\xff\x00a", b"time,len\n1,2\n"):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(WorkloadError, match="line 1: not JSON"):
            batches(str(tmp_path / "junk"))
    (tmp_path / "junk").write_bytes(b"PK\x03\x04\n\n")
    with pytest.raises(WorkloadError, match="the npz is damaged"):
        batches(str(tmp_path / "junk"))


def test_damaged_gzip(tmp_path: Path) -> None:
    text = b"".join(
        json.dumps(mooncake(timestamp=i, hash_ids=[i, i * 7])).encode() + b"\n" for i in range(5000)
    )
    whole, path = gzip.compress(text), tmp_path / "trace.jsonl.gz"
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for data in (whole[:-1000], whole[:-4], whole[:9], bytes(flipped), whole + b"tail"):
        path.write_bytes(data)
        with pytest.raises(WorkloadError, match=r"^[^\n]*(gzip data is damaged|not JSON|hash_ids)[^\n]*$"):
            batches(str(path))


def test_block_sizes_that_do_not_divide(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake())
    with pytest.raises(WorkloadError, match="48 is neither .* 1, 2, 4, 8, 16, 32, 64, 128, 256, 512$"):
        batches(path, 48)
    with pytest.raises(WorkloadError, match="1025 is neither a part nor a multiple: .* multiple of 512"):
        batches(path, 1025)
    assert contents(batches(path, 1024)) == contents(batches(path, 512))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"time_scale": float("nan")}, "finite"),
        ({"time_scale": 0.0}, "greater than 0"),
        ({"limit": 0}, "greater than 0"),
        ({"request_rate": 3.0}, "set arrival: constant"),
        ({"arrival": "constant", "time_scale": 2.0}, "no effect"),
        ({"concurrency": 3, "time_scale": 2.0}, "clients set the pace"),
        ({"path": ""}, "at least 1 character"),
        ({"format": "tsv"}, "'auto'"),
    ],
)
def test_bad_fields(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trace(**{"path": "trace.jsonl", **fields})


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 16), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


@given(prompts, st.sampled_from([1, 2, 4, 8, 16]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reblocking(tmp_path: Path, drawn: list[tuple[list[int], int, int]], block: int) -> None:
    """Blocks of a divisor share what the trace's ids share: every whole id, and nothing of an answer."""
    known: dict[tuple[int, ...], int] = {}
    rows, chains = [], []
    for path_ids, last, output in drawn:
        chain = [known.setdefault(tuple(path_ids[: i + 1]), len(known)) for i in range(len(path_ids))]
        chain.append(known.setdefault((*path_ids, -last), len(known)))  # a partial end is its own id
        chains.append(chain)
        length = 16 * (len(chain) - 1) + last
        rows.append(mooncake(input_length=length, output_length=output, hash_ids=chain))
    parts = batches(write(tmp_path, *rows), block, trace_block_size=16)
    expected = 0
    for i, chain in enumerate(chains):
        cap = (rows[i]["input_length"] - 1) // block * block
        best = 0
        for before in range(i):
            equal = next(
                (k for k, (a, b) in enumerate(zip(chain, chains[before], strict=False)) if a != b), None
            )
            shared = 16 * (min(len(chain), len(chains[before])) if equal is None else equal)
            best = max(
                best, min(shared, rows[i]["input_length"], rows[before]["input_length"]) // block * block
            )
        expected += min(best, cap)
    assert hit_tokens(parts, block, outputs=False) == expected


json_line = st.one_of(
    st.builds(mooncake, timestamp=st.integers(0, 5), hash_ids=st.lists(st.integers(-3, 2**63), max_size=3)),
    st.builds(mooncake, extra=st.one_of(st.text(), st.none(), st.floats(), st.lists(st.integers()))),
    st.builds(mooncake, session_id=st.one_of(st.text(), st.integers(-9, 9), st.none(), st.booleans())),
)


@given(st.lists(json_line, min_size=1, max_size=4), st.integers(0, 10**6), st.binary(max_size=2))
@settings(max_examples=400)
def test_fast_and_slow_parsing_agree(rows: list[Row], where: int, patch: bytes) -> None:
    """Whatever Arrow takes, the json module reads as the same rows."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    at = where % len(text)
    text = text[:at] + patch + text[at + len(patch) :]
    lines = text.splitlines(keepends=True)
    parser = Parser("trace", "mooncake")
    fast = parser._parse_fast(0, lines)
    if fast is None:
        return
    slow = parser._parse_slowly(0, lines)
    for name in ("line", "prompt_len", "output_len", "start", "ids"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name))
    assert np.array_equal(fast.time, slow.time)
    assert fast.optional == slow.optional
