"""What a finished run is known by: everything that its figures depend on."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from sim._jit import sources
from sim.scenario import Scenario
from sim.scenario_file import named_files


@functools.cache
def code_version() -> str:
    """A digest of all code and data that ships with prefixsim."""
    digest = hashlib.sha256()
    for pattern in ("*.py", "*.yaml"):
        for name, source in sources(pattern):
            digest.update(f"{name} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()[:16]


def run_key(scenario: Scenario, text: str, seed: int) -> str:
    """The key of a scenario's run with `seed`; `text` is the scenario as YAML."""
    digest = hashlib.sha256(f"{code_version()} {seed}\n{text}".encode())
    for path in named_files(scenario):
        digest.update(_content(path))
    return digest.hexdigest()[:32]


@functools.cache
def _content(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
