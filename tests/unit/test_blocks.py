"""The block pool: every block is in exactly one place, whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corogen.schedule.blocks import BlockPool
from corogen.schedule.prefix import PrefixHasher
from corogen.schedule.slots import SlotPool


def test_released_blocks_with_registered_contents_are_cached_and_found_again():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.register(block, b"key")
    pool.release([block])
    assert pool.counts == (3, 1, 0)
    assert pool.lookup(b"key") == block
    pool.share(block)
    assert pool.counts == (3, 0, 1)


def test_the_oldest_cached_block_is_evicted_first_and_a_prompts_end_before_its_beginning():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"beginning")
    pool.register(second, b"end")
    pool.release([first, second])
    pool.allocate(1)
    assert pool.lookup(b"end") is None
    assert pool.lookup(b"beginning") == first


def test_a_shared_block_is_released_only_by_its_last_user():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"k")
    pool.share(block)
    pool.release([block])
    assert pool.counts.used == 1
    pool.release([block])
    assert pool.counts == (0, 1, 0)


def test_forgetting_contents_leaves_nothing_to_hit():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.register(block, b"k")
    pool.release([block])
    pool.forget_contents()
    assert pool.lookup(b"k") is None
    assert pool.counts == (2, 0, 0)
    pool.check()


def test_check_finds_a_double_release():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release([block])
    pool.release([block])
    with pytest.raises(RuntimeError, match="damaged"):
        pool.check()


@given(st.lists(st.tuples(st.sampled_from("arsg"), st.integers(0, 7)), max_size=80))
def test_free_cached_and_used_always_add_up(operations):
    pool, held = BlockPool(6), []
    for name, number in operations:
        if name == "a" and pool.available:
            held += pool.allocate(1)
        elif name == "r" and held:
            pool.release([held.pop(number % len(held))])
        elif name == "s" and (block := pool.lookup(bytes([number]))) is not None:
            pool.share(block)
            held.append(block)
        elif name == "g" and held:
            pool.register(held[number % len(held)], bytes([number]))
        pool.check()
        assert sum(pool.counts) == 6


def test_a_blocks_key_covers_everything_before_it():
    hasher = PrefixHasher(2)
    same = hasher.extend([], [1, 2, 3, 4], 2)
    assert hasher.extend([], [1, 2, 3, 4, 5], 2) == same
    other = hasher.extend([], [9, 2, 3, 4], 2)
    assert other[1] != same[1]
    assert PrefixHasher(2).extend([], [1, 2], 1) != same[:1], "keys are secret and new in every process"


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_the_semaphore_never_has_more_permits_than_its_size(operations, size):
    slots, held = SlotPool(size), []
    for acquire in operations:
        if acquire and slots:
            held.append(slots.acquire())
        elif held:
            slots.release(held.pop())
        assert len(set(held)) == len(held) == slots.taken <= size
        assert bool(slots) == (slots.taken < size)


def test_giving_a_slot_back_twice_is_found():
    slots = SlotPool(1)
    slot = slots.acquire()
    slots.release(slot)
    with pytest.raises(RuntimeError, match="twice"):
        slots.release(slot)
