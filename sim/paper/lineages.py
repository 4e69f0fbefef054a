"""What sharing in beam search owes to how candidates draw their parents.

The engine draws each candidate's parent among all present ones, equally likely: nobody published how
real ones do. Here, apart from the engine, a candidate goes on from its own text with probability `own`,
and else draws as there; blocks are counted as in section 6.3. At own = 0 the two must agree.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from sim.request import Ints

Block = tuple[int, int]  # when it was last begun or copied, and by whom


def saved(prompt_len: Ints, output_len: Ints, width: int, own: float, block_size: int, seed: int) -> float:
    """% of blocks that candidates of the same request share, summed over all steps of all requests."""
    rng = np.random.default_rng(seed)
    entries = blocks = 0
    for prompt, outputs in zip(prompt_len.tolist(), output_len.tolist(), strict=True):
        for used, distinct in _lives(rng, prompt, outputs, width, own, block_size):
            entries += used
            blocks += distinct
    return 100.0 * (1.0 - blocks / entries)


def _lives(
    rng: np.random.Generator, prompt: int, outputs: int, width: int, own: float, block_size: int
) -> list[tuple[int, int]]:
    """After each output of one request: its table entries, and how many different blocks they name."""
    full, filled = divmod(prompt, block_size)
    tables: list[list[Block]] = [[(-1 - i, 0) for i in range(full)] for _ in range(width)]
    last: list[Block] = [(0, 0)] * width
    counted = []
    for step in range(1, outputs):
        if filled == 0:
            last = [(step, j) for j in range(width)]
        else:
            holders = Counter(last)
            for j, block in enumerate(last):
                if holders[block] > 1:  # copy on write; the last holder writes in place
                    holders[block] -= 1
                    last[j] = (step, j)
        filled += 1
        different = len({block for table in tables for block in table} | set(last))
        counted.append((sum(map(len, tables)) + width, different))
        if filled == block_size:
            tables = [[*table, block] for table, block in zip(tables, last, strict=True)]
            filled = 0
        parents = [j if rng.random() < own else int(rng.integers(width)) for j in range(width)]
        tables = [tables[parent] for parent in parents]
        last = [last[parent] for parent in parents]
    return counted
