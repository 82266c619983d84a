"""What is told of operations that were lost after they had returned, and to whom; see also test_deadlines.py."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from fake_verbs import FakeVerbs, Status, windows
from harness import raises, wait_until

from onesided import ConnectionLost, DeadlineExceeded, Plan, RegistrationError

MIB = 1 << 20
LARGE = np.full(300 << 10, 7, np.uint8)  # goes over all rails


def flushed_by_two(fake: FakeVerbs, all_ranks: bool) -> None:
    """Whoever flushes while another thread does waits as long, and leaves others running meanwhile."""
    with windows(2, 1 << 16) as (near, far):
        near.put(b"", 1, signal=0)
        near.flush()
        fake.hold()
        near.put(b"x", 1)
        seen: list[bytes] = []

        def flush() -> None:
            near.flush(None if all_ranks else 1, timeout_s=20)
            seen.append(bytes(far.array[:1]))

        threads = [threading.Thread(target=flush) for _ in range(2)]
        threads[0].start()
        wait_until(lambda: fake.pending() >= 2, "the first flush waits")
        threads[1].start()
        begun = time.monotonic()
        while time.monotonic() - begun < 0.2:  # this thread runs
            assert seen == []
        fake.release_all()
        fake.deliver_immediately()
        for thread in threads:
            thread.join()
        assert seen == [b"x", b"x"]


@pytest.mark.parametrize("all_ranks", [False, True], ids=["one rank", "all ranks"])
def test_two_threads_flush(alone, all_ranks: bool) -> None:
    alone(flushed_by_two, all_ranks, devices=1)


def another_error(fake: FakeVerbs) -> None:
    """An error that says nothing of what was lost does not count as having told it."""
    with windows(2, MIB) as (near, far):
        near.put(b"", 1, signal=0)
        near.flush()
        near.put(LARGE, 1, async_op=True).wait(20)
        first_rail = fake.qp_nums("fake0")
        for pair in first_rail:
            fake.hold(pair)
        near.put(b"LOST", 1, 8)
        fake.fail_completion(Status.RETRY_EXC_ERR)
        for pair in first_rail:
            fake.release_all(pair)
            fake.deliver_immediately(pair)
        fake.fail("reg_mr", 12, times=50)
        with raises((RegistrationError, ConnectionLost)):
            near.put(np.full(300 << 10, 9, np.uint8), 1, 4096, signal=1)
        fake.fail("reg_mr", 12, nth=10**9)
        with raises(ConnectionLost, "earlier operation"):
            near.signal(1, 0)
        near.flush(1)
        assert (far.signal_value(0), far.signal_value(1)) == (1, 0)


def test_another_error_does_not_tell_of_a_loss(alone) -> None:
    alone(another_error, devices=2)


FAIL: dict[str, Callable[[FakeVerbs], None]] = {
    "deadline": lambda fake: fake.hold(),
    "registration": lambda fake: fake.fail("reg_mr", 12, times=9),
}


def told_once(fake: FakeVerbs, how: str, signal: bool) -> None:
    """Who raised has told of its own parts: what comes next does not do so again."""
    with windows(2, MIB) as (near, far):
        near.put(b"", 1, signal=0)
        near.flush()
        for call in (
            lambda: near.put_many([(b"small", 0), (LARGE, 4096)], 1, signal=1 if signal else None, timeout_s=0.1),
            lambda: near.put(np.full(LARGE.size, 8, np.uint8), 1, signal=1 if signal else None, timeout_s=0.1),
        ):
            FAIL[how](fake)
            with raises((DeadlineExceeded, RegistrationError)):
                call()
            fake.release_all()
            fake.deliver_immediately()
            fake.fail("reg_mr", 12, nth=10**9)
            near.put(b"next", 1, signal=0, timeout_s=20)
            near.flush(timeout_s=20)
        assert far.signal_value(0) == 3
        assert far.signal_value(1) == 0


@pytest.mark.parametrize("rails", [1, 2])
@pytest.mark.parametrize("signal", [False, True], ids=["put", "put with a signal"])
@pytest.mark.parametrize("how", FAIL)
def test_a_failed_operation_is_told_once(alone, how: str, signal: bool, rails: int) -> None:
    alone(told_once, how, signal, devices=rails)


def many_small_pieces(fake: FakeVerbs) -> None:
    """A deadline is looked at between pieces, too, not only where they have to wait for room."""
    with windows(2, 1 << 16) as (near, far):
        plan = Plan([(np.full(8, 3, np.uint8), 0)] * 1_000_000)
        with raises(DeadlineExceeded):
            near.put_many(plan, 1, timeout_s=0.01)
        near.put_many(plan, 1)
        near.flush(1)
        assert (far.array[:8] == 3).all()


def test_many_small_pieces_have_a_deadline(alone) -> None:
    alone(many_small_pieces, devices=1)
