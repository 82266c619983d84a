"""Asynchronous operations: order, outcome, and the deadline as a fence (case 32)."""

import contextlib
import gc

import numpy as np
import pytest
from harness import Kind, Processes, Threads, parent, pattern, raises, same

from onesided import ConnectionLost, DeadlineExceeded, Group, StaleHandle, Window, Work

Ranks = Threads | Processes
MIB = 1 << 20


def make_window(group: Group, kind: Kind, nbytes: int, private: bool = False, signals: int = 2) -> Window:
    if private:
        return Window.create(group, np.zeros(nbytes, np.uint8), signals=signals, transport=kind.name)
    return Window.allocate(group, nbytes, signals=signals, transport=kind.name)


# ---- Outcome ---------------------------------------------------------------------------------------------------------


def outcome(group: Group, kind: Kind) -> None:
    window = make_window(group, kind, 64)
    peer = (group.rank + 1) % group.size
    work = window.put(b"abc", peer)
    assert isinstance(work, Work)
    assert work.done()
    assert work.exception() is None
    work.wait()
    work.wait(timeout_s=0)
    for started in (window.put(b"abc", peer, async_op=True), window.get(bytearray(3), peer, async_op=True),
                    window.signal(peer, 0, async_op=True)):  # fmt: skip
        started.wait()
        assert started.done()
        assert started.exception() is None
        started.wait(timeout_s=0)
    into = bytearray(3)
    window.get(into, peer, async_op=True).wait()
    assert into == b"abc"
    group.barrier()
    window.close()


def test_outcome(ranks: Ranks, kind: Kind) -> None:
    ranks.run(outcome, 2, kind)


def in_order(group: Group, kind: Kind) -> None:
    """Operations to one peer run in the order in which they were issued."""
    window = make_window(group, kind, MIB)
    peer = (group.rank + 1) % group.size
    for turn in range(30):
        into = np.zeros(MIB, np.uint8)
        window.put(np.full(MIB, turn, np.uint8), peer, async_op=True)
        window.put(np.full(MIB, turn + 100, np.uint8), peer, async_op=True)
        window.get(into, peer, async_op=True).wait()
        assert (into == turn + 100).all()
    window.flush(peer)
    group.barrier()
    window.close()


def test_operations_to_one_peer_run_in_order(ranks: Ranks, kind: Kind) -> None:
    ranks.run(in_order, 2, kind)


def failures_are_told(group: Group, kind: Kind) -> None:
    """Each failed operation has its own cause; flush tells the first that nobody asked for, once."""
    window = make_window(group, kind, 64)
    other = make_window(group, kind, 64)
    if group.rank == 1:
        group.barrier()
        window.close()
        group.barrier()
        group.barrier()
        assert bytes(other.array[:5]) == b"other"
    else:
        window.put(b"before", 1, async_op=True).wait()
        group.barrier()
        group.barrier()
        work = window.put(b"after", 1, async_op=True)
        with raises(StaleHandle):
            work.wait()
        assert isinstance(work.exception(), StaleHandle)
        with raises(StaleHandle):
            work.wait()  # every time
        window.flush(0)
        quiet = [window.put(b"quiet", 1, async_op=True) for _ in range(3)]
        with raises(StaleHandle):
            window.flush(1)
        assert all(isinstance(work.exception(), StaleHandle) for work in quiet)
        other.put(b"other", 1, async_op=True)
        other.flush(1)
        other.flush()
        window.put(b"own", 0, async_op=True).wait()
        window.flush(0)
        group.barrier()
    group.barrier()
    other.close()


def test_case_35_each_failure_is_its_own(ranks: Ranks, kind: Kind) -> None:
    ranks.run(failures_are_told, 2, kind)


def kept(group: Group, kind: Kind) -> None:
    """A Work keeps all that it needs: source, window and connection."""
    window = make_window(group, kind, 4 * MIB)
    array, memory = window.array, window.memory
    work = window.put(pattern(4 * MIB, 3), group.rank, async_op=True)
    del window
    gc.collect()
    work.wait()
    same(array, pattern(4 * MIB, 3))
    memory.close()


def test_a_work_keeps_its_window(ranks: Ranks, kind: Kind) -> None:
    ranks.run(kept, 1, kind)


def pending_at_close(group: Group, kind: Kind) -> None:
    """torchcomms: closed with three pending: each is over, one way or the other, when close returns."""
    window = make_window(group, kind, 64 * MIB)
    source = np.ones(64 * MIB, np.uint8)
    group.barrier()
    works = [window.put(source, (group.rank + 1) % group.size, async_op=True) for _ in range(3)]
    window.close()
    for work in works:
        assert work.done()
        assert work.exception() is None or isinstance(work.exception(), StaleHandle)
    group.barrier()


def test_torchcomms_three_pending_at_close(ranks: Ranks, kind: Kind) -> None:
    ranks.run(pending_at_close, 2, kind)


# ---- Deadlines -------------------------------------------------------------------------------------------------------


def fence(group: Group, kind: Kind, private: bool, how: str) -> None:
    """After DeadlineExceeded the source is overwritten; none of that ever arrives."""
    nbytes, count = 64 * MIB, 24
    window = make_window(group, kind, nbytes, private)
    if group.rank == 1:
        parent.say("ready")
        group.barrier(timeout_s=60)
        assert not (window.array == 0xEE).any()
        group.barrier()
        assert (window.array == 0x22).all()
        group.barrier()
        return
    parent.hear()
    source = np.full(nbytes, 0x11, np.uint8)
    if how == "sync":
        with raises(DeadlineExceeded):
            for _ in range(count):
                window.put(source, 1, timeout_s=0.001)  # a quarter of it at 16 GB/s
    else:
        works = [window.put(source, 1, async_op=True) for _ in range(count)]
        with raises(DeadlineExceeded):
            works[2].wait(0) if how == "wait" else window.flush(1, timeout_s=0)
        ended = works[2:] if how == "wait" else works
        assert all(work.done() for work in ended)  # all that were issued behind it are over, too
        assert isinstance(works[-1].exception(), DeadlineExceeded)
        if how == "wait":
            for work in works[:2]:
                work.wait()
    source[:] = 0xEE
    parent.say("overwritten")
    group.barrier(timeout_s=60)
    source[:] = 0x22
    window.put(source, 1)  # the window is as usable as before
    group.barrier()
    group.barrier()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
@pytest.mark.parametrize("how", ["sync", "wait", "flush"])
def test_case_32_a_deadline_is_a_fence(
    processes: Processes, lasting: Kind, how: str, private: bool, stopped: bool
) -> None:
    team = processes.start(fence, 2, lasting, private, how)
    team[1].said()
    if stopped:
        team[1].stop()
    team[0].tell()
    team[0].said()
    team[1].resume()
    processes.finish(team)


def tried_again(group: Group, kind: Kind, private: bool) -> None:
    """Who only tries again when flush was late hears what was cancelled, before a signal says that it is there."""
    nbytes = 64 * MIB
    window = make_window(group, kind, nbytes, private)
    if group.rank == 0:
        source = np.full(nbytes, 1, np.uint8)
        for again in (
            lambda: window.flush(1),
            lambda: window.flush(),
            lambda: window.signal(1, 0),
            lambda: window.put(b"behind it", 1, signal=0),
        ):
            works = [window.put(source, 1, async_op=True) for _ in range(20)]
            with raises(DeadlineExceeded):
                window.flush(1, timeout_s=0)
            with raises(ConnectionLost, "an earlier operation"):
                again()
            window.flush()
            assert isinstance(works[-1].exception(), DeadlineExceeded)
        window.signal(1, 0)
    else:
        assert window.wait_signal(0, 1) == 1
    group.barrier()
    window.close()


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
def test_what_a_late_flush_cancelled_is_told_when_it_is_tried_again(ranks: Ranks, lasting: Kind, private: bool) -> None:
    ranks.run(tried_again, 2, lasting, private)


def signals_once_refused(group: Group, kind: Kind) -> None:
    """A signal that is not sent because of an earlier failure tells of it: the next one is."""
    nbytes = 64 * MIB
    window = make_window(group, kind, nbytes + MIB)
    if group.rank == 0:
        source = np.full(nbytes, 1, np.uint8)
        slow = [window.put(source, 1, async_op=True) for _ in range(20)]
        lost = [window.put(b"lost", 1, nbytes + 8 * i, async_op=True) for i in range(100)]
        with raises(DeadlineExceeded):
            slow[-1].wait(0)
        with raises(ConnectionLost):
            window.signal(1, 0, async_op=True).wait()
        window.signal(1, 1, async_op=True).wait()
        assert isinstance(lost[-1].exception(), DeadlineExceeded)
    else:
        window.wait_signal(1, 1)
        assert window.signal_value(0) == 0
    group.barrier()
    window.close()


def test_a_refused_signal_tells_once(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(signals_once_refused, 2, lasting)


def more_failures_than_remembered(group: Group, kind: Kind) -> None:
    """However many failures nobody was told of: a signal is not sent before one of them is told."""
    nbytes = 64 * MIB
    window = make_window(group, kind, nbytes + MIB)
    if group.rank == 0:
        source = np.full(nbytes, 1, np.uint8)

        def cancelled() -> list[Work]:
            slow = [window.put(source, 1, async_op=True) for _ in range(20)]
            works = [window.put(b"lost", 1, nbytes + 8 * i, async_op=True) for i in range(4000)]
            with raises(DeadlineExceeded):
                works[0].wait(0)
            for work in slow:
                work.wait()
            return works

        asked = cancelled()
        not_asked = cancelled()
        assert all(work.exception() is not None for work in asked)
        with raises(ConnectionLost):
            window.signal(1, 0)
        window.signal(1, 1)
        assert not_asked[-1].exception() is not None
    else:
        window.wait_signal(1, 1)
        assert window.signal_value(0) == 0
    group.barrier()
    window.close()


def test_more_failures_than_are_remembered(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(more_failures_than_remembered, 2, lasting)


def running_is_fenced(group: Group, kind: Kind, private: bool, how: str) -> None:
    """The operation that is cancelled is running; its source is overwritten right where it is being read."""
    piece = 16 * MIB
    window = make_window(group, kind, 10 * piece, private)
    if group.rank == 1:
        group.barrier()
        return
    source, seen, ended = np.empty(10 * piece, np.uint8), bytearray(1), 0
    for turn in range(1, 9):
        source[:] = turn
        at = turn % 5 * piece
        work = window.put(source, 1, async_op=True)
        while seen[0] != turn and not work.done():
            window.get(seen, 1, at)
        with contextlib.suppress(DeadlineExceeded):
            work.wait(0) if how == "wait" else window.flush(1, timeout_s=0)
        source[at : at + 3 * piece] = 0xEE
        assert work.done()
        ended += work.exception() is not None
        arrived = np.zeros(4 * piece, np.uint8)
        window.get(arrived, 1, at)
        assert not (arrived == 0xEE).any()
    assert ended > 4  # most of them were ended in the middle, and not waited for
    group.barrier()


@pytest.mark.parametrize("private", [False, True], ids=["allocated", "private"])
@pytest.mark.parametrize("how", ["wait", "flush"])
def test_case_32_what_runs_is_ended_within_a_piece(ranks: Ranks, lasting: Kind, how: str, private: bool) -> None:
    ranks.run(running_is_fenced, 2, lasting, private, how)


def zero_deadlines(group: Group, kind: Kind) -> None:
    """torchcomms: each of 32 succeeds or raises, at least one raises, the next succeeds."""
    nbytes = 64 * MIB
    window = make_window(group, kind, nbytes)
    peer = (group.rank + 1) % group.size
    source = np.full(nbytes, group.rank + 1, np.uint8)
    outcomes = []
    for _ in range(32):
        work = window.put(source, peer, async_op=True)
        with contextlib.suppress(DeadlineExceeded):
            work.wait(timeout_s=0)
        assert work.done()
        outcomes.append(work.exception())
    assert any(outcomes)
    assert {type(outcome) for outcome in outcomes} <= {DeadlineExceeded, type(None)}
    with raises(DeadlineExceeded):
        window.put(source, peer, timeout_s=0)
    window.put(source, peer, async_op=True, timeout_s=20).wait(20)
    group.barrier()
    assert (window.array == (group.rank - 1) % group.size + 1).all()
    group.barrier()
    window.close()


def test_torchcomms_32_writes_with_a_zero_deadline(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(zero_deadlines, 2, lasting)


def other_peers(group: Group, kind: Kind) -> None:
    """What is cancelled towards one peer does not touch what goes to another."""
    nbytes = 16 * MIB
    window = make_window(group, kind, nbytes)
    if group.rank == 0:
        source = np.full(nbytes, 9, np.uint8)
        slow = [window.put(source, 1, async_op=True) for _ in range(50)]
        fine = [window.put(source, 2, async_op=True) for _ in range(3)]
        with raises(DeadlineExceeded):
            window.flush(1, timeout_s=0)
        for work in fine:
            work.wait()
        assert all(work.done() for work in slow)
    group.barrier()
    if group.rank == 2:
        assert (window.array == 9).all()
    group.barrier()
    window.close()


def test_a_deadline_of_one_peer_leaves_others_alone(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(other_peers, 3, lasting)


def back_pressure(group: Group, kind: Kind) -> None:
    """Who issues more than the queue holds waits, until the deadline."""
    window = make_window(group, kind, 64 * MIB)
    source = np.ones(64 * MIB, np.uint8)
    # No deadline for these: they keep the queue long, each takes milliseconds.
    works = [window.put(source, group.rank, async_op=True) for _ in range(4000)]
    with raises(DeadlineExceeded, "no room"):
        works.extend(window.put(source, group.rank, async_op=True, timeout_s=0.001) for _ in range(100_000))
    assert 4000 <= len(works) < 100_000
    with raises(DeadlineExceeded):
        window.flush(timeout_s=0)
    assert all(work.done() for work in works)
    window.put(b"after", group.rank, async_op=True).wait()
    window.close()


def test_back_pressure_honours_the_deadline(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(back_pressure, 1, lasting)


def waits_by_many(group: Group, kind: Kind) -> None:
    """Any number of threads may wait for one Work; one that gives up ends it for all."""
    from harness import in_threads

    window = make_window(group, kind, 64 * MIB)
    source = np.ones(64 * MIB, np.uint8)
    works = [window.put(source, group.rank, async_op=True) for _ in range(40)]

    def wait() -> None:
        with raises(DeadlineExceeded):
            works[-1].wait(20)

    def give_up() -> None:
        with raises(DeadlineExceeded):
            works[-1].wait(0)

    in_threads([wait, wait, wait, give_up])
    window.close()


def test_many_threads_wait_for_one_work(ranks: Ranks, lasting: Kind) -> None:
    ranks.run(waits_by_many, 1, lasting)
