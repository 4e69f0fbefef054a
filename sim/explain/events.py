"""What happens in a small run, as values: events, each with the whiteboard as it stands after it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Content(NamedTuple):
    """The tokens in one block, and the name under which they can be found."""

    tokens: tuple[int, ...]  # at most block_size of them
    parent: bytes  # hash of the block before, NONE_HASH for a first block
    hash: bytes | None  # None: not in the hash table, because it is not full (or caching is off)


class Board(NamedTuple):
    """The whole state of the cache: what a person would have on the whiteboard."""

    tables: dict[str, tuple[int, ...]]  # block tables of running requests, in order of admission
    waiting: tuple[str, ...]  # in the order they will be scheduled
    refs: dict[int, int]  # reference counts above 0, by block
    free: tuple[int, ...]  # the free queue, head first; cached blocks are in it too
    hashes: dict[bytes, tuple[int, ...]]  # the hash table: block hash -> its blocks, first found first
    contents: dict[int, Content]  # of the blocks that are in use or cached


class Verdict(Enum):
    """Why a block of a prompt was or was not a hit."""

    HIT = "hit"
    DIFFERS = "some tokens differ"  # a cached block goes on from the same parent with other tokens
    UNFINISHED = "the block that begins like it is not full"
    EVICTED = "evicted"
    UNKNOWN = "not cached"
    LAST_TOKEN = "the last token must be computed"
    NOT_FULL = "not full"
    AFTER_MISS = "behind the first miss"
    CACHING_OFF = "prefix caching is off"


class Looked(NamedTuple):
    """One block of a request in its lookup."""

    tokens: tuple[int, ...]
    hash: bytes | None  # None: not full
    verdict: Verdict
    block: int = 0  # HIT, LAST_TOKEN: where it is; DIFFERS, UNFINISHED: the nearest block
    common: int = 0  # DIFFERS, UNFINISHED: how many leading tokens agree


class Arrival(NamedTuple):
    """A request enters the waiting queue."""

    time: float  # seconds; of every event: when the scheduler sees it
    board: Board
    request: str
    arrival_time: float  # seconds, before the front end
    prompt: tuple[int, ...]
    hashes: tuple[bytes, ...]  # of its full blocks
    refused: bool  # it can never fit


class Running(NamedTuple):
    """The first half of a step's schedule: the running requests go on."""

    time: float
    board: Board
    step: int
    scheduled: dict[str, int]  # tokens to compute
    taken: dict[str, tuple[int, ...]]  # blocks by which tables grow
    evicted: tuple[int, ...]
    registered: tuple[int, ...]  # blocks that are now full
    preempted: tuple[str, ...]


class Admission(NamedTuple):
    """The other half: a waiting request is looked up, gets its blocks, and runs."""

    time: float
    board: Board
    step: int
    request: str
    resumed: bool  # after a preemption
    looked: tuple[Looked, ...]
    hit_tokens: int
    scheduled: int  # tokens to compute in this step
    left: int  # tokens to compute in later steps
    touched: tuple[int, ...]  # hit blocks that were free and leave the queue
    taken: tuple[int, ...]
    evicted: tuple[int, ...]
    registered: tuple[int, ...]


class Blocked(NamedTuple):
    """The head of the waiting queue stays there, and so all behind it."""

    time: float
    board: Board
    step: int
    request: str
    reason: str


class Output(NamedTuple):
    """A step has ended: what it sampled."""

    time: float
    board: Board
    step: int
    tokens: dict[str, int]
    registered: tuple[int, ...]


class Finish(NamedTuple):
    """A request has ended and gives its blocks back, the last one first."""

    time: float
    board: Board
    step: int
    request: str
    table: tuple[int, ...]
    to_head: tuple[int, ...]  # as they now stand in the queue
    to_tail: tuple[int, ...]
    kept: tuple[int, ...]  # blocks that others still use


Event = Arrival | Running | Admission | Blocked | Output | Finish
