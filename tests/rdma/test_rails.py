"""Connections over several devices (case 10)."""

import threading

import numpy as np
import pytest
from fake_verbs import FakeVerbs, connected, windows
from harness import pattern, raises, same, wait_until

from onesided import DeadlineExceeded

MIB = 1 << 20


def balance(fake: FakeVerbs, rails: int) -> None:
    with windows(2, 4 * MIB) as (near, far):
        source, landing = pattern(4 * MIB), np.zeros(4 * MIB, np.uint8)
        fake.reset_counts()
        for turn in range(8):
            nbytes = 4 * MIB - 4097 * turn
            near.put(source[:nbytes], 1, signal=0)
            near.put(source[:nbytes], 1, async_op=True).wait(20)
            near.get(landing[:nbytes], 1)
        same(far.array, source)
        same(landing, source)
        for what in ("written", "read"):
            moved = [fake.traffic(f"fake{rail}", what) for rail in range(rails)]
            assert max(moved) <= 1.1 * min(moved), (what, moved)


@pytest.mark.parametrize("rails", [2, 3, 8])
def test_large_operations_use_all_rails_alike(alone, rails: int) -> None:
    alone(balance, rails, devices=rails)


def held_back(fake: FakeVerbs, slow: int, how: str) -> None:
    """One rail stands still: the signal comes when what that one has to bring is there, and not before."""
    with windows(2, MIB) as (near, far):
        source = pattern(MIB, 5)
        pairs = fake.qp_nums(f"fake{slow}")
        for pair in pairs:
            fake.hold(pair)

        def put() -> None:
            if how == "put with a signal":
                near.put(source, 1, signal=0)
            elif how == "put, then signal":
                near.put(source, 1, async_op=True)
                near.signal(1, 0)
            elif how == "asynchronous put with a signal":
                near.put(source, 1, signal=0, async_op=True).wait(20)
            else:
                near.put(source, 1, async_op=True)
                near.put(b"", 1, signal=0)

        thread = threading.Thread(target=put)
        thread.start()
        wait_until(lambda: fake.pending() > 0, "the slow rail has something to do")
        with raises(DeadlineExceeded):
            far.wait_signal(0, 1, timeout_s=0.1)
        while fake.pending() > 0:
            # Before the last request of the slow rail there is no signal.
            assert far.signal_value(0) == 0
            for pair in pairs:
                fake.release(1, pair)
        for pair in pairs:
            fake.deliver_immediately(pair)
        far.wait_signal(0, 1, timeout_s=20)
        same(far.array, source)
        thread.join()


HOWS = ["put with a signal", "put, then signal", "asynchronous put with a signal", "put, then empty put with a signal"]


@pytest.mark.parametrize(
    ("slow", "how"), [(slow, how) for slow in (0, 1) for how in HOWS if (slow, how) != (1, HOWS[2])]
)
def test_case_10_a_signal_never_overtakes_its_bytes(alone, slow: int, how: str) -> None:
    alone(held_back, slow, how, devices=2)


def not_alike(fake: FakeVerbs, here: int, there: int) -> None:
    """Ends with different numbers of rails: all of the larger number are used."""
    names = [f"fake{i}" for i in range(8)]
    with connected(MIB, a={"nics": names[:here]}, b={"nics": names[:there]}) as pair:
        assert len([row for row in pair.connection.describe() if row.startswith("lane")]) == max(here, there)
        source, landing = pattern(MIB), np.zeros(MIB, np.uint8)
        fake.reset_counts()
        pair.connection.write(source, pair.remote, signal=0)
        pair.connection.read(landing, pair.remote)
        same(pair.array, source)
        same(landing, source)
        assert pair.memory.signal_value(0) == 1
        assert [pair.connection.fetch_add(pair.remote, 0, 0) for _ in range(2)] == [source.view(np.uint64)[0]] * 2
        used = [fake.traffic(name, "written") > 0 for name in names]
        assert used == [i < here for i in range(8)]


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 3), (3, 2), (1, 8), (8, 1), (8, 3)])
def test_different_numbers_of_rails(alone, here: int, there: int) -> None:
    alone(not_alike, here, there, devices=8)


def cut_off(fake: FakeVerbs) -> None:
    """Rails that do not reach each other: `b` has them in the other order, and one that nothing reaches."""
    with connected(MIB, a={"nics": ["fake0"]}, b={"nics": ["fake1"]}) as pair:
        source = pattern(MIB)
        pair.connection.write(source, pair.remote, signal=0)
        same(pair.array, source)


def test_one_rail_each_and_not_the_same(alone) -> None:
    alone(cut_off)
