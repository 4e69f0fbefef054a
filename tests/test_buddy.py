"""Buddy allocation against a model that knows only which units are taken."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sim._jit import entry
from sim.caches.contiguous import buddy
from sim.caches.contiguous.buddy import NEXT, NONE, ORDER, PREV, Buddy, new_buddy

allocate = entry(buddy.allocate)
can_allocate = entry(buddy.can_allocate)
release = entry(buddy.release)
order_of = entry(buddy.order_of)


def chunks(memory: Buddy) -> dict[int, int]:
    """The free chunks, order by start, as the lists have them; the lists must be whole."""
    found: dict[int, int] = {}
    for order, (head, count) in enumerate(memory.sizes.T.tolist()):
        before, start = NONE, head
        while start != NONE:
            assert start not in found and memory.chunks[ORDER, start] == order
            assert memory.chunks[PREV, start] == before
            found[start] = order
            count -= 1
            before, start = start, int(memory.chunks[NEXT, start])
        assert count == 0
    assert (memory.chunks[ORDER] != NONE).sum() == len(found)
    return found


def largest_free(num_units: int, taken: set[int]) -> dict[int, int]:
    """The free aligned regions of 2**k units that no larger one contains: what complete merging leaves.

    A region may not reach over the cuts of the memory into powers of two, and never does: the one
    that would is aligned on a cut and longer than what follows it.
    """
    found: dict[int, int] = {}
    covered: set[int] = set()
    for order in reversed(range(num_units.bit_length())):
        for start in range(0, num_units - (1 << order) + 1, 1 << order):
            units = set(range(start, start + (1 << order)))
            if not units & taken and not units & covered:
                found[start] = order
                covered |= units
    return found


class Machine(RuleBasedStateMachine):
    """Regions taken and given back in any order."""

    @initialize(num_units=st.integers(1, 70))
    def begin(self, num_units: int) -> None:
        self.num_units = num_units
        self.memory = new_buddy(num_units)
        self.regions: dict[int, int] = {}  # order by start

    def taken(self) -> set[int]:
        units = [unit for start, order in self.regions.items() for unit in range(start, start + (1 << order))]
        assert len(units) == len(set(units)), "regions overlap"
        return set(units)

    @rule(size=st.one_of(st.integers(1, 9), st.integers(1, 80)))
    def allocate(self, size: int) -> None:
        order = order_of(size)
        assert size <= 1 << order < 2 * size
        free = largest_free(self.num_units, self.taken())
        fitting = [(of, start) for start, of in free.items() if of >= order]
        regions = sum(1 << (of - order) for of, _ in fitting)
        assert can_allocate(self.memory, order, regions)
        assert not can_allocate(self.memory, order, regions + 1)
        start = allocate(self.memory, order)
        if not fitting:
            assert start == NONE
            return
        assert (min(fitting)[0], start) in fitting  # of the smallest size that will do, its lower end
        self.regions[start] = order

    @rule(place=st.integers(0, 1 << 20))
    def release(self, place: int) -> None:
        if self.regions:
            start = sorted(self.regions)[place % len(self.regions)]
            release(self.memory, start, self.regions.pop(start))

    @invariant()
    def merged(self) -> None:
        taken = self.taken()
        assert all(0 <= unit < self.num_units for unit in taken)
        assert chunks(self.memory) == largest_free(self.num_units, taken)


def test_against_the_model() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )


@pytest.mark.slow
def test_against_the_model_at_length() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=1000, stateful_step_count=80, deadline=None)
    )


def test_a_memory_of_any_size_is_cut_into_powers_of_two() -> None:
    """12 GiB hold 15,728 tokens of a 13B model: 8192 + 4096 + 2048 + 1024 + 256 + 64 + 32 + 16."""
    memory = new_buddy(15_728)
    assert [1 << order for order in chunks(memory).values()] == [16, 32, 64, 256, 1024, 2048, 4096, 8192]
    assert chunks(memory) == {
        0: 13, 8192: 12, 12288: 11, 14336: 10, 15360: 8, 15616: 6, 15680: 5, 15712: 4,
    }  # fmt: skip


def test_seven_regions_of_2048_fit_as_the_paper_counts() -> None:
    """Figure 13 of the PagedAttention paper: Orca (Max) batches 7.00 requests; figure 2: 8.9 % are left."""
    memory = new_buddy(15_728)
    starts = [allocate(memory, 11) for _ in range(8)]
    assert sorted(starts[:7]) == list(range(0, 7 * 2048, 2048)) and starts[7] == NONE
    free = sum(1 << order for order in chunks(memory).values())
    assert round(100 * free / 15_728, 1) == 8.9


def test_the_chunk_freed_last_is_taken_first() -> None:
    memory = new_buddy(16)
    a, b, c, d = (allocate(memory, 2) for _ in range(4))
    assert (a, b, c, d) == (0, 4, 8, 12)
    release(memory, a, 2)
    release(memory, c, 2)
    assert [allocate(memory, 2), allocate(memory, 2)] == [c, a]
