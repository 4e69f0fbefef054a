"""Recordings of version 2 for tests: of what replays of recorded cases decide, and of version 1 retold."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sim.blocks import FREE
from sim.columns import K, R
from sim.core import EngineConfig
from sim.verify.compare import free_queue
from sim.verify.contents import crc, known_tokens
from sim.verify.scheduler import Decided, Name, SchedulerReplay

VOCABULARY = 31990  # of the runs in tests/measured
Line = dict[str, Any]


def chunk_ids(tokens: Sequence[int], size: int) -> list[str]:
    """The id of each full chunk, which covers all before it."""
    running = blake2b(digest_size=8)
    ids = []
    for start in range(0, len(tokens) - size + 1, size):
        running.update(str(tokens[start : start + size]).encode())
        ids.append(running.hexdigest())
    return ids


def chunk_size(block_size: int) -> int:
    """The largest divisor of a block up to 16, or the block."""
    size = max(n for n in range(1, 17) if block_size % n == 0)
    return size if size > 1 else block_size


def contents(tokens: Sequence[int], prompt_len: int, form: str, size: int) -> tuple[Any, Any]:
    """What the `add` and the `o` line of a request say of its tokens."""
    if form == "token_ids":
        return list(tokens[:prompt_len]), list(tokens[prompt_len:])
    ids, first = chunk_ids(tokens, size), prompt_len // size
    return "".join(ids[:first]), "".join(ids[first:])


def delta_coded(lines: Iterator[Line]) -> Iterator[Line]:
    """The lines, with requests that decode on as numbers of them."""
    before: list[list[int]] = []
    for line in lines:
        if "s" in line:
            full = [list(entry) for entry in line["s"]]
            coded: list[Any] = []
            at = 0
            for row, new, computed in full:
                on = [i for i in range(at, len(before)) if before[i][0] == row]
                if new == 1 and on and before[on[0]][1] + before[on[0]][2] == computed:
                    if on[0] > at:
                        coded.append(at - on[0])
                    if coded and isinstance(coded[-1], int) and coded[-1] > 0:
                        coded[-1] += 1
                    else:
                        coded.append(1)
                    at = on[0] + 1
                else:
                    coded.append([row, new, computed])
            before = full
            line = line | {"s": coded}
        yield line


def write(path: Path, lines: Iterator[Line] | Sequence[Line]) -> Path:
    """A file of these lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path) -> list[Line]:
    """The lines of a file."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def without_empty(line: Line, *optional: str) -> Line:
    """A line without those optional fields that say nothing."""
    return {field: value for field, value in line.items() if value or field not in optional}


def header_of(config: EngineConfig, form: str = "hashed") -> Line:
    """The first line for an engine of this configuration."""
    effective = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_gpu_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "policy": "priority" if config.priority_policy else "fcfs",
        "chunked": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "async_scheduling": config.async_scheduling,
        "reserve_full_isl": config.reserve_full_isl,
        "watermark": config.watermark,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "max_loras": config.max_loras or None,
        "kv_groups": ["FullAttentionSpec(...)"],
    }
    content = {"form": form, "tokens": chunk_size(config.block_size)}
    return {"schema": "prefixsim_recording/2", "effective": effective, "content": content, "free0": None}


class RecordingReplay(SchedulerReplay):
    """A replay that writes down what it decides: where it replays a case of vLLM, that is what vLLM did."""

    form = "hashed"
    last: RecordingReplay  # that was made

    def __init__(self, config: EngineConfig, num_records: int, table_len: int = 0) -> None:
        super().__init__(config, num_records, table_len)
        RecordingReplay.last = self
        self.lines = [header_of(config, self.form)]
        self.rows: dict[Name, int] = {}
        self.answers: dict[Name, tuple[list[int], int]] = {}  # tokens of prompt and answer, of the prompt
        self.num_steps = self.num_updates = self.clock = 0

    def now(self) -> int:
        self.clock += 100
        return self.clock

    def add(self, name: str, rank: int, tokens: list[int], prompt_len: int, **kwargs: Any) -> None:
        super().add(name, rank, tokens, prompt_len, **kwargs)
        self.rows[name] = len(self.rows)
        self.answers[name] = tokens, prompt_len
        arrival, lora = kwargs["arrival_time"], kwargs["lora"]
        line = {
            "add": self.rows[name], "t": self.now(), "id": name,
            "arr": round(arrival * 1e6), "np": prompt_len,
            "max": kwargs["max_tokens"], "prio": kwargs["priority"], "salt": kwargs["salt"],
            "lora": None if lora is None else str(lora),
            "c": contents(tokens, prompt_len, self.form, self.lines[0]["content"]["tokens"])[0],
        }  # fmt: skip
        self.lines.append(without_empty(line, "prio", "salt", "lora", "c"))

    def outcome(self, name: Name, num_tokens: int) -> Line:
        tokens, prompt_len = self.answers.pop(name)
        size = self.lines[0]["content"]["tokens"]
        answer = contents(tokens[:num_tokens], prompt_len, self.form, size)[1]
        return without_empty({"o": self.rows[name], "t": self.clock, "n": num_tokens, "c": answer}, "c")

    def schedule(self) -> Decided:
        core = self.state.core
        before = {
            self.name(slot): [
                int(core.requests[R.num_computed, slot]),
                int(core.requests[R.num_tokens, slot] - core.requests[R.prompt_len, slot]),
            ]
            for slot in self.running()
        }
        decided = super().schedule()
        row, hit = self.rows, decided.hit
        line = {
            "s": [[row[name], new, hit[self.slot_of[name]]] for name, new in decided.scheduled],
            "i": self.num_steps, "t": [self.now(), self.now()],
            "new": [[row[self.name(slot)], hit[slot]] for slot in decided.new],
            "res": [[row[self.name(slot)], hit[slot]] for slot in decided.resumed],
            "pre": [[row[name], *before[name]] for name in decided.preempted],
            "nb": len(decided.taken), "bcrc": crc(decided.taken),
            "nev": len(decided.evicted), "ecrc": crc(decided.evicted),
            "fr": int(self.state.core.pool.count[FREE]),
            "q": [self.count(K.num_running), self.count(K.num_waiting)],
        }  # fmt: skip
        self.num_steps += 1
        self.lines.append(without_empty(line, "new", "res", "pre", "nb", "bcrc", "nev", "ecrc"))
        return decided

    def update(self) -> dict[str, Any]:
        updated = super().update()
        ended = updated["fin"]
        outputs = self.state.core.record_ints[: len(ended), R.RECORDED].tolist()
        line = {
            "u": self.num_updates, "t": [self.now(), self.now()],
            "fin": [self.rows[name] for name, _ in ended],
            "stop": [self.rows[name] for name, how in ended if how == "stop"],
            "pcs": updated["pcs"] if any(updated["pcs"]) else None,
            "fr2": int(self.state.core.pool.count[FREE]),
        }  # fmt: skip
        self.num_updates += 1
        self.lines.append(without_empty(line, "fin", "stop", "pcs"))
        for (name, _), generated in zip(ended, outputs, strict=True):
            self.lines.append(self.outcome(name, self.answers[name][1] + generated))
        return updated

    def abort(self, name: Name) -> bool:
        slot = self.slot_of.get(name)
        if slot is None:
            return False
        num_tokens = int(self.state.core.requests[R.num_tokens, slot])
        super().abort(name)
        self.lines.append({"abort": [self.rows[name]], "t": self.now()})
        self.lines.append(self.outcome(name, num_tokens))
        return True

    def reset(self) -> int:
        done = super().reset()
        self.lines.append({"reset": bool(done), "t": self.now()})
        return done

    def finished(self) -> list[Line]:
        """All lines, the last one included."""
        queue = free_queue(self.state.core)
        return [*self.lines, {"end": True, "t": self.now(), "end_free": crc(queue), "steps": self.num_steps}]


def of_version_1(path: Path, form: str) -> Iterator[Line]:
    """A recording of version 1 as one of version 2, its tokens computed anew."""
    run = json.loads(gzip.decompress(path.read_bytes()))
    requests = {request["id"]: request for request in run["reqs"]}
    size = chunk_size(run["effective"]["block_size"])
    same = ("versions", "effective", "free0", "device")
    yield {"schema": "prefixsim_recording/2", "content": {"form": form, "tokens": size}, "model": "tiny"} | {
        field: run[field] for field in same if field in run
    }
    tokens: dict[str, list[int]] = {}
    for name, request in requests.items():
        tokens[name] = []
        for segment in request["segs"]:
            if segment[0] == "o":
                tokens[name] += requests[segment[1]]["o_ids"][: segment[2]]
            else:
                tokens[name] += known_tokens(segment[0], segment[1], VOCABULARY)
        tokens[name] += request["o_ids"]
    row: dict[str, int] = {}
    for number, step in enumerate(run["steps"]):
        for name in step.get("arr", []):
            row[name] = len(row)
            request = requests[name]
            times, content = request["T"], contents(tokens[name], request["np"], form, size)[0]
            yield {
                "add": row[name], "t": times["add"], "id": name, "arr": times["arr"], "np": request["np"],
                "max": request["out"], "c": content,
            }  # fmt: skip
        line = {"s": [[row[name], *rest] for name, *rest in step["s"]], "i": number, "t": step["t"][:2]}
        line |= {
            f: [[row[name], *rest] for name, *rest in step[f]] for f in ("new", "res", "pre") if f in step
        }
        yield line | {f: step[f] for f in ("nb", "bcrc", "nev", "ecrc", "fr", "q") if f in step}
        ended = step.get("fin", [])
        line = {"u": number, "t": step["t"][2:], "fr2": step["fr2"], "fin": [row[name] for name in ended]}
        yield line | {f: step[f] for f in ("pcs",) if f in step}
        for name in ended:
            content = contents(tokens[name], requests[name]["np"], form, size)[1]
            yield {"o": row[name], "t": step["t"][3], "n": len(tokens[name]), "c": content}
    yield {"end": True, "t": run["steps"][-1]["t"][3]}
