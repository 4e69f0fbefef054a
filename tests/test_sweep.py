"""What a sweep's file says: axes, points, bad input; and what is made of its runs: bands, tables, figures."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from sim.errors import InputError
from sim.scenario_file import load
from sim.sweeps.axes import Axis, LogRange, Range, Value, label_of, values_of
from sim.sweeps.bands import band, student_t
from sim.sweeps.figures import Shape, curve, figure_of, shape_of
from sim.sweeps.grid import Point, points
from sim.sweeps.key import run_key
from sim.sweeps.schema import Plan, load_sweep
from sim.sweeps.table import Results, Run, by_point, curves_csv, label_of_metric, lines, to_csv, to_object
from workloads import SharedPrefix

BASE = """\
cost: {base_us: 5000, token_us: 50}
engine: {block_size: 16, num_gpu_blocks: 60, max_model_len: 800}
workload:
  {kind: shared_prefix, num_groups: 3, prefix_len: 96, suffix_len: 40, output_len: 10, request_rate: 12,
   num_requests: 60}
"""
HEAD = "base: base.yaml\naxes:\n"


def plan_of(folder: Path, text: str, *overrides: str, large: bool = False) -> Plan:
    (folder / "base.yaml").write_text(BASE)
    (folder / "s.yaml").write_text(text)
    return load_sweep(folder / "s.yaml", overrides, large=large)


def all_points(folder: Path, axes: str) -> list[Point]:
    return list(points(plan_of(folder, HEAD + axes)))


def numbers(axes: str, folder: Path) -> list[Any]:
    (axis,) = plan_of(folder, f"{HEAD}  engine.block_size: {axes}\n").axes
    return [step[0].value for step in axis.steps]


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("[16, 32]", [16, 32]),
        ("{range: [16, 64, 16]}", [16, 32, 48, 64]),
        ("{range: [16, 63, 16]}", [16, 32, 48]),
        ("{range: [64, 16, -16]}", [64, 48, 32, 16]),
        ("{range: [0.1, 0.3, 0.1]}", [0.1, 0.2, 0.3]),  # .2 / .1 is a little under 2
        ("{log_range: [1, 512, 10]}", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
        ("{log_range: [0.5, 8.0, 5]}", [0.5, 1.0, 2.0, 4.0, 8.0]),
        ("{log_range: [1000, 10, 3]}", [1000, 100, 10]),
    ],
)
def test_an_axis_is_a_list_even_steps_or_equal_ratios(
    written: str, values: list[Any], tmp_path: Path
) -> None:
    found = numbers(written, tmp_path)
    assert found == values and [type(one) for one in found] == [type(one) for one in values]


def test_axes_are_crossed_the_last_fastest_and_zipped_ones_go_together(tmp_path: Path) -> None:
    axes = "  engine.block_size: [16, 32]\n  workload.request_rate: [1, 2]\n  workload.prefix_len: [10, 20]\n"
    crossed = all_points(tmp_path, axes)
    assert [point.labels for point in crossed][:3] == [
        ("16", "1", "10"),
        ("16", "1", "20"),
        ("16", "2", "10"),
    ]
    assert len(crossed) == 8
    together = all_points(tmp_path, f"{axes}zip: [[engine.block_size, workload.prefix_len]]\n")
    assert [point.labels for point in together] == [
        ("16", "10", "1"), ("16", "10", "2"), ("32", "20", "1"), ("32", "20", "2"),
    ]  # fmt: skip
    last = together[-1].scenario
    assert isinstance(last.workload, SharedPrefix)
    assert (last.engine.block_size, last.workload.prefix_len.lowest, last.workload.request_rate) == (
        32,
        20,
        2,
    )


def test_each_point_is_the_base_with_its_values(tmp_path: Path) -> None:
    found = all_points(tmp_path, "  engine.block_size: [16, 32]\n  workload.request_rate: [3]\n")
    for point, size in zip(found, (16, 32), strict=True):
        asked = [f"engine.block_size={size}", "workload.request_rate=3"]
        assert point.scenario == load(tmp_path / "base.yaml", asked)


def test_a_whole_part_of_the_scenario_can_be_an_axis(tmp_path: Path) -> None:
    axes = """\
  workload.suffix_len:
    - 40
    - {label: spread, value: {distribution: lognormal, mean: 40, sigma: 1}}
    - {distribution: uniform, low: 1, high: 79}
"""
    found = all_points(tmp_path, axes)
    assert [point.labels for point in found] == [
        ("40",), ("spread",), ("{distribution: uniform, low: 1, high: 79}",),
    ]  # fmt: skip
    means = [point.scenario.workload.suffix_len for point in found]  # type: ignore[union-attr]
    assert [type(one).__name__ for one in means] == ["Constant", "Lognormal", "Uniform"]


def test_a_part_comes_before_a_field_of_it(tmp_path: Path) -> None:
    axes = "  engine.block_size: [32]\n  engine: [{num_gpu_blocks: 99}]\n"
    (point,) = all_points(tmp_path, axes)
    assert (point.scenario.engine.block_size, point.scenario.engine.num_gpu_blocks) == (32, 99)


def test_an_alias_is_a_value_of_its_own(tmp_path: Path) -> None:
    text = """\
base:
  workload:
    kind: mix
    tenants:
      a: &one {workload: {kind: scan, num_requests: 3, prompt_len: 10, output_len: 1, request_rate: 1}}
      b: *one
axes:
  workload.tenants.a.cache_salt: [x]
"""
    (point,) = points(plan_of(tmp_path, text))
    tenants = point.scenario.workload.tenants  # type: ignore[union-attr]
    assert (tenants["a"].cache_salt, tenants["b"].cache_salt) == ("x", None)


def test_seeds_are_a_number_from_the_bases_on_or_a_list(tmp_path: Path) -> None:
    axis = f"{HEAD}  engine.block_size: [16]\n"
    assert plan_of(tmp_path, axis).seeds == [0, 1, 2, 3, 4]
    assert plan_of(tmp_path, f"{axis}seeds: 3\n", "seed=7").seeds == [7, 8, 9]
    plan = plan_of(tmp_path, f"{axis}seeds: [4, 2]\n")
    assert plan.seeds == [4, 2]
    assert next(points(plan)).scenario.seed == 4


def test_the_sweep_as_run_is_the_same_sweep(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("tokens\n5\n")
    text = f"""{HEAD}
  workload.prefix_len: {{range: [16, 64, 16]}}
  workload.output_len: [1, 2, 3, {{label: four, value: 4}}]
  workload.suffix_len: [{{distribution: empirical, path: lengths.csv, column: tokens}}]
zip: [[workload.prefix_len, workload.output_len]]
seeds: 2
"""
    plan = plan_of(tmp_path, text, "workload.num_requests=9")
    before = plan.to_yaml()
    assert len(list(points(plan))) == plan.num_points and plan.to_yaml() == before, (
        "points leave it as it was"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "s.yaml").write_text(plan.to_yaml())
    again = load_sweep(elsewhere / "s.yaml")
    assert [one.scenario for one in points(again)] == [one.scenario for one in points(plan)]
    assert again.to_yaml() == plan.to_yaml()


def test_files_are_named_so_that_anybody_finds_them(tmp_path: Path) -> None:
    """Those of the base lie beside the base; workers and result folders are elsewhere."""
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "lengths.csv").write_text("tokens\n5\n")
    length = "{distribution: empirical, path: lengths.csv, column: tokens}"
    (tmp_path / "bases" / "base.yaml").write_text(BASE.replace("suffix_len: 40", f"suffix_len: {length}"))
    plan = plan_of(tmp_path, "base: bases/base.yaml\naxes: {engine.block_size: [16]}\n")
    (point,) = points(plan)
    path = str((tmp_path / "bases" / "lengths.csv").resolve())
    assert point.scenario.workload.suffix_len.path == path  # type: ignore[union-attr]
    assert plan.base.data["workload"]["suffix_len"]["path"] == path


def test_what_a_run_depends_on_is_in_its_key(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    axis = "  workload.suffix_len: [{distribution: empirical, path: lengths.csv, column: tokens}]\n"
    lengths.write_text("tokens\n5\n")
    (first,) = all_points(tmp_path, axis)
    key = run_key(first.scenario, "text", 0)
    assert key == run_key(first.scenario, "text", 0)
    assert key != run_key(first.scenario, "text", 1) and key != run_key(first.scenario, "other", 0)
    other = tmp_path / "other"
    other.mkdir()
    (other / "lengths.csv").write_text("tokens\n6\n")
    (second,) = all_points(other, axis)
    assert key != run_key(second.scenario, "text", 0), "a file's content counts"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{HEAD}  engine.block_sise: [16]\n",
            "s.yaml:3: engine.block_sise: unknown field; did you mean block_size?",
        ),
        (f"{HEAD}  engin.block_size: [16]\n", "s.yaml:3: engin: unknown field; did you mean engine?"),
        (f"{HEAD}  engine.block_size:\n  - 16\n  - big\n", "s.yaml:5: engine.block_size: should be"),
        (f"{HEAD}  engine.block_size: [16, 32, 16]\n", "s.yaml:3: axes.engine.block_size: has 16 twice"),
        (
            f"{HEAD}  engine.block_size: []\n",
            "s.yaml:3: axes.engine.block_size: has no values, so the grid is empty",
        ),
        ("base: base.yaml\naxes: {}\n", "s.yaml:2: axes: the grid is empty"),
        ("base: base.yaml\n", "axes: this field is required"),
        (BASE, "s.yaml: is a scenario, not a sweep; try prefixsim run"),
        (f"{HEAD}  engine.block_size: 16\n", "s.yaml:3: axes.engine.block_size: should be"),
        (
            f"{HEAD}  engine.block_size: {{range: [1, 9, 0]}}\n",
            "s.yaml:3: axes.engine.block_size: no step of 0",
        ),
        (f"{HEAD}  engine.block_size: {{range: [9, 1, 1]}}\n", "no step of 1 leads from 9 to 1"),
        (f"{HEAD}  engine.block_size: {{log_range: [0, 8, 4]}}\n", "0 has no ratios"),
        (f"{HEAD}  engine.block_size: {{log_range: [1, 8, 1]}}\n", "the number of values is 1"),
        (f"{HEAD}  engine.block_size: {{log_range: [1, 3, 9]}}\n", "has 1 twice"),
        (
            f"{HEAD}  engine.block_size: [16]\nmetrix: [a]\n",
            "s.yaml:4: metrix: unknown field; did you mean metrics?",
        ),
        (f"{HEAD}  seed: [1, 2]\n", "s.yaml:3: axes.seed: cannot be an axis; say which under seeds"),
        (f"{HEAD}  engine..x: [1]\n", "cannot be an axis"),
        (f"{HEAD}  name.x: [1]\n", "s.yaml:3: name is 'base', which has no fields"),
        (f"{HEAD}  engine.block_size: [16]\nseeds: 0\n", "s.yaml:4: seeds: should be"),
        (f"{HEAD}  engine.block_size: [16]\nseeds: [1, 1]\n", "s.yaml:4: seeds: one is given twice"),
        (
            f"{HEAD}  engine.block_size: [16]\nseeds: []\n",
            "s.yaml:4: seeds: should be a valid integer or a list of at least 1, not []",
        ),
        (f"{HEAD}  engine.block_size: [16]\nseeds: [3, -1]\n", "s.yaml:4: seeds.1: should be greater than"),
        (f"{HEAD}  engine.block_size: [16]\nseeds: [a]\n", "s.yaml:4: seeds.0: should be a valid integer"),
        (f"{HEAD}  engine.block_size: [16]\nname: a/b\n", "s.yaml:4: name: 'a/b' is no name for a folder"),
        (
            f"{HEAD}  engine.block_size: [16]\nmetrics: [a, b, a]\n",
            "s.yaml:4: metrics: a is given twice; keep one",
        ),
        (
            f"{HEAD}  a: {{range: [1, 1.0e+10, 1.0e-310]}}\n",
            "s.yaml:3: axes.a: steps of 1e-310 from 1 to 10000000000.0 cannot be counted",
        ),
        (f"{HEAD}  a: {{range: [1, 1.0e+300, 1]}}\n", "s.yaml:3: axes.a.range.1: should be less than"),
        (f"{HEAD}  a: {{log_range: [1.0e-310, 9, 3]}}\n", "s.yaml:3: axes.a: 1e-310 and 9 are too far apart"),
        (f"{HEAD}  a: {{log_range: [1.0e+9, 1.0e-320, 3]}}\n", "1e-320 are too far apart"),
        (f"{HEAD}  engine.block_size: [{{label: 3, value: 16}}]\n", "the label 3 is no word"),
        (f"{HEAD}  seed_: [1]\n  b: [1]\nzip: [[seed_, c]]\n", "s.yaml:5: zip: c is no axis"),
        (f"{HEAD}  a: [1]\n  b: [1]\nzip: [[a, a]]\n", "s.yaml:5: zip: an axis is named twice"),
        (f"{HEAD}  a: [1]\n  b: [1]\nzip:\n- [a, b]\n- [b, a]\n", "s.yaml:7: zip: an axis is named twice"),
        (f"{HEAD}  a: [1]\n  b: [1, 2]\nzip: [[a, b]]\n", "need as many values each; they have: a 1, b 2"),
        ("base: nowhere.yaml\naxes: {a: [1]}\n", "s.yaml:1: base: no file nowhere.yaml here or in "),
        ("base: {workload: {kind: scam}}\naxes: {gpu: [x]}\n", "s.yaml:1: workload.kind: unknown value"),
    ],
)
def test_bad_input_is_one_line_with_its_place(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        list(points(plan_of(tmp_path, text)))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_fault_of_the_base_is_told_with_its_own_line(tmp_path: Path) -> None:
    plan_of(tmp_path, f"{HEAD}  engine.block_size: [16]\n")
    (tmp_path / "base.yaml").write_text(BASE.replace("800", "long"))
    with pytest.raises(InputError, match="base.yaml:2: engine.max_model_len"):
        list(points(load_sweep(tmp_path / "s.yaml")))


def test_an_axis_is_not_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--set engine.block_size=8: engine.block_size is an axis"):
        plan_of(tmp_path, f"{HEAD}  engine.block_size: [16]\n", "engine.block_size=8")
    with pytest.raises(InputError, match="--set engine.block_size=8: engine is an axis"):
        plan_of(tmp_path, f"{HEAD}  engine: [{{}}]\n", "engine.block_size=8")


def test_an_override_changes_the_first_seed_and_no_listed_one(tmp_path: Path) -> None:
    text = f"{HEAD}  engine.block_size: [16]\nseeds: "
    assert plan_of(tmp_path, f"{text}2\n", "seed=7").seeds == [7, 8]
    with pytest.raises(InputError, match="--set seed=abc: seed: should be a whole number, not 'abc'"):
        plan_of(tmp_path, f"{text}2\n", "seed=abc")
    with pytest.raises(InputError, match="--set seed=7: the sweep lists its seeds"):
        plan_of(tmp_path, f"{text}[1, 2]\n", "seed=7")


def test_a_large_grid_is_refused_unless_asked_for(tmp_path: Path) -> None:
    just = f"{HEAD}  workload.num_requests: {{range: [1, 20000, 1]}}\n"
    assert plan_of(tmp_path, just).num_points == 20_000
    more = just.replace("20000", "20001")
    with pytest.raises(InputError, match="s.yaml:2: axes: 100,005 runs are more than 100,000; .*--yes"):
        plan_of(tmp_path, more)
    assert plan_of(tmp_path, more, large=True).num_points == 20_001
    zipped = just.replace("range: [1, 20000, 1]", "range: [1, 300, 1]")
    zipped += (
        "  workload.num_groups: {range: [1, 300, 1]}\nzip: [[workload.num_requests, workload.num_groups]]\n"
    )
    assert plan_of(tmp_path, zipped).num_points == 300, "what goes together counts once"
    huge = f"{HEAD}  workload.num_requests: {{range: [1, 1000000000000, 1]}}\n"  # never laid out
    with pytest.raises(InputError, match="--yes"):
        plan_of(tmp_path, huge)


def test_labels_read_as_yaml() -> None:
    values = [True, None, 3, 0.1, 1e6, 1 / 3, "auto", {"a": [1, False]}]
    assert [label_of(value) for value in values] == [
        "true", "null", "3", "0.1", "1e+06", "0.3333333333333333", "auto", "{a: [1, false]}",
    ]  # fmt: skip


def test_students_t_is_scipys() -> None:
    special = pytest.importorskip("scipy.special", reason="needs the extra [calibrate]")
    for degrees in [*range(1, 40), 99, 100, 999, 1000]:
        assert student_t(degrees) == pytest.approx(special.stdtrit(degrees, 0.975), rel=1e-9), degrees


# Student's t at 97.5 %, from tables: 2 degrees of freedom 4.303, 4 2.776
@pytest.mark.parametrize(
    ("values", "half"),
    [([1.0, 2.0, 3.0], 4.303 / math.sqrt(3)), ([1.0, 2.0, 3.0, 4.0, 5.0], 2.776 * math.sqrt(2.5 / 5))],
)
def test_a_band_is_students(values: list[float], half: float) -> None:
    mean, low, high, n = band([*values, None])
    assert (mean, n) == (sum(values) / len(values), len(values))
    assert high - mean == pytest.approx(half, rel=1e-3) == mean - low


def test_a_band_needs_two_values() -> None:
    assert band([None]).n == 0 and math.isnan(band([]).mean)
    assert band([5]).mean == 5 and math.isnan(band([5]).low)


def axis_of(path: str, *values: Any) -> Axis:
    return Axis((path,), [(Value(label_of(value), value),) for value in values])


def results_of(axes: list[Axis], hit_rates: list[list[float | None]], saturation: str = "STABLE") -> Results:
    """Runs with the given hit rates, a row of seeds for each point; None: failed."""
    shape = [len(axis.steps) for axis in axes]
    runs = []
    for point, row in enumerate(hit_rates):
        place = np.unravel_index(point, shape)
        labels = tuple(axis.steps[i][0].label for axis, i in zip(axes, place, strict=True))
        for seed, rate in enumerate(row):
            figures = {"prefix_cache_hit_rate": rate, "saturation": saturation, "completed": 9, "failed": 1}
            failed = rate is None
            runs.append(Run(point, labels, seed, {} if failed else figures, "too small" if failed else ""))
    return Results("s", axes, ["prefix_cache_hit_rate"], runs)


def test_tables_have_every_run_and_every_band() -> None:
    results = results_of([axis_of("engine.block_size", 16, 32)], [[0.5, 0.6], [None, 0.25]])
    rows = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert rows[0] == {
        "point": "0", "engine.block_size": "16", "seed": "0", "prefix_cache_hit_rate": "0.5",
        "saturation": "STABLE", "completed": "9", "failed": "1", "error": "",
    }  # fmt: skip
    assert [row["error"] for row in rows] == ["", "", "too small", ""]
    bands = list(csv.DictReader(io.StringIO(curves_csv(results))))
    assert [(row["metric"], float(row["mean"]), row["n"]) for row in bands] == [
        ("prefix_cache_hit_rate", 0.55, "2"), ("prefix_cache_hit_rate", 0.25, "1"),
    ]  # fmt: skip
    assert float(bands[0]["high"]) - 0.55 == pytest.approx(12.706 * 0.05, rel=1e-3) and bands[1]["low"] == ""
    told = to_object(results)
    assert told["runs"] == 4 and told["errors"] == [{"point": 1, "seed": 0, "error": "too small"}]
    assert told["points"][1]["metrics"]["prefix_cache_hit_rate"] == {
        "mean": 0.25,
        "low": None,
        "high": None,
        "n": 1,
    }
    text = [line for _, line in lines(results)]
    assert any("16" in line and "55.00 ± 63.53" in line and "STABLE" in line for line in text)
    assert text[-1] == "failed (1 of 4 runs): too small"


def test_a_point_is_called_by_its_worst_seed() -> None:
    results = results_of([axis_of("a", 1)], [[0.5, 0.6]])
    runs = [results.runs[0], results.runs[1]._replace(figures={"saturation": "BACKLOGGED"})]
    (point,) = by_point(results._replace(runs=runs))
    assert point.saturation == "BACKLOGGED"


def test_metrics_have_names_with_units() -> None:
    names = ("prefix_cache_hit_rate", "p99_itl_ms", "mean_front_end_time_ms", "token_fates.partial_block")
    assert [label_of_metric(name) for name in names] == [
        "Hit rate (%)", "P99 ITL (ms)", "Mean front end time (ms)", "Prompt tokens: partial block",
    ]  # fmt: skip


def test_numbers_lie_along_the_bottom_and_words_are_curves() -> None:
    size, rate = axis_of("engine.block_size", 16, 32), axis_of("workload.request_rate", 1.5, 2.0)
    caching, one = axis_of("engine.enable_prefix_caching", True, False), axis_of("gpu", "a100")
    spread = Axis(("x",), [(Value("few", 1),), (Value("many", 9),)])
    assert shape_of([size]) == Shape(0, None, [])
    assert shape_of([caching, size]) == Shape(1, None, [0])
    assert shape_of([spread, size]) == Shape(1, None, [0]), "numbers with names are words"
    assert shape_of([size, one, rate]) == Shape(0, 2, []), "an axis of one value is no dimension"
    assert shape_of([size, axis_of("seed_", 5), rate]) == Shape(0, 2, [])
    assert shape_of([caching]) == Shape(0, None, [])
    assert shape_of([size, rate, caching]) is None
    assert shape_of([size, axis_of("gpu", *"abcdefghi")]) is None, "too many curves to tell apart"


def test_figures_are_drawn_and_the_same_bytes() -> None:
    size, rate = axis_of("engine.block_size", 16, 32), axis_of("workload.request_rate", 1.5, 2.0)
    curves = results_of([size], [[0.5, 0.6], [0.25, None]])
    flat = results_of([size, rate], [[0.5], [0.6], [0.25], [0.1]], "OVERLOADED")
    alone = results_of([axis_of("engine.block_size", 16)], [[0.5]])
    for results, name in ((curves, "curves.png"), (flat, "heatmap.png"), (alone, "curves.png")):
        found = figure_of(results)
        assert found is not None and found == figure_of(results)
        assert found[0] == name and found[1].startswith(b"\x89PNG")
    assert figure_of(results_of([size], [[None], [None]])) is None
    for results in (curves, flat):
        undefined = [run._replace(figures={"saturation": "STABLE"}) for run in results.runs]
        assert figure_of(results._replace(runs=undefined)) is not None, "a metric that no run defines"


def test_an_axis_that_ends_at_infinity_is_one_of_words() -> None:
    values = tuple(Value(label_of(value), value) for value in (1, 4, math.inf))
    assert Axis(("workload.request_rate",), [(value,) for value in values]).numbers is None
    assert Axis(("workload.request_rate",), [(value,) for value in values[:2]]).numbers == [1, 4]


def test_a_curve_shows_means_bands_and_who_did_not_keep_up() -> None:
    results = results_of([axis_of("engine.block_size", 16, 32)], [[0.5, 0.6], [0.25, 0.35]])
    behind = by_point(results)[1]._replace(saturation="OVERLOADED")
    panel = Figure().subplots()
    x = np.array([16.0, 32.0])
    curve(panel, x, [by_point(results)[0], behind], "prefix_cache_hit_rate", "red", "o", "", joined=True)
    line, hollow = panel.get_lines()
    np.testing.assert_allclose(line.get_ydata(), [55.0, 30.0])
    np.testing.assert_allclose(hollow.get_xdata(), [32.0])
    (drawn,) = panel.collections
    heights = drawn.get_paths()[0].vertices[:, 1]
    half = 12.706 * 5.0
    assert heights.max() == pytest.approx(55 + half, rel=1e-3)
    assert heights.min() == pytest.approx(30 - half, rel=1e-3)


@pytest.mark.parametrize("path", sorted(Path("scenarios/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_can_be_laid_out_and_drawn(path: Path) -> None:
    plan = load_sweep(path)
    drawn_by_its_page = path.stem == "three_systems"
    assert plan.name == path.stem and (shape_of(plan.axes) is None) == drawn_by_its_page
    assert len(list(points(plan))) == plan.num_points
    assert len(plan.seeds) >= 3


def test_the_block_size_sweep_is_ten_sizes_by_five_seeds_of_ten_thousand_requests() -> None:
    plan = load_sweep(Path("scenarios/sweeps/block_size.yaml"))
    found = list(points(plan))
    assert [one.scenario.engine.block_size for one in found] == [2**i for i in range(10)]
    assert {one.scenario.workload.expected_requests for one in found} == {10_000}
    assert len(plan.seeds) == 5


def test_prefix_lengths_of_the_shipped_sweep_have_one_mean() -> None:
    plan = load_sweep(Path("scenarios/sweeps/prefix_length.yaml"))
    lengths = {one.labels[0]: one.scenario.workload.prefix_len for one in points(plan)}  # type: ignore[union-attr]
    assert set(lengths) == {"constant", "uniform", "lognormal", "bimodal"}
    for name, one in lengths.items():
        mean = one.draw(np.random.default_rng(0), 1_000_000).mean()
        assert mean == pytest.approx(2048, rel=0.005), name


def test_ranges_know_their_size() -> None:
    for axis in (Range(range=[1, 10, 2]), Range(range=[0.1, 0.5, 0.1]), LogRange(log_range=[1, 512, 10])):
        assert axis.size == len(values_of(axis))
