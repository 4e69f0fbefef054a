"""Recompute recorded block hashes, byte for byte."""

from __future__ import annotations

from typing import Any

from sim.hashing import Lora, MultimodalItem, block_hashes, none_hash
from sim.verify.compare import compare


def replay_hashes(case: dict[str, Any], by_seed: dict[str, Any]) -> None:
    """Recompute a chain under every recorded seed and algorithm; Mismatch at the first difference."""
    lora = Lora(case["lora"][0], case["lora"][2]) if case["lora"] else None
    items = [MultimodalItem(*item) for item in case["mm"] or []]
    for seed, algorithms in by_seed.items():
        for algo, recorded in algorithms.items():
            if seed == "unset" and algo.startswith("xxhash"):
                start = bytes.fromhex(recorded["none_hash"])  # random in every process
            else:
                start = none_hash(algo, None if seed == "unset" else seed)
            got = block_hashes(
                case["tokens"],
                case["block_size"],
                algo=algo,
                none_hash=start,
                lora=lora,
                mm=items,
                cache_salt=case["salt"],
                lookahead=case["lookahead"],
            )
            where = f"{algo}, PYTHONHASHSEED {seed}"
            compare(where, {"none_hash": recorded["none_hash"]}, {"none_hash": start.hex()})
            for i, expected in enumerate(recorded["chains"][case["name"]]):
                have = got[i].hex() if i < len(got) else "absent"
                compare(where, {f"block {i}": expected}, {f"block {i}": have})
            compare(where, {"blocks": len(recorded["chains"][case["name"]])}, {"blocks": len(got)})
