"""Where the KV memory goes: token states, reservations, and fragments that hold nothing.

In slots, of one token each, over the time in which the engine works, as figure 2 of the PagedAttention
paper has it (its section 3.1 names the three kinds of waste):

- token states: slots with the keys and values of a token that is computed, or is in this step; a slot
  that several requests share counts once;
- reserved: slots that a running request holds and its own later tokens will fill;
- internal fragmentation: slots that a request holds and will never fill, since its answer ends before
  its reservation, or inside its last block: known at its end only;
- external fragmentation: slots that the allocator cannot give to anybody: those of a region beyond what
  was asked for, as buddy allocation rounds up, and all free ones while they do not do for the next
  request, which therefore waits;
- free: the rest, cached blocks that no running request uses among them.
"""

from __future__ import annotations

from sim._dispatch import constant
from sim._jit import verb
from sim.blocks import FREE
from sim.caches import held_slots, num_sequences, num_tables, wanted_slots
from sim.columns import K, Q, R, W
from sim.core import Core
from sim.request import Floats, Ints

# rows of the sums, in the order of their columns in `clock` and `count`
COUNTED = ("token_states", "reserved", "internal_fragmentation", "external_fragmentation")
STATES = (*COUNTED, "free")


@constant
def adds_states(core: Core) -> bool:
    """Whether this engine does: known when it is compiled, so that one that does not pays nothing."""
    return core.memory.ndim > 1


@verb
def note_held(core: Core) -> int:
    """Add up what the running requests hold, ask for, and never fill; returns their computed tokens.

    Of several sequences each has its own, shared or not.
    """
    count = core.count
    requests = core.requests
    computed: int = 0
    count[K.slots_held] = 0
    count[K.slots_wanted] = 0
    count[K.slots_never_filled] = 0
    for i in range(count[K.num_running]):
        slot = core.queues[Q.running, i]
        here = requests[R.num_computed, slot]
        # each sequence has a last block, or a region, of its own from its first output on, or before
        sequences = num_sequences(core, slot, here - 1)
        tables = num_tables(core, slot, here - 1)
        wanted = wanted_slots(core, slot)
        longest = min(requests[R.prompt_len, slot] + requests[R.output_len, slot], core.config.max_model_len)
        count[K.slots_held] += tables * held_slots(core, slot)
        count[K.slots_wanted] += tables * wanted
        count[K.slots_never_filled] += tables * max(0, wanted - longest)
        computed += sequences * here
    return computed


@verb
def add_states(core: Core, computed: int, refused: bool, duration: float) -> None:
    """Add a step to the sums: after `note_held`, with `computed` tokens of the running requests.

    `refused`: whether the waiting queue's head found too little memory.
    """
    count = core.count
    clock = core.clock
    block_size = core.config.block_size
    num_free = core.pool.count[FREE] * block_size
    internal = count[K.slots_never_filled]
    reserved = count[K.slots_wanted] - computed - internal
    beyond = count[K.slots_held] - count[K.slots_wanted]
    states = (core.pool.blocks.shape[1] - 1) * block_size - num_free - reserved - internal - beyond
    external = beyond + num_free if refused else beyond
    clock[W.token_states] += states * duration
    clock[W.reserved] += reserved * duration
    clock[W.internal] += internal * duration
    clock[W.external] += external * duration
    if states > count[K.fullest_token_states]:
        count[K.fullest_token_states] = states
        count[K.fullest_reserved] = reserved
        count[K.fullest_internal] = internal
        count[K.fullest_external] = external


def state_times(core: Core) -> Floats:
    """Slots x seconds by COUNTED, up to now."""
    return core.clock[W.token_states : W.external + 1].copy()


def fullest_states(core: Core) -> Ints:
    """Slots by COUNTED in the step with most token states."""
    return core.count[K.fullest_token_states : K.fullest_external + 1].copy()
