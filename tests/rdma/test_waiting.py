"""What ends a wait for a device that does nothing, and who runs meanwhile (case 30)."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_verbs import FakeVerbs, Pair, connected, windows
from harness import is_asleep, parent, raises, wait_until

from onesided import DeadlineExceeded

MIB = 1 << 20
OLD, NEW = 0x11, 0xEE


def fill(put: Callable[[], object], count: int = 1500) -> None:
    """Puts until the queue is full, which it is long before: it holds 512 a rail."""
    for _ in range(count):
        put()
    raise AssertionError(f"there is room for {count}")


class Stage:
    """Two ranks, a source for large operations, and puts that are under way."""

    def __init__(self, ranks: list[Any], pair: Pair) -> None:
        self.near, self.far = ranks
        self.pair = pair
        self.source = np.full(MIB, OLD, np.uint8)
        self.landing = np.zeros(MIB, np.uint8)
        self.works: list[Any] = []

    def begin(self) -> None:
        self.works = [self.near.put(self.source, 1, async_op=True) for _ in range(3)]


# Every call that waits for the device: what has to be under way before, and what is called.
USES: dict[str, tuple[bool, Callable[[Stage], object]]] = {
    "work.wait": (True, lambda s: s.works[-1].wait()),
    "flush": (True, lambda s: s.near.flush(1)),
    "flush of all": (True, lambda s: s.near.flush()),
    "signal behind puts": (True, lambda s: s.near.signal(1, 0)),
    "put with a signal behind puts": (True, lambda s: s.near.put(b"x", 1, signal=0)),
    "close": (True, lambda s: s.near.close(timeout_s=None)),
    "close of the owner": (True, lambda s: s.far.close(timeout_s=None)),
    "get": (False, lambda s: s.near.get(s.landing[:8], 1)),
    "large get": (False, lambda s: s.near.get(s.landing, 1)),
    "large put": (False, lambda s: s.near.put(s.source, 1)),
    "fetch_add": (False, lambda s: s.near.fetch_add(1, 0, 1)),
    "compare_swap": (False, lambda s: s.near.compare_swap(1, 0, 0, 1)),
    "back-pressure, 8 bytes": (False, lambda s: fill(lambda: s.near.put(b"8 bytes!", 1))),
    "back-pressure, 4 KiB": (False, lambda s: fill(lambda: s.near.put(s.source[:4096], 1))),
    "back-pressure, async": (False, lambda s: fill(lambda: s.near.put(s.source, 1, async_op=True))),
    "back-pressure, signals": (False, lambda s: fill(lambda: s.near.signal(1, 1))),
    "connect": (False, lambda s: s.pair.a.connect(s.pair.b.bind(), timeout_s=None)),
}
# Their Ctrl-C ends the wait and not the operations: each has its Work, or has left its source behind.
GO_ON = ["work.wait", "close", "close of the owner", "connect", *(use for use in USES if "back-pressure" in use)]

ATOMICS = ("fetch_add", "compare_swap")


def interrupted(fake: FakeVerbs, use: Callable[[], object]) -> float:
    """Blocks in `use` until SIGINT; returns when that got through."""

    def say() -> None:
        wait_until(lambda: fake.pending() > 0, "the device has something to do")
        parent.say("blocking")

    thread = threading.Thread(target=say)
    thread.start()
    try:
        use()
    except KeyboardInterrupt:
        ended = time.monotonic()
        thread.join()
        return ended
    raise AssertionError("it was not interrupted")


def ctrl_c(fake: FakeVerbs, use: str) -> float:
    with connected() as pair, windows(2, MIB) as ranks:
        stage = Stage(ranks, pair)
        fake.hold()
        queued, call = USES[use]
        if queued:
            stage.begin()
        ended = interrupted(fake, lambda: call(stage))
        if use not in GO_ON:
            assert fake.pending() == 0, "the device was not told to stop"
            stage.source[:] = NEW
            stage.landing[:] = NEW
        fake.release_all()
        if use not in GO_ON:
            assert not (stage.far.array == NEW).any()
            assert (stage.landing == NEW).all()
        after_interrupt(use, stage)
    return ended


def after_interrupt(use: str, stage: Stage) -> None:
    """All is as usable as before."""
    if use.startswith("close"):
        (stage.near if use == "close" else stage.far).close()
        assert all(work.done() for work in stage.works)
        return
    if use == "work.wait":
        for work in stage.works:
            work.wait(20)
        assert (stage.far.array == OLD).all()
    if use == "connect":
        stage.pair.a.connect(stage.pair.b.bind(), timeout_s=20).close()
    for work in stage.works:
        if work.done():
            work.exception()  # is told; else the next signal would tell
    before = stage.far.signal_value(0)
    stage.near.put(b"it works", 1, signal=0)
    stage.far.wait_signal(0, before + 1, timeout_s=20)
    assert bytes(stage.far.array[:8]) == b"it works"
    stage.near.flush(timeout_s=20)


@pytest.mark.parametrize("use", USES)
def test_ctrl_c_ends_every_wait_for_a_device(alone, use: str, capsys) -> None:
    process = alone.begin(ctrl_c, use)
    assert process.said(3) == "blocking"
    for _ in range(3):  # it may have been asleep for another reason, but not for long
        wait_until(lambda: is_asleep(process.pid), f"{use} blocks")
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    took_s = process.result() - pressed
    with capsys.disabled():
        print(f"[{use}: {1000 * took_s:.0f} ms] ", end="")
    assert took_s < 10  # it would take for ever


# ---- Who runs meanwhile ----------------------------------------------------------------------------------------------


class Releases(threading.Thread):
    """Does work of its own while the main thread waits, then has the device go on: nobody else would."""

    def __init__(self, fake: FakeVerbs) -> None:
        super().__init__()
        self.fake, self.rounds = fake, 0

    def run(self) -> None:
        wait_until(lambda: self.fake.pending() > 0 and is_asleep(os.getpid()), "the main thread waits")
        for _ in range(100_000):
            self.rounds += 1
        self.fake.release_all()


def others_run(fake: FakeVerbs, uses: list[str]) -> None:
    """Every use in turn; one that kept the GIL would never end, as the device is released by another thread."""
    with connected() as pair:
        for use in uses:
            queued, call = USES[use]
            with windows(2, MIB) as ranks:
                stage = Stage(ranks, pair)
                fake.hold()
                if queued:
                    stage.begin()
                other = Releases(fake)
                other.start()
                if use.startswith("back-pressure"):
                    with raises(AssertionError, "there is room"):  # from when it is released
                        call(stage)
                else:
                    call(stage)
                other.join()
                assert other.rounds == 100_000, use


def test_case_30_other_threads_run_while_a_device_is_waited_for(alone) -> None:
    alone(others_run, [use for use in USES if use not in ATOMICS], timeout_s=60)


@pytest.mark.parametrize("use", ATOMICS)
def test_case_30_other_threads_run_while_an_atomic_is_waited_for(alone, use: str) -> None:
    alone(others_run, [use], timeout_s=2)


def no_room(fake: FakeVerbs) -> None:
    """A deadline that passes in back-pressure posts nothing, and ends nothing."""
    with windows(2, MIB) as (near, far):
        fake.hold()
        count = 0
        with raises(DeadlineExceeded, "no room"):
            while True:
                near.put(count.to_bytes(8, "little"), 1, 8 * count, timeout_s=0.05)
                count += 1
        assert fake.pending() == count
        fake.release_all()
        near.flush()
        assert (far.array.view(np.uint64)[:count] == np.arange(count)).all()
        assert not far.array[8 * count :].any()


def test_a_deadline_without_room_ends_nothing(alone) -> None:
    alone(no_room)
