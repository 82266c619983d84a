"""A deadline is a fence (case 32): the device holds everything, the deadline passes, the source is overwritten, the
device goes on. Nothing of the new bytes may arrive then."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from fake_verbs import Device, FakeVerbs, Pair, Status, connected, windows
from harness import raises, same, wait_until

from onesided import ConnectionLost, DeadlineExceeded, OnesidedError, Window, Work

MIB = 1 << 20
OLD, NEW, LAST = 0x11, 0xEE, 0x22
PASSES_S = 0.05

SIZES = {"small": 8, "copied": 3000, "large": MIB}


def usable_again(fake: FakeVerbs, pair: Pair) -> None:
    """The next operations open the next generation, and all of them work."""
    fake.release_all()
    assert not (pair.array == NEW).any()
    last = np.full(MIB, LAST, np.uint8)
    connection, remote = pair.connection, pair.remote
    connection.write(last, remote, signal=1, timeout_s=20)
    connection.flush(remote, timeout_s=20)
    same(pair.array, last)
    assert pair.memory.signal_value(1) == 1
    landing = np.zeros(MIB, np.uint8)
    connection.read(landing, remote, timeout_s=20)
    same(landing, last)
    assert connection.fetch_add(remote, 0, 1) == int.from_bytes(bytes([LAST] * 8), "little")


# ---- Synchronous -----------------------------------------------------------------------------------------------------

SYNCHRONOUS: dict[str, Callable[[Pair, "np.ndarray", "np.ndarray"], object]] = {
    "put": lambda pair, source, landing: pair.connection.write(source, pair.remote, timeout_s=PASSES_S),
    "put with a signal": lambda pair, source, landing: pair.connection.write(
        source, pair.remote, signal=0, timeout_s=PASSES_S
    ),
    "get": lambda pair, source, landing: pair.connection.read(landing, pair.remote, timeout_s=PASSES_S),
    "flush": lambda pair, source, landing: pair.connection.flush(pair.remote, timeout_s=PASSES_S),
    "fetch_add": lambda pair, source, landing: pair.connection.fetch_add(pair.remote, 0, 1, timeout_s=PASSES_S),
    "compare_swap": lambda pair, source, landing: pair.connection.compare_swap(
        pair.remote, 0, 0, 1, timeout_s=PASSES_S
    ),
    "close": lambda pair, source, landing: pair.connection.close(timeout_s=PASSES_S),
    "close of the memory": lambda pair, source, landing: pair.memory.close(timeout_s=PASSES_S),
}


def synchronous(fake: FakeVerbs, use: str, nbytes: int) -> None:
    for works_before in (False, True):
        with connected(MIB) as pair:
            source, landing = np.full(nbytes, OLD, np.uint8), np.zeros(nbytes, np.uint8)
            fake.hold()
            before = [pair.connection.write(source, pair.remote, async_op=True) for _ in range(3) if works_before]
            if use == "flush":
                pair.connection.write(b"to be flushed", pair.remote)
            if use == "close of the memory":
                # Its owner does not wait longer than that for who has it open, and nothing of theirs lands afterwards.
                SYNCHRONOUS[use](pair, source, landing)
                source[:] = NEW
            elif use == "close" and not works_before:
                SYNCHRONOUS[use](pair, source, landing)
            elif nbytes <= 4096 and use.startswith("put"):
                SYNCHRONOUS[use](pair, source, landing)  # it was copied: the source is free
                source[:] = NEW
                fake.release_all()
                for work in before:
                    work.wait(20)
                continue
            else:
                with raises(DeadlineExceeded):
                    SYNCHRONOUS[use](pair, source, landing)
            source[:] = NEW
            landing[:] = NEW
            # When the owner closes, it takes its own queue pairs away; the other side hears of that in its own time.
            assert use == "close of the memory" or fake.pending() == 0, "something is still posted"
            fake.release_all()
            assert not (pair.array == NEW).any()
            assert (landing == NEW).all(), "something landed after the deadline"
            assert pair.array.view(np.uint64)[0] in (0, int.from_bytes(bytes([OLD] * 8), "little"))
            wait_until(lambda: all(work.done() for work in before), "what was under way is over")  # noqa: B023
            for work in before:
                assert isinstance(work.exception(), OnesidedError)
            if use == "flush":
                fake.release_all()
                with raises(ConnectionLost, "an earlier operation to b was lost"):
                    pair.connection.flush(pair.remote, timeout_s=20)
            if not use.startswith("close"):
                usable_again(fake, pair)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("use", [use for use in SYNCHRONOUS if "_" not in use])
def test_case_32_a_deadline_is_a_fence(alone, use: str, rails: int, size: str) -> None:
    alone(synchronous, use, SIZES[size], devices=rails)


@pytest.mark.parametrize("use", ["fetch_add", "compare_swap"])
def test_case_32_a_deadline_is_a_fence_for_atomics(alone, use: str) -> None:
    alone(synchronous, use, 8, timeout_s=2)


# ---- Asynchronous ----------------------------------------------------------------------------------------------------


def asynchronous(fake: FakeVerbs, nbytes: int, how: str) -> None:
    with windows(2, MIB) as (near, far):
        source, landing = np.full(nbytes, OLD, np.uint8), np.zeros(nbytes, np.uint8)
        fake.hold()
        own = PASSES_S if how == "own deadline" else None
        works = [
            near.put(source, 1, async_op=True, timeout_s=own),
            near.get(landing, 1, async_op=True, timeout_s=own),
            near.put(source, 1, MIB - nbytes, async_op=True, timeout_s=own),
            near.put_many([(source, 0), (source[:9], MIB // 2)], 1, async_op=True, timeout_s=own),
            near.get_many([(landing, 0), (landing[:9], 9)], 1, async_op=True, timeout_s=own),
            near.signal(1, 0, async_op=True, timeout_s=own) if nbytes < 100_000 else None,  # waits on two rails
        ]
        works = [work for work in works if work is not None]
        assert not any(work.done() for work in works)
        with raises(DeadlineExceeded):
            if how == "flush":
                near.flush(1, timeout_s=PASSES_S)
            else:
                works[0].wait(None if how == "own deadline" else PASSES_S)
        for work in works:
            assert work.done()
            assert isinstance(work.exception(), DeadlineExceeded)
        source[:] = NEW
        landing[:] = NEW
        assert fake.pending() == 0
        fake.release_all()
        assert not far.array.any()
        assert (landing == NEW).all()
        assert far.signal_value(0) == 0
        near.put(np.full(MIB, LAST, np.uint8), 1, signal=0, timeout_s=20)
        far.wait_signal(0, 1, timeout_s=20)
        assert (far.array == LAST).all()


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["wait", "own deadline", "flush"])
def test_case_32_for_asynchronous_operations(alone, how: str, size: str, rails: int) -> None:
    alone(asynchronous, SIZES[size], how, devices=rails)


def many_pieces(fake: FakeVerbs, nbytes: int) -> None:
    """The same for synchronous ones of many pieces, whose small ones are copied and large ones read where they lie."""
    with windows(2, MIB) as (near, far):
        source, landing = np.full(nbytes, OLD, np.uint8), np.zeros(nbytes, np.uint8)
        fake.hold()
        with raises(DeadlineExceeded):
            near.put_many([(source[:8], MIB - 8), (source, 0)], 1, signal=0, timeout_s=PASSES_S)
        source[:] = NEW
        with raises((DeadlineExceeded, ConnectionLost)):
            near.get_many([(landing, 0), (landing[:8], 100)], 1, timeout_s=PASSES_S)
        landing[:] = NEW
        assert fake.pending() == 0
        fake.release_all()
        assert not (far.array == NEW).any()
        assert (landing == NEW).all()
        assert far.signal_value(0) == 0
        with contextlib.suppress(ConnectionLost):  # the small piece had been posted
            near.flush(timeout_s=20)
        near.put(np.full(MIB, LAST, np.uint8), 1, signal=0, timeout_s=20)
        far.wait_signal(0, 1, timeout_s=20)
        assert (far.array == LAST).all()


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("nbytes", [5000, MIB])
def test_case_32_for_many_pieces(alone, nbytes: int, rails: int) -> None:
    alone(many_pieces, nbytes, devices=rails)


def done_passes(fake: FakeVerbs) -> None:
    """done() ends a work whose own deadline has passed."""
    with windows(2, MIB) as (near, far):
        source = np.full(MIB, OLD, np.uint8)
        fake.hold()
        work = near.put(source, 1, async_op=True, timeout_s=PASSES_S)
        while not work.done():
            pass
        source[:] = NEW
        assert isinstance(work.exception(), DeadlineExceeded)
        fake.release_all()
        assert not far.array.any()


def test_case_32_done_ends_what_is_late(alone) -> None:
    alone(done_passes)


# ---- In the middle ---------------------------------------------------------------------------------------------------


def partly_posted(fake: FakeVerbs, use: str, how: str) -> None:
    """An operation of more requests than the queue has room for, which the deadline meets between two of them."""
    with connected(MIB, a={"depth": 16}) as pair:
        source, landing = np.full(MIB, OLD, np.uint8), np.zeros(MIB, np.uint8)
        fake.hold()
        with raises(DeadlineExceeded):
            if use == "put":
                pair.connection.write(source, pair.remote, async_op=how == "async", timeout_s=PASSES_S)
            else:
                pair.connection.read(landing, pair.remote, async_op=how == "async", timeout_s=PASSES_S)
        source[:] = NEW
        landing[:] = NEW
        fake.release_all()
        assert not (pair.array == NEW).any(), "the source was read after the deadline"
        assert (landing == NEW).all(), "something landed after the deadline"
        usable_again(fake, pair)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("use", ["put", "get"])
def test_case_32_in_the_middle_of_posting(alone, use: str, how: str) -> None:
    alone(partly_posted, use, how, devices=[Device("fake0", limits={"max_mr_size": 32 << 10})])


def half_finished(fake: FakeVerbs, done: int) -> None:
    """Some of the pieces have arrived when the deadline passes: they stay, and nothing else comes."""
    with connected(MIB) as pair:
        source = np.full(MIB, OLD, np.uint8)
        fake.hold()
        work = pair.connection.write(source, pair.remote, async_op=True)
        assert fake.release(done) == done
        with raises(DeadlineExceeded):
            work.wait(PASSES_S)
        source[:] = NEW
        arrived = int(np.count_nonzero(pair.array == OLD))
        assert 0 < arrived < MIB
        usable_again(fake, pair)


@pytest.mark.parametrize("done", [1, 5, 31])
def test_case_32_for_half_finished_operations(alone, done: int) -> None:
    alone(half_finished, done, devices=[Device("fake0", limits={"max_mr_size": 32 << 10})])


def one_peer_only(fake: FakeVerbs) -> None:
    """What is cancelled towards one peer leaves the others alone, though they share the device."""
    with windows(3, MIB) as ranks:
        near = ranks[0]
        source = np.full(MIB, OLD, np.uint8)
        fake.hold()
        slow = near.put(source, 1, async_op=True)
        fine = near.put(source, 2, async_op=True)
        with raises(DeadlineExceeded):
            slow.wait(PASSES_S)
        assert not fine.done()
        fake.release_all()
        fine.wait(20)
        assert (ranks[2].array == OLD).all()
        assert not ranks[1].array.any()


def test_a_deadline_of_one_peer_leaves_others_alone(alone) -> None:
    alone(one_peer_only)


ENDS: dict[str, Callable[[FakeVerbs, Window], object]] = {
    "a work's deadline": lambda fake, near: near.put(LARGE, 1, async_op=True).wait(PASSES_S),
    "a put's deadline": lambda fake, near: near.put(LARGE, 1, timeout_s=PASSES_S),
    "a get's deadline": lambda fake, near: near.get(np.zeros(8, np.uint8), 1, timeout_s=PASSES_S),
    "a flush's deadline": lambda fake, near: near.flush(1, timeout_s=PASSES_S),
    "a flush of all's deadline": lambda fake, near: near.flush(timeout_s=PASSES_S),
    "the failure of a work": lambda fake, near: fails(fake, near.put(LARGE, 1, async_op=True)),
}
TELLS: dict[str, Callable[[Window], object]] = {
    "flush": lambda near: near.flush(1, timeout_s=20),
    "flush of all": lambda near: near.flush(timeout_s=20),
    "signal": lambda near: near.signal(1, 0, timeout_s=20),
    "put with a signal": lambda near: near.put(b"a signal behind it", 1, 100, signal=0, timeout_s=20),
    "asynchronous signal": lambda near: near.signal(1, 0, async_op=True, timeout_s=20).wait(),
    "put behind a fence": lambda near: (near.fence(1), near.put(b"after it", 1, 100, timeout_s=20)),
}
IS_LOST: dict[str, Callable[[Window], object]] = {
    "put": lambda near: near.put(b"lost", 1),
    "work that nobody has": lambda near: near.put(LARGE, 1, async_op=True) and None,
    "signal": lambda near: near.signal(1, 1),
    "put with a signal": lambda near: near.put(b"lost", 1, signal=1),
    "puts of small pieces": lambda near: near.put_many([(b"lost", 0), (b"lost", 8)], 1),
}
LARGE = np.full(MIB, OLD, np.uint8)


def fails(fake: FakeVerbs, work: Work) -> None:
    fake.fail_completion(Status.RETRY_EXC_ERR)
    fake.release_all()
    work.wait(20)


def lost_with_another(fake: FakeVerbs) -> None:
    """What was over for its caller when it was posted, and ends with another operation, is told once, by whatever says
    that all before it is there: however the other ended, and although that was told."""
    with windows(2, MIB) as (near, far):
        signals = 0
        for is_lost in IS_LOST.values():
            for end in ENDS.values():
                for tells in TELLS.values():
                    fake.hold()
                    is_lost(near)
                    with raises((DeadlineExceeded, ConnectionLost)):
                        end(fake, near)
                    fake.release_all()
                    fake.deliver_immediately()
                    with raises(ConnectionLost, "earlier operation"):
                        tells(near)
                    near.flush(timeout_s=20)
                    assert (far.signal_value(0), far.signal_value(1)) == (signals, 0)
                    near.put(b"well", 1, signal=0)
                    signals += 1
                    near.flush(timeout_s=20)
                    assert far.signal_value(0) == signals


def test_what_is_lost_with_another_operation_is_told(alone) -> None:
    alone(lost_with_another, devices=2)


def again_and_again(fake: FakeVerbs) -> None:
    """Deadlines say nothing of the way to the peer: the next generation is opened at once, after however many of them.

    (What fails again and again is tried less and less often: the ninth time it would not be tried for 0.64 s.)
    """
    with connected(MIB) as pair:
        for turn in range(1, 12):
            fake.hold()
            work = pair.connection.write(np.full(MIB, OLD, np.uint8), pair.remote, async_op=True)
            with raises(DeadlineExceeded):
                work.wait(0)
            fake.release_all()
            fake.deliver_immediately()
            last = np.full(MIB, turn, np.uint8)
            pair.connection.write(last, pair.remote, timeout_s=0.6)
            pair.connection.flush(pair.remote, timeout_s=20)
            same(pair.array, last)


def test_deadlines_again_and_again_do_not_slow_a_connection_down(alone) -> None:
    alone(again_and_again, devices=1)
