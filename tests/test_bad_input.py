"""Bad input through the real command: one line on stderr, exit 2, no traceback, no result folder."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sim.cli import app
from sim.result_folder import RESULT_FILES

WORKLOAD = (
    "workload: {kind: fourteen_tokens, num_requests: 40, prompt_len: 64, shared_len: 48, request_rate: 5}\n"
)
SCENARIO = "engine: {block_size: 16, num_gpu_blocks: 100}\n" + WORKLOAD
TRACE = "engine: {block_size: 64, num_gpu_blocks: 1000}\nworkload: {kind: trace, path: t.jsonl}\n"


def row(timestamp: Any = 0, prompt: Any = 1000, output: Any = 5, ids: Any = (1, 2)) -> str:
    fields = {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(fields) + "\n"


ROWS = "".join(row(1000 * i) for i in range(5))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs: a scenario `s.yaml`, one of a trace `t.yaml`, and the trace."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "t.yaml").write_text(TRACE)
    (tmp_path / "t.jsonl").write_text(ROWS)
    return tmp_path


def prefixsim(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def messages(result: Any) -> list[str]:
    return [line for line in result.stderr.splitlines() if "compiling" not in line]


def refusal(folder: Path, *arguments: str) -> str:
    """The one line of a run that is refused and leaves nothing."""
    before = sorted(os.listdir(folder))
    result = prefixsim("run", *arguments, "--out", "out")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert sorted(os.listdir(folder)) == before
    (line,) = messages(result)
    assert line.startswith("prefixsim: ")
    return line


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.blok_size=16", ["engine.blok_size", "did you mean block_size?"]),
        ("workload.shared_length=3", ["did you mean shared_len?"]),
        ("slo.tfft=3", ["did you mean ttft?"]),
        ("a.b.c=3", ["a: unknown field"]),
        ("cache=null", ["cache: should be a cache's name (apc, radix, paged, contiguous) or a mapping"]),
        ("engine.block_size=abc", ["engine.block_size", "integer", "'abc'"]),
        ("engine.block_size=16.5", ["engine.block_size", "integer"]),
        ("engine.enable_prefix_caching=yes", ["engine.enable_prefix_caching", "boolean", "'yes'"]),
        ("name=3", ["name", "string"]),
        ("workload.prompt_len=-1", ["workload.prompt_len", "-1"]),
        ("workload.prompt_len=0", ["workload.prompt_len", "0"]),
        ("workload.prompt_len=1e300", ["workload.prompt_len", "integer", "1e+300"]),
        (f"workload.prompt_len={2**70}", ["workload.prompt_len", "2147483647"]),
        ("workload.request_rate=0", ["workload.request_rate", "greater than 0"]),
        ("workload.request_rate=nan", ["workload.request_rate", "nan"]),
        ("workload.request_rate=1e-300", ["check arrivals"]),
        ("workload.request_rate=1e-320", ["check arrivals"]),
        ("engine.watermark=.nan", ["engine.watermark", "nan"]),
        ("engine.block_size=0", ["engine.block_size", "1"]),
        ("engine.max_num_seqs=0", ["engine.max_num_seqs", "1"]),
        ("engine.num_gpu_blocks=1", ["engine.num_gpu_blocks", "2"]),
        ("engine.num_gpu_blocks=2", ["none of the 40 requests can run", "num_gpu_blocks"]),
        ("engine.max_model_len=10", ["none of the 40 requests can run", "max_model_len"]),
        ("engine.num_gpu_blocks=2147483647", ["memory"]),
        ("engine.max_num_seqs=2147483647", ["memory"]),
        (f"seed={'9' * 5000}", ["seed", "integer"]),
        ("seed=!!int x", ["tag"]),
        ("name=!!timestamp x", ["tag"]),
        ("name=!!bool maybe", ["tag"]),
        ("engine.block_size", ["path=value"]),
        ("=3", ["path=value"]),
        ("name=*x", ["alias"]),
        ("cost={form: whole_step, base_us: 1e300}", ["cost.base_us", "1e+300"]),
        ("cost=nothing", ["unknown calibration 'nothing'"]),
        ("gpu=h100", ["h100"]),
    ],
)
def test_bad_field(folder: Path, override: str, words: list[str]) -> None:
    line = refusal(folder, "s.yaml", "--set", override)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["empty"]),
        ("- 3\n", ["b.yaml:1: ", "mapping"]),
        (b"\xff\xfe\x80", ["UTF-8"]),
        (b"a: \x00\x01b\n", ["not valid YAML"]),
        (SCENARIO.encode("utf-16"), ["UTF-8"]),
        ("engine:\n\tblock_size: 3\n", ["b.yaml:2: ", "\\t"]),
        ("seed: 1\nseed: 2\n" + WORKLOAD, ["b.yaml:2: ", "given twice"]),
        ("engine: {block_size: [}\n" + WORKLOAD, ["b.yaml:1: ", "not valid YAML"]),
        ("name: " + "[" * 5000, ["nested too deeply"]),
        ("engine: &e {block_size: *e}\n" + WORKLOAD, ["nested too deeply"]),
        ("name: !!set {a}\n" + WORKLOAD, ["b.yaml:1: ", "tag"]),
        ("? [a]\n: 3\n" + WORKLOAD, ["b.yaml:1: ", "a field name should be a word"]),
        (WORKLOAD + "---\n" + WORKLOAD, ["b.yaml:2: ", "another document"]),
        ("base: {}\naxes: {}\n", ["b.yaml: is a sweep, not a scenario; try prefixsim sweep"]),
    ],
)
def test_bad_file(folder: Path, content: str | bytes, words: list[str]) -> None:
    (folder / "b.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    line = refusal(folder, "b.yaml")
    for word in words:
        assert word in line


def test_a_few_aliases_that_stand_for_very_much(folder: Path) -> None:
    names = "abcdefghijkl"
    text = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, name in itertools.pairwise(names):
        text += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    (folder / "b.yaml").write_text(text)
    assert "without aliases" in refusal(folder, "b.yaml")


@pytest.mark.parametrize("change", ["\r\n", "bom", "anchors"])
def test_what_editors_do_to_a_scenario_is_fine(folder: Path, change: str) -> None:
    text = {
        "\r\n": SCENARIO.replace("\n", "\r\n"),
        "bom": "\ufeff" + SCENARIO,
        "anchors": "name: &n x\nmodel: llama-3.1-8b\n" + SCENARIO,
    }[change]
    (folder / "b.yaml").write_bytes(text.encode())
    assert prefixsim("run", "b.yaml").exit_code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no requests"]),
        ("\n  \n\n", ["no requests"]),
        (ROWS + "{oops\n" + ROWS, ["line 6", "not JSON", "{oops"]),
        (ROWS + row(5000)[:40], ["line 6", "not JSON"]),
        ("[1, 2]\n", ["line 1", "not a JSON object"]),
        ("3\n", ["line 1", "not a JSON object"]),
        ('{"a": 1}\n', ["line 1", "format is unknown"]),
        ("[" * 100_000, ["line 1", "not JSON"]),
        (ROWS + ROWS, ["line 6", "timestamp 0 comes after 4000", "sort"]),
        (ROWS + row(5000, prompt=-1000), ["line 6", "input_length is -1000"]),
        (ROWS + row(5000, prompt=0, ids=[]), ["line 6", "input_length is 0"]),
        (ROWS + row(5000, output=-1), ["line 6", "output_length is -1"]),
        (ROWS + row(5000, prompt=2**70), ["line 6", "input_length is 1180591620717411303424"]),
        (ROWS + row(5000, ids=[1]), ["line 6", "hash_ids has 1 ids"]),
        (ROWS + row(5000, ids="ab"), ["line 6", "hash_ids is 'ab'"]),
        (ROWS + row(float("nan")), ["line 6", "timestamp is nan"]),
        (ROWS + row(float("inf")), ["line 6", "timestamp is inf"]),
        (ROWS + row(-5), ["line 6", "timestamp is -5"]),
        (ROWS + row("5"), ["line 6", "timestamp is '5'"]),
        (ROWS + row(None), ["line 6", "timestamp is None"]),
        (ROWS + row(1e299), ["line 6", "timestamp is 1e+299", "from 0 to 1e+15"]),
        (b"\x00" * 3000, ["line 1", "not JSON"]),
        (bytes(range(256)) * 20, ["line 1", "not JSON"]),
        (ROWS.encode("utf-16"), ["line 1", "not JSON"]),
        (gzip.compress(ROWS.encode())[:-10], ["gzip data is damaged", "fetch the file again"]),
        (gzip.compress(ROWS.encode())[:5], ["gzip data is damaged"]),
        (gzip.compress(ROWS.encode())[:40] + b"\x00" * 40, ["gzip data is damaged"]),
    ],
)
def test_bad_trace(folder: Path, content: str | bytes, words: list[str]) -> None:
    (folder / "t.jsonl").write_bytes(content.encode() if isinstance(content, str) else content)
    line = refusal(folder, "t.yaml")
    assert "t.jsonl" in line or "t: " in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "content",
    [ROWS.replace("\n", "\r\n").encode(), gzip.compress(ROWS.encode()), ROWS.replace("\n", "\n\n").encode()],
)
def test_trace_in_any_usual_form(folder: Path, content: bytes) -> None:
    (folder / "t.jsonl").write_bytes(content)
    result = prefixsim("run", "t.yaml", "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["completed"] == 5


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("p,t,p,o", "line 1: 2 columns are named 'p', which is prompt_len: rename all but one"),
        ("t,x,p,o", None),
        ("t,x,p,o,x", None),
    ],
)
def test_columns_of_one_name(folder: Path, header: str, says: str | None) -> None:
    names = header.split(",")
    (folder / "t.csv").write_text(f"{header}\n" + ",".join("9" for _ in names) + "\n")
    columns = "workload.columns={arrival_time: t, prompt_len: p, output_len: o}"
    arguments = ["run", "t.yaml", "--set", "workload.path=t.csv", "--set", columns]
    result = prefixsim(*arguments)
    assert result.exit_code == (0 if says is None else 2), result.stderr
    assert says is None or f"t.csv, {says}" in result.stderr


def test_nothing_is_compiled_for_bad_input(folder: Path) -> None:
    """So that the one line is the only one, in a first run as well."""
    (folder / "bad.yaml").write_text("gpu: h100-sxm\n")
    (folder / "bad.jsonl").write_text(ROWS + row(5000, prompt=-1))
    environment = {"NUMBA_DISABLE_JIT": "0", "NUMBA_CACHE_DIR": str(folder / "cache")}
    for arguments in (
        ["run", "s.yaml", "--set", "cost=bad.yaml"],
        ["trace", "describe", "bad.jsonl"],
    ):
        process = command(*arguments, env=environment)
        shown, said = process.communicate(timeout=60)
        assert (process.returncode, shown, said.count("\n")) == (2, "", 1), said
        assert "compiling" not in said


def test_missing_files(folder: Path) -> None:
    assert "none.yaml: cannot read the scenario: no such file" in refusal(folder, "none.yaml")
    assert "is a directory" in refusal(folder, str(folder))
    assert "no file none.jsonl" in refusal(folder, "t.yaml", "--set", "workload.path=none.jsonl")
    assert "no file /" in refusal(folder, "t.yaml", "--set", "workload.path=/")
    assert "100 is neither a part" in refusal(folder, "t.yaml", "--set", "engine.block_size=100")


def test_prompts_that_can_never_fit_are_refused_one_by_one(folder: Path) -> None:
    (folder / "t.jsonl").write_text(row(0) + row(1000, prompt=100_000, ids=list(range(196))) + row(2000))
    result = prefixsim("run", "t.yaml", "--format", "json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    (line,) = messages(result)
    assert (
        line.startswith("prefixsim: warning: 1 of 3 requests can never fit in 63936 tokens") and ": 1" in line
    )
    assert "none of the 3 requests can run" in refusal(folder, "t.yaml", "--set", "engine.num_gpu_blocks=3")


def test_a_block_no_request_can_fill_is_a_warning(folder: Path) -> None:
    result = prefixsim("run", "s.yaml", "--format", "json", "--set", "engine.block_size=64")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["prefix_cache_hits"] == 0 and summary["completed"] == 40
    (line,) = messages(result)
    assert line.startswith("prefixsim: warning: no prompt is longer than one block of 64 tokens")
    assert "hits will be 0" in line


@pytest.mark.parametrize("out", ["s.yaml", "s.yaml/out", "/proc/out", "x" * 300, "/"])
def test_result_folder_that_cannot_be_written(folder: Path, out: str) -> None:
    before = sorted(os.listdir(folder))
    result = prefixsim("run", "s.yaml", "--out", out)
    assert result.exit_code == 2
    (line,) = messages(result)
    assert line.startswith("prefixsim: --out ") and len(line) < 500
    assert sorted(os.listdir(folder)) == before


# What happens to the process: the real command, in plain Python so that it starts at once.

ENVIRONMENT = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
LONG = ["run", "s.yaml", "--out", "out", "--set", "workload.num_requests=100000000"]


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "sim.cli", *arguments]
    root = str(Path(__file__).parent.parent)
    environment = {**ENVIRONMENT, "PYTHONPATH": root, **options.pop("env", {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, env=environment, **{**pipes, **options})


def stopped_amid(folder: Path, number: signal.Signals) -> tuple[int, str]:
    """Stop a long run once it has begun to write; its status and what it said."""
    process = command(*LONG)
    deadline = time.monotonic() + 60
    while not list(folder.glob(".out.*.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    status, said = stopped_amid(folder, signal.SIGINT)
    assert (status, said) == (130, "prefixsim: interrupted; nothing was written\n")
    assert sorted(os.listdir(folder)) == before


def test_terminated_leaves_nothing(folder: Path) -> None:
    before = sorted(os.listdir(folder))
    status, said = stopped_amid(folder, signal.SIGTERM)
    assert (status, said) == (143, "")
    assert sorted(os.listdir(folder)) == before


def test_killed_leaves_nothing_under_the_final_name(folder: Path) -> None:
    assert stopped_amid(folder, signal.SIGKILL)[0] == -9
    assert not (folder / "out").exists()
    (left,) = folder.glob(".out.*.partial")
    assert prefixsim("run", "s.yaml", "--out", "out").exit_code == 0
    assert left.exists(), "it might be another run's, at work"
    yesterday = time.time() - 2 * 24 * 3600
    for path in (*left.iterdir(), left):
        os.utime(path, (yesterday, yesterday))
    assert prefixsim("run", "s.yaml", "--out", "out").exit_code == 0
    assert not list(folder.glob(".out.*"))
    assert {path.name for path in (folder / "out").iterdir()} == RESULT_FILES


def limited_to(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("size", [0, 100, 3000, 9000, 30_000])
def test_full_disk(folder: Path, size: int) -> None:
    before = sorted(os.listdir(folder))
    environment = {"MPLCONFIGDIR": "/nowhere"}
    process = command("run", "s.yaml", "--out", "out", preexec_fn=limited_to(size), env=environment)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("prefixsim")]
    assert "out" in line and "Traceback" not in said
    assert sorted(os.listdir(folder)) == before


def test_full_disk_under_stdout(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        process = command("run", "s.yaml", "--format", "json", stdout=full)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = said.splitlines()
    assert line.startswith("prefixsim: ") and "No space left" in line


def test_reader_that_went_away(folder: Path) -> None:
    process = command("run", "s.yaml", "--format", "json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


def test_terminal_without_utf8(folder: Path) -> None:
    (folder / "b.yaml").write_text("name: schön 日本\n" + SCENARIO, encoding="utf-8")
    for output in ("json", "table"):
        environment = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        process = command("run", "b.yaml", "--format", output, env=environment)
        shown, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
        if output == "json":
            assert json.loads(shown)["name"] == "schön 日本"


@pytest.mark.parametrize(
    "changes",
    [
        ["workload.arrival=constant", "workload.request_rate=1e-308"],
        ["workload.arrival=step", "workload.schedule=[[0, 1e-308]]", "workload.request_rate=.inf"],
    ],
)
def test_a_run_beyond_all_time_corrupts_nothing(changes: list[str]) -> None:
    """Infinity less infinity is in no bin of a histogram; in plain Python a wrong bin is an IndexError."""
    scan = str(Path(__file__).parent.parent / "scenarios" / "scan.yaml")
    sets = [word for change in ["workload.num_requests=50", *changes] for word in ("--set", change)]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    program = [sys.executable, "-m", "sim.cli", "run", scan, *sets]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    assert done.returncode == 2, done.stderr
    assert "too late for a clock" in done.stderr and done.stderr.count("\n") == 1
