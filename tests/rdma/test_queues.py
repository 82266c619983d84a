"""How many operations there can be under way, and what each of them costs (cases 5, 7 and 14)."""

import numpy as np
import pytest
from fake_verbs import Device, FakeVerbs, connected, windows
from harness import in_threads, pattern, raises, same

from onesided import DeadlineExceeded

MIB = 1 << 20
DEPTH = 512  # the default of RdmaTransport


def queued(fake: FakeVerbs, count: int) -> None:
    """Small puts without a flush between: one doorbell each, few completions, none lost."""
    with windows(2, 8 * count) as (near, far):
        values = np.arange(count, dtype=np.uint64) + 1
        sources = values.view(np.uint8).reshape(count, 8)
        fake.reset_counts()
        for i, source in enumerate(sources):
            near.put(source, 1, 8 * i)
        near.flush(1)
        assert (far.array.view(np.uint64) == values).all()
        # The flush is one read.
        assert fake.count("post_sends") == fake.count("wrs") == count + 1
        assert fake.count("inlined") == count
        # Every eighth of the queue one asks for a completion, and the flush does.
        assert fake.count("signaled") == count // (DEPTH // 8) + 1
        assert fake.count("cqes") == fake.count("signaled")
        assert fake.count("unfenced") == 0


@pytest.mark.parametrize("count", [65_000, 100_000])
def test_case_7_small_puts_between_two_flushes(alone, count: int) -> None:
    alone(queued, count, devices=1)


def queued_at_a_slow_device(fake: FakeVerbs, nbytes: int, count: int) -> None:
    """The queue is full most of the time."""
    with windows(2, nbytes * count) as (near, far):
        source = pattern(nbytes * count)
        fake.reset_counts()
        fake.deliver_in_thread(delay_us=0)
        for i in range(count):
            piece = source[nbytes * i : nbytes * (i + 1)].copy()
            near.put(piece, 1, nbytes * i)
            piece[:] = 0  # at once: what small puts say is on its way
        near.flush(1)
        same(far.array, source)
        assert fake.count("wrs") - count < count / 2


@pytest.mark.parametrize(("nbytes", "count"), [(8, 30_000), (500, 3000), (4096, 2000)])
def test_case_7_at_a_slow_device(alone, nbytes: int, count: int) -> None:
    alone(queued_at_a_slow_device, nbytes, count, devices=1)


def asynchronous(fake: FakeVerbs) -> None:
    """Works, of which a queue's worth is under way at any time."""
    count = 30_000
    with windows(2, 8 * count) as (near, far):
        values = np.arange(count, dtype=np.uint64) + 1
        sources = values.view(np.uint8).reshape(count, 8)
        fake.deliver_in_thread(delay_us=0)
        works = [near.put(source, 1, 8 * i, async_op=True) for i, source in enumerate(sources)]
        works[-1].wait(20)
        assert all(work.done() for work in works)  # they complete in order
        assert not any(work.exception() for work in works)
        assert (far.array.view(np.uint64) == values).all()


def test_case_7_asynchronous(alone) -> None:
    alone(asynchronous, devices=1)


def signals_in_flight(fake: FakeVerbs, count: int) -> None:
    """Puts with a signal, none of which is complete before all are posted."""
    with windows(2, MIB) as (near, far):
        fake.hold()
        for i in range(count):
            near.put(i.to_bytes(8, "little"), 1, 8 * i, signal=0)
        assert fake.pending() == 2 * count
        assert far.signal_value(0) == 0
        for done in range(1, count + 1):
            assert fake.release(2) == 2
            assert far.wait_signal(0, done, timeout_s=20) == done
            assert far.array.view(np.uint64)[done - 1] == done - 1
        fake.release_all()
        near.flush()


def test_case_14_signals_in_flight(alone) -> None:
    alone(signals_in_flight, 250, devices=1)


def more_signals_than_room(fake: FakeVerbs) -> None:
    """1,000 from each of four threads; the queue takes a quarter of those of one."""
    count, threads = 1000, 4
    with windows(2, 8 * count * threads) as (near, far):
        fake.deliver_in_thread(delay_us=0)

        def put(thread: int) -> None:
            for i in range(count):
                at = thread * count + i
                near.put((at + 1).to_bytes(8, "little"), 1, 8 * at, signal=thread % 2)

        in_threads([lambda thread=thread: put(thread) for thread in range(threads)])
        for index in range(2):
            assert far.wait_signal(index, count * threads // 2, timeout_s=20) == count * threads // 2
        assert (far.array.view(np.uint64) == np.arange(count * threads, dtype=np.uint64) + 1).all()


@pytest.mark.parametrize("rails", [1, 2])
def test_case_14_more_signals_than_there_is_room(alone, rails: int) -> None:
    alone(more_signals_than_room, devices=rails)


def pieces(fake: FakeVerbs, nbytes: int) -> None:
    """More requests than the queue holds, for one operation; the signal is the last of them."""
    with connected(nbytes, a={"depth": 16}) as pair:
        source = pattern(nbytes)
        fake.deliver_in_thread(delay_us=0)
        pair.connection.write(source, pair.remote, signal=0, timeout_s=20)
        pair.memory.wait_signal(0, 1, timeout_s=20)
        same(pair.array, source)
        landing = np.zeros(nbytes, np.uint8)
        pair.connection.read(landing, pair.remote, async_op=True).wait(20)
        same(landing, source)


def test_case_5_more_pieces_than_room(alone) -> None:
    limits = {"max_mr_size": 64 << 10}
    alone(pieces, 8 * MIB + 12_345, devices=[Device(f"fake{i}", limits=limits) for i in range(2)])


def waits_for_room(fake: FakeVerbs) -> None:
    """What finds no room waits for half of the queue, not for every single request."""
    with connected(MIB, a={"depth": 64}) as pair:
        fake.hold()
        for i in range(64):
            pair.connection.write(b"8 bytes!", pair.remote, 8 * i)
        assert fake.pending() == 64
        for timeout_s in (0.02, 0.02):
            with raises(DeadlineExceeded, "no room"):
                pair.connection.write(b"8 bytes!", pair.remote, timeout_s=timeout_s)
        assert fake.release(32) == 32
        pair.connection.write(b"8 bytes!", pair.remote, 0, timeout_s=20)
        fake.release_all()
        pair.connection.flush(pair.remote)
        assert bytes(pair.array[:512]) == b"8 bytes!" * 64


def test_back_pressure_ends_when_half_of_the_queue_is_done(alone) -> None:
    alone(waits_for_room, devices=1)
