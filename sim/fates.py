"""Why a prompt token was or was not found in the prefix cache: one fate for each token.

Decided once for each request, at its first admission. Of a prompt's L tokens in blocks of B, vLLM
looks up at most cap = (L - 1) // B * B, whole blocks that leave the last token to compute. With h
tokens hit, s the longest prefix ever computed under this LoRA and cache_salt, and u the longest
under any, a prompt reads, from its front:

hit            found in the cache
evicted        computed before and within reach of a lookup, so an infinite pool would have it
last_token     computed before, in the last block of a prompt of whole blocks, which is never looked up
partial_block  computed before, but in a block that nobody has filled with these tokens
isolated       computed before under another LoRA or cache_salt only
cold           never computed; where all of the prompt was, its final token is a last_token
"""

from __future__ import annotations

from sim._jit import verb

FATES = ("hit", "evicted", "last_token", "partial_block", "isolated", "cold")
MISSES = FATES[1:]  # as `miss_fates` returns them, and in the order of their columns of requests


@verb
def miss_fates(
    prompt_len: int, block_size: int, hit: int, computed: int, computed_anywhere: int
) -> tuple[int, int, int, int, int]:
    """How many tokens of a prompt are evicted, last_token, partial_block, isolated and cold.

    `computed` and `computed_anywhere` are s and u, at most prompt_len. Together with the `hit`
    tokens the five make up the prompt, exactly.
    """
    cap = (prompt_len - 1) // block_size * block_size
    whole = computed // block_size * block_size
    retained = max(hit, min(whole, cap))  # what an infinite pool would have hit
    ours = max(retained, computed)
    anybodys = max(ours, computed_anywhere)
    last_token = 0
    partial_block = 0
    if whole > cap:
        last_token = ours - retained
    else:
        partial_block = ours - retained
    isolated = anybodys - ours
    if anybodys == prompt_len:  # the final token has to be computed whoever has computed it
        if isolated > 0:
            isolated -= 1
            last_token += 1
        elif partial_block > 0:
            partial_block -= 1
            last_token += 1
    return retained - hit, last_token, partial_block, isolated, prompt_len - anybodys
