"""The fates of a request's prompt tokens, and what it adds to the history of computed tokens."""

from __future__ import annotations

from sim._jit import verb
from sim.caches import computed_when_scheduled
from sim.columns import H, K, Q, R, S
from sim.core import Core
from sim.fates import miss_fates
from sim.history import NODES_PER_SEGMENT, ROOT, add, computed_under, find, raise_computed


@verb
def has_room(core: Core, slot: int) -> bool:
    """Whether the history has room for all that a request may add."""
    wanted = NODES_PER_SEGMENT * core.requests[R.num_segments, slot]
    room: bool = core.count[K.history_nodes] + wanted <= len(core.history.nodes)
    return room


@verb
def find_or_add(core: Core, parent: int, branch: int, segment: int) -> int:
    """The history's node of this piece, made if there is none; `has_room` was true."""
    node: int = find(core.history, parent, branch, segment)
    if node == ROOT:
        node = core.count[K.history_nodes]
        core.count[K.history_nodes] = node + 1
        add(core.history, node, parent, branch, segment)
    return node


@verb
def note_admission(core: Core, step: int, slot: int, num_hit_tokens: int, num_new_tokens: int) -> None:
    """The step being scheduled is about to admit a request: decide its fates, write its progress down."""
    if not computed_when_scheduled(core):
        num_new_tokens = 0
    elif core.count[K.num_admitted] == 0:
        note_running(core, step)
    if core.requests[R.num_preemptions, slot] == 0:
        decide_fates(core, slot, num_hit_tokens, num_new_tokens)
    else:
        note_computed(core, slot, num_hit_tokens + num_new_tokens)


@verb
def note_running(core: Core, step: int) -> None:
    """Write down what the running requests have computed, the step being scheduled included."""
    for i in range(core.count[K.num_running]):
        slot = core.queues[Q.running, i]
        note_computed(core, slot, core.requests[R.num_computed, slot])
    for i in range(core.count[K.step_size + step]):
        slot = core.steps[S.slot, step, i]
        note_computed(core, slot, core.requests[R.num_computed, slot] + core.steps[S.tokens, step, i])


@verb
def decide_fates(core: Core, slot: int, num_hit_tokens: int, num_new_tokens: int) -> None:
    """Give every prompt token of a request its fate, and its whole path nodes.

    Then its hit and new tokens count as computed; it stays at the node where they end.
    """
    requests = core.requests
    history = core.history
    namespace = requests[R.namespace, slot]
    prompt_len = requests[R.prompt_len, slot]
    first = requests[R.first_segment, slot]
    num_computed = num_hit_tokens + num_new_tokens
    known = 0  # tokens of the prompt that were ever computed in this namespace
    known_anywhere = 0
    on_path = True  # of what this namespace has computed
    on_any_path = True
    node = ROOT
    start = 0  # tokens before the piece
    branch = 0
    for i in range(first, first + requests[R.num_segments, slot]):
        segment = core.segments[0, i]
        length = core.segments[1, i]
        if segment < 0:
            break
        if length == 0:
            continue
        node = find_or_add(core, node, branch, segment)
        if namespace != 0:
            find_or_add(core, node, -namespace, 0)
        if on_any_path:
            tokens = min(history.nodes[node, H.computed], length, prompt_len - start)
            known_anywhere += tokens
            on_any_path = tokens == length
        if on_path:
            tokens = min(computed_under(history, node, namespace), length, prompt_len - start)
            known += tokens
            on_path = tokens == length
        if start <= num_computed:
            raise_computed(history, node, namespace, min(length, num_computed - start))
            requests[R.history_node, slot] = node
            requests[R.history_segment, slot] = i - first
            requests[R.history_start, slot] = start
        start += length
        branch = length
    requests[R.history_tokens, slot] = num_computed
    evicted, last_token, partial_block, isolated, cold = miss_fates(
        prompt_len, core.config.block_size, num_hit_tokens, known, known_anywhere
    )
    requests[R.fate_evicted, slot] = evicted
    requests[R.fate_last_token, slot] = last_token
    requests[R.fate_partial_block, slot] = partial_block
    requests[R.fate_isolated, slot] = isolated
    requests[R.fate_cold, slot] = cold


@verb
def note_computed(core: Core, slot: int, num_computed: int) -> None:
    """Write down that an admitted request has computed its first `num_computed` tokens."""
    requests = core.requests
    node = requests[R.history_node, slot]
    if node == ROOT or num_computed <= requests[R.history_tokens, slot]:
        return
    namespace = requests[R.namespace, slot]
    first = requests[R.first_segment, slot]
    end = first + requests[R.num_segments, slot]
    i = first + requests[R.history_segment, slot]
    start = requests[R.history_start, slot]
    while True:
        length = core.segments[1, i]
        raise_computed(core.history, node, namespace, min(length, num_computed - start))
        if num_computed - start <= length:
            break
        start += length
        i += 1
        while i < end and core.segments[1, i] == 0:
            i += 1
        if i == end or core.segments[0, i] < 0:
            node = ROOT  # the rest is nobody else's
            break
        node = find(core.history, node, length, core.segments[0, i])
    requests[R.history_node, slot] = node
    requests[R.history_segment, slot] = i - first
    requests[R.history_start, slot] = start
    requests[R.history_tokens, slot] = num_computed
