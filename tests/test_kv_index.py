"""What a router knows of caches: the index of their blocks, and the keys that name content."""

from __future__ import annotations

import numpy as np
import pytest

from sim import content_key
from sim._jit import entry
from sim.content_key import ROOT_KEY, prefix_key, weigh
from sim.kv_index import SLOTS, KvIndex
from sim.request import Ints

block_key, segment_key = entry(content_key.block_key), entry(content_key.segment_key)
mixed_wide, namespace_key = entry(content_key.mixed_wide), entry(content_key.namespace_key)
B = 16
A, C = 7, 9  # segments


def segments(*pairs: tuple[int, int]) -> Ints:
    return np.array(pairs, np.int64).T.copy()


def names(length: int, segment: int = A, namespace: int = 0) -> list[int]:
    """The keys of the full blocks of one segment from the beginning."""
    path = segment_key(namespace_key(ROOT_KEY, namespace), 0, segment)
    return [int(block_key(path, block)) for block in range(1, length // B + 1)]


def told(index: KvIndex, replica: int, *events: int) -> None:
    index.apply(replica, np.array(events, np.int64))


def cached(index: KvIndex, length: int, *pairs: tuple[int, int], namespace: int = 0) -> list[int]:
    return index.cached_tokens(segments(*pairs), namespace, length, B).tolist()  # type: ignore[no-any-return]


def test_leading_blocks_only_and_never_the_whole_prompt() -> None:
    index = KvIndex(3)
    told(index, 0, *names(64))
    told(index, 1, *names(64)[1:])  # a hole at the beginning
    told(index, 2, *names(32), names(64)[3])  # one after the second
    assert cached(index, 65, (A, 65)) == [64, 0, 32]
    assert cached(index, 64, (A, 64)) == [48, 0, 32]  # the last token is always computed
    assert cached(index, 17, (A, 17)) == [16, 0, 16]
    assert cached(index, 16, (A, 16)) == [0, 0, 0]
    assert cached(index, 65, (C, 65)) == [0, 0, 0]
    assert cached(index, 65, (A, 65), namespace=1) == [0, 0, 0]


def test_a_content_in_two_blocks_is_there_until_both_are_evicted() -> None:
    index = KvIndex(2)
    (name,) = names(16)
    told(index, 0, name, name)
    told(index, 1, name)
    told(index, 0, -name)
    assert cached(index, 17, (A, 17)) == [16, 16]
    told(index, 0, -name)
    assert cached(index, 17, (A, 17)) == [0, 16]


def test_segments_of_no_token_name_nothing() -> None:
    index = KvIndex(1)
    told(index, 0, *names(64))
    assert cached(index, 65, (C, 0), (A, 65)) == [64]
    assert prefix_key(segments((C, 0), (A, 65)), 0, 65) == prefix_key(segments((A, 65)), 0, 65)


def test_a_block_across_segments_is_named_by_all_of_them() -> None:
    """20 tokens of A, then C: the second block depends on both and on where they meet."""
    index = KvIndex(1)
    path = segment_key(segment_key(ROOT_KEY, 0, A), 20, C)
    told(index, 0, *names(16), int(block_key(path, 2)))
    assert cached(index, 33, (A, 20), (C, 13)) == [32]
    assert cached(index, 33, (A, 21), (C, 12)) == [16]
    assert cached(index, 33, (A, 20), (8, 13)) == [16]


def test_it_grows_and_forgets() -> None:
    """Far more keys than at first there is room for, most of them gone again."""
    index = KvIndex(2)
    for text in range(40):
        keys = names(B * SLOTS // 4, segment=100 + text)
        told(index, text % 2, *keys)
        if text >= 2:
            gone = names(B * SLOTS // 4, segment=98 + text)
            told(index, text % 2, *(-key for key in gone))
        assert 2 * index.num_keys <= index.table.shape[1]
    assert index.table.shape[1] <= 8 * SLOTS
    for text, replica in ((38, 0), (39, 1)):
        length = B * SLOTS // 4
        expected = [0, 0]
        expected[replica] = length
        assert cached(index, length + 1, (100 + text, length + 1)) == expected
    assert cached(index, 17, (137, 17)) == [0, 0]


def test_keys_differ_in_all_that_they_name() -> None:
    base = prefix_key(segments((A, 100), (C, 200)), 0, 256)
    others = [
        prefix_key(segments((A, 100), (C, 200)), 1, 256),
        prefix_key(segments((A, 100), (C, 200)), -1, 256),
        prefix_key(segments((A, 101), (C, 200)), 0, 256),
        prefix_key(segments((A, 100), (8, 200)), 0, 256),
        prefix_key(segments((A, 100), (C, 200)), 0, 255),
        prefix_key(segments((A, 100), (C + 2**31, 200)), 0, 256),
        prefix_key(segments((C, 100), (A, 200)), 0, 256),
    ]
    assert len({base, *others}) == 1 + len(others)
    # what lies behind those tokens does not count
    assert prefix_key(segments((A, 100), (C, 300), (5, 9)), 0, 256) == base
    assert prefix_key(segments((A, 100), (C, 156)), 0, 256) == base
    assert all(0 <= key < 2**62 for key in (base, *others))


def test_block_keys_are_never_zero_and_do_not_collide() -> None:
    keys = {key for segment in range(300) for key in names(B * 100, segment)}
    assert len(keys) == 300 * 100 and 0 not in keys
    assert all(key & 1 for key in keys)


def test_weights_are_of_key_and_place() -> None:
    one, other, longer = np.zeros(8, np.int64), np.zeros(8, np.int64), np.zeros(9, np.int64)
    weigh(1, one)
    weigh(2, other)
    weigh(1, longer)
    assert (longer[:8] == one).all() and (one != other).all() and len(set(one.tolist())) == 8


@pytest.mark.parametrize("value", [0, 5, 2**31, 2**45, -1, -(2**40)])
def test_wide_values_count_in_all_their_bits(value: int) -> None:
    key = mixed_wide(ROOT_KEY, value)
    assert key != mixed_wide(ROOT_KEY, value + 1) and key != mixed_wide(ROOT_KEY, value + 2**31)
    assert 0 <= key < 2**62


def test_what_is_held_once_outlives_growth() -> None:
    index = KvIndex(2)
    told(index, 0, *names(64))
    told(index, 1, *names(B * 3 * SLOTS, C))
    assert 2 * index.num_keys <= index.table.shape[1]
    assert cached(index, 65, (A, 65)) == [64, 0]
    assert cached(index, 1001, (C, 1001)) == [0, 992]
