"""Traces fetched: from a local server, checked, once."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sim.errors import InputError
from sim.trace.fetch import SOURCES, Source, fetch

CONTENT = b'{"timestamp": 0}\n'
requests_seen: list[str] = []


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        requests_seen.append(self.path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of one file, and a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    requests_seen.clear()
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "trace.jsonl").write_bytes(CONTENT)
    web = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "web")))
    thread = threading.Thread(target=web.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    web.server_close()
    thread.join()


def source(url: str, content: bytes = CONTENT) -> dict[str, Source]:
    return {"mine": Source(url, hashlib.sha256(content).hexdigest(), "MIT", "a test")}


def test_fetched_once(server: str, tmp_path: Path) -> None:
    sources = source(f"{server}/trace.jsonl")
    path = fetch("mine", sources)
    assert path == tmp_path / "cache" / "prefixsim" / "traces" / "mine.jsonl"
    assert path.read_bytes() == CONTENT
    assert fetch("mine", sources) == path
    assert requests_seen == ["/trace.jsonl"]
    path.write_bytes(b"damaged")
    assert fetch("mine", sources).read_bytes() == CONTENT


def test_another_file_is_refused_and_not_kept(server: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the file that was recorded"):
        fetch("mine", source(f"{server}/trace.jsonl", b"other"))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_server_that_does_not_answer(server: str) -> None:
    with pytest.raises(InputError, match=r"cannot be fetched \(status 404\)"):
        fetch("mine", source(f"{server}/none.jsonl"))
    with pytest.raises(InputError, match=r"cannot be fetched \(ConnectionError\)"):
        fetch("mine", source("http://127.0.0.1:9/trace.jsonl"))


def test_unknown_names_are_told_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown trace 'mooncake_conv'; did you mean mooncake_conversation"):
        fetch("mooncake_conv")


def test_the_sources_are_complete() -> None:
    for name, one in SOURCES.items():
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert one.url.startswith("https://")
        assert re.search(r"/[0-9a-f]{40}/", one.url)  # of one commit, so that the hash can hold
        assert re.fullmatch(r"[0-9a-f]{64}", one.sha256)
        assert one.licence


FILES = {
    "mooncake_conversation": "mooncake_conversation_trace.jsonl.gz",
    "mooncake_synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "azure_2023_code": "azure2023_code.csv.gz",
    "azure_2023_conv": "azure2023_conv.csv.gz",
}


@pytest.mark.parametrize("name", FILES)
def test_hashes_are_of_the_traces_that_the_tests_read(name: str) -> None:
    import gzip

    from test_workloads_trace import shipped

    with gzip.open(shipped(FILES[name])) as file:
        assert hashlib.sha256(file.read()).hexdigest() == SOURCES[name].sha256
