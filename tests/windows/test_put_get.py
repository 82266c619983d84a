"""put, get and flush: the right bytes at the right place, and nothing else touched (cases 1 to 9 and 18)."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from harness import Kind, Processes, Threads, in_threads, is_asleep, parent, pattern, raises, same, wait_until

from onesided import BoundsError, Group, LayoutError, StaleHandle, Window
from onesided.errors import OnesidedError

Ranks = Threads | Processes

NUMPY_TYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip


# ---- Case 1 ----------------------------------------------------------------------------------------------------------


def ring_of_words(group: Group, kind: Kind) -> None:
    right = (group.rank + 1) % group.size
    with Window.allocate(group, shape=10, dtype=np.uint64, signals=1, transport=kind.name) as window:
        for turn in range(1, 11):
            window.put(np.arange(10, dtype=np.uint64) * (group.rank + 1) + turn, right, signal=0)
            window.wait_signal(0, turn)
            left = (group.rank - 1) % group.size
            same(window.array, np.arange(10, dtype=np.uint64) * (left + 1) + turn)
            group.barrier()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_case_1_ring_of_ten_words_and_a_signal(ranks: Ranks, kind: Kind, size: int) -> None:
    ranks.run(ring_of_words, size, kind)


def ring_of_slices(group: Group, kind: Kind, count: int, dtype: str, async_op: bool, iterations: int) -> None:
    """torchcomms: rank r puts full(count, r) to r + 1 at offset dst * count."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    mine = np.full(count, group.rank, dtype)
    window = Window.allocate(group, shape=(group.size, count), dtype=dtype, signals=1, transport=kind.name)
    for turn in range(1, iterations + 1):
        work = window.put(mine, right, right * mine.nbytes, signal=0, async_op=async_op)
        window.wait_signal(0, turn)
        same(window.array[group.rank], np.full(count, left, dtype))
        work.wait()
        assert work.done()
        assert work.exception() is None
        group.barrier()
    others = [rank for rank in range(group.size) if rank != group.rank]
    assert not window.array[others].any()
    window.close()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8"])
@pytest.mark.parametrize("count", [4, 1024, 1 << 20])
def test_torchcomms_window_ring(ranks: Ranks, kind: Kind, count: int, dtype: str, async_op: bool) -> None:
    ranks.run(ring_of_slices, 2, kind, count, dtype, async_op, 10 if count < 1 << 20 else 3)


def ring_of_different_sizes(group: Group, kind: Kind) -> None:
    right = (group.rank + 1) % group.size
    window = Window.allocate(group, 1000 * (group.rank + 1), signals=1, transport=kind.name)
    window.put(pattern(1000 * (right + 1), group.rank), right, signal=0)
    with raises(BoundsError):
        window.put(b"x", right, 1000 * (right + 1))
    window.wait_signal(0, 1)
    same(window.array, pattern(1000 * (group.rank + 1), (group.rank - 1) % group.size))
    group.barrier()
    window.close()


def test_torchcomms_different_sizes_by_rank(ranks: Ranks, kind: Kind) -> None:
    ranks.run(ring_of_different_sizes, 3, kind)


# ---- Case 2 ----------------------------------------------------------------------------------------------------------


def every_count(group: Group, kind: Kind) -> None:
    peer = (group.rank + 1) % group.size
    for dtype in NUMPY_TYPES:
        values = pattern(9 * np.dtype(dtype).itemsize, group.rank).view(dtype) if dtype != "bool" else np.ones(9, bool)
        window = Window.allocate(group, shape=10, dtype=dtype, signals=1, transport=kind.name)
        for count in range(10):
            memory = np.frombuffer(window.memory, np.uint8)
            memory[:] = 0xA5
            group.barrier()
            window.put(values[:count], peer, signal=0)
            window.wait_signal(0)
            expected = pattern(count * values.itemsize, peer).view(dtype) if dtype != "bool" else np.ones(count, bool)
            same(window.array[:count], expected, f"{count} of {dtype}")
            assert (memory[count * values.itemsize :] == 0xA5).all(), f"after {count} of {dtype}"
            got = np.full(10, 0, dtype)
            window.get(got[:count], peer)
            same(got[:count], values[:count], f"got {count} of {dtype}")
            assert not got[count:].any()
            group.barrier()
        window.close()


def test_case_2_counts_0_to_9_of_every_dtype(ranks: Ranks, kind: Kind) -> None:
    ranks.run(every_count, 2, kind)


# ---- Case 3 ----------------------------------------------------------------------------------------------------------


def zero_bytes(group: Group, kind: Kind) -> None:
    with Window.allocate(group, 64, signals=2, transport=kind.name) as window:
        window.array[:] = 7
        group.barrier()
        for peer in range(group.size):
            for nothing in (
                b"",
                bytearray(),
                np.empty(0),
                np.empty((3, 0, 2)),
                memoryview(b"")[0:0],
                window.memory.view(64),
            ):
                for offset in (0, 1, 63, 64):
                    window.put(nothing, peer, offset)
                    window.put(nothing, peer, offset, async_op=True).wait()
            window.get(bytearray(), peer, 64)
            window.get(bytearray(), peer, 64, async_op=True).wait()
            window.put(b"", peer, 64, signal=0)
            window.put(b"", peer, 64, signal=1, add=5, async_op=True).wait()
            with raises(BoundsError):
                window.put(b"", peer, 65)
        assert window.wait_signal(0, group.size) == group.size
        assert window.wait_signal(1, 5 * group.size) == 5 * group.size
        assert (window.array == 7).all()
        group.barrier()
    with Window.allocate(group, 0, signals=1, transport=kind.name) as window:
        for peer in range(group.size):
            window.put(b"", peer, signal=0)
            with raises(BoundsError):
                window.put(b"x", peer)
        window.wait_signal(0, group.size)
        group.barrier()


def test_case_3_zero_bytes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(zero_bytes, 2, kind)


# ---- Case 4 ----------------------------------------------------------------------------------------------------------


def out_of_bounds(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 100, signals=1, transport=kind.name)
    other = Window.allocate(group, 100, signals=1, transport=kind.name)
    window.array[:] = other.array[:] = 3
    group.barrier()
    bad = [(1, 100), (2, 99), (101, 0), (100, 1), (1, 1 << 63), (8, (1 << 64) - 8), (8, (1 << 64) - 1), (1, 1 << 64)]
    for peer in range(group.size):
        for nbytes, offset in [*bad, (1, -1), (8, -8), (1, -(1 << 63)), (1, 1 << 200)]:
            for async_op in (False, True):
                with raises(BoundsError):
                    window.put(bytes(nbytes), peer, offset, async_op=async_op)
                with raises(BoundsError):
                    window.put(bytes(nbytes), peer, offset, signal=0, async_op=async_op)
                into = bytearray(b"\x11" * nbytes)
                with raises(BoundsError):
                    window.get(into, peer, offset, async_op=async_op)
                assert into == b"\x11" * nbytes
        for rank in (-1, group.size, 1 << 31, 1 << 32, 1 << 63, -(1 << 63), 1 << 100):
            with raises(BoundsError):
                window.put(b"x", rank)
        window.put(bytes([peer + 10]), peer, 99)
        other.put(bytes([peer + 20]), peer, 99)
    group.barrier()
    assert (window.array[:99] == 3).all()
    assert (other.array[:99] == 3).all()
    assert (window.array[99], other.array[99]) == (group.rank + 10, group.rank + 20)
    assert window.signal_value(0) == 0
    window.close()
    other.close()


def test_case_4_out_of_bounds(ranks: Ranks, kind: Kind) -> None:
    ranks.run(out_of_bounds, 2, kind)


# ---- Case 5 (sizes of 2 GiB and more: test_large.py) -----------------------------------------------------------------


def many_elements(group: Group, kind: Kind) -> None:
    count, times = 4_194_304, 10 if kind.slow else 100
    window = Window.allocate(group, shape=count, dtype=np.float32, signals=2, transport=kind.name)
    if group.rank == 0:
        source = np.arange(count, dtype=np.float32)
        for turn in range(1, times + 1):
            source += 1
            window.put(source, 1, signal=0)
            window.wait_signal(1, turn)
    else:
        expected = np.arange(count, dtype=np.float32)
        for turn in range(1, times + 1):
            expected += 1
            window.wait_signal(0, turn)
            same(window.array, expected, f"turn {turn}")
            window.signal(0, 1)
    window.close()


def test_case_5_4194304_elements_100_times(processes: Processes, kind: Kind) -> None:
    processes.run(many_elements, 2, kind)


SIZES = [64, 512, 1024, 4095, 4096, 4097, 4098, 8192, 65536, 1 << 20, (1 << 24) - 1, (1 << 24) + 1, 40_000_001]
SLOW_NBYTES = 4 << 20


def odd_sizes(group: Group, kind: Kind) -> None:
    """Around the sizes at which the way of copying changes, at odd addresses."""
    sizes = [nbytes for nbytes in SIZES if nbytes <= SLOW_NBYTES] if kind.slow else SIZES
    window = Window.allocate(group, max(sizes) + 100, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    for turn, nbytes in enumerate(sizes, 1):
        at = turn * 7 % 64
        source = pattern(nbytes + 13, group.rank * 100 + turn)[13:]
        window.put(source, peer, at, signal=0)
        window.wait_signal(0, turn)
        same(window.array[at : at + nbytes], pattern(nbytes + 13, (group.rank - 1) % group.size * 100 + turn)[13:])
        into = np.zeros(nbytes + 5, np.uint8)
        window.get(into[5:], peer, at)
        same(into[5:], source, f"got {nbytes}")
        assert not into[:5].any()
        group.barrier()
    window.close()


def test_torchcomms_sizes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(odd_sizes, 2, kind)


# ---- Case 6 ----------------------------------------------------------------------------------------------------------


def all_to_all(group: Group, kind: Kind, threads: int, rounds: int) -> None:
    """Every thread of every rank puts to its own slot at every rank, and gets all slots back."""
    words = 257
    window = Window.allocate(group, shape=(group.size, threads, words), dtype=np.uint64, transport=kind.name)
    slot_bytes = words * 8

    def values(origin: int, thread: int, target: int, turn: int) -> np.ndarray:
        seed = ((origin * threads + thread) * group.size + target) * rounds + turn
        return np.arange(words, dtype=np.uint64) + np.uint64(seed * 1_000_003)

    def one(thread: int) -> None:
        at = (group.rank * threads + thread) * slot_bytes
        for turn in range(rounds):
            for target in range(group.size):
                window.put(values(group.rank, thread, target, turn), target, at)
            window.flush()
            for target in range(group.size):
                back = np.zeros(words, np.uint64)
                window.get(back, target, at)
                same(back, values(group.rank, thread, target, turn))

    in_threads([lambda thread=thread: one(thread) for thread in range(threads)])
    group.barrier()
    for origin in range(group.size):
        for thread in range(threads):
            same(window.array[origin, thread], values(origin, thread, group.rank, rounds - 1))
    group.barrier()
    window.close()


@pytest.mark.parametrize("threads", [1, 8])
def test_case_6_all_to_all(ranks: Ranks, kind: Kind, threads: int) -> None:
    ranks.run(all_to_all, 3, kind, threads, 20)


# ---- Case 7 ----------------------------------------------------------------------------------------------------------


def many_small_puts(group: Group, kind: Kind, count: int, async_op: bool) -> None:
    window = Window.allocate(group, shape=count, dtype=np.uint32, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    words = np.arange(count, dtype=np.uint32) * np.uint32(3) + np.uint32(peer)
    bytes_of_words = memoryview(words).cast("B")
    for i in range(count):
        window.put(bytes_of_words[4 * i : 4 * i + 4], peer, 4 * i, async_op=async_op)
    window.flush(peer)
    group.barrier()
    same(window.array, np.arange(count, dtype=np.uint32) * np.uint32(3) + np.uint32(group.rank))
    window.close()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "queued"])
def test_case_7_many_small_puts_between_two_flushes(processes: Processes, kind: Kind, async_op: bool) -> None:
    """100,000 queued ones are more than the queue holds: who puts is held back, nothing is lost."""
    processes.run(many_small_puts, 2, kind, 100_000 if async_op else 65_000, async_op)


# ---- Case 8 ----------------------------------------------------------------------------------------------------------


def passive_target(group: Group, kind: Kind) -> None:
    """Rank 1 sleeps in a system call; ranks 0 and 2 pass bytes through its window."""
    window = Window.allocate(group, 1 << 20, signals=1, transport=kind.name)
    if group.rank == 1:
        parent.say("asleep")
        parent.hear()
        same(window.array, pattern(1 << 20, 5))
    elif group.rank == 0:
        parent.hear()
        window.put(pattern(1 << 20, 5), 1, async_op=True)
        window.flush(1)
        window.signal(2, 0)
    else:
        window.wait_signal(0, 1, source=0)
        into = np.zeros(1 << 20, np.uint8)
        window.get(into, 1)
        same(into, pattern(1 << 20, 5))
        assert window.fetch_add(1, 0, 0) == int(pattern(8, 5).view(np.uint64)[0])
        parent.say("through")
        parent.hear()
    group.barrier()
    window.close()


@pytest.mark.parametrize("stopped", [False, True], ids=["sleeping", "stopped"])
def test_case_8_flush_while_the_target_sleeps(processes: Processes, kind: Kind, stopped: bool) -> None:
    team = processes.start(passive_target, 3, kind)
    assert team[1].said() == "asleep"
    if stopped:
        team[1].stop()
    else:
        wait_until(lambda: is_asleep(team[1].pid), "rank 1 sleeps")
    team[0].tell()
    assert team[2].said() == "through"
    team[1].resume()
    team[1].tell()
    team[2].tell()
    processes.finish(team)


# ---- Case 9 ----------------------------------------------------------------------------------------------------------


def reuse_of_the_source(group: Group, kind: Kind, async_op: bool) -> None:
    window = Window.allocate(group, 1 << 20, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    source = np.empty(1 << 20, np.uint8)
    for turn in range(1, 30):
        source[:] = turn
        window.put(source, peer, signal=0, async_op=async_op).wait()
        source[:] = 0xEE
        window.wait_signal(0, turn)
        assert (window.array == turn).all()
        group.barrier()
    window.close()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_case_9_the_source_is_free_once_the_work_is_done(ranks: Ranks, kind: Kind, async_op: bool) -> None:
    ranks.run(reuse_of_the_source, 2, kind, async_op)


# ---- Case 18 ---------------------------------------------------------------------------------------------------------


def strided_sources(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 1024, signals=1, transport=kind.name)
    window.array[:] = 9
    group.barrier()
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    peer = (group.rank + 1) % group.size
    strided = [
        square.T,
        square[:, :4],
        square[::2],
        square[::-1],
        np.asfortranarray(square),
        square[:, 0],
        square[1:7, 1:7],
    ]
    strided += [memoryview(bytearray(64))[::2], np.broadcast_to(np.float32(1), 8)]
    for source in strided:
        with raises(LayoutError):
            window.put(source, peer)
        with raises(LayoutError):
            window.put(source, peer, signal=0, async_op=True)
        if not np.asarray(source).flags.writeable:
            continue
        with raises(LayoutError):
            window.get(source, peer)
    # These look strided and are not: rows of a C-contiguous array, and dimensions of one element.
    window.put(square[2:5], peer, signal=0)
    window.put(np.asfortranarray(square[:1]), peer, 512, signal=0)
    window.put(square[:, :1][:1], peer, 900, signal=0)
    window.wait_signal(0, 3)
    same(window.array[:96], square[2:5])
    same(window.array[512:544], square[:1])
    same(window.array[900:904], square[0, :1])
    assert (window.array[96:512] == 9).all()
    group.barrier()
    window.close()


def test_case_18_strided_memory_raises(ranks: Ranks, kind: Kind) -> None:
    ranks.run(strided_sources, 2, kind)


def dropped_sources(group: Group, kind: Kind) -> None:
    nbytes = 4 << 20
    window = Window.allocate(group, nbytes, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    for turn in range(1, 20):
        source = np.full(nbytes, turn, np.uint8)
        window.put(source, peer, signal=0, async_op=True)
        del source
        rubbish = np.full(nbytes, 0xEE, np.uint8)  # most likely where the source was, had it been freed
        window.wait_signal(0, turn)
        assert (window.array == turn).all()
        del rubbish
        window.flush()
        group.barrier()
    window.close()


def test_case_18_a_source_dropped_right_after_the_put(ranks: Ranks, kind: Kind) -> None:
    ranks.run(dropped_sources, 2, kind)


# ---- More ------------------------------------------------------------------------------------------------------------


def every_kind_of_source(group: Group, kind: Kind) -> None:
    import array
    import ctypes
    import mmap

    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    data = bytes(range(1, 33))
    mapped = mmap.mmap(-1, 32)
    mapped[:] = data
    words = array.array("I")
    words.frombytes(data)
    window.array[32:] = np.frombuffer(data, np.uint8)
    sources = [
        data, bytearray(data), memoryview(data), memoryview(bytearray(data)).cast("B", (4, 8)), mapped, words,
        (ctypes.c_char * 32).from_buffer_copy(data), np.frombuffer(data, np.uint8), np.frombuffer(data, np.int64),
        np.frombuffer(data, "V8"), np.frombuffer(data, [("a", "<i4"), ("b", "<f4")]),
        window.memory.view(32, 32),
    ]  # fmt: skip
    for source in sources:
        window.array[:32] = 0
        window.put(source, group.rank)
        same(window.array[:32], data, type(source).__name__)
        window.array[:32] = 0
        window.put(source, group.rank, async_op=True).wait()
        same(window.array[:32], data, type(source).__name__)
    del source, sources
    gc.collect()
    mapped.close()  # nothing holds on to it any more
    window.close()


def test_every_kind_of_source(ranks: Ranks, kind: Kind) -> None:
    ranks.run(every_kind_of_source, 1, kind)


def overlapping_put(group: Group, kind: Kind) -> None:
    """A put within one memory moves bytes as memmove does."""
    window = Window.allocate(group, 3 << 20, transport=kind.name)
    for start, to in ((0, 1), (1, 0), (100, 5000), (5000, 100), (0, 0)):
        for nbytes in (50, 4096, 2 << 20):
            window.array[:] = expected = pattern(3 << 20, start)
            moved = expected.copy()
            moved[to : to + nbytes] = expected[start : start + nbytes]
            window.put(window.memory.view(start, nbytes), group.rank, to)
            same(window.array, moved)
            window.array[:] = expected
            window.get(window.memory.view(to, nbytes), group.rank, start)
            same(window.array, moved)
    window.close()


def test_a_put_into_its_own_source_moves(ranks: Ranks, kind: Kind) -> None:
    if kind.name != "shm":
        pytest.skip("not promised: a device reads the source while it writes the target")
    ranks.run(overlapping_put, 1, kind)


def after_close(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    array = window.array
    work = window.put(b"abc", group.rank, async_op=True)
    window.close()
    window.close()
    assert work.done()
    assert bytes(array[:3]) == b"abc"  # valid as long as it lives
    uses = [
        lambda: window.put(b"x", 0), lambda: window.get(bytearray(1), 0), lambda: window.signal(0, 0), window.flush,
        lambda: window.flush(0), lambda: window.wait_signal(0, 1), lambda: window.fetch_add(0, 0, 1),
        lambda: window.compare_swap(0, 0, 0, 0), lambda: window.signal_value(0), lambda: window.test_signal(0, 0),
        window.lost, window.acknowledge_lost, lambda: window.array, lambda: window.tensor, lambda: window.memory,
        lambda: window.put(b"x", 0, async_op=True), lambda: window.rank, lambda: window.size,
    ]  # fmt: skip
    for use in uses:
        with raises(StaleHandle):
            use()
    assert window.closed
    assert window.describe() == {"name": window.name, "state": "closed"}
    assert "closed" in repr(window)


def test_torchcomms_everything_raises_after_close(ranks: Ranks, kind: Kind) -> None:
    ranks.run(after_close, 2, kind)


def evil_argument(group: Group, kind: Kind) -> None:
    """An argument may run any code while it is converted, and close the very window."""

    class Closes:
        def __index__(self) -> int:
            window.close()
            gc.collect()
            return 0

    class ClosesAsFloat:
        def __float__(self) -> float:
            window.close()
            gc.collect()
            return 1.0

    uses = [
        lambda bad: window.put(b"x" * 8, bad), lambda bad: window.put(b"x" * 8, 0, bad),
        lambda bad: window.put(b"x" * 8, 0, 0, signal=bad), lambda bad: window.put(b"x" * 8, 0, 0, signal=0, add=bad),
        lambda bad: window.get(bytearray(8), 0, bad), lambda bad: window.signal(0, bad), lambda bad: window.flush(bad),
        lambda bad: window.fetch_add(0, 0, bad), lambda bad: window.compare_swap(0, 0, 0, bad),
        lambda bad: window.signal_value(bad), lambda bad: window.test_signal(0, bad),
        lambda bad: window.wait_signal(bad, 1), lambda bad: window.memory.view(bad),
    ]  # fmt: skip
    for use in uses:
        for bad in (Closes(), ClosesAsFloat()):
            window = Window.allocate(group, 64, signals=1, transport=kind.name)
            try:
                use(bad)
            except (OnesidedError, TypeError):
                pass
            window.close()
    timed = [
        lambda bad: window.put(b"x" * 8, 0, timeout_s=bad), lambda bad: window.get(bytearray(8), 0, timeout_s=bad),
        lambda bad: window.signal(0, 0, timeout_s=bad), lambda bad: window.flush(0, timeout_s=bad),
        lambda bad: window.flush(timeout_s=bad), lambda bad: window.wait_signal(0, 1, timeout_s=bad),
    ]  # fmt: skip
    for use in timed:
        window = Window.allocate(group, 64, signals=1, transport=kind.name)
        with raises(StaleHandle):
            use(ClosesAsFloat())
    window = Window.allocate(group, 64, signals=1, transport=kind.name)
    window.close(timeout_s=ClosesAsFloat())


def test_an_argument_that_closes_the_window_while_it_is_converted(processes: Processes, kind: Kind) -> None:
    processes.run(evil_argument, 1, kind)


def closing_during_puts(group: Group, kind: Kind) -> None:
    """One thread closes the window while others use it: each use works or raises StaleHandle."""
    for _ in range(10):
        window = Window.allocate(group, 1 << 20, signals=1, transport=kind.name)
        source = np.ones(1 << 20, np.uint8)

        turns: list[int] = []

        def use(window: Window = window, source: np.ndarray = source, turns: list[int] = turns) -> None:
            with raises(StaleHandle):  # closed here, or at the other rank
                while True:
                    for peer in range(group.size):
                        window.put(source, peer, async_op=True)
                        window.put(b"x", peer, signal=0)
                        window.get(bytearray(100_000), peer)
                        turns.append(peer)
            turns.extend(range(6))

        def close(window: Window = window, turns: list[int] = turns) -> None:
            wait_until(lambda: len(turns) > 5, "puts are under way, or over already")
            window.close()

        in_threads([use, use, use, close])
        group.barrier()


def test_a_window_closed_by_another_thread(ranks: Ranks, kind: Kind) -> None:
    ranks.run(closing_during_puts, 2, kind)


def test_the_children_are_of_this_test(processes: Processes, kind: Kind) -> None:
    """The ranks of `processes` are processes of their own, each with another window and no torch."""
    pids = processes.run(process_of, 3)
    assert len({os.getpid(), *pids}) == 4
    assert all(Path("/proc", str(pid)).exists() for pid in pids)


def process_of(group: Group) -> int:
    import sys

    assert "torch" not in sys.modules
    return os.getpid()


# ---- Storages that are freed and allocated again (case 19) -----------------------------------------------------------


def reallocated(group: Group, kind: Kind) -> None:
    """As FSDP does: the tensor lives on, its memory is given back, and often comes at the same address again."""
    import torch

    most = 4 << 20
    window = Window.allocate(group, most, transport=kind.name)
    same_address = 0
    for nbytes in (5000, 100_000, 1 << 20, most):
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        for turn in range(1, 12):
            address = tensor.data_ptr()
            storage.resize_(0)
            storage.resize_(nbytes)
            same_address += tensor.data_ptr() == address
            tensor.fill_(turn)
            window.put(tensor, 0)
            window.flush(0)
            assert (window.array[:nbytes] == turn).all(), f"put of {nbytes} bytes, turn {turn}"
            storage.resize_(0)
            storage.resize_(nbytes)
            window.array[:nbytes] = 100 + turn
            window.get(tensor, 0)
            assert (tensor == 100 + turn).all(), f"get of {nbytes} bytes, turn {turn}"
    assert same_address > 0
    window.close()


def test_case_19_reallocated_storages(ranks: Ranks, kind: Kind) -> None:
    ranks.run(reallocated, 1, kind)


def test_memory_under_a_window_stays_where_it_is(kind: Kind) -> None:
    """torch refuses to resize what a window lies over; without that, peers would write into freed memory."""
    import torch

    with Group.local(1)[0] as group:
        for dtype in (torch.uint8, torch.bfloat16):
            tensor = torch.ones(1000, dtype=dtype)
            with Window.create(group, tensor, transport=kind.name) as window:
                window.put(torch.full((1000,), 2, dtype=dtype), 0)
                window.flush(0)
                assert (tensor == 2).all()
                address = tensor.data_ptr()
                for use in (lambda t=tensor: t.untyped_storage().resize_(0), lambda t=tensor: t.resize_(5_000_000)):
                    with pytest.raises(RuntimeError, match="resiz"):
                        use()
                assert tensor.untyped_storage().data_ptr() == address
