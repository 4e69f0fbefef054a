"""What a scheduled step looks like to the GPU, and how far it takes its requests."""

from __future__ import annotations

from sim._jit import hot
from sim.caches import num_sequences
from sim.columns import K, R, S
from sim.core import Core


@hot
def update_after_schedule(core: Core, step: int) -> int:
    """Advance the scheduled requests and sum up the step's shape; returns how many there are.

    num_computed advances here, not when the output arrives (Scheduler._update_after_schedule).
    """
    requests = core.requests
    count = core.count
    size: int = count[K.step_size + step]
    outputs = 0
    decodes = 0
    decode_kv = 0
    prefills = 0
    tokens = 0
    squares = 0
    cross = 0
    context = 0
    for i in range(size):
        slot = core.steps[S.slot, step, i]
        num_new = core.steps[S.tokens, step, i]
        computed = requests[R.num_computed, slot]
        width = num_sequences(core, slot, computed)
        if num_new == 1:
            decodes += width
            decode_kv += width * (computed + 1)
        else:
            prefills += width
            tokens += width * num_new
            squares += width * (num_new * num_new)
            cross += width * (num_new * computed)
            context += width * computed
        computed += num_new
        requests[R.num_computed, slot] = computed
        requests[R.in_flight, slot] += num_new
        samples = computed >= requests[R.num_tokens, slot] + requests[R.placeholders, slot]
        core.steps[S.samples, step, i] = samples
        core.steps[S.request_id, step, i] = requests[R.request_id, slot]
        if samples:
            outputs += 1
            if core.config.async_scheduling:
                requests[R.placeholders, slot] += 1
    count[K.shape_outputs] = outputs
    count[K.shape_decodes] = decodes
    count[K.shape_decode_kv] = decode_kv
    count[K.shape_prefills] = prefills
    count[K.shape_tokens] = tokens
    count[K.shape_squares] = squares
    count[K.shape_cross] = cross
    count[K.shape_context] = context
    return size
