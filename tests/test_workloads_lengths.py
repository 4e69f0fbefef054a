"""Length distributions: frequencies against their definitions, and files that hold no lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import chi_square, make, whole
from pydantic import ValidationError

from sim.errors import InputError
from sim.request import Ints
from sim.scenario_file import load, to_yaml
from workloads import WorkloadError
from workloads.lengths import read_lengths

CSV = "id,prompt_len,answer\na,5,1\nb,70,0\nc, 9 ,3\nd,5,1\n"


def scan(length: Any, **fields: Any) -> Any:
    return make({"kind": "scan", "num_requests": 20_000, "output_len": 1, "prompt_len": length, **fields})


def drawn(length: Any) -> Ints:
    return whole(scan(length)).prompt_len


def file(folder: Path, text: str | bytes = CSV) -> str:
    path = folder / "lengths.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_zipf_lengths_have_their_weights() -> None:
    found = drawn({"distribution": "zipf", "low": 3, "high": 22, "alpha": 1.3})
    counts = np.bincount(found, minlength=23)[3:]
    assert counts.sum() == 20_000
    assert chi_square(counts, np.arange(1, 21) ** -1.3) < 3
    assert chi_square(counts, np.arange(1, 21) ** -1.25) > 3
    even = np.bincount(drawn({"distribution": "zipf", "low": 3, "high": 22, "alpha": 0}))[3:]
    assert chi_square(even, np.ones(20)) < 3
    assert drawn({"distribution": "zipf", "high": 9}).min() == 1


def test_empirical_lengths_are_those_of_the_rows(tmp_path: Path) -> None:
    length = {"distribution": "empirical", "path": file(tmp_path), "column": "prompt_len"}
    values, counts = np.unique(drawn(length), return_counts=True)
    assert values.tolist() == [5, 9, 70]
    assert chi_square(counts, [2, 1, 1]) < 3


def test_columns_are_found_by_name_behind_a_byte_order_mark(tmp_path: Path) -> None:
    path = file(tmp_path, b"\xef\xbb\xbfa,b\r\n1,2\r\n\r\n3,4\r\n")
    assert read_lengths(path, "a").tolist() == [1, 3]
    assert read_lengths(path, "b").tolist() == [2, 4]


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        (CSV, "prompt", "no column 'prompt' in line 1: name one of: id, prompt_len, answer"),
        (CSV, "id", "line 2: id is 'a': it must be a whole number of tokens from 0"),
        ("n\n5\n\n-3\n", "n", "line 4: n is '-3'"),
        ("n\n5\n1.5\n", "n", "line 3: n is '1.5'"),
        ("n\n99999999999\n", "n", "line 2: n is '99999999999'"),
        ("m,n\n5\n", "n", "line 2: n is ''"),
        ("n\n\u0663\n", "n", "line 2: n is '\u0663'"),
        ("n\n", "n", "holds no lengths"),
        ("", "n", "no column 'n' in line 1: name one of: none"),
        ("n,m,n\n1,2,3\n", "n", "line 1: two columns are named 'n': rename all but one"),
        (b"n\n\xff\n", "n", "not a CSV file of UTF-8 text"),
    ],
)
def test_a_file_without_lengths_says_where(tmp_path: Path, text: str | bytes, column: str, says: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(WorkloadError, match=says) as raised:
        read_lengths(path, column)
    assert str(raised.value).startswith(path)
    assert "\n" not in str(raised.value)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        read_lengths(str(tmp_path / "none.csv"), "n")
    with pytest.raises(WorkloadError, match="directory"):
        read_lengths(str(tmp_path), "n")


@pytest.mark.parametrize(
    ("length", "says"),
    [
        ({"distribution": "zipf", "low": 0, "high": 9}, "length of 0 is possible"),
        ({"distribution": "zipf", "low": 10, "high": 9}, "exchange them"),
        ({"distribution": "zipf", "high": 2**21}, "narrow them"),
        ({"distribution": "zipf", "high": 9, "alpha": float("inf")}, "finite"),
        ({"distribution": "zipf"}, "required"),
    ],
)
def test_impossible_lengths_are_refused(length: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        scan(length)


def test_a_column_with_a_zero_is_refused_where_it_must_not_be(tmp_path: Path) -> None:
    length = {"distribution": "empirical", "path": file(tmp_path), "column": "answer"}
    with pytest.raises(ValidationError, match="length of 0 is possible"):
        scan(length)
    shared = {"kind": "shared_prefix", "num_requests": 3, "suffix_len": 1, "output_len": 1}
    assert make({**shared, "prefix_len": length}).prefix_len.lowest == 0


def test_drawing_leaves_a_workload_equal_to_itself_read_again(tmp_path: Path) -> None:
    for length in (
        {"distribution": "zipf", "high": 9},
        {"distribution": "empirical", "path": file(tmp_path), "column": "prompt_len"},
    ):
        used = scan(length)
        whole(used)
        assert make(used.model_dump()) == used
        assert make({**used.model_dump(), "num_requests": 1}) != used


SCENARIO = """\
workload:
  kind: mix
  tenants:
    chat:
      workload:
        kind: scan
        num_requests: 3
        output_len: 1
        prompt_len: {distribution: empirical, path: lengths.csv, column: prompt_len}
"""


def test_a_file_is_found_beside_the_scenario(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    field = "workload.tenants.chat.workload.prompt_len.path"
    with pytest.raises(InputError, match=f"scenario.yaml:9: {field}: no file lengths.csv here or in"):
        load(path)
    found = file(tmp_path)
    scenario = load(path)
    assert found in to_yaml(scenario)
    (tmp_path / "other.csv").write_text("prompt_len\n0\n")
    with pytest.raises(InputError, match="length of 0 is possible") as raised:
        load(path, [f"{field}=other.csv"])
    assert str(raised.value).count("\n") == 0


def test_long_lognormal_lengths_are_drawn_again() -> None:
    """What is left is the distribution below `high`: the same shares at each length, none above."""
    whole_range = drawn({"distribution": "lognormal", "mean": 100, "sigma": 1.0})
    found = drawn({"distribution": "lognormal", "mean": 100, "sigma": 1.0, "high": 150})
    expected = whole_range[whole_range <= 150]
    assert found.max() == 150 and len(found) == 20_000
    assert len(expected) < 17_000
    levels = np.linspace(5, 95, 19)
    np.testing.assert_allclose(np.percentile(found, levels), np.percentile(expected, levels), rtol=0.06)


def test_a_high_that_cuts_nothing_changes_no_length() -> None:
    plain = drawn({"distribution": "lognormal", "mean": 100, "sigma": 0.5})
    assert (drawn({"distribution": "lognormal", "mean": 100, "sigma": 0.5, "high": 100_000}) == plain).all()


def test_a_high_below_the_median_is_refused() -> None:
    with pytest.raises(ValidationError, match="high 60 is below the median 61"):
        scan({"distribution": "lognormal", "mean": 100, "sigma": 1.0, "high": 60})
