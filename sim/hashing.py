"""Block hashes, byte for byte as vLLM 0.33.0 computes them (vllm/v1/core/kv_cache_utils.py).

A full block's hash covers its parent's hash, its tokens and its extra keys, so that equal hashes
mean equal prefixes. The simulator itself compares interned chain ids, which are exact; these bytes
exist for people who compare with a real engine, and for what hashing costs in time.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import cbor2
import xxhash

Algorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


class Lora(NamedTuple):
    """The part of a LoRA adapter that its block hashes cover; its number is not one."""

    name: str
    path: str


class MultimodalItem(NamedTuple):
    """One image, video or audio clip whose placeholder tokens lie in the prompt."""

    identifier: str  # hash of the content, or the user's uuid
    offset: int  # first placeholder token
    length: int  # placeholder tokens


def none_hash(algo: Algorithm, seed: str | None = None) -> bytes:
    """NONE_HASH, the parent of every first block (kv_cache_utils.init_none_hash).

    `seed` is the engine's PYTHONHASHSEED, None where that is unset. An unset seed is a fixed string
    in the sha256 family. In the xxhash family vLLM draws random bytes once a process, which nobody
    can repeat: ValueError.
    """
    if seed is None:
        if algo.startswith("xxhash"):
            raise ValueError(
                f"{algo} without PYTHONHASHSEED has a random NONE_HASH in each process: pass a seed"
            )
        seed = "vllm-none-hash"
    return _hash_function(algo)(seed)


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    algo: Algorithm,
    none_hash: bytes,
    lora: Lora | None = None,
    mm: Sequence[MultimodalItem] = (),
    cache_salt: str | None = None,
    lookahead: int = 0,
) -> list[bytes]:
    """The hashes of all full blocks of `tokens`, first block first (get_request_block_hasher).

    `mm` is in order of offset. `lookahead` is the number of tokens after a block that its hash also
    covers (1 with EAGLE drafting, else 0); a block has a hash only once those tokens exist too.
    Hashes are 32 bytes (sha256) or 16 (xxhash). Modifies nothing.

    With pickle ("sha256", "xxhash") vLLM's hashes are not a function of values alone: pickle writes a
    string that is the same object as an earlier one as a reference. Here, as in an engine whose
    requests arrived over its socket, no two strings of a request are the same object, even where
    they are equal (a LoRA whose name is its path). Only strings of one character cannot be kept apart.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    hash_object = _hash_function(algo)
    ids = list(tokens)
    if type(sum(ids)) is not int:  # NumPy integers would be serialised otherwise
        ids = [int(token) for token in ids]
    hashes: list[bytes] = []
    parent = none_hash
    for start in range(0, len(ids) - block_size - lookahead + 1, block_size):
        end = start + block_size
        extra: tuple[object, ...] | None = _extra_keys(start, end, lora, mm, cache_salt)
        if lookahead:
            extra = (extra, *ids[end : end + lookahead])
        # kv_cache_utils.hash_block_tokens
        parent = hash_object((parent, tuple(ids[start:end]), extra))
        hashes.append(parent)
    return hashes


def with_group_id(block_hash: bytes, group_id: int) -> bytes:
    """The key under which a KV cache group's block is found (make_block_hash_with_group_id)."""
    return block_hash + group_id.to_bytes(4, "big")


def _extra_keys(
    start: int, end: int, lora: Lora | None, mm: Sequence[MultimodalItem], cache_salt: str | None
) -> tuple[object, ...] | None:
    """What besides tokens tells blocks [start, end) apart (generate_block_hash_extra_keys)."""
    keys: list[object] = []
    if lora is not None:
        keys.append(("lora", _own_copy(lora.name), _own_copy(lora.path)))
    for item in mm:
        if item.offset < end and item.offset + item.length > start:
            # Relative to the block: negative where the item began in an earlier one.
            keys.append(("mm", _own_copy(item.identifier), item.offset - start))
    if start == 0 and cache_salt:  # later blocks inherit the salt through their parent
        keys.append(("cache_salt", _own_copy(cache_salt)))
    return tuple(keys) or None


def _own_copy(text: str) -> str:
    """An equal string that is another object, so that pickle's memo never joins two of them."""
    return text.encode("utf-8").decode("utf-8")


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _hash_function(algo: Algorithm) -> Callable[[object], bytes]:
    """vllm/utils/hashing.py: serialise, then digest."""
    if algo not in ALGORITHMS:
        raise ValueError(f"unknown hash algorithm {algo!r}; known: {', '.join(ALGORITHMS)}")
    serialise = _cbor if algo.endswith("_cbor") else _pickled
    if algo.startswith("sha256"):
        return lambda value: hashlib.sha256(serialise(value)).digest()
    return lambda value: xxhash.xxh3_128_digest(serialise(value))
