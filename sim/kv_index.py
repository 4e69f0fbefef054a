"""What a router knows of the replicas' caches: an index of their KV events.

vLLM's block pool publishes BlockStored and BlockRemoved (v1/core/block_pool.BlockPool with
enable_kv_cache_events), and routers that know where a prefix is cached live on them. Here an event
is the content key of a block, negative where the block was evicted. A key is 62 bits of the LoRA and
cache_salt, of the segments up to the block's end, and of the block's number; it does not depend on
which replica made it. Two contents may share a key by chance, once in some billions: a router would
then expect a hit that it does not get.
"""

from __future__ import annotations

import numpy as np

from sim._jit import entry, verb
from sim.content_key import ROOT_KEY, block_key, namespace_key, segment_key
from sim.request import Ints

KEYS, FIRST_COUNT = 0, 1  # rows of the index: keys, then the blocks of that key at each replica
SLOTS = 1 << 12  # to begin with, a power of two


class KvIndex:
    """A hash table from content keys to how many blocks of each replica hold that content."""

    def __init__(self, num_replicas: int) -> None:
        self.table: Ints = np.zeros((FIRST_COUNT + num_replicas, SLOTS), np.int64)
        self.num_keys = 0

    def apply(self, replica: int, events: Ints) -> None:
        """Take in a replica's events, in order; they are not modified."""
        if 2 * (self.num_keys + len(events)) > self.table.shape[1]:
            self.make_room(len(events))
        self.num_keys += apply_events(self.table, FIRST_COUNT + replica, events)

    def make_room(self, num_events: int) -> None:
        """Forget the keys that nobody holds, and have room for `num_events` more."""
        old = self.table
        num_held = int(np.count_nonzero(old[FIRST_COUNT:].any(axis=0)))
        size = 1 << (4 * (num_held + num_events)).bit_length()
        self.table = np.zeros((len(old), max(size, SLOTS)), np.int64)
        self.num_keys = move_held(old, self.table)

    def cached_tokens(self, segments: Ints, namespace: int, prompt_len: int, block_size: int) -> Ints:
        """How many leading tokens of a prompt each replica has in full blocks, at most prompt_len - 1."""
        tokens = np.zeros(len(self.table) - FIRST_COUNT, np.int64)
        match(self.table, segments, namespace, prompt_len, block_size, tokens)
        return tokens


@verb
def slot_of(table: Ints, key: int) -> int:
    """Where a key is, or would be put."""
    mask = table.shape[1] - 1
    slot: int = (key ^ (key >> 31)) & mask
    while table[KEYS, slot] != 0 and table[KEYS, slot] != key:
        slot = (slot + 1) & mask
    return slot


@verb
def apply_events_verb(table: Ints, row: int, events: Ints) -> int:
    """Count events into a row of the index; returns how many keys are new."""
    new = 0
    for i in range(len(events)):
        key = abs(events[i])
        slot = slot_of(table, key)
        if table[KEYS, slot] == 0:
            table[KEYS, slot] = key
            new += 1
        table[row, slot] += 1 if events[i] > 0 else -1
    return new


apply_events = entry(apply_events_verb)


@verb
def move_held_verb(old: Ints, new: Ints) -> int:
    """Copy the keys that some replica holds to a larger, empty index; returns how many there are."""
    moved = 0
    for slot in range(old.shape[1]):
        held = False
        for row in range(FIRST_COUNT, old.shape[0]):
            held = held or old[row, slot] != 0
        if held:
            place = slot_of(new, old[KEYS, slot])
            for row in range(old.shape[0]):
                new[row, place] = old[row, slot]
            moved += 1
    return moved


move_held = entry(move_held_verb)


@verb
def match_verb(
    table: Ints, segments: Ints, namespace: int, prompt_len: int, block_size: int, tokens: Ints
) -> int:
    """Write the leading tokens of a prompt that each replica has into `tokens`, zeros before.

    The walk is sim/chains.name_chains'. Returns the number of blocks looked up.
    """
    path = namespace_key(ROOT_KEY, namespace)
    depth = 0  # tokens before the segment
    before = 0  # tokens of the segment before it
    block = 0
    limit = (prompt_len - 1) // block_size
    for i in range(segments.shape[1]):
        length = segments[1, i]
        if length == 0:
            continue
        path = segment_key(path, before, segments[0, i])
        while block < limit and (block + 1) * block_size <= depth + length:
            slot = slot_of(table, block_key(path, block + 1))
            somebody = False
            for replica in range(len(tokens)):
                if tokens[replica] == block * block_size and table[FIRST_COUNT + replica, slot] > 0:
                    tokens[replica] += block_size
                    somebody = True
            block += 1
            if not somebody:
                return block
        depth += length
        before = length
    return block


match = entry(match_verb)
