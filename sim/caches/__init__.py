"""The ways to share KV, a folder each, and the verbs by which the scheduler drives them all.

The class of `core.cache` says which one an engine has. A cache's folder has that class, `Cache`, a
named tuple of arrays, `new_cache`, which makes one, and its own version of the verbs below where it
differs from what stands here. To add one, write its folder and list it in `sim/cache_kinds.py`; the
conformance suite then tests it.

Beside the verbs it has `metadata(core)`: how many entries the cache keeps to find KV, and for how
many slots. It may have `figures(sums)`, what a summary says of `core.cache.sums`, with the `LABELS` of
a report; `begin(cache, pool, tree)`, what it takes out of the pool before the run; `widened(cache,
width)`, itself with room for groups of so many sequences; and `audit(core)`, asserts for tests.

`slot` is a request's place in the columns of `core.requests`. A verb changes what it says, and
nothing where it returns False.
"""

from __future__ import annotations

from sim._dispatch import per_cache
from sim.blocks import reset_prefix_cache
from sim.columns import K, Q, R, T
from sim.core import Core
from sim.seats import leave_plain_seat, take_plain_seat
from sim.waiting import prepend_request


@per_cache
def take_seat(core: Core, slot: int) -> bool:
    """Give a waiting request what its lookup needs; False if tables must grow first (State.grow)."""
    take_plain_seat(core, slot)
    return True


@per_cache
def leave_seat(core: Core, slot: int) -> None:
    """Take that back, of a request without blocks."""
    leave_plain_seat(core, slot)


@per_cache
def order_waiting(core: Core) -> None:
    """Before a step admits requests: put the waiting queue into the cache's own order."""


@per_cache
def get_computed_tokens(core: Core, slot: int) -> int:
    """How many leading tokens of a seated, waiting request have KV already; references nothing."""
    return 0


@per_cache
def is_still_blocked(core: Core, slot: int, coming_changes: int) -> bool:
    """Whether the waiting queue's head, refused before, surely cannot be admitted yet."""
    return False


@per_cache
def note_blocked(core: Core, slot: int, num_hit_tokens: int) -> None:
    """The head has been refused: remember what `is_still_blocked` needs."""


@per_cache
def unblocks(core: Core, slot: int, head: int) -> bool:
    """Whether the block that a decoding request completes next may help the refused head."""
    return False


@per_cache
def allocate_slots(core: Core, slot: int, num_new_tokens: int, num_hit_tokens: int) -> bool:
    """Give a waiting request its hit, and blocks for new tokens; False if they lack."""
    raise NotImplementedError


@per_cache
def extend(core: Core, slot: int, num_new_tokens: int) -> bool:
    """Give a running request blocks for its next tokens; False if they lack.

    Called once its tokens reach requests[R.edge, slot], which this and `allocate_slots` set.
    """
    raise NotImplementedError


@per_cache
def choose_victim(core: Core) -> int:
    """The place in the running list of the request to preempt: the last, or the least urgent.

    As Scheduler.schedule does.
    """
    running = core.queues[Q.running]
    last: int = core.count[K.num_running] - 1
    if not core.config.priority_policy:
        return last
    requests = core.requests
    worst = 0
    for i in range(1, last + 1):
        priority = requests[R.priority, running[i]]
        worst_priority = requests[R.priority, running[worst]]
        if priority > worst_priority or (
            priority == worst_priority
            and core.times[T.arrival_time, running[i]] > core.times[T.arrival_time, running[worst]]
        ):
            worst = i
    return worst


@per_cache
def preempt(core: Core, slot: int) -> int:
    """Take a running request's blocks; returns how many of its tokens keep their KV elsewhere."""
    free(core, slot)
    leave_seat(core, slot)
    return 0


@per_cache
def queue_again(core: Core, slot: int) -> None:
    """Put a preempted request into the waiting queue: in front of all, unless priorities decide."""
    prepend_request(core, slot)


@per_cache
def after_step(core: Core, slot: int, num_tokens: int, sampled: bool) -> None:
    """A running request's step has ended: its first `num_tokens` tokens have KV, and it has sampled or not.

    The new token is not yet counted in R.num_tokens.
    """


@per_cache
def free(core: Core, slot: int) -> None:
    """Take back all blocks of a request that ends; a waiting one has none."""
    raise NotImplementedError


@per_cache
def reset(core: Core) -> bool:
    """Forget all cached content, if no block is in use; returns whether it did."""
    return reset_prefix_cache(core.pool, core.tree)


@per_cache
def num_sequences(core: Core, slot: int, num_computed: int) -> int:
    """How many sequences of a request run in a step that begins after `num_computed` tokens."""
    return 1


@per_cache
def cut_chunk(core: Core, slot: int, num_computed: int, num_new_tokens: int) -> int:
    """How many of a request's next tokens one step may compute, the budget aside."""
    return num_new_tokens


@per_cache
def runs_decodes(core: Core) -> bool:
    """Whether steps of decodes may be taken many at a time, with a look at the cache at edges only."""
    return True


@per_cache
def transfer_time(core: Core) -> float:
    """Seconds by which what was copied for the step being scheduled prolongs it."""
    return 0.0


@per_cache
def computed_when_scheduled(core: Core) -> bool:
    """Whether a lookup may find tokens as soon as they are scheduled, as a token's fate must know.

    If not, the cache says itself, by `note_computed`, when others may find them.
    """
    return True


@per_cache
def num_tables(core: Core, slot: int, num_computed: int) -> int:
    """How many tables of blocks, or regions, a running request has after `num_computed` tokens."""
    return num_sequences(core, slot, num_computed)


@per_cache
def held_slots(core: Core, slot: int) -> int:
    """How many tokens there is room for in each of them."""
    return core.requests[R.num_blocks, slot] * core.config.block_size  # type: ignore[no-any-return]


@per_cache
def wanted_slots(core: Core, slot: int) -> int:
    """How many of these it asked for: less where the allocator gives more."""
    return held_slots(core, slot)
