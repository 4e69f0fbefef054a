"""Record what a real vLLM's scheduler decides, to be replayed decision by decision.

    vllm serve MODEL --scheduler-cls sim.integrations.vllm_recorder.RecordingScheduler

That is the whole change: each override below calls vLLM's own method and notes what came of it, so
nothing is decided differently. The file is a gzip of JSON lines in the order of the calls
(docs/recordings.md has every field); `prefixsim verify FILE` replays it.

    PREFIXSIM_RECORDING=FILE      where to (prefixsim-recording-PID.jsonl.gz in the working folder)
    PREFIXSIM_RECORD_TOKENS=1     token ids as they are; by default no token leaves the server

By default a prompt is written as one 64-bit id for each 16 tokens or so, a hash with a random key that is
never written: two ids are equal where all tokens up to there are, and nothing else can be read from them.

The file can be cut anywhere: what was decided is on disk a second later, or as soon as the server is idle.
Memory is bounded by the requests in the server. A fault of the recorder (a full disk) ends the recording
with a warning, never the server.

This module needs the standard library and vLLM only, and may be copied to a server by itself.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import logging
import os
import platform
import time
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from itertools import compress, count, repeat
from operator import ne
from pathlib import Path
from typing import Any, NoReturn

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

SCHEMA = "prefixsim_recording/2"
KNOWN = ("0.32.", "0.33.")  # releases whose scheduler was replayed or read
FLUSH_SECONDS = 1.0
BUFFER_CHARS = 1 << 16
CHUNK_TOKENS = 16  # at most: see chunk_size
SUFFIXES = (".jsonl.gz", ".json.gz", ".gz")

logger = logging.getLogger("vllm.prefixsim")  # vLLM formats and shows what is below its own name
to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, recorded; with async scheduling on, an AsyncRecordingScheduler is made instead."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is RecordingScheduler and vllm_config.scheduler_config.async_scheduling:
            return super().__new__(AsyncRecordingScheduler)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(Scheduler)
        super().__init__(*args, **kwargs)
        check_server(self)
        try:
            self._recording = Recording(self)
        except AttributeError as error:
            unknown_version(str(error))
        weakref.finalize(self, self._recording.end)  # an engine in the caller's process is not shut down

    def schedule(self, throttle_prefills: bool = False) -> Any:
        start = self._recording.now()
        output = super().schedule(throttle_prefills)
        self._recording.scheduled(self, output, start, throttle_prefills)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        start = self._recording.update_begins()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._recording.updated(scheduler_output, outputs, start)
        return outputs

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:  # else the next input of a streaming session
            self._recording.added(request)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        self._recording.abort_begins()
        finished = super().finish_requests(request_ids, finished_status)
        self._recording.aborted(request_ids is None)
        return finished

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        self._recording.reset(done)
        return bool(done)

    def set_pause_state(self, pause_state: Any) -> None:
        super().set_pause_state(pause_state)
        self._recording.paused(pause_state)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        self._recording.preempts(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self._recording.ends(request)
        return super()._free_request(request, delay_free_blocks)

    def shutdown(self) -> None:
        self._recording.end()
        super().shutdown()


class AsyncRecordingScheduler(RecordingScheduler, AsyncScheduler):
    """The same over vLLM's AsyncScheduler: its schedule of step k + 1 comes before its update of step k."""


def noted(note: Callable[..., None]) -> Callable[..., None]:
    """Count the note's time as the recorder's, and let no fault of it reach the server."""

    @functools.wraps(note)
    def call(self: Recording, *args: Any) -> None:
        if self.file is None:
            return
        begin = time.perf_counter_ns()
        try:
            note(self, *args)
        except Exception as error:
            self.give_up(error)
        self.spent_ns += time.perf_counter_ns() - begin

    return call


class Recording:
    """One server's recording: what lives between the calls, and a line for each.

    Requests are numbered in order of arrival at the scheduler, schedules from 0. Times are integer
    microseconds of the monotonic clock since the recording began.
    """

    def __init__(self, scheduler: Any) -> None:
        self.pool = scheduler.kv_cache_manager.block_pool
        self.started_ns = time.monotonic_ns()
        self.wall_at_start = time.time()
        self.with_tokens = wants_tokens()
        self.chunk = chunk_size(scheduler.hash_block_size)
        self.key = os.urandom(32)
        self.live: dict[str, Live] = {}
        self.num_requests = 0
        self.num_steps = 0
        self.in_flight: deque[tuple[Any, int]] = deque()  # scheduler outputs without their update yet
        self.last: tuple[list[str], list[int]] = ([], [])  # schedule: names, computed if they decode on
        self.taken: list[Any] = []  # blocks, since the last schedule
        self.evicted: list[Any] = []
        self.preempted: list[list[int]] = []
        self.ended: list[Any] = []  # requests, since the last line that ended some
        self.updating = False
        self.closing = False  # every request was aborted: a shutdown, or a pause
        self.before_abort: tuple[int, int] | None = None  # in an update: free blocks, requests ended
        self.spent_ns = 0
        header = self.header(scheduler)
        self.file: LineFile | None = LineFile(recording_path(scheduler))
        self.file.write(header)
        self.file.flush()
        self.watch(self.pool)
        content = "token ids" if self.with_tokens else "prompts as keyed hashes"
        logger.info("prefixsim records this server's scheduling to %s (%s)", self.file.path, content)

    def now(self) -> int:
        return (time.monotonic_ns() - self.started_ns) // 1000

    def watch(self, pool: Any) -> None:
        """Note the blocks that the pool hands out, and those among them that lose their key."""
        take, evict = pool.get_new_blocks, pool._maybe_evict_cached_block
        note_taken, note_evicted = self.taken.extend, self.evicted.append

        def get_new_blocks(num_blocks: int) -> Any:
            blocks = take(num_blocks)
            note_taken(blocks)
            return blocks

        def maybe_evict_cached_block(block: Any) -> Any:
            evicted = evict(block)
            if evicted:
                note_evicted(block)
            return evicted

        pool.get_new_blocks = get_new_blocks
        pool._maybe_evict_cached_block = maybe_evict_cached_block

    @noted
    def added(self, request: Any) -> None:
        live = self.live[request.request_id] = Live(self.num_requests, self.key)
        self.num_requests += 1
        self.closing = False
        lora = request.lora_request
        self.write(
            {
                "add": live.number,
                "t": self.now(),
                "id": request.request_id,
                "arr": round((request.arrival_time - self.wall_at_start) * 1e6),
                "np": request.num_prompt_tokens,
                "max": request.max_tokens,
            },
            prio=request.priority,
            salt=self.hashed(request.cache_salt) if request.cache_salt else None,
            lora=self.hashed(f"{lora.lora_name}\0{lora.lora_path}") if lora else None,
            uses=uses(request),
            c=self.content(live, request),
        )

    @noted
    def scheduled(self, scheduler: Any, output: Any, start: int, throttled: bool) -> None:
        step, self.num_steps = self.num_steps, self.num_steps + 1
        self.in_flight.append((output, step))
        sequence = self.sequence(scheduler.requests, output.num_scheduled_tokens)
        new, resumed = self.admissions(scheduler.requests, output)
        taken, evicted = block_ids(self.taken), block_ids(self.evicted)
        self.write(
            {
                "s": sequence,
                "i": step,
                "t": [start, self.now()],
                "fr": self.pool.get_num_free_blocks(),
                "q": list(scheduler.get_request_counts()),
            },
            new=new,
            res=resumed,
            pre=self.preempted,
            nb=len(taken),
            bcrc=checksum(taken),
            nev=len(evicted),
            ecrc=checksum(evicted),
            throttle=throttled,
        )
        self.taken.clear()
        self.evicted.clear()
        self.preempted = []

    def sequence(self, requests: dict[str, Any], scheduled: dict[str, int]) -> list[Any]:
        """What is scheduled, in order.

        An entry is [request, tokens, tokens computed before]; a run of k requests that each go on for one
        token, in the order of the schedule before, is the number k, and k of that schedule that are left
        out between such runs are -k: most of a large batch decodes on.
        """
        names, tokens = list(scheduled), list(scheduled.values())
        after = [requests[name].num_computed_tokens for name in names]
        was, expected = self.last
        self.last = (names, [computed + 1 for computed in after])
        items: list[Any] = []
        i = j = 0
        while j < len(names):
            run = min(len(was) - i, len(names) - j)
            for now, due in (names, was[i:]), (after, expected[i:]), (tokens, repeat(1)):
                run = next(compress(count(), map(ne, now[j : j + run], due)), run)  # up to what differs
            if run:
                items.append(run)
                i, j = i + run, j + run
                continue
            try:  # the run may go on behind requests that are left out
                ahead = was.index(names[j], i)
            except ValueError:
                ahead = i
            if ahead > i and tokens[j] == 1 and expected[ahead] == after[j]:
                items.append(i - ahead)
                i = ahead
            else:
                items.append([self.live[names[j]].number, tokens[j], after[j] - tokens[j]])
                j += 1
        return items

    def admissions(self, requests: dict[str, Any], output: Any) -> tuple[list[list[int]], list[list[int]]]:
        """The [request, hit tokens] of first admissions and of those resumed after a preemption."""
        names = {data.req_id for data in output.scheduled_new_reqs}
        names |= output.scheduled_cached_reqs.resumed_req_ids
        new: list[list[int]] = []
        resumed: list[list[int]] = []
        if names:
            for name, tokens in output.num_scheduled_tokens.items():
                if name in names:
                    live, request = self.live[name], requests[name]
                    hit = request.num_computed_tokens - tokens
                    if live.hit is None:
                        live.hit = hit
                    (resumed if request.num_preemptions else new).append([live.number, hit])
        return new, resumed

    @noted
    def preempts(self, request: Any) -> None:
        number = self.live[request.request_id].number
        self.preempted.append([number, request.num_computed_tokens, request.num_output_tokens])
        names, expected = self.last
        if request.request_id in names:
            expected[names.index(request.request_id)] = -1  # resumed at once, it does not decode on

    def update_begins(self) -> int:
        self.updating = True
        return self.now()

    @noted
    def updated(self, scheduler_output: Any, outputs: dict[int, Any], start: int) -> None:
        end = self.now()
        output, step = self.in_flight.popleft()
        while output is not scheduler_output:
            output, step = self.in_flight.popleft()
        free, num_ended = self.before_abort or (self.pool.get_num_free_blocks(), len(self.ended))
        ended, aborted = self.ended[:num_ended], self.ended[num_ended:]
        self.ended, self.before_abort, self.updating = [], None, False
        early = [r for r in ended if r.num_output_tokens < r.max_tokens]
        self.write(
            {"u": step, "t": [start, end], "fr2": free},
            fin=self.numbers(ended),
            stop=self.numbers(early),
            pcs=cache_statistics(outputs),
        )
        self.write_ends(ended, end)
        self.write_abort(aborted, end)
        self.may_be_last()

    def abort_begins(self) -> None:
        """Requests that end from here on in an update were not ended by their last token."""
        if self.updating and self.before_abort is None:
            self.before_abort = (self.pool.get_num_free_blocks(), len(self.ended))

    @noted
    def aborted(self, everything: bool) -> None:
        self.closing |= everything
        if not self.updating:  # else its line comes behind that of the update
            ended, self.ended = self.ended, []
            self.write_abort(ended, self.now())
            self.may_be_last()

    def may_be_last(self) -> None:
        """With nothing left to do, leave a file that is whole: a server that shuts down may be killed."""
        if not self.live and self.file is not None:
            if self.closing:
                self.file.write(self.last_line(self.file.num_lines))
                self.file.finish()
            else:
                self.file.flush()

    def write_abort(self, requests: list[Any], at: int) -> None:
        if requests:
            self.write({"abort": self.numbers(requests), "t": at})
            self.write_ends(requests, at)

    @noted
    def ends(self, request: Any) -> None:
        self.ended.append(request)

    def write_ends(self, requests: list[Any], at: int) -> None:
        """A line for each request that has ended: what it really was, with its answer."""
        for request in requests:
            live = self.live.pop(request.request_id)
            self.write(
                {"o": live.number, "t": at, "n": request.num_tokens},
                cached=live.hit,
                npre=request.num_preemptions,
                c=self.content(live, request),
            )

    def numbers(self, requests: Iterable[Any]) -> list[int]:
        return [self.live[request.request_id].number for request in requests]

    @noted
    def reset(self, done: bool) -> None:
        preempted, self.preempted = self.preempted, []
        self.write({"reset": bool(done), "t": self.now()}, pre=preempted)

    @noted
    def paused(self, state: Any) -> None:
        self.write({"pause": state.name, "t": self.now()})

    def content(self, live: Live, request: Any) -> str | list[int]:
        """The request's tokens that are not written yet: themselves, or the ids of their full chunks."""
        tokens: list[int] = request.all_token_ids[live.written :]
        if self.with_tokens:
            live.written += len(tokens)
            return tokens
        full = len(tokens) // self.chunk * self.chunk
        ids = chunk_ids(live.hash, tokens[:full], self.chunk, live.written, images_of(request))
        live.written += full
        return ids

    def hashed(self, text: str) -> str:
        return blake2b(text.encode(), key=self.key, digest_size=8).hexdigest()

    def header(self, scheduler: Any) -> str:
        free = block_ids(self.pool.free_block_queue.get_all_free_blocks())
        config = scheduler.vllm_config
        return to_json(
            {
                "schema": SCHEMA,
                "versions": {
                    "vllm": vllm.__version__,
                    "torch": version_of("torch"),
                    "python": platform.python_version(),
                },
                "model": str(config.model_config.served_model_name),
                "device": device_name(config),
                "effective": effective(scheduler),
                "content": {"form": "token_ids" if self.with_tokens else "hashed", "tokens": self.chunk},
                "free0": None if free == list(range(1, len(free) + 1)) else free,
                "wall": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.wall_at_start)),
            }
        )

    def write(self, line: dict[str, Any], **fields: Any) -> None:
        """One line: what is always there, and those fields that are not empty."""
        assert self.file is not None
        self.file.write(to_json(line | {name: value for name, value in fields.items() if value}))

    def end(self) -> None:
        """Close the recording with its last line; does nothing the second time."""
        if self.file is None:
            return
        file, self.file = self.file, None
        try:
            file.write(self.last_line(file.num_lines))
            file.close()
        except Exception as error:
            logger.warning("prefixsim: the recording %s has no end: %s", file.path, error)

    def last_line(self, num_lines: int) -> str:
        return to_json(
            {
                "end": True,
                "t": self.now(),
                "end_free": checksum(block_ids(self.pool.free_block_queue.get_all_free_blocks())),
                "recorder_us": self.spent_ns // 1000,
                "steps": self.num_steps,
                "lines": num_lines,
            }
        )

    def give_up(self, error: Exception) -> None:
        """Record no more; the server goes on."""
        file, self.file = self.file, None
        logger.warning("prefixsim stops recording: %s: %s", type(error).__name__, error)
        for name in ("get_new_blocks", "_maybe_evict_cached_block"):
            vars(self.pool).pop(name, None)
        if file is not None:
            try:
                file.write(to_json({"failed": f"{type(error).__name__}: {error}", "t": self.now()}))
                file.close()
            except Exception:
                logger.debug("prefixsim: the recording's last line could not be written", exc_info=True)


class Live:
    """A request in the server: its number, the hash of its tokens, and how many of them are written."""

    __slots__ = ("hash", "hit", "number", "written")

    def __init__(self, number: int, key: bytes) -> None:
        self.number = number
        self.hash = blake2b(key=key, digest_size=8)
        self.written = 0
        self.hit: int | None = None  # of the first admission


class LineFile:
    """A gzip file of lines, written as a stream; what was flushed survives the death of the process."""

    def __init__(self, path: Path) -> None:
        try:
            self.raw = path.open("xb", buffering=0)
        except FileExistsError:
            fail(f"{path} exists; move it away or set PREFIXSIM_RECORDING to another file")
        except OSError as error:
            fail(f"cannot write {path}: {error.strerror}; set PREFIXSIM_RECORDING to a file that can be")
        self.path = path
        self.owner = os.getpid()  # a forked child must not write into it
        self.gzip = new_gzip()
        self.lines: list[str] = []
        self.chars = 0
        self.num_lines = 0
        self.flushed = time.monotonic()

    def write(self, line: str) -> None:
        self.lines.append(line)
        self.chars += len(line)
        self.num_lines += 1
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()
        elif self.chars > BUFFER_CHARS:
            self.compress()

    def compress(self) -> None:
        self.lines.append("")
        self.put(self.gzip.compress("\n".join(self.lines).encode()))
        self.lines = []
        self.chars = 0

    def flush(self) -> None:
        """What was written is on disk, and readable, from here on."""
        self.compress()
        self.put(self.gzip.flush(zlib.Z_SYNC_FLUSH))
        self.flushed = time.monotonic()

    def finish(self) -> None:
        """The file is whole, should nothing follow; what does is a gzip member behind the last one."""
        self.compress()
        self.put(self.gzip.flush())
        self.gzip = new_gzip()

    def close(self) -> None:
        self.finish()
        self.raw.close()

    def put(self, data: bytes) -> None:
        if os.getpid() == self.owner:
            view = memoryview(data)
            while view:
                view = view[self.raw.write(view) :]


def new_gzip() -> Any:
    return zlib.compressobj(1, zlib.DEFLATED, 31)


def chunk_size(hash_block_size: int) -> int:
    """Tokens to a chunk: the largest divisor of the block size up to 16, so that chunks tile blocks."""
    size = max(n for n in range(1, CHUNK_TOKENS + 1) if hash_block_size % n == 0)
    return size if size > 1 else hash_block_size


def chunk_ids(
    running: Any, tokens: list[int], size: int, start: int, images: list[tuple[int, int, str]]
) -> str:
    """16 hex digits for each chunk of `tokens`: the digest of all that `running` has seen up to its end.

    `running` is a blake2b object that has seen the tokens before position `start`; it is fed the new ones,
    and the name and place of each image (first position, position after the last, name) that is in a chunk.
    """
    raw = array("i", tokens).tobytes()
    width = size * array("i").itemsize
    feed, digest = running.update, running.digest
    ids: list[bytes] = []
    for at in range(0, len(raw), width):
        feed(raw[at : at + width])
        if images:
            begin = start + at // width * size
            for first, behind, name in images:
                if first < begin + size and begin < behind:
                    feed(f"{name}@{first - begin}".encode())
        ids.append(digest())
    return b"".join(ids).hex()


def images_of(request: Any) -> list[tuple[int, int, str]]:
    spans = ((item.mm_position, item.identifier) for item in request.mm_features)
    return [(span.offset, span.offset + span.length, name) for span, name in spans]


def uses(request: Any) -> list[str]:
    """What a request asks for that is not in its tokens, and that a replay may not know."""
    asked = {
        "images": bool(request.mm_features),
        "embeds": request.prompt_embeds is not None,
        "grammar": request.use_structured_output,
        "streaming": request.resumable,
        "pooling": request.pooling_params is not None,
        "no_cache_read": request.skip_reading_prefix_cache,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def block_ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def checksum(ids: list[int]) -> int:
    """crc32 of the ids in order, with commas between them; 0 of none."""
    return zlib.crc32(",".join(map(str, ids)).encode())


def cache_statistics(outputs: dict[int, Any]) -> list[int] | None:
    """Requests, queried and hit tokens of first admissions, then of resumed ones, since the last update."""
    for output in outputs.values():
        if output.scheduler_stats is not None:
            s = output.scheduler_stats.prefix_cache_stats
            counts = [s.requests, s.queries, s.hits, s.preempted_requests, s.preempted_queries]
            counts.append(s.preempted_hits)
            return counts if any(counts) else None
    return None


def effective(scheduler: Any) -> dict[str, Any]:
    """The settings that the scheduler really uses, by their names in version 1 of the format."""
    config, cache, asked = scheduler.vllm_config, scheduler.cache_config, scheduler.scheduler_config
    groups = scheduler.kv_cache_config.kv_cache_groups
    lora, parallel = config.lora_config, config.parallel_config
    return {
        "num_gpu_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "block_size": scheduler.block_size,
        "hash_block_size": scheduler.hash_block_size,
        "enable_prefix_caching": bool(cache.enable_prefix_caching),
        "hash_algo": cache.prefix_caching_hash_algo,
        "max_num_seqs": scheduler.max_num_running_reqs,
        "max_num_active_seqs": scheduler.max_num_active_reqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "max_num_scheduled_tokens": scheduler.max_num_scheduled_tokens,
        "max_model_len": scheduler.max_model_len,
        "policy": scheduler.policy.value,
        "chunked": bool(asked.enable_chunked_prefill),
        "long_prefill_token_threshold": asked.long_prefill_token_threshold,
        "long_prefill_token_threshold_adaptive": asked.long_prefill_token_threshold_adaptive,
        "watermark": asked.watermark,
        "reserve_full_isl": asked.scheduler_reserve_full_isl,
        "prefill_schedule_interval": asked.prefill_schedule_interval,
        "async_scheduling": bool(asked.async_scheduling),
        "scheduler_base": "AsyncScheduler" if isinstance(scheduler, AsyncScheduler) else "Scheduler",
        "kv_groups": [str(group.kv_cache_spec) for group in groups],
        "max_loras": lora.max_loras if lora else None,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "kv_cache_dtype": cache.cache_dtype,
        "log_stats": bool(scheduler.log_stats),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(config: Any) -> str:
    try:
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())
    except Exception:  # a platform without a name for its devices
        return str(config.device_config.device_type)


def recording_path(scheduler: Any) -> Path:
    """Where to write: one file a data-parallel rank."""
    named = os.environ.get("PREFIXSIM_RECORDING") or f"prefixsim-recording-{os.getpid()}.jsonl.gz"
    parallel = scheduler.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        suffix = next((s for s in SUFFIXES if named.endswith(s)), "")
        named = f"{named.removesuffix(suffix)}-dp{parallel.data_parallel_index}{suffix}"
    return Path(named).absolute()


def wants_tokens() -> bool:
    asked = os.environ.get("PREFIXSIM_RECORD_TOKENS", "")
    if asked not in ("", "0", "1"):
        fail(f"PREFIXSIM_RECORD_TOKENS={asked} is neither 0 nor 1")
    return asked == "1"


def check_version(base: type) -> None:
    """Refuse a vLLM whose scheduler has not the methods that are overridden here, with their parameters."""
    for name, own in vars(RecordingScheduler).items():
        if not inspect.isfunction(own) or name in ("__new__", "__init__"):
            continue
        expected = list(inspect.signature(own).parameters)
        theirs = getattr(base, name, None)
        found = list(inspect.signature(theirs).parameters) if theirs else None
        if found != expected:
            is_there = "is not there" if found is None else f"takes ({', '.join(found)})"
            unknown_version(f"Scheduler.{name} {is_there}, expected ({', '.join(expected)})")
    if not vllm.__version__.startswith(KNOWN):
        logger.warning(
            "prefixsim's recorder knows vLLM 0.32 and 0.33, this is %s: its scheduler has the same methods, "
            "so it is recorded; check the recording with `prefixsim verify FILE`",
            vllm.__version__,
        )


def unknown_version(difference: str) -> NoReturn:
    fail(
        f"vLLM {vllm.__version__} is not one that it knows: {difference}; "
        "record with vLLM 0.32 or 0.33, or with a newer prefixsim"
    )


def check_server(scheduler: Any) -> None:
    """Refuse what the format has no place for."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    config = scheduler.vllm_config
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups})) or "none"
        fail(f"the model has {len(groups)} KV cache groups ({kinds}), a recording has one: serve it without")
    if config.speculative_config is not None:
        fail("speculative decoding is not recorded; serve without --speculative-config")
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        fail("a KV or encoder-cache connector is not recorded; serve without --kv-transfer-config")


def fail(reason: str) -> NoReturn:
    raise RuntimeError(f"prefixsim's recorder: {reason}") from None
