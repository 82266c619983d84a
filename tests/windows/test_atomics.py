"""fetch_add and compare_swap (case 16)."""

import numpy as np
import pytest
from harness import Kind, Processes, Threads, in_threads, raises

from onesided import BoundsError, Group, RemoteAccessError, Unsupported, Window

Ranks = Threads | Processes


def exact_sum(group: Group, kind: Kind, times: int, threads: int) -> list[int]:
    window = Window.allocate(group, shape=4, dtype=np.uint64, transport=kind.name)
    seen: list[int] = []

    def add() -> None:
        seen.extend(window.fetch_add(0, 8, 1) for _ in range(times))

    in_threads([add] * threads)
    group.barrier()
    total = times * threads * group.size
    into = np.zeros(4, np.uint64)
    window.get(into, 0)
    assert into.tolist() == [0, total, 0, 0]
    group.barrier()
    window.close()
    return seen


@pytest.mark.parametrize("threads", [1, 4])
def test_case_16_fetch_add_by_all(ranks: Ranks, kind: Kind, threads: int) -> None:
    """An exact sum, and every returned value once."""
    seen = ranks.run(exact_sum, 4, kind, 1000 // threads, threads)
    assert sorted(value for values in seen for value in values) == list(range(4000))


def ladder(group: Group, kind: Kind) -> None:
    """Rank r may step from k to k + 1 where k % size == r: all take turns."""
    window = Window.allocate(group, shape=1, dtype=np.uint64, transport=kind.name)
    steps = 100
    for k in range(group.rank, steps, group.size):
        while window.compare_swap(0, 0, k, k + 1) != k:
            pass
    group.barrier()
    assert window.compare_swap(0, 0, steps + 1, 0) == steps  # changes nothing
    assert window.fetch_add(0, 0, 0) == steps
    group.barrier()
    window.close()


def test_case_16_compare_swap_ladder(ranks: Ranks, kind: Kind) -> None:
    ranks.run(ladder, 2, kind)


def lock(group: Group, kind: Kind, times: int) -> None:
    """A lock in word 0; what it guards is read and written by plain get and put."""
    window = Window.allocate(group, shape=2, dtype=np.uint64, transport=kind.name)
    mine = group.rank + 1
    for _ in range(times):
        while window.compare_swap(0, 0, 0, mine) != 0:
            pass
        value = np.zeros(1, np.uint64)
        window.get(value, 0, 8)
        window.put(value + np.uint64(1), 0, 8)
        window.flush(0)
        assert window.compare_swap(0, 0, mine, 0) == mine
    group.barrier()
    if group.rank == 0:
        assert window.array.tolist() == [0, times * group.size]
    group.barrier()
    window.close()


def test_case_16_a_lock_excludes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(lock, 3, kind, 200)


def values(group: Group, kind: Kind) -> None:
    """The whole range of 64 bits, both signs, with wrapping."""
    window = Window.allocate(group, shape=2, dtype=np.uint64, transport=kind.name)
    peer = (group.rank + 1) % group.size
    expected = 0
    for add in (1, -1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 12345):
        assert window.fetch_add(peer, 8, add) == expected
        expected = (expected + add) % 2**64
    for value in (0, 2**64 - 1, 2**63, 7):
        assert window.compare_swap(peer, 8, expected, value) == expected
        expected = value
    assert window.compare_swap(peer, 8, 7, -1) == 7
    assert window.compare_swap(peer, 8, -1, 3) == 2**64 - 1
    group.barrier()
    assert window.array.tolist() == [0, 3]
    group.barrier()
    window.close()


def test_values_of_64_bits(ranks: Ranks, kind: Kind) -> None:
    ranks.run(values, 2, kind)


def refused(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 64, transport=kind.name)
    window.array[:] = 6
    group.barrier()
    peer = (group.rank + 1) % group.size
    for offset in (1, 2, 3, 4, 5, 6, 7, 12, 57, 60, 63, 64, 65, 72, 2**63, 2**64 - 8, 2**64 - 1, 2**64, -8, -1):
        with raises(BoundsError):
            window.fetch_add(peer, offset, 1)
        with raises(BoundsError):
            window.compare_swap(peer, offset, 0x0606060606060606, 0)
    for number in (2**64, -(2**63) - 1, 2**200):
        with raises(BoundsError):
            window.fetch_add(peer, 0, number)
        with raises(BoundsError):
            window.compare_swap(peer, 0, number, 0)
        with raises(BoundsError):
            window.compare_swap(peer, 0, 0, number)
    group.barrier()
    assert (window.array == 6).all()
    small = Window.allocate(group, 7, transport=kind.name)
    with raises(BoundsError):
        small.fetch_add(peer, 0, 1)
    group.barrier()
    small.close()
    window.close()


def test_case_16_misaligned_and_out_of_bounds(ranks: Ranks, kind: Kind) -> None:
    ranks.run(refused, 2, kind)


def not_permitted(group: Group, kind: Kind) -> None:
    peer = (group.rank + 1) % group.size
    for access in ("r", "w"):
        window = Window.allocate(group, 64, access=access, transport=kind.name)
        with raises(RemoteAccessError):
            window.fetch_add(peer, 0, 1)
        with raises(RemoteAccessError):
            window.compare_swap(peer, 0, 0, 1)
        group.barrier()
        assert not window.array.any()
        window.close()
    private = Window.create(group, np.zeros(8, np.uint64), transport=kind.name)
    if kind.private_atomics:
        assert private.fetch_add(peer, 0, 1) == 0
        assert private.compare_swap(peer, 0, 1, 0) == 1
    else:
        with raises(Unsupported, "private"):
            private.fetch_add(peer, 0, 1)
        with raises(Unsupported, "private"):
            private.compare_swap(peer, 0, 0, 1)
    group.barrier()
    assert not private.array.any()
    private.close()


def test_where_atomics_are_refused(ranks: Ranks, kind: Kind) -> None:
    """Where the access is not both, and on memory that cannot be shared."""
    ranks.run(not_permitted, 2, kind)


def unaligned_window(group: Group, kind: Kind) -> None:
    """A window that begins at an odd address has no aligned word at offset 0: the memory's alignment counts."""
    whole = Window.allocate(group, 64, transport=kind.name)
    part = Window.create(group, whole.array[4:60], transport=kind.name)
    peer = (group.rank + 1) % group.size
    with raises(BoundsError, "aligned"):
        part.fetch_add(peer, 0, 1)
    assert part.fetch_add(peer, 4, 5) == 0
    group.barrier()
    assert whole.array.view(np.uint64).tolist() == [0, 5, 0, 0, 0, 0, 0, 0]
    group.barrier()
    part.close()
    whole.close()


def test_alignment_is_that_of_the_memory(ranks: Ranks, kind: Kind) -> None:
    ranks.run(unaligned_window, 2, kind)
