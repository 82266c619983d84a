"""wait_any, signals of one origin, fence, and the atomics of narrow words and of this rank's own."""

import threading

import numpy as np
from harness import Kind, Processes, Threads, in_threads, pattern, raises, same

from onesided import BoundsError, DeadlineExceeded, Group, LayoutError, StaleHandle, Unsupported, Window

Ranks = Threads | Processes

# ---- wait_any --------------------------------------------------------------------------------------------------------


def any_of_several(group: Group, kind: Kind) -> None:
    """Every signal is found, in whatever order they come; the lowest place first."""
    window = Window.allocate(group, 8, signals=5, transport=kind.name)
    peer = 1 - group.rank
    if group.rank == 0:
        for index in (3, 1, 4, 0, 2, 3):
            window.signal(peer, index, add=2)
            window.wait_signal(0, timeout_s=30)  # the answer
    else:
        counts = [0] * 5
        for _ in range(6):
            place = window.wait_any([(i, counts[i] + 2) for i in range(5)], timeout_s=30)
            counts[place] += 2
            window.signal(peer, 0)
        assert counts == [2, 2, 2, 4, 2]
        assert window.wait_any([(0, 3), (4, 1), (2, 2)]) == 1
        with raises(DeadlineExceeded, "signal 3 stands at 4, waited for 5"):
            window.wait_any([(0, 3), (3, 5)], timeout_s=0.05)
    group.barrier()
    window.close()


def test_wait_any(ranks: Ranks, kind: Kind) -> None:
    ranks.run(any_of_several, 2, kind)


def any_mistakes(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 8, signals=2, transport=kind.name)
    for error, signals in (
        (BoundsError, []), (BoundsError, [(2, 1)]), (BoundsError, [(0, -1)]), (TypeError, 5), (TypeError, [1]),
        (TypeError, [(0, 1.5)]), (TypeError, [(0, 1, 2)]), (TypeError, None),
    ):  # fmt: skip
        with raises(error):
            window.wait_any(signals, timeout_s=0)  # type: ignore[arg-type]
    closing = threading.Timer(0.1, window.close)
    closing.start()
    with raises(StaleHandle):
        window.wait_any([(0, 1), (1, 1)], timeout_s=30)
    closing.join()


def test_wait_any_mistakes_and_close(ranks: Ranks, kind: Kind) -> None:
    ranks.run(any_mistakes, 1, kind)


# ---- Signals of one origin -------------------------------------------------------------------------------------------


def of_each_origin(group: Group, kind: Kind) -> None:
    """All put to all; each waits for each origin by itself, and the shared counters stay."""
    window = Window.allocate(group, shape=group.size, dtype=np.uint64, signals=3, origin_signals=2, transport=kind.name)
    mine = window.origin_signal(1)
    assert mine == window.origin_signal(1, group.rank)
    everybody = [window.origin_signal(i, r) for i in range(2) for r in range(group.size)]
    assert sorted(everybody) == list(range(3, 3 + 2 * group.size))
    for turn in range(1, 20):
        for peer in range(group.size):
            window.put(np.uint64([turn * 100 + group.rank]), peer, 8 * group.rank, signal=mine)
        for origin in range(group.size):
            window.wait_signal(window.origin_signal(1, origin), turn, source=origin, timeout_s=30)
            assert window.array[origin] == turn * 100 + origin
        group.barrier()
    assert [window.signal_value(i) for i in range(3)] == [0, 0, 0]
    for index, origin in ((2, 0), (-1, 0), (0, group.size), (0, -1)):
        with raises(BoundsError):
            window.origin_signal(index, origin)
    group.barrier()
    window.close()


def test_signals_of_each_origin(ranks: Ranks, kind: Kind) -> None:
    ranks.run(of_each_origin, 3, kind)


def disagreeing(group: Group) -> None:
    with raises((LayoutError,)):
        Window.allocate(group, 8, signals=4, origin_signals=group.rank, transport="shm")
    with raises((LayoutError,)):
        Window.allocate(group, 8, signals=4 + group.rank, origin_signals=1, transport="shm")
    with Window.allocate(group, 8, signals=4 + group.rank, transport="shm") as window, raises(BoundsError):
        window.origin_signal(0)
    for wrong in (-1, 1.5, None, True):
        with raises((BoundsError, TypeError)):
            Window.allocate(group, 8, origin_signals=wrong, transport="shm")  # type: ignore[arg-type]
    group.barrier()


def test_ranks_must_agree_on_signals_of_origins(processes: Processes) -> None:
    processes.run(disagreeing, 2)


# ---- Words of this rank, and narrow ones -----------------------------------------------------------------------------


def narrow(group: Group, kind: Kind) -> None:
    """All add to both halves of one 8-byte word, as halves: neither carries into the other, nor is any add lost."""
    times = 200
    window = Window.allocate(group, shape=8, dtype=np.uint32, transport=kind.name)
    seen: list[int] = []

    def add(offset: int, by: int) -> None:
        seen.extend(window.fetch_add(0, offset, by, word_nbytes=4) for _ in range(times))

    in_threads([lambda: add(8, 1), lambda: add(12, -1)])
    group.barrier()
    if group.rank == 0:
        total = times * group.size
        assert window.array.tolist() == [0, 0, total, 2**32 - total, 0, 0, 0, 0]
        assert window.atomic_load(8) == (2**32 - total) << 32 | total
        assert window.atomic_load(12, word_nbytes=4) == 2**32 - total
        assert window.atomic_add(12, total, word_nbytes=4) == 2**32 - total
        assert window.atomic_add(8, 1) == total
        assert window.swap(0, 16, -1, word_nbytes=4) == 0
        assert window.swap(0, 16, 5) == 2**32 - 1
        assert window.compare_swap(0, 20, 0, 2**32 - 1, word_nbytes=4) == 0
        assert window.compare_swap(0, 20, -1, 9, word_nbytes=4) == 2**32 - 1
        assert window.array[4:6].tolist() == [5, 9]
    assert len(seen) == 2 * times
    group.barrier()
    window.close()


def test_words_of_4_bytes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(narrow, 2, kind)


def swapped(group: Group, kind: Kind) -> None:
    """Tokens that are swapped into one word: none is lost, none is doubled."""
    window = Window.allocate(group, shape=1, dtype=np.uint64, transport=kind.name)
    got = [window.swap(0, 0, 1 + group.rank * 1000 + turn) for turn in range(300)]
    group.barrier()
    last = window.fetch_add(0, 0, 0)
    everything = [int(x) for part in group.all_gather(",".join(map(str, got)).encode()) for x in part.split(b",")]
    assert sorted([*everything, last]) == sorted(
        [0] + [1 + r * 1000 + t for r in range(group.size) for t in range(300)]
    )
    group.barrier()
    window.close()


def test_swap_loses_nothing(ranks: Ranks, kind: Kind) -> None:
    ranks.run(swapped, 3, kind)


def word_mistakes(group: Group, kind: Kind) -> None:
    window = Window.allocate(group, 24, transport=kind.name)
    for error, use in (
        (BoundsError, lambda: window.fetch_add(0, 2, 1, word_nbytes=4)),
        (BoundsError, lambda: window.fetch_add(0, 24, 1, word_nbytes=4)),
        (BoundsError, lambda: window.fetch_add(0, 4, 1)),
        (BoundsError, lambda: window.fetch_add(0, 0, 1, word_nbytes=2)),
        (BoundsError, lambda: window.fetch_add(0, 0, 2**32, word_nbytes=4)),
        (BoundsError, lambda: window.swap(0, 0, -(2**31) - 1, word_nbytes=4)),
        (BoundsError, lambda: window.swap(0, 0, 2**64)),
        (TypeError, lambda: window.swap(0, 0, 1.0)),  # type: ignore[arg-type]
        (TypeError, lambda: window.swap(0, 0, 1, word_nbytes=None)),  # type: ignore[arg-type]
        (BoundsError, lambda: window.atomic_load(24)),
        (BoundsError, lambda: window.atomic_load(4)),
        (BoundsError, lambda: window.atomic_load(22, word_nbytes=4)),
        (BoundsError, lambda: window.atomic_add(17, 1)),
        (BoundsError, lambda: window.swap(1, 0, 1)),
    ):
        with raises(error):
            use()
    assert not window.array.any()
    window.close()
    for use in (lambda: window.atomic_load(0), lambda: window.atomic_add(0, 1), lambda: window.swap(0, 0, 1)):
        with raises(StaleHandle):
            use()


def test_word_mistakes(ranks: Ranks, kind: Kind) -> None:
    ranks.run(word_mistakes, 1, kind)


# ---- fence -----------------------------------------------------------------------------------------------------------


def fenced(group: Group, kind: Kind) -> None:
    """What comes behind a fence is seen only after what was before it, asynchronous and large or not."""
    nbytes = 1 << 20
    window = Window.allocate(group, nbytes + 8, signals=1, transport=kind.name)
    peer = 1 - group.rank
    for turn in range(1, 40):
        if group.rank == 0:
            data = pattern(nbytes, seed=turn)
            window.put(data, peer, async_op=True)
            window.fence(peer)
            if turn % 2:
                window.put(np.uint64([turn]), peer, nbytes)
            else:
                window.swap(peer, nbytes, turn)
            window.flush(peer)
        else:
            while window.atomic_load(nbytes) != turn:
                pass
            same(window.array[:nbytes], pattern(nbytes, seed=turn))
        group.barrier()
    with raises(BoundsError):
        window.fence(2)
    window.close()
    with raises(StaleHandle):
        window.fence(peer)


def test_fence(ranks: Ranks, kind: Kind) -> None:
    ranks.run(fenced, 2, kind)


def reads_first(group: Group, kind: Kind) -> None:
    """A get before a fence does not see the put behind it."""
    nbytes = 1 << 20
    window = Window.allocate(group, nbytes, transport=kind.name)
    if group.rank == 0:
        into = np.zeros(nbytes, np.uint8)
        for turn in range(30):
            work = window.get(into, 1, async_op=True)
            window.fence(1)
            window.put(np.full(nbytes, turn + 1, np.uint8), 1, async_op=turn % 2 == 0)
            window.flush(1)
            work.wait()
            assert (into == turn).all()
    group.barrier()
    window.close()


def test_a_fence_keeps_puts_behind_gets(ranks: Ranks, kind: Kind) -> None:
    ranks.run(reads_first, 2, kind)


def test_what_attached_windows_have_not(kind: Kind) -> None:
    with Group.local(1)[0] as group:
        with (
            Window.expose(group.directory, "waits", nbytes=64, transport=kind.name) as own,
            Window.attach(group.directory, "waits") as attached,
        ):
            attached.swap(0, 8, 7)
            attached.fence(0)
            attached.flush(0)
            assert own.atomic_load(8) == 7
            assert own.atomic_add(8, 1) == 7
            for use in (
                lambda: attached.wait_any([(0, 1)]),
                lambda: attached.atomic_load(0),
                lambda: attached.atomic_add(0, 1),
                lambda: attached.origin_signal(0),
                lambda: own.origin_signal(0),
            ):
                with raises(Unsupported):
                    use()
