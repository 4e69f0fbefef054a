"""Numbers for content that mean the same at every replica: 62 bits, mixed step by step.

All products stay below 2**63, so that plain Python agrees with compiled code.
"""

from __future__ import annotations

from sim._jit import entry, verb
from sim.request import Ints

ROOT_KEY = 0x1B873593
_LOW = 0x7FFFFFFF


@verb
def mixed(key: int, value: int) -> int:
    """A key that depends on another and on a value of 31 bits."""
    low, high = key & _LOW, key >> 31
    mix = (low ^ value) * 1540483477 + high
    low = (mix ^ (mix >> 29)) & _LOW
    mix = (high ^ low) * 1103515245 + value
    high = (mix ^ (mix >> 27)) & _LOW
    return (high << 31) | low


@verb
def mixed_wide(key: int, value: int) -> int:
    """The same for a value of 62 bits, negative ones among them."""
    return mixed(mixed(key, value & _LOW), (value >> 31) & _LOW)


@verb
def namespace_key(key: int, namespace: int) -> int:
    """The key of what stands before all content under a LoRA and cache_salt."""
    if namespace == 0:
        return key
    return mixed_wide(key, namespace)


@verb
def segment_key(key: int, before: int, segment: int) -> int:
    """The key of a segment that follows `before` tokens of the one with `key`."""
    return mixed_wide(mixed_wide(key, before), segment)


@verb
def block_key(key: int, block: int) -> int:
    """The key of the content up to the end of full block number `block`, from 1; not 0.

    `key` is that of the segment which holds the block's last token.
    """
    name: int = mixed_wide(key, block)
    return name | 1


@verb
def prefix_key_verb(segments: Ints, namespace: int, num_tokens: int) -> int:
    """The key of the first `num_tokens` tokens, or fewer, of segments [0: id, 1: tokens] in order."""
    key = namespace_key(ROOT_KEY, namespace)
    before = 0
    for i in range(segments.shape[1]):
        length = min(segments[1, i], num_tokens)
        if length > 0:
            key = segment_key(key, before, segments[0, i])
            before = length
            num_tokens -= length
    return mixed_wide(key, before)


@verb
def weigh_verb(key: int, weights: Ints) -> int:
    """Write a number for each place into `weights`, different for each key; returns how many."""
    for place in range(len(weights)):
        weights[place] = mixed_wide(mixed_wide(ROOT_KEY, key), place)
    return len(weights)


prefix_key = entry(prefix_key_verb)
weigh = entry(weigh_verb)
