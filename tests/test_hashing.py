"""Block hashes against those recorded from vLLM 0.33.0, and each rule by itself."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sim.hashing import ALGORITHMS, Algorithm, Lora, MultimodalItem, block_hashes, none_hash, with_group_id

GOLDEN = json.loads(gzip.decompress((Path(__file__).parent / "golden/golden_hashes.json.gz").read_bytes()))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
RECORDED = [
    (seed, algo, name)
    for seed, algos in GOLDEN["by_seed"].items()
    for algo, recorded in algos.items()
    for name in recorded["chains"]
]
TOKENS = list(range(100, 112))
CBOR: Algorithm = "sha256_cbor"
ROOT = none_hash(CBOR)


def chain(**changes: Any) -> list[bytes]:
    given: dict[str, Any] = {"tokens": TOKENS, "block_size": 4, "algo": CBOR, "none_hash": ROOT}
    return block_hashes(**(given | changes))


def differing(left: list[bytes], right: list[bytes]) -> list[bool]:
    assert len(left) == len(right)
    return [a != b for a, b in zip(left, right, strict=True)]


def test_there_are_210_recorded_chains() -> None:
    assert len(RECORDED) == 210


@pytest.mark.parametrize(("seed", "algo", "name"), RECORDED)
def test_recorded_chain(seed: str, algo: Algorithm, name: str) -> None:
    recorded, case = GOLDEN["by_seed"][seed][algo], CASES[name]
    root = none_hash(algo, None if seed == "unset" else seed)
    assert root.hex() == recorded["none_hash"]
    hashes = block_hashes(
        case["tokens"],
        case["block_size"],
        algo=algo,
        none_hash=root,
        lora=Lora(case["lora"][0], case["lora"][2]) if case["lora"] else None,
        mm=[MultimodalItem(*item) for item in case["mm"] or []],
        cache_salt=case["salt"],
        lookahead=case["lookahead"],
    )
    assert [block_hash.hex() for block_hash in hashes] == recorded["chains"][name]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(chain(tokens=TOKENS[:n])) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_token_changes_its_block_and_all_later_ones() -> None:
    changed = [*TOKENS[:5], 7, *TOKENS[6:]]
    assert differing(chain(), chain(tokens=changed)) == [False, True, True]


def test_the_root_and_the_algorithm_change_every_block() -> None:
    assert all(differing(chain(), chain(none_hash=none_hash(CBOR, "0"))))
    assert all(differing(chain(), chain(algo="sha256")))


def test_the_salt_enters_the_first_block_only_and_reaches_the_rest_through_it() -> None:
    plain, salted = chain(), chain(cache_salt="tenant")
    assert all(differing(plain, salted))
    assert salted[1:] == chain(tokens=TOKENS[4:], none_hash=salted[0])  # no extra key of their own
    assert chain(cache_salt="") == plain


def test_a_lora_enters_every_block_with_its_name_and_path() -> None:
    adapted = chain(lora=Lora("a", "/a"))
    assert adapted[1:] == chain(tokens=TOKENS[4:], none_hash=adapted[0], lora=Lora("a", "/a"))
    assert all(differing(adapted, chain(tokens=TOKENS)))
    assert all(differing(adapted, chain(lora=Lora("b", "/a"))))
    assert all(differing(adapted, chain(lora=Lora("a", "/b"))))


@pytest.mark.parametrize(
    ("offset", "length", "changed"),
    [
        (0, 4, [True, True, True]),
        (4, 4, [False, True, True]),
        (8, 1, [False, False, True]),
        (12, 4, [False, False, False]),
    ],
)
def test_a_multimodal_item_enters_its_blocks(offset: int, length: int, changed: list[bool]) -> None:
    assert differing(chain(), chain(mm=[MultimodalItem("image", offset, length)])) == changed


def test_the_offset_of_a_multimodal_item_is_relative_to_the_block() -> None:
    from_start = chain(mm=[MultimodalItem("image", 2, 5)])
    one_block_on = chain(tokens=TOKENS[4:], none_hash=from_start[0], mm=[MultimodalItem("image", -2, 5)])
    assert from_start[1:] == one_block_on


def test_extra_keys_come_as_lora_then_multimodal_then_salt() -> None:
    import cbor2

    extra = (("lora", "l", "p"), ("mm", "image", 1), ("cache_salt", "s"))
    expected = hashlib.sha256(cbor2.dumps((ROOT, tuple(TOKENS[:4]), extra), canonical=True)).digest()
    mm = [MultimodalItem("image", 1, 2)]
    assert chain(tokens=TOKENS[:4], lora=Lora("l", "p"), mm=mm, cache_salt="s") == [expected]


def test_lookahead_covers_the_next_tokens_and_waits_for_them() -> None:
    assert len(chain(lookahead=1)) == 2
    assert len(chain(tokens=[*TOKENS, 5], lookahead=1)) == 3
    changed = [*TOKENS[:4], 7, *TOKENS[5:]]
    assert differing(chain(lookahead=1), chain(tokens=changed, lookahead=1)) == [True, True]
    assert chain(lookahead=1)[0] != chain()[0]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_hashes_depend_on_values_not_on_which_objects_hold_them(algo: Algorithm) -> None:
    name = "adapter"
    same_object, equal = Lora(name, name), Lora(name, "".join(["adap", "ter"]))
    root = none_hash(algo, "0")
    given: dict[str, Any] = {"algo": algo, "none_hash": root, "cache_salt": name}
    hashes = block_hashes(TOKENS, 4, lora=same_object, **given)
    assert hashes == block_hashes(TOKENS, 4, lora=equal, **given)
    assert hashes == block_hashes(np.array(TOKENS), 4, lora=equal, **given)  # type: ignore[arg-type]


def test_pickle_alone_would_depend_on_the_objects() -> None:
    name, equal = "adapter", "".join(["adap", "ter"])
    assert pickle.dumps((name, name), protocol=5) != pickle.dumps((name, equal), protocol=5)


def test_the_group_id_follows_in_four_bytes_big_endian() -> None:
    assert with_group_id(b"\x01", 258) == b"\x01\x00\x00\x01\x02"


def test_digest_lengths() -> None:
    assert [len(none_hash(algo, "0")) for algo in ALGORITHMS] == [32, 32, 16, 16]


def test_an_unset_seed_is_random_for_xxhash_and_so_refused() -> None:
    with pytest.raises(ValueError, match="pass a seed"):
        none_hash("xxhash")


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        chain(block_size=0)
    with pytest.raises(ValueError, match="'md5'; known: sha256"):
        none_hash("md5", "0")  # type: ignore[arg-type]
