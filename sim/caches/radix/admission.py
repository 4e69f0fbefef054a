"""How SGLang guesses what a request will need before it admits it, and whom it retracts when it was wrong.

Follows SGLang 0.5.9: srt/managers/schedule_policy.PrefillAdder, srt/managers/scheduler.Scheduler
(new_token_ratio, update_running_batch) and ScheduleBatch.retract_decode, with the defaults of its
environment variables. A request may be admitted if its prompt and all the tokens it may ask for fit
into what is free or evictable, less a share of what the running requests may still ask for. That
share, the new-token ratio, falls with each step of decodes alone, starts anew when the engine has
been idle, and after a retraction is set by how far those that stay have come.

Where it differs from SGLang: pages are taken at once, not when the batch is complete; a lone request
is admitted whatever it may ask for, since one that the pool can never hold is refused at its arrival.
"""

from __future__ import annotations

import numpy as np

from sim._jit import verb
from sim.blocks import FREE
from sim.columns import K, Q, R, W
from sim.core import Core
from sim.request import Floats

CLIP_MAX_NEW_TOKENS = 4096  # of what a request may still ask for, no more is counted
INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO_FACTOR = 0.14
NEW_TOKEN_RATIO_DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20  # for so many more steps of those that stay a retraction makes room

# Cache.count of sim/caches/radix; steps are numbered from 1
FULL, LPM, DECAYED, STEADY, STEADY_STEP, COUNT_WIDTH = range(6)
# Cache.ratio: the new-token ratio now, at first, at last and by step; tokens promised to others
RATIO, INIT, LEAST, DECAY, PROMISED = range(5)


def new_ratio(schedule_conservativeness: float) -> Floats:
    """The ratio of an idle engine and what it will be by (Scheduler.init_schedule_policy)."""
    init = min(INIT_NEW_TOKEN_RATIO * schedule_conservativeness, 1.0)
    least = min(init * MIN_NEW_TOKEN_RATIO_FACTOR, 1.0)
    return np.array([init, init, least, (init - least) / NEW_TOKEN_RATIO_DECAY_STEPS, 0.0])


@verb
def max_new_tokens(core: Core, slot: int) -> int:
    """The tokens that a request may ask for, cut to what context and pool can hold at most.

    As TokenizerManager and Scheduler.init_req_max_new_tokens cut it.
    """
    config = core.config
    longest = min(config.max_model_len, (config.num_gpu_blocks - 1) * config.block_size) - 1
    room = longest - core.requests[R.prompt_len, slot] - 1
    tokens: int = max(min(core.requests[R.max_tokens, slot], room), 0)
    return tokens


@verb
def tokens_left(core: Core, slot: int) -> int:
    """The tokens that a request may still ask for, as far as they count."""
    outputs = core.requests[R.num_tokens, slot] - core.requests[R.prompt_len, slot]
    left: int = min(max(max_new_tokens(core, slot) - outputs, 0), CLIP_MAX_NEW_TOKENS)
    return left


@verb
def is_prefilling(core: Core, slot: int) -> bool:
    """Whether a running request has still to compute tokens that it had when it was admitted."""
    prefilling: bool = core.requests[R.num_computed, slot] < core.cache.prefill[core.requests[R.seat, slot]]
    return prefilling


@verb
def keep_ratio(core: Core, step: int) -> None:
    """Step number `step` prefills or has retracted: it leaves the ratio as it is."""
    count = core.cache.count
    if count[STEADY_STEP] != step:
        count[STEADY_STEP] = step
        count[STEADY] += 1


@verb
def settle_ratio(core: Core) -> None:
    """Bring the ratio up to date: one decay for each step of decodes since the last time."""
    count = core.cache.count
    ratio = core.cache.ratio
    decays = core.count[K.num_steps] - count[STEADY]
    if core.count[K.num_running] == 0 and core.clock[W.now] > core.clock[W.last_update]:
        ratio[RATIO] = ratio[INIT]  # it was idle (Scheduler.self_check_during_idle)
        count[DECAYED] = max(count[DECAYED], decays)
    while count[DECAYED] < decays and ratio[RATIO] > ratio[LEAST]:
        ratio[RATIO] = max(ratio[RATIO] - ratio[DECAY], ratio[LEAST])
        count[DECAYED] += 1
    count[DECAYED] = max(count[DECAYED], decays)


@verb
def promise(core: Core) -> None:
    """Add up what the running requests may still take, before others are admitted.

    Of decoding ones the ratio's share counts, of those whose prompt this step computes all
    (PrefillAdder.__init__, add_chunked_req).
    """
    settle_ratio(core)
    whole = 0
    shared = 0
    for i in range(core.count[K.num_running]):
        slot = core.queues[Q.running, i]
        if is_prefilling(core, slot):
            whole += min(max_new_tokens(core, slot), CLIP_MAX_NEW_TOKENS)
        else:
            shared += tokens_left(core, slot)
    core.cache.ratio[PROMISED] = whole + core.cache.ratio[RATIO] * shared


@verb
def remaining_tokens(core: Core) -> float:
    """Tokens that are free or evictable and promised to nobody (PrefillAdder.rem_total_tokens)."""
    remaining: float = core.pool.count[FREE] * core.config.block_size - core.cache.ratio[PROMISED]
    return remaining


@verb
def may_be_admitted(core: Core, slot: int, num_hit_tokens: int) -> bool:
    """Whether the estimate lets a waiting request in (PrefillAdder.add_one_req)."""
    if core.count[K.num_running] == 0:
        return True
    wanted = core.requests[R.num_tokens, slot] - num_hit_tokens + tokens_left(core, slot)
    fits: bool = wanted < remaining_tokens(core)
    return fits


@verb
def note_admitted(core: Core, slot: int) -> None:
    """A request has been admitted and has its pages: promise it the rest (PrefillAdder.budget_state)."""
    core.cache.ratio[PROMISED] += min(max_new_tokens(core, slot), CLIP_MAX_NEW_TOKENS)
    if remaining_tokens(core) <= 0:
        core.cache.count[FULL] = 1


@verb
def is_before(core: Core, a: int, b: int) -> bool:
    """Whether `a` is retracted rather than `b`, which is admitted before it."""
    requests = core.requests
    if is_prefilling(core, a) != is_prefilling(core, b):
        return is_prefilling(core, b)
    outputs_a = requests[R.num_tokens, a] - requests[R.prompt_len, a]
    outputs_b = requests[R.num_tokens, b] - requests[R.prompt_len, b]
    if outputs_a != outputs_b:
        fewer: bool = outputs_a < outputs_b
        return fewer
    longer: bool = requests[R.prompt_len, a] >= requests[R.prompt_len, b]
    return longer


@verb
def least_to_lose(core: Core) -> int:
    """The place in the running list of the request to retract (ScheduleBatch.retract_decode).

    The one with the fewest outputs, of these the longest prompt, of these the last; one whose
    prompt is not computed only where no other runs, since SGLang retracts decodes.
    """
    running = core.queues[Q.running]
    worst = 0
    for i in range(1, core.count[K.num_running]):
        if is_before(core, running[i], running[worst]):
            worst = i
    return worst


@verb
def note_retracted(core: Core) -> int:
    """Somebody has been retracted: set the ratio by those that stay; returns how many decode.

    As if each of them will end within RETRACT_DECODE_STEPS steps more than the tokens that it has.
    """
    settle_ratio(core)
    keep_ratio(core, core.count[K.num_steps] + 1)
    requests = core.requests
    decodes = 0
    outputs = 0
    asked = 0
    for i in range(core.count[K.num_running]):
        slot = core.queues[Q.running, i]
        if not is_prefilling(core, slot):
            decodes += 1
            outputs += requests[R.num_tokens, slot] - requests[R.prompt_len, slot]
            asked += max_new_tokens(core, slot)
    if decodes > 0:
        ratio = (outputs + RETRACT_DECODE_STEPS * decodes) / (asked + 1)
        core.cache.ratio[RATIO] = min(1.0, ratio)
    core.cache.count[FULL] = 0
    return decodes
