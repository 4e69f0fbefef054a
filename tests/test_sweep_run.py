"""Sweeps that run: the same bytes wherever and however often stopped, failures as rows, nothing lost."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.errors import InputError
from sim.scenario import Scenario
from sim.scenario_file import load
from sim.simulation import run
from sim.sweeps.cluster import connected, on_cluster
from sim.sweeps.content import Replay, _kept, _size, with_content
from sim.sweeps.execute import run_sweep
from sim.sweeps.journal import Record, journal, locked, read_journal
from sim.sweeps.processes import on_processes
from sim.sweeps.schema import load_sweep
from sim.sweeps.work import Outcome

SWEEP = """\
name: small
base:
  cost: {base_us: 5000, token_us: 50}
  engine: {block_size: 16, num_gpu_blocks: 60, max_model_len: 800}
  workload:
    {kind: shared_prefix, num_groups: 3, prefix_len: 96, suffix_len: 40, output_len: 10, request_rate: 12,
     num_requests: 60}
axes:
  engine.num_gpu_blocks: [30, 60, 600]
  engine.enable_prefix_caching: [true, false]
seeds: 2
"""
RUNS = 12
SLOW = ["--set", "workload.num_requests=10000"]  # some tenths of a second a run: time to kill it


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SWEEP)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small sweep, run in one go in one process."""
    return in_one_go(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the slow one."""
    return in_one_go(tmp_path_factory.mktemp("straight"), *SLOW)


def in_one_go(folder: Path, *options: str) -> Path:
    path = folder / "small.yaml"
    path.write_text(SWEEP)
    result = prefixsim("sweep", path, "--jobs", "1", "--out", folder / "out", *options)
    assert result.exit_code == 0, result.output
    return folder / "out"


def prefixsim(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def started(*arguments: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sim.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(what: Any, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def one_line(result: Any, *words: str) -> None:
    assert result.exit_code == 2 and result.stdout == "", result.output
    *_, line = result.stderr.splitlines()
    assert line.startswith("prefixsim: ") and all(word in line for word in words), line
    assert "Traceback" not in result.output


def tables(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("sweep.csv", "curves.csv", "sweep.yaml")}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_row_is_a_run_of_its_stored_scenario(finished: Path) -> None:
    with open(finished / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == RUNS
    for row in rows:
        scenario = load(finished / "scenarios" / f"{row['point']}.yaml", [f"seed={row['seed']}"])
        assert str(scenario.engine.num_gpu_blocks) == row["engine.num_gpu_blocks"]
        summary = run(scenario).summary
        for name in ("prefix_cache_hit_rate", "mean_ttft_ms", "p95_ttft_ms", "saturation", "completed"):
            assert row[name] == str(summary[name]), name
    assert len({row["mean_ttft_ms"] for row in rows}) > RUNS / 2
    names = {"sweep.csv", "curves.csv", "curves.png", "sweep.yaml", "journal.jsonl", "scenarios"}
    assert {path.name for path in finished.iterdir()} == names


def test_any_number_of_processes_gives_the_same_bytes(sweep: Path, finished: Path) -> None:
    out = sweep.parent / "two"
    result = prefixsim("sweep", sweep, "--jobs", "2", "--out", out, "--format", "json")
    assert result.exit_code == 0, result.output
    assert tables(out) == tables(finished)
    told = json.loads(result.stdout)
    assert told["sweep"] == "small" and told["runs"] == RUNS and len(told["points"]) == RUNS / 2


def test_killed_and_resumed_it_repeats_nothing_and_ends_the_same(
    sweep: Path, straight: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = started("sweep", sweep, "--jobs", "2", "--out", out, *SLOW)
    wait_for(lambda: num_lines(out / "journal.jsonl") >= 3, process)
    process.kill()
    process.wait()
    before = (out / "journal.jsonl").read_bytes()
    assert 3 <= before.count(b"\n") < RUNS and not (out / "sweep.csv").exists()
    whole = before[: before.rindex(b"\n") + 1]
    (out / "journal.jsonl").write_bytes(whole + b'{"key": "torn')
    one_line(prefixsim("sweep", sweep, "--out", out, *SLOW), f"of {RUNS} runs of this sweep; add --resume")
    result = prefixsim("sweep", sweep, "--jobs", "1", "--out", out, "--resume", *SLOW)
    assert result.exit_code == 0, result.output
    after = (out / "journal.jsonl").read_bytes()
    assert after.startswith(whole), "what was done is kept as it was"
    keys = [json.loads(line)["key"] for line in after.splitlines()]
    assert len(keys) == len(set(keys)) == RUNS, "and nothing is done twice"
    assert tables(out) == tables(straight)
    assert prefixsim("sweep", sweep, "--out", out, "--resume", *SLOW).exit_code == 0
    assert (out / "journal.jsonl").read_bytes() == after, "nothing is left to do"


def test_runs_of_other_code_are_run_again(sweep: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out).exit_code == 0
    path = out / "journal.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["key"] = "0" * 32  # as other sources would have it
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out, "--resume").exit_code == 0
    assert num_lines(path) == RUNS + 1
    assert tables(out) == tables(finished)


def test_a_run_that_fails_is_a_row_and_stops_no_other(sweep: Path) -> None:
    sweep.write_text(SWEEP.replace("[30, 60, 600]", "[2, 60]"))  # one usable block holds no prompt
    out = sweep.parent / "out"
    result = prefixsim("sweep", sweep, "--jobs", "1", "--out", out)
    assert (
        result.exit_code == 1
        and "failed (4 of 8 runs): small: none of the 60 requests can run" in result.stdout
    )
    with open(out / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["error"]) for row in rows] == [True] * 4 + [False] * 4
    assert [row["mean_ttft_ms"] == "" for row in rows] == [True] * 4 + [False] * 4
    before = num_lines(out / "journal.jsonl")
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out, "--resume").exit_code == 1
    assert num_lines(out / "journal.jsonl") == before == 8


def square(number: int) -> int:
    return number**2


def square_or_die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_item_is_done_once(jobs: int) -> None:
    assert dict(on_processes(square, range(20), jobs=jobs)) == {i: i**2 for i in range(20)}
    assert list(on_processes(square, [], jobs=jobs)) == []


def test_no_more_processes_are_started_than_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def parallel(function: Any, items: Any, jobs: int) -> Iterator[tuple[int, Any]]:
        asked.append(jobs)
        return ((i, function(item)) for i, item in items)

    monkeypatch.setattr("sim.sweeps.processes._parallel", parallel)
    monkeypatch.setattr("joblib.cpu_count", lambda: 3)
    for jobs, num_items in ((None, 9), (2, 9), (1000, 9), (1000, 2)):
        assert len(list(on_processes(abs, range(num_items), jobs=jobs))) == num_items
    assert asked == [3, 2, 9, 3]


def test_an_item_that_kills_its_process_stops_no_other() -> None:
    found = list(on_processes(square_or_die, range(10), jobs=2))
    assert len(found) == 10
    assert dict(found) == {i: None if i == 3 else i**2 for i in range(10)}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A real Dask scheduler on loopback, and two workers of one thread each."""
    pytest.importorskip("distributed", reason="needs the extra [cluster]")
    file = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": tmp_path}
    options = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file), "--no-dashboard"]
    processes = [
        subprocess.Popen([sys.executable, "-m", "distributed.cli.dask_scheduler", *options], **quiet)
    ]  # type: ignore[call-overload]
    try:
        deadline = time.monotonic() + 60
        while not file.exists() or not file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        address = json.loads(file.read_text())["address"]
        options = [address, "--no-nanny", "--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1"]
        command = [sys.executable, "-m", "distributed.cli.dask_worker", *options]
        processes += [subprocess.Popen(command, **quiet) for _ in range(2)]  # type: ignore[call-overload]
        yield address, processes[1:]
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def test_on_a_cluster_with_a_worker_killed_the_bytes_are_the_same(
    sweep: Path, straight: Path, cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, workers = cluster
    with connected(address) as client:
        assert dict(on_cluster(abs, range(-20, 0), client=client)) == {i: 20 - i for i in range(20)}
        assert list(on_cluster(abs, [], client=client)) == []
    out = tmp_path / "out"
    process = started("sweep", sweep, "--cluster", address, "--out", out, *SLOW)
    wait_for(lambda: num_lines(out / "journal.jsonl") >= 2, process)
    workers[0].kill()
    assert num_lines(out / "journal.jsonl") < RUNS
    assert process.wait(timeout=120) == 0
    assert tables(out) == tables(straight)


def test_an_unreachable_cluster_is_told_soon(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed", reason="needs the extra [cluster]")
    monkeypatch.setattr("sim.sweeps.cluster.PATIENCE", 0.5)
    out = tmp_path / "out"
    for address in ("tcp://127.0.0.1:1", "nonsense", "tcp://127.0.0.1"):
        begin = time.monotonic()
        result = prefixsim("sweep", sweep, "--cluster", address, "--out", out)
        one_line(result, f"--cluster {address}: no Dask scheduler answers", "start one")
        assert time.monotonic() - begin < 20
    one_line(prefixsim("sweep", sweep, "--cluster", "tcp://127.0.0.1:1", "--jobs", "2"), "--jobs")
    assert not out.exists()


def test_something_else_at_the_address_of_a_cluster_is_told_in_one_line(sweep: Path, tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs the extra [cluster]")
    with socketserver.TCPServer(("127.0.0.1", 0), WebServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for address in (f"tcp://127.0.0.1:{server.server_address[1]}", "http://127.0.0.1:1", ""):
            command = [sys.executable, "-m", "sim.cli", "sweep", sweep, "--cluster", address]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
            told = f"prefixsim: --cluster {address}: no Dask scheduler answers there within 10 s"
            assert ended.returncode == 2 and ended.stdout == ""
            assert ended.stderr.startswith(told) and ended.stderr.count("\n") == 1
        server.shutdown()


class WebServer(socketserver.BaseRequestHandler):
    """What many a port has: it answers, and not in Dask's language."""

    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


TRACE = "".join(
    json.dumps(
        {"timestamp": 400 * i, "input_length": 1100, "output_length": 9, "hash_ids": [0, i % 3, i + 9]}
    )
    + "\n"
    for i in range(50)
)


def traced(folder: Path, block_size: int = 64, seed: int = 0) -> Scenario:
    (folder / "t.yaml").write_text(
        "cost: {base_us: 5000, token_us: 50}\nengine: {num_gpu_blocks: 60, max_model_len: 3000}\n"
        f"workload: {{kind: trace, path: {folder / 'trace.jsonl'}}}\n"
    )
    return load(folder / "t.yaml", [f"engine.block_size={block_size}", f"seed={seed}"])


def test_a_trace_at_hand_runs_to_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    for block_size, seed in ((64, 0), (256, 0), (64, 1), (64, 0)):
        scenario = traced(tmp_path, block_size, seed)
        assert run(with_content(scenario)).summary == run(scenario).summary
        assert isinstance(with_content(scenario).workload, Replay)
    assert 0.2 < run(scenario).summary["prefix_cache_hit_rate"] < 0.9
    trace.write_text(TRACE[: TRACE.index("\n", len(TRACE) // 2) + 1])
    assert run(with_content(scenario)).summary == run(scenario).summary, "a changed file is read again"
    monkeypatch.setattr("sim.sweeps.content.MOST_BYTES", 1000)
    assert with_content(traced(tmp_path, 128)).workload == scenario.workload, "what is too large is not kept"
    assert not _kept or sum(map(_size, _kept.values())) <= 1000


def test_a_worker_with_other_sources_is_told(sweep: Path, tmp_path: Path) -> None:
    def elsewhere(function: Any, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i, item in enumerate(items):
            result = function(item)
            yield i, result._replace(code="other") if isinstance(result, Outcome) else result

    with pytest.raises(InputError, match="a worker has other sources"):
        run_sweep(load_sweep(sweep), tmp_path / "out", elsewhere)
    assert num_lines(tmp_path / "out" / "journal.jsonl") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("  engine.num_gpu_blocks: [30, 60]", "another"),
        ("  engine.num_gpu_blocks: [30, 60, 601]", "601"),
        ("  engine.max_num_seqs: [30, 60, 600]", "max_num_seqs"),
    ],
)
def test_the_folder_of_another_sweep_is_left_alone(
    change: str, words: str, sweep: Path, finished: Path
) -> None:
    before = contents(finished)
    text = SWEEP.replace("  engine.num_gpu_blocks: [30, 60, 600]", change)
    for name, told in (("small", "this sweep as it was before a change"), ("other", "another sweep")):
        sweep.write_text(text.replace("name: small", f"name: {name}"))
        for more in ([], ["--resume"]):
            result = prefixsim("sweep", sweep, "--out", finished, *more)
            one_line(result, f"--out {finished}: holds {told}", "give another folder")
    assert words in result.stderr or told in result.stderr
    assert contents(finished) == before


def test_a_folder_that_no_sweep_wrote_is_left_alone(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "summer.jpg").write_bytes(b"!")
    one_line(prefixsim("sweep", sweep, "--out", tmp_path / "photos"), "summer.jpg, which no sweep wrote")
    one_line(prefixsim("sweep", sweep, "--out", sweep), "there is a file of that name")
    one_line(prefixsim("sweep", sweep, "--out", sweep / "below"), "--out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["photos", "small.yaml", "summer.jpg"]


def test_a_finished_sweep_is_made_anew(sweep: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out).exit_code == 0
        assert num_lines(out / "journal.jsonl") == RUNS
        assert tables(out) == tables(finished)


def test_a_metric_that_only_some_caches_have(tmp_path: Path) -> None:
    """It is known wherever its cache stands in the axis, and whatever that is told of prefixes."""
    path = tmp_path / "small.yaml"
    path.write_text(
        SWEEP.replace("max_model_len: 800", "max_model_len: 800, async_scheduling: false").split("axes:")[0]
        + "axes:\n  cache: [apc, {kind: paged, reserve_prefixes: true}]\nseeds: 1\n"
        + "metrics: [num_cow_copies]\n"
    )
    result = prefixsim("sweep", path, "--jobs", "1", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    with (tmp_path / "out" / "sweep.csv").open() as file:
        apc, paged = (row["num_cow_copies"] for row in csv.DictReader(file))
    assert apc == "" and paged != ""


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("mean_tfft_ms", "no run has mean_tfft_ms; did you mean mean_ttft_ms?"),
        ("saturation", "no run has saturation"),  # no number
        ("request_goodput", "no run has request_goodput"),  # without an slo
        ("token_fates.partial", "did you mean token_fates.partial_block?"),
    ],
)
def test_a_metric_that_does_not_exist(metric: str, words: str, sweep: Path, tmp_path: Path) -> None:
    sweep.write_text(f"{SWEEP}metrics: [mean_ttft_ms, {metric}]\n")
    one_line(
        prefixsim("sweep", sweep, "--jobs", "1", "--out", tmp_path / "out"), "small.yaml:12: metrics: ", words
    )
    assert not (tmp_path / "out").exists()


def test_goodput_is_a_metric_where_there_are_limits(sweep: Path, tmp_path: Path) -> None:
    sweep.write_text(f"{SWEEP}metrics: [request_goodput]\n")
    slo = ["--set", "slo.ttft=15"]
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", tmp_path / "out", *slo).exit_code == 0
    with open(tmp_path / "out" / "sweep.csv", newline="") as file:
        assert all(float(row["request_goodput"]) > 0 for row in csv.DictReader(file))


def test_a_full_disk_loses_nothing(
    sweep: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write = os.write
    room = [600]  # bytes

    def full(file: int, data: Any) -> int:
        if len(data) > room[0]:
            written = write(file, bytes(data)[: room[0]])
            room[0] = 0
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return written
        room[0] -= len(data)
        return write(file, data)

    with monkeypatch.context() as patch:
        patch.setattr("sim.sweeps.journal.os.write", full)
        result = prefixsim("sweep", sweep, "--jobs", "1", "--out", out)
    one_line(result, "journal.jsonl", "No space left on device; free some there", "--resume goes on")
    kept = (out / "journal.jsonl").read_bytes()
    assert kept.endswith(b"\n") and 0 < kept.count(b"\n") < RUNS
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out, "--resume").exit_code == 0
    assert (out / "journal.jsonl").read_bytes().startswith(kept)
    assert tables(out) == tables(finished)


def test_two_sweeps_do_not_write_one_journal(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out).exit_code == 0
    before = contents(out)
    with locked(out / "journal.jsonl"):
        one_line(prefixsim("sweep", sweep, "--jobs", "1", "--out", out), "another sweep writes there")
    assert contents(out) == before


def test_why_there_is_no_figure_is_told(sweep: Path, tmp_path: Path) -> None:
    sweep.write_text(SWEEP.replace("[30, 60, 600]", "[2, 3]"))
    result = prefixsim("sweep", sweep, "--jobs", "1", "--out", tmp_path / "out")
    assert result.exit_code == 1 and "no figure: every run failed; see sweep.csv" in result.stderr
    axes = "  engine.max_num_seqs: [8, 9]\n  engine.max_num_batched_tokens: [900, 901]\nseeds: 2"
    sweep.write_text(SWEEP.replace("[30, 60, 600]", "[60, 600]").replace("seeds: 2", axes))
    small = ["--set", "workload.num_requests=2"]
    result = prefixsim("sweep", sweep, "--jobs", "1", "--out", tmp_path / "four", *small)
    assert result.exit_code == 0 and "no figure: more axes than one can show" in result.stderr


def test_of_two_sweeps_at_once_the_second_touches_nothing(
    sweep: Path, finished: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other.yaml"
    other.write_text(SWEEP.replace("[30, 60, 600]", "[40, 60, 600]"))
    first = True

    def meanwhile(function: Any, items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        nonlocal first
        if first:
            first = False
            assert prefixsim("sweep", sweep, "--jobs", "1", "--out", out).exit_code == 0
        yield from on_processes(function, items, jobs=1)

    with pytest.raises(InputError, match="holds this sweep as it was before a change"):
        run_sweep(load_sweep(other), out, meanwhile)
    assert tables(out) == tables(finished)


def test_a_sweep_stopped_before_its_first_run_starts_anew(
    sweep: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "journal.jsonl").write_bytes(b'{"key": "torn')
    assert prefixsim("sweep", sweep, "--jobs", "1", "--out", tmp_path / "out").exit_code == 0
    assert tables(tmp_path / "out") == tables(finished)


def test_a_journal_reads_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    records = [Record(str(i), {"a": i / 3}, "") for i in range(3)]
    with locked(path) as file:
        kept = journal(file, path, resume=False)
        for record in records:
            kept.append(record)
    text = path.read_bytes()
    assert read_journal(path) == ({record.key: record for record in records}, len(text))
    for cut in range(1, len(text)):
        path.write_bytes(text[:cut])
        found, end = read_journal(path)
        assert list(found.values()) == records[: text[:cut].count(b"\n")]
        assert text[:end].count(b"\n") == len(found) and text[:end].endswith(b"\n" if found else b"")
    with locked(path) as file:
        kept = journal(file, path, resume=True)
        assert list(kept.records) == ["0", "1"]
        kept.append(records[2])
    assert path.read_bytes() == text


@pytest.mark.slow
def test_bands_cover_the_mean_wait_of_a_queue(tmp_path: Path) -> None:
    """M/D/1 at load .5, 200 times with 5 seeds: 90 to 99 % of the bands hold the mean wait of .5 s."""
    from sim.sweeps.bands import band

    path = tmp_path / "queue.yaml"
    path.write_text("""\
base:
  cost: {token_us: 1000}
  engine:
    {num_gpu_blocks: 100, max_model_len: 2000, max_num_seqs: 1, enable_prefix_caching: false,
     async_scheduling: false}
  workload: {kind: scan, num_requests: 5000, prompt_len: 1000, output_len: 1, request_rate: 0.5}
  measure_from: 200
axes:
  engine.max_num_batched_tokens: [8192]
seeds: 1000
metrics: [mean_queue_time_ms]
""")
    result = prefixsim("sweep", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    with open(tmp_path / "out" / "sweep.csv", newline="") as file:
        waits = [float(row["mean_queue_time_ms"]) for row in csv.DictReader(file)]
    bands = [band(waits[i : i + 5]) for i in range(0, 1000, 5)]
    covering = sum(one.low <= 500.0 <= one.high for one in bands)
    print(f"{covering} of 200 bands hold 500 ms; mean of all {sum(waits) / 1000:.2f}")
    assert 180 <= covering <= 198
