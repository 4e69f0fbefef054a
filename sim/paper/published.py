"""What the PagedAttention paper printed: numbers, with where they stand."""

from __future__ import annotations

from typing import NamedTuple

# Table 1: an A100 with 40 GB and a model of 13B parameters.
KV_GIB = 12
NUM_SLOTS = 15_700  # tokens of KV


class Dataset(NamedTuple):
    """Mean lengths (figure 11) and the load of figure 13."""

    prompt_len: float  # tokens
    output_len: float
    rate: float  # requests a second
    batched: dict[str, float]  # mean number of batched requests, by system


SHAREGPT = Dataset(
    161.31, 337.99, 2.0, {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}
)
ALPACA = Dataset(19.31, 58.45, 30.0, {"max": 7.00, "pow2": 43.24, "oracle": 72.75, "paged": 132.44})

# Figure 2, % of the KV memory in the experiments of section 6.2: token states, reserved, internal
# fragmentation, external fragmentation and others. Of vLLM the first alone is printed.
MEMORY = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
}
MEMORY_PAGED = 96.3

# Section 6.4: highest request rates, vLLM's over Orca (Oracle)'s, by the prefix's tokens.
PREFIX_RATIOS = {80: 1.67, 341: 3.58}

# Section 6.3, % of blocks saved by sharing, for 2, 4 and 6 sequences; of ShareGPT the ends are printed.
SAVED_PARALLEL = {"alpaca": (6.09, 8.53, 9.79), "sharegpt": (16.2, None, 30.5)}
SAVED_BEAM = {"alpaca": (37.56, 53.13, 55.16), "sharegpt": (44.3, None, 66.3)}

# Section 7.2: the block sizes that work best.
BEST_BLOCK_SIZES = {"sharegpt": (16, 128), "alpaca": (16, 32)}
