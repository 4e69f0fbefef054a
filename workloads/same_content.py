"""Which content of one run is the same in another, that begins with the cache the first has left.

Workloads name content by numbers, so the question is which numbers mean the same in both:

- The same prompts again. Two workloads of one seed that are equal in all but PACE ask the same, at
  other times or for more answers: all content is the same.
- The same pools. Two workloads of one kind whose POOLS are described alike have them in common by
  number: prefix i, document i, example i, system prompt i, the ids of the same trace file. Where
  lengths are drawn, the seed belongs to the description. What each request has of its own differs.
- Otherwise nothing is the same.

In a mix that holds of each tenant, and the tenants of both have to stand in one order.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from sim.request import OWN, Batch, named
from workloads import AnyWorkload
from workloads.errors import WorkloadError
from workloads.mix import SEGMENT_BITS, SESSION_IDS

Description = dict[str, Any]  # of a workload and its seed, in the types of JSON

PACE = frozenset(
    {
        "request_rate", "arrival", "burstiness", "states", "schedule", "amplitude", "period", "concurrency",
        "think_time", "think_time_distribution", "session_rate", "tool_time", "time_scale", "pace",
        "n", "beam_width",  # samples beside the first are drawn anew, and nobody asks with them
    }
)  # fmt: skip
POOLS: dict[str, tuple[str, ...]] = {  # by kind: the fields that say what its pools hold
    "agent": ("system_prompt_len",),
    "documents": ("system_prompt_len", "num_documents", "document_len"),
    "few_shot": ("system_prompt_len", "num_examples", "example_len"),
    "fourteen_tokens": ("shared_len",),
    "multi_turn": ("num_system_prompts", "system_prompt_len"),
    "recording": ("path",),
    "scan": (),
    "shared_prefix": ("num_groups", "prefix_len"),
    "trace": ("path", "format", "columns", "prefix_model", "trace_block_size", "session_rate"),
    "tree": (),
}


class Shared(NamedTuple):
    """What two runs have in common."""

    again: bool  # the same prompts again
    ids: tuple[tuple[int, int], ...]  # ranges [first, end) of segment ids that mean the same in both


def description(workload: AnyWorkload, seed: int) -> Description:
    """Say what a workload asks, in the types of JSON; a file stands there by the sha256 of its bytes.

    Raises: WorkloadError for a file that cannot be read.
    """
    return {"seed": seed, "workload": _without_paths(json.loads(workload.model_dump_json()))}


def is_description(thing: Any) -> bool:
    """Whether JSON from a file has the form that `description` gives, as far as `shared` reads it."""
    return isinstance(thing, dict) and isinstance(thing.get("seed"), int) and _is_load(thing.get("workload"))


def shared(former: Description, latter: Description) -> Shared:
    """Return what two runs have in common. Modifies nothing.

    Raises: WorkloadError where two mixes number their tenants so that they cannot be told apart.
    """
    one, other = former["workload"], latter["workload"]
    if one["kind"] != other["kind"]:
        return Shared(False, ())
    if former["seed"] == latter["seed"] and _without_pace(one) == _without_pace(other):
        return Shared(True, ((0, 2**63 - 1),))
    if one["kind"] == "mix":
        return Shared(False, _of_tenants(former, latter))
    pools = _pools(one, former["seed"]) == _pools(other, latter["seed"])
    return Shared(False, ((0, _pool_end(one)),) if pools and _pool_end(one) else ())


def with_names(batch: Batch) -> Batch:
    """Return the requests with names for what each has of its own, equal names in equal runs."""
    return batch._replace(segment_id=named(batch.segment_id))


def _is_load(part: Any) -> bool:
    match part:
        case {"kind": "mix", "tenants": dict(tenants)}:
            return all(_is_tenant(tenant) for tenant in tenants.values())
        case {"kind": "multi_turn"}:
            return isinstance(part.get("num_system_prompts"), int)
        case {"kind": str(kind)}:
            return kind != "mix"
    return False


def _is_tenant(part: Any) -> bool:
    names = ("texts", "cache_salt", "lora")
    return (
        isinstance(part, dict)
        and all(name in part and isinstance(part[name], str | None) for name in names)
        and _is_load(part.get("workload"))
    )


def _without_paths(part: Any) -> Any:
    if isinstance(part, dict):
        return {
            key: _digest(value) if key == "path" else _without_paths(value) for key, value in part.items()
        }
    return part


def _digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read it: {(error.strerror or str(error)).lower()}") from None


def _without_pace(workload: dict[str, Any]) -> dict[str, Any]:
    # When recorded sessions start decides which of their turns comes first, and that numbers what is theirs.
    pace = PACE - {"session_rate"} if workload["kind"] == "trace" else PACE
    kept = {name: value for name, value in workload.items() if name not in pace}
    if workload["kind"] == "mix":
        # in a list, for the order of tenants matters
        kept["tenants"] = [
            (name, {**tenant, "workload": _without_pace(tenant["workload"])})
            for name, tenant in workload["tenants"].items()
        ]
    return kept


def _pools(workload: dict[str, Any], seed: int) -> tuple[dict[str, Any], int | None]:
    """What a workload's pools hold; the seed is None where it does not matter."""
    held = {name: workload.get(name) for name in POOLS[workload["kind"]]}
    drawn = any(isinstance(value, dict) and "distribution" in value for value in held.values())
    in_file_order = held.get("session_rate", "Infinity") == "Infinity"
    return held, seed if drawn or not in_file_order else None


def _pool_end(workload: dict[str, Any]) -> int:
    """Segment ids below it name what pools hold, others what requests or sessions have of their own."""
    match workload["kind"]:
        case "multi_turn":
            return int(workload["num_system_prompts"])
        case "agent":
            return 1
        case "tree" | "scan":
            return 0
    return OWN


def _of_tenants(former: Description, latter: Description) -> tuple[tuple[int, int], ...]:
    """The segment ids of tenants that both mixes have and that ask of the same texts."""
    one, other = (list(load["workload"]["tenants"].items()) for load in (former, latter))
    if not {name for name, _ in one} & {name for name, _ in other}:
        return ()
    differ: set[int] = set()
    texts: dict[tuple[bool, str], int] = {}
    for number, ((name, tenant), (also, again)) in enumerate(zip(one, other, strict=False)):
        if name != also:
            raise WorkloadError(
                f"tenant {number + 1} of the mix is {name} in the run before and {also} in this one, so their"
                " contents would be mistaken: list the tenants of both first, in one order"
            )
        for field in ("texts", "cache_salt", "lora"):
            if tenant[field] != again[field]:
                raise WorkloadError(
                    f"tenant {name}: {field} is {tenant[field]!r} in the run before and {again[field]!r} in"
                    " this one: give it the same"
                )
        own = (True, name) if tenant["texts"] is None else (False, tenant["texts"])
        first = texts.setdefault(own, number)
        of_one, of_other = tenant["workload"], again["workload"]
        if (
            of_one["kind"] != of_other["kind"]
            or not _pool_end(of_one)
            or (_pools(of_one, former["seed"]) != _pools(of_other, latter["seed"]))
        ):
            differ.add(first)
    same = sorted(set(texts.values()) - differ)
    begins = [(first << SEGMENT_BITS, one[first][1]) for first in same]
    return tuple((begin, begin + _shared_end(tenant)) for begin, tenant in begins)


def _shared_end(tenant: dict[str, Any]) -> int:
    """Segment ids of a tenant below it are its texts': sessions have others of their own."""
    sessions = tenant["workload"]["kind"] in ("agent", "multi_turn", "tree")
    return SESSION_IDS if sessions else 1 << SEGMENT_BITS
