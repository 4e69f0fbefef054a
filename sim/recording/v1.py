"""Version 1, one JSON object a file, retold as the lines of version 2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

STEPS = re.compile(r'"steps"\s*:\s*\[')
COMMA = re.compile(r"\s*,\s*")
OUTPUTS = 2**40  # segment ids from here up: what request 0, 1, ... generated


def parse(text: str) -> tuple[dict[str, Any], bool]:
    """The object of a file, and whether it was cut off: then it has the steps up to there.

    ValueError if it is none.
    """
    try:
        return json.loads(text), False
    except ValueError:
        found = STEPS.search(text)
        if found is None:
            raise
    document = json.loads(text[: found.end()] + "]}")
    decoder = json.JSONDecoder()
    steps: list[Any] = []
    at = found.end()
    try:
        while True:
            step, at = decoder.raw_decode(text, at)
            steps.append(step)
            comma = COMMA.match(text, at)
            if comma is None:
                break
            at = comma.end()
    except ValueError:
        pass
    return document | {"steps": steps}, True


def retold(document: dict[str, Any], cut: bool) -> Iterator[dict[str, Any]]:
    """The lines of version 2 that say the same; the fields of requests that only version 1 has go with them.

    The last line is left out where the file was `cut` off.
    What is not of the expected kind raises KeyError, TypeError, ValueError, AttributeError or IndexError.
    """
    requests = {request["id"]: request for request in document["reqs"]}
    row: dict[str, int] = {}  # by id, in order of arrival
    for step in document["steps"]:
        for name in step.get("arr", []):
            row[name] = len(row)
    end = 0
    for number, step in enumerate(document["steps"]):
        start, scheduled, updated, end = step["t"]
        for name in step.get("arr", []):
            yield _add(requests[name], row)
        line = {"s": [[row[name], *rest] for name, *rest in step["s"]], "i": number, "t": [start, scheduled]}
        for field in ("new", "res", "pre"):
            if field in step:
                line[field] = [[row[name], *rest] for name, *rest in step[field]]
        same = ("nb", "bcrc", "nev", "ecrc", "fr", "q")
        yield line | {field: step[field] for field in same if field in step}
        ended = step.get("fin", [])
        fin = [row[name] for name in ended]
        stop = [row[name] for name in ended if requests[name]["ngen"] < requests[name]["out"]]
        line = {"u": number, "t": [updated, end], "fin": fin, "stop": stop, "fr2": step["fr2"]}
        yield line | {field: step[field] for field in ("pcs", "w") if field in step}
        for name in ended:
            yield _output(requests[name], row[name])
    if not cut:
        yield {"end": True, "t": end, "num_free": document.get("end_free")}


def _add(request: dict[str, Any], row: dict[str, int]) -> dict[str, Any]:
    times = request["T"]
    segments = [[OUTPUTS + row[one[1]], one[2]] if one[0] == "o" else one for one in request["segs"]]
    line = {
        "add": row[request["id"]], "t": times["add"], "id": request["id"], "arr": times["arr"],
        "np": request["np"], "max": request["out"], "c": segments,
        "inq": times["inq"], "sub": times["sub"],
    }  # fmt: skip
    if "after" in request:
        line |= {"after": row[request["after"]], "think": request["think"]}
    return line | {field: request[field] for field in ("prio", "salt") if field in request}


def _output(request: dict[str, Any], row: int) -> dict[str, Any]:
    times, generated = request["T"], request["ngen"]
    line = {
        "o": row, "t": times["ltok"], "n": request["np"] + generated, "c": [[OUTPUTS + row, generated]],
    }  # fmt: skip
    return line | {field: times[field] for field in ("sched", "ftok", "ltok", "cfirst", "clast")}
