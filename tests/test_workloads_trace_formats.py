"""Traces of sessions and CSV traces; bad lines skipped; prefix models."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_workloads_trace import batches, contents, mooncake, segments, shipped, write

from sim.request import Batch
from workloads import Trace, WorkloadError, WorkloadWarning
from workloads.base import Workload

Row = dict[str, Any]
SEED = np.random.SeedSequence(0)


def turn(session: str, t: float, prompt: int, keep: int, new: list[int], **fields: Any) -> Row:
    return {
        "session_id": session, "t": t, "input_length": prompt, "output_length": 7,
        "think_time": None, "api_time": 1.5, "keep": keep, "new_hash_ids": new, **fields,
    }  # fmt: skip


DELTA = [
    turn("a", 0.0, 130, 0, [1, 2]),
    turn("a", 9.0, 200, 1, [3, 4]),
    turn("a", 9.5, 260, 3, [5]),
    turn("b", 0.0, 64, 0, [1]),
    turn("b", 4.0, 70, 1, []),
    turn("b", 20.0, 40, 0, []),
]


def write_npz(path: Path, **arrays: Any) -> str:
    whole: dict[str, Any] = {
        "ids": [1, 2, 1, 3, 4, 1], "off": [0, 2, 5, 6, 6], "il": [130, 200, 64, 40], "ol": [7, 7, 7, 7],
        "ts": [0.0, 9.0, 0.0, 4.0], "tr": [5, 5, 9, 9],
    }  # fmt: skip
    np.savez(path, **{name: np.array(value) for name, value in {**whole, **arrays}.items()})
    return str(path)


def ids(batch: Batch) -> list[list[int]]:
    """Each request's named content, in blocks of 64."""
    return [[one for one, _ in row if one >= 0] for _, row in contents([batch])]


def test_delta_turns_keep_and_add(tmp_path: Path) -> None:
    (batch,) = batches(write(tmp_path, *DELTA))
    assert batch.arrival_time.tolist() == [0.0, 0.0, 4.0, 9.0, 9.5, 20.0]  # ties keep file order
    assert batch.session_id.tolist() == [0, 1, 1, 0, 0, 1]
    own = 1 << 32  # b's ids are b's own, though they look like a's
    assert ids(batch) == [[1, 2], [own + 1], [own + 1], [1, 3, 4], [1, 3, 4, 5], []]
    assert batch.prompt_len.tolist() == [130, 64, 70, 200, 260, 40]
    # What is no full block, and the answer, is the request's own.
    assert [row[-1][1] for _, row in contents([batch])] == [9, 7, 13, 15, 11, 47]


def test_sessions_start_at_a_rate(tmp_path: Path) -> None:
    path = write(tmp_path, *DELTA)
    (batch,) = batches(path, session_rate=0.1)
    first = {session: batch.arrival_time[batch.session_id == session] for session in (0, 1)}
    assert 0 < first[0][0] < first[1][0]  # b starts after a, in file order
    assert (first[0] - first[0][0]).tolist() == pytest.approx([0, 9, 9.5])
    assert (first[1] - first[1][0]).tolist() == pytest.approx([0, 4, 20])
    (slower,) = batches(path, session_rate=0.05)
    assert slower.arrival_time[slower.session_id == 1][0] == pytest.approx(2 * first[1][0])
    with pytest.raises(WorkloadError, match="session_rate is for recorded sessions .* and this is mooncake"):
        batches(write(tmp_path, mooncake()), session_rate=1.0)


def test_mean_gap_between_sessions(tmp_path: Path) -> None:
    path = write(tmp_path, *[turn(str(i), 0.0, 64, 0, [1]) for i in range(4000)])
    times = np.concatenate([batch.arrival_time for batch in batches(path, session_rate=2.0)])
    assert np.diff(times).mean() == pytest.approx(0.5, rel=0.06)  # four standard errors


def test_npz_ids_are_common_to_sessions(tmp_path: Path) -> None:
    (batch,) = batches(write_npz(tmp_path / "t.npz"))
    assert batch.arrival_time.tolist() == [0.0, 0.0, 4.0, 9.0]
    assert batch.session_id.tolist() == [0, 1, 1, 0]
    assert ids(batch) == [[1, 2], [1], [], [1, 3, 4]]
    (limited,) = batches(write_npz(tmp_path / "t.npz"), limit=2)
    assert limited.arrival_time.tolist() == [0.0, 0.0]


def test_chunks_of_sessions_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *DELTA)
    whole = contents(batches(path))
    for size in (1, 2, 5):
        monkeypatch.setattr(Workload, "chunk_size", size)
        assert contents(batches(path)) == whole
        assert contents(batches(path, limit=3)) == whole[:3]


@pytest.mark.parametrize("field", [*DELTA[0]])
def test_a_turn_that_says_a_thing_twice(tmp_path: Path, field: str) -> None:
    bad = json.dumps(DELTA[1])[:-1] + f', "{field}": {json.dumps(DELTA[1][field])}}}'
    with pytest.raises(WorkloadError, match=f"line 2: {field} is given twice: keep one of the two"):
        batches(write(tmp_path, DELTA[0], bad))


@pytest.mark.parametrize("rate", [1e-13, 1e-300, 5e-324])
def test_sessions_beyond_all_clocks(tmp_path: Path, rate: float, recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(WorkloadError, match=r"session_rate is .*: the last of 2 sessions would start after"):
        batches(write(tmp_path, *DELTA), session_rate=rate)
    assert not recwarn


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"off": [0, 2, 5, 6, 7]}, "off must rise from 0 to the number of ids, 6"),
        ({"off": [0, 5, 2, 6, 6]}, "off must rise"),
        ({"off": [0, 6]}, "array off has 2 entries for 4 of il: it needs 5"),
        ({"ts": [0.0]}, "array ts has 1 entries"),
        ({"ts": [0.0, math.nan, 0.0, 4.0]}, "row 2: ts is nan"),
        ({"ts": [0.0, 9.0, -1.0, 4.0]}, "row 3: ts is -1"),
        ({"il": [130.5, 200, 64, 40]}, "array il is float64"),
        ({"il": [130, 200, 64, 70]}, "row 4: hash_ids has 0 ids, but 70 tokens at 64 an id need 1"),
        ({"ol": [7, 7, 7, -1]}, "row 4: ol is -1"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: Row, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        batches(write_npz(tmp_path / "t.npz", **arrays))


def test_damaged_npz(tmp_path: Path) -> None:
    path = Path(write_npz(tmp_path / "t.npz"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(WorkloadError, match="the npz is damaged"):
        batches(str(path))
    np.savez(path, ids=np.array([1]))
    with pytest.raises(WorkloadError, match="array off is missing"):
        batches(str(path))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (turn("a", 10.0, 260, 5, []), "keep is 5: it must be from 0 to 4"),
        (turn("a", 10.0, 260, -1, []), "keep is -1"),
        (turn("a", "x", 260, 4, []), "t is 'x'"),
        (turn("a", 10.0, 260, 3, [2**32]), r"new_hash_ids is \[4294967296\]"),
        (turn("a", 10.0, 260, 4, [], api_time="long"), "api_time is 'long'"),
        (turn("a", 10.0, 320, 4, []), "hash_ids has 4 ids, but 320 tokens at 64 an id need 5"),
        ({"session_id": "a", "t": 1.0}, "input_length is missing"),
        ("nonsense", "not JSON"),
    ],
)
def test_a_bad_turn_names_its_line(tmp_path: Path, bad: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=f"line 7: {says}"):
        batches(write(tmp_path, *DELTA, bad))




def test_what_follows_a_skipped_turn_is_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, DELTA[0], turn("a", 9.0, 200, 9, [3, 4]), *DELTA[2:])
    with pytest.warns(WorkloadWarning, match=r"2 bad lines were skipped; the first: .*line 2: keep is 9"):
        (batch,) = batches(path, skip_bad_lines=True)
    assert batch.session_id.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("chunk", [2, 3, 100])
def test_skipping_leaves_the_good_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(Workload, "chunk_size", chunk)
    good = [mooncake(timestamp=t, output_length=t + 1) for t in range(9)]
    bad: list[Any] = ["{", mooncake(hash_ids=[1]), mooncake(timestamp=2), mooncake(input_length=0)]
    path = write(tmp_path, *good[:4], *bad[:2], "", *good[4:6], *bad[2:], *good[6:])
    with pytest.raises(WorkloadError, match="line 5: not JSON"):
        batches(path)
    with pytest.warns(WorkloadWarning, match="4 bad lines were skipped; the first: .*line 5: not JSON"):
        parts = batches(path, skip_bad_lines=True)
    assert np.concatenate([part.output_len for part in parts]).tolist() == list(range(1, 10))
    with pytest.warns(WorkloadWarning, match="2 bad lines"):
        parts = batches(path, skip_bad_lines=True, limit=5)
    assert np.concatenate([part.output_len for part in parts]).tolist() == list(range(1, 6))


def test_a_file_of_bad_lines_holds_no_requests(tmp_path: Path) -> None:
    path = write(tmp_path, mooncake(input_length=0), "{")
    with pytest.raises(WorkloadError, match="holds no requests"):
        batches(path, skip_bad_lines=True)
    with pytest.raises(WorkloadError, match="not JSON"):
        batches(write(tmp_path, "junk", "{"), skip_bad_lines=True)
    with pytest.warns(WorkloadWarning, match="1 bad lines"):
        batches(write(tmp_path, "junk", segments()), skip_bad_lines=True)


def test_a_limit_counts_requests_not_lines(tmp_path: Path) -> None:
    rows = [mooncake(output_length=n) for n in (1, 2, 3)]
    path = write(tmp_path, rows[0], "", *rows[1:])
    assert [n for part in batches(path, limit=2) for n in part.output_len.tolist()] == [1, 2]


def test_ids_of_full_blocks_only(tmp_path: Path) -> None:
    rows = [mooncake(input_length=n, hash_ids=list(range(n // 16))) for n in (32, 40, 10, 47)]
    (batch,) = batches(write(tmp_path, *rows), trace_block_size=16)
    assert [row[-1][1] for _, row in contents([batch])] == [5, 13, 15, 20]
    assert [len(row) for _, row in contents([batch])] == [3, 3, 1, 3]
    mixed = [*rows, mooncake(input_length=40, hash_ids=[1, 2, 3])]
    with pytest.raises(WorkloadError, match="line 5: hash_ids has 3 ids, but 40 tokens at 16 an id need 2"):
        batches(write(tmp_path, *mixed), trace_block_size=16)
    with pytest.raises(WorkloadError, match=r"at 512 an id need 1: .*trace_block_size \(16 fits\)"):
        batches(write(tmp_path, mooncake(input_length=500, hash_ids=list(range(31)))))


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.4799600,110,27\r\n"
    "2023-11-16 18:18:03.9799600,100,0\r\n"
)


def write_text(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_bytes(text.encode())
    return str(path)


@pytest.mark.parametrize("compress", [False, True])
def test_azure(tmp_path: Path, compress: bool) -> None:
    path = Path(write_text(tmp_path, AZURE))
    if compress:
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.warns(WorkloadWarning, match="1 requests have output_length 0"):
        (batch,) = batches(str(path))
    assert batch.arrival_time.tolist() == [0.0, 0.5, 60.0]
    assert contents([batch]) == [(4808, [(-1, 4818)]), (110, [(-2, 137)]), (100, [(-3, 101)])]


def test_prefix_model(tmp_path: Path) -> None:
    path = write_text(tmp_path, AZURE.replace(",0\r", ",1\r"))
    (batch,) = batches(path, prefix_model={"num_groups": 1, "shared_fraction": 0.5})
    assert contents([batch]) == [
        (4808, [(0, 2404), (-1, 2414)]), (110, [(0, 55), (-2, 82)]), (100, [(0, 50), (-3, 51)])
    ]  # fmt: skip
    assert batch.prefix_group.tolist() == [0, 0, 0]
    (batch,) = batches(path, prefix_model={"num_groups": 1, "prefix_len": 110})
    assert [row[0] for _, row in contents([batch])] == [(0, 110), (0, 110), (0, 100)]


def test_prefix_model_draws_by_zipf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text(tmp_path, "t,p,o\n" + "".join(f"{i},100,1\n" for i in range(6000)))
    columns = {"arrival_time": "t", "prompt_len": "p", "output_len": "o"}
    model = {"num_groups": 3, "zipf_alpha": 1.0, "prefix_len": 10}

    def groups() -> list[int]:
        parts = batches(path, columns=columns, prefix_model=model)
        return [group for part in parts for group in part.prefix_group.tolist()]

    drawn = groups()
    shares = np.bincount(drawn) / len(drawn)
    assert shares == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.025)  # four standard errors
    monkeypatch.setattr(Workload, "chunk_size", 7)
    assert groups() == drawn


def test_csv_columns(tmp_path: Path) -> None:
    text = '\ufeffwho, out,"in",when,user\nx,3,20,1.5,u\ny,4,30,2.5,v\nx,5,40,2.5,u\n\n'
    columns = {
        "arrival_time": "when", "prompt_len": "in", "output_len": "out", "prefix_group": "who",
        "session_id": "user",
    }  # fmt: skip
    path = write_text(tmp_path, text)
    (batch,) = batches(path, columns=columns, prefix_model={"prefix_len": 16})
    assert batch.arrival_time.tolist() == [1.5, 2.5, 2.5]
    assert batch.prompt_len.tolist() == [20, 30, 40]
    assert batch.output_len.tolist() == [3, 4, 5]
    assert batch.prefix_group.tolist() == [0, 1, 0]
    assert batch.session_id.tolist() == [0, 1, 0]
    assert [row[0] for _, row in contents([batch])] == [(0, 16), (1, 16), (0, 16)]


CSV_COLUMNS = {"arrival_time": "t", "prompt_len": "p", "output_len": "o"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("2,x,1", "p is 'x': it must be a whole number of tokens"),
        ("2,5.0,1", "p is '5.0'"),
        ("2,0,1", "p is 0: it must be a number of tokens from 1"),
        ("2,5,-1", "o is -1: it must be a number of tokens from 0"),
        ("2,5", "2 fields under a header of 3"),
        ("soon,5,1", "t is 'soon': it must be a number of seconds, as before"),
        ("nan,5,1", "t is nan"),
        ("0.5,5,1", "t 0.5 comes after 1"),
    ],
)
def test_a_bad_csv_row_names_its_line(tmp_path: Path, row: str, says: str) -> None:
    path = write_text(tmp_path, f"t,p,o\n1,5,1\n{row}\n3,5,1\n")
    with pytest.raises(WorkloadError, match=f"line 3: {says}") as raised:
        batches(path, columns=CSV_COLUMNS)
    assert "\n" not in str(raised.value)
    with pytest.warns(WorkloadWarning, match=f"1 bad lines were skipped; the first: .*{says}"):
        (batch,) = merged(batches(path, columns=CSV_COLUMNS, skip_bad_lines=True))
    assert batch == [1.0, 3.0]


def merged(parts: list[Batch]) -> list[list[float]]:
    return [[time for part in parts for time in part.arrival_time.tolist()]]


def test_bad_azure_time(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="line 2: TIMESTAMP is 'noon': .* as in 2023-11-16"):
        batches(write_text(tmp_path, AZURE.replace("2023-11-16 18:17:03.9799600", "noon")))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"columns": {**CSV_COLUMNS, "prompt_len": "q"}}, "no column 'q' for prompt_len: .* t, p, o"),
        ({}, "line 1: not JSON"),
        ({"format": "csv"}, "a CSV needs workload.columns"),
        ({"columns": CSV_COLUMNS, "format": "azure"}, "workload.columns is for a CSV"),
        ({"columns": CSV_COLUMNS, "trace_block_size": 16}, "the csv format has no hash ids"),
        ({"columns": CSV_COLUMNS, "prefix_model": {"prefix_len": 3}}, "set one of them"),
        (
            {
                "columns": {**CSV_COLUMNS, "prefix_group": "p"},
                "prefix_model": {"prefix_len": 3, "num_groups": 2},
            },
            "set one of them",
        ),
    ],
)
def test_settings_that_do_not_suit_a_csv(tmp_path: Path, fields: Row, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        batches(write_text(tmp_path, "t,p,o\n1,5,1\n"), **fields)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"num_groups": 2}, "one of shared_fraction and prefix_len"),
        ({"num_groups": 2, "prefix_len": 2, "shared_fraction": 0.5}, "one of shared_fraction and prefix_len"),
        ({"prefix_len": 2, "zipf_alpha": 2.0}, "zipf_alpha has no effect"),
        ({"num_groups": 2, "shared_fraction": 1.5}, "less than or equal to 1"),
    ],
)
def test_bad_prefix_models(model: Row, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trace(path="x", prefix_model=model)


def test_a_prefix_model_is_for_files_without_prefixes(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the mooncake format says what is shared"):
        batches(write(tmp_path, mooncake()), prefix_model={"num_groups": 1, "prefix_len": 5})


@pytest.mark.filterwarnings("ignore:.*output_length 0")
def test_the_recorded_sessions() -> None:
    parts = batches(shipped("kct60_delta.jsonl.gz"))
    assert sum(len(part.prompt_len) for part in parts) == 1_718
    assert len(np.unique(np.concatenate([part.session_id for part in parts]))) == 60
    # No session has an id of another, so the sessions' first turns share nothing.
    with gzip.open(shipped("kct60_delta.jsonl.gz")) as file:
        firsts = [row for row in map(json.loads, file) if row["t"] == 0]
    assert sum(int((part.arrival_time == 0).sum()) for part in parts) == len(firsts)
