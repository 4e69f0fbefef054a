"""The page's controls: their names, the values they may have, and their place in the page's address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sim.explore.two_prompts import MOST_TOKENS

WORKLOADS = {
    "system prompts": "shared_prefix",
    "chat of several turns": "multi_turn",
    "questions about documents": "documents",
    "nothing shared": "scan",
}
CACHES = {
    "vLLM: hashed blocks": "apc",
    "SGLang: radix tree": "radix",
    "vLLM 0.2: paged, reserved prefixes": "paged",
    "contiguous, nothing shared": "contiguous",
}
SHARED, PROMPTS, BLOCKS = range(MOST_TOKENS + 1), range(1, MOST_TOKENS + 1), range(1, 17)  # tokens
RATES = range(1, 41)  # requests a second
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # tokens
POOLS = (16_384, 32_768, 65_536, 131_072, 262_144, 393_216)  # tokens of KV
PREFIX_LENS = range(8, 2049, 8)  # tokens


class Controls(NamedTuple):
    """Where all controls stand; the first three are the 14 tokens', the others the server's."""

    shared: int = 10  # tokens
    prompt: int = 14  # tokens
    block: int = 4  # tokens
    workload: str = "shared_prefix"
    prefix: int = 1000  # tokens
    rate: int = 8  # requests a second
    block_size: int = 16  # tokens
    pool: int = 65_536  # tokens
    cache: str = "apc"
    caching: bool = True


CHOICES: dict[str, Sequence[int] | Sequence[str]] = {
    "shared": SHARED,
    "prompt": PROMPTS,
    "block": BLOCKS,
    "workload": tuple(WORKLOADS.values()),
    "prefix": PREFIX_LENS,
    "rate": RATES,
    "block_size": BLOCK_SIZES,
    "pool": POOLS,
    "cache": tuple(CACHES.values()),
    "caching": ("on", "off"),
}


def from_address(query: Mapping[str, str | Sequence[str]]) -> Controls:
    """The controls that an address tells of. What it leaves out, or no control can be, has its default."""
    told = {}
    for name, allowed in CHOICES.items():
        given = query.get(name, "")
        text = given if isinstance(given, str) else given[-1]
        for choice in allowed:
            if text == str(choice):
                told[name] = text == "on" if name == "caching" else choice
    return Controls()._replace(**told)  # type: ignore[arg-type]  # each name has a choice of its own type


def to_address(controls: Controls) -> dict[str, str]:
    """The query of the address: the controls that do not stand at their defaults."""
    defaults = Controls()._asdict()
    return {
        name: {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        for name, value in controls._asdict().items()
        if value != defaults[name]
    }
