"""Signals and waits: counts, strength, wrapping (cases 11 to 14)."""

import threading

import numpy as np
import pytest
from harness import Kind, Processes, Threads, in_threads, pattern, raises, same

from onesided import BoundsError, DeadlineExceeded, Group, StaleHandle, Window

Ranks = Threads | Processes


# ---- Case 11 ---------------------------------------------------------------------------------------------------------


def never_stale(group: Group, kind: Kind, words: int, iterations: int) -> None:
    """Word 0 and all others are the iteration; the reader looks from the back."""
    window = Window.allocate(group, shape=words, dtype=np.uint64, signals=2, transport=kind.name)
    peer = 1 - group.rank
    source = np.zeros(words, np.uint64)
    for turn in range(1, iterations + 1):
        if group.rank == 0:
            source[:] = turn
            window.put(source, peer, signal=0)
            window.wait_signal(1)
        else:
            window.wait_signal(0)
            backwards = window.array[::-1]
            assert backwards[0] == turn, f"the last word is {backwards[0]} at {turn}"
            assert (backwards == turn).all(), f"stale at {turn}"
            window.signal(peer, 1)
    window.close()


def test_case_11_never_stale(processes: Processes, kind: Kind) -> None:
    """MSCCL++'s test of memory consistency: 65,537 words, 10,000 times."""
    processes.run(never_stale, 2, kind, 65_537, 1_000 if kind.slow else 10_000)


def strong_after_async(group: Group, kind: Kind) -> None:
    """A signal, alone or with a put of no bytes, comes after all puts that were issued before it."""
    nbytes, pieces = 8 << 20, 4
    window = Window.allocate(group, nbytes * pieces, signals=3, transport=kind.name)
    peer = (group.rank + 1) % group.size
    for turn in range(1, 6):
        source = np.full(nbytes, turn, np.uint8)
        for piece in range(pieces):
            window.put(source, peer, piece * nbytes, async_op=True)
        if turn % 3 == 0:
            window.signal(peer, 0)
        elif turn % 3 == 1:
            window.put(b"", peer, signal=0)
        else:
            window.signal(peer, 0, async_op=True)
        window.wait_signal(0, turn)
        assert window.array[-1] == turn
        assert (window.array == turn).all()
        window.flush()
        group.barrier()
    window.close()


def test_a_signal_comes_after_asynchronous_puts(ranks: Ranks, kind: Kind) -> None:
    ranks.run(strong_after_async, 2, kind)


def strong_after_failure(group: Group, kind: Kind) -> None:
    """A signal that would follow a put that was cancelled is not sent: it would say that the bytes are there."""
    window = Window.allocate(group, 64 << 20, signals=1, transport=kind.name)
    source = np.ones(64 << 20, np.uint8)
    works = [window.put(source, group.rank, async_op=True) for _ in range(8)]
    with raises(DeadlineExceeded):
        window.signal(group.rank, 0, timeout_s=0)
    assert window.signal_value(0) == 0
    failed = [work for work in works if work.exception() is not None]
    assert failed or kind.name == "rdma"  # Soft-RoCE on one processor moves the bytes while they are posted
    assert all(isinstance(work.exception(), DeadlineExceeded) for work in failed)
    window.signal(group.rank, 0)
    window.flush()
    assert window.signal_value(0) == 1
    window.close()


def test_a_signal_behind_a_cancelled_put_is_not_sent(ranks: Ranks, kind: Kind) -> None:
    ranks.run(strong_after_failure, 1, kind)


# ---- Case 12 ---------------------------------------------------------------------------------------------------------


def counts(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=3, transport=kind.name)
    n, me = group.size, group.rank
    for peer in range(n):
        window.signal(peer, 0)
        window.signal(peer, 1, me)
        window.put(b"", peer, signal=2, add=me + 1)
    assert 1 <= window.wait_signal(0, 1) <= n
    assert window.wait_signal(0, n) == n
    assert window.wait_signal(1, n * (n - 1) // 2) == n * (n - 1) // 2
    assert window.wait_signal(2, n * (n + 1) // 2) == n * (n + 1) // 2
    group.barrier()
    assert [window.signal_value(i) for i in range(3)] == [n, n * (n - 1) // 2, n * (n + 1) // 2]
    assert window.test_signal(0, n)
    assert not window.test_signal(0, n + 1)
    for index in range(3):
        with raises(DeadlineExceeded, f"signal {index}"):
            window.wait_signal(index, window.signal_value(index) + 1, timeout_s=0.01)
    group.barrier()
    window.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_case_12_counts_from_every_rank(ranks: Ranks, kind: Kind, size: int) -> None:
    ranks.run(counts, size, kind)


# ---- Case 13 ---------------------------------------------------------------------------------------------------------


def wrapping(group: Group, kind: Kind, start: int) -> None:
    """Counters that begin just under a power of two."""
    modulus = 1 << 64
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    window.signal(peer, 0, start)
    group.barrier()  # not wait_signal: from 2**64 - 4 on, the 0 that stood there before would do
    assert window.signal_value(0) == start
    for step in range(1, 9):
        expected = (start + step) % modulus
        assert not window.test_signal(0, expected)
        with raises(DeadlineExceeded):
            window.wait_signal(0, expected, timeout_s=0)
        group.barrier()
        window.signal(peer, 0)
        assert window.wait_signal(0, expected, timeout_s=20) == expected
        assert window.test_signal(0, expected)
        assert window.test_signal(0, (expected - 1) % modulus)
        assert not window.test_signal(0, (expected + 1) % modulus)
        group.barrier()
    window.signal(peer, 0, -8)
    group.barrier()
    assert window.signal_value(0) == start
    group.barrier()
    window.close()


@pytest.mark.parametrize("start", [2**32 - 4, 2**63 - 4, 2**64 - 4, 2**31 - 4])
def test_case_13_counters_wrap(ranks: Ranks, kind: Kind, start: int) -> None:
    ranks.run(wrapping, 2, kind, start)


def last_index(group: Group, kind: Kind, signals: int) -> None:
    window = Window.allocate(group, 16, signals=signals, transport=kind.name)
    window.array[:] = 5
    group.barrier()
    peer = (group.rank + 1) % group.size
    for bad in (signals, signals + 1, 1 << 20, 1 << 32, 1 << 64, -1):
        uses = [
            lambda bad=bad: window.signal(peer, bad), lambda bad=bad: window.put(b"abc", peer, signal=bad),
            lambda bad=bad: window.put(b"abc", peer, signal=bad, async_op=True),
            lambda bad=bad: window.signal(peer, bad, async_op=True), lambda bad=bad: window.wait_signal(bad, 0),
            lambda bad=bad: window.wait_signal(bad), lambda bad=bad: window.signal_value(bad),
            lambda bad=bad: window.test_signal(bad, 0),
        ]  # fmt: skip
        for use in uses:
            with raises(BoundsError):
                use()
    group.barrier()
    assert (window.array == 5).all()
    if signals:
        window.signal(peer, signals - 1, 3)
        assert window.wait_signal(signals - 1, 3) == 3
        assert [window.signal_value(i) for i in range(signals - 1)] == [0] * (signals - 1)
    group.barrier()
    window.close()


@pytest.mark.parametrize("signals", [0, 1, 2, 64, 1000])
def test_case_13_the_last_index_works_one_past_it_raises(ranks: Ranks, kind: Kind, signals: int) -> None:
    ranks.run(last_index, 2, kind, signals)


def adds(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    expected = 0
    for add in (0, 1, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 5):
        window.signal(group.rank, 0, add)
        expected = (expected + add) % 2**64
        assert window.signal_value(0) == expected
    for add in (2**64, -(2**63) - 1, 2**200):
        with raises(BoundsError):
            window.signal(group.rank, 0, add)
        with raises(BoundsError):
            window.put(b"x", group.rank, signal=0, add=add)
    assert window.signal_value(0) == expected
    window.close()


def test_case_13_what_can_be_added(ranks: Ranks, kind: Kind) -> None:
    ranks.run(adds, 1, kind)


# ---- Case 14 ---------------------------------------------------------------------------------------------------------


def in_flight(group: Group, kind: Kind, count: int, nbytes: int) -> None:
    window = Window.allocate(group, count * nbytes, signals=2, transport=kind.name)
    peer = (group.rank + 1) % group.size
    data = pattern(count * nbytes, group.rank)
    works = [
        window.put(data[i * nbytes : (i + 1) * nbytes], peer, i * nbytes, signal=i % 2, async_op=True)
        for i in range(count)
    ]
    total = window.wait_signal(0, (count + 1) // 2) + window.wait_signal(1, count // 2)
    assert total == count
    same(window.array, pattern(count * nbytes, (group.rank - 1) % group.size))
    for work in works:
        work.wait()
    group.barrier()
    assert window.signal_value(0) + window.signal_value(1) == count
    window.close()


@pytest.mark.parametrize(("count", "nbytes"), [(300, 65536), (3000, 100), (20_000, 8)])
def test_case_14_puts_with_signals_in_flight(ranks: Ranks, kind: Kind, count: int, nbytes: int) -> None:
    ranks.run(in_flight, 2, kind, count, nbytes)


# ---- Consuming -------------------------------------------------------------------------------------------------------


def consuming(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=2, transport=kind.name)
    peer = (group.rank + 1) % group.size
    for turn in range(1, 20):
        window.signal(peer, 0)
        assert window.wait_signal(0) >= turn
    group.barrier()
    with raises(DeadlineExceeded):  # all 19 are consumed
        window.wait_signal(0, timeout_s=0.01)
    group.barrier()
    window.signal(peer, 0, 2)
    window.wait_signal(0)
    window.wait_signal(0)  # the wait that failed has consumed nothing
    with raises(DeadlineExceeded):
        window.wait_signal(0, timeout_s=0)
    with raises(DeadlineExceeded):
        window.wait_signal(1, timeout_s=0)  # another index counts by itself
    assert window.signal_value(0) == 21
    group.barrier()
    window.close()


def test_consuming_takes_one_at_a_time(ranks: Ranks, kind: Kind) -> None:
    ranks.run(consuming, 2, kind)


def consuming_threads(group: Group, kind: Kind) -> None:
    """No signal is consumed twice, and none is forgotten, by any number of threads."""
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    consumed: list[int] = []

    def consume() -> None:
        consumed.extend(window.wait_signal(0, timeout_s=20) for _ in range(50))

    def send() -> None:
        for _ in range(50):
            window.signal(group.rank, 0)

    in_threads([consume, send] * 4)
    assert len(consumed) == window.signal_value(0) == 200
    with raises(DeadlineExceeded):
        window.wait_signal(0, timeout_s=0)
    window.close()


def test_consuming_from_many_threads(ranks: Ranks, kind: Kind) -> None:
    ranks.run(consuming_threads, 1, kind)


def waiting_side_by_side(group: Group, kind: Kind) -> None:
    """Many waiters, for different counts of several signals: each wakes at its own."""
    window = Window.allocate(group, 8, signals=4, transport=kind.name)
    waiters = [lambda i=i, n=n: window.wait_signal(i, n, timeout_s=20) for i in range(4) for n in range(1, 6)]

    def send() -> None:
        for _ in range(5):
            for index in range(4):
                window.signal(group.rank, index)

    in_threads([*waiters, send])
    window.close()


def test_many_waiters_wake_each_at_its_count(ranks: Ranks, kind: Kind) -> None:
    ranks.run(waiting_side_by_side, 1, kind)


def closed_meanwhile(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        with raises(StaleHandle):
            window.wait_signal(0, 1, timeout_s=20)

    def close() -> None:
        waiting.wait()
        window.close()

    in_threads([wait, close])


def test_a_wait_ends_when_its_window_is_closed(ranks: Ranks, kind: Kind) -> None:
    ranks.run(closed_meanwhile, 1, kind)


def waits_with_source(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=1, transport=kind.name)
    peer = (group.rank + 1) % group.size
    window.signal(peer, 0)
    assert window.wait_signal(0, 1, source=(group.rank - 1) % group.size) == 1
    for bad in (-1, group.size, 1 << 40, 1 << 70):
        with raises(BoundsError):
            window.wait_signal(0, 1, source=bad)
    assert window.lost() == []
    assert window.acknowledge_lost() == []
    group.barrier()
    window.close()


def test_a_wait_for_one_rank(ranks: Ranks, kind: Kind) -> None:
    ranks.run(waits_with_source, 3, kind)
