"""What lives how long: objects that are dropped in any order, and forked processes (case 29)."""

import gc
import os
import random
import signal
import threading

import numpy as np
import pytest
from fake_verbs import FakeVerbs, connected, windows
from harness import raises, wait_until

from onesided import Group, OnesidedError, RdmaTransport, RemoteMemory, Window

MIB = 1 << 20


def dropped(fake: FakeVerbs) -> None:
    """Nothing is closed: all is dropped, in any order, with operations under way or not."""
    numbers = random.Random(11)
    for turn in range(60):
        a, b = RdmaTransport(), RdmaTransport()
        memory = b.allocate(MIB, signals=1)
        remote = RemoteMemory.from_bytes(memory.handle())
        connection = a.connect(b.bind())
        if turn % 6 == 0:
            fake.hold()
        work = connection.write(np.ones(MIB, np.uint8), remote, async_op=True)
        begins = threading.Event()

        def release(begins: threading.Event = begins) -> None:
            begins.wait()
            fake.release_all()

        thread = threading.Thread(target=release)
        thread.start()
        held: list = [a, b, memory, connection, work]
        numbers.shuffle(held)
        del a, b, memory, connection, work
        begins.set()  # from here on: a transport waits for what is under way, and lets others run
        while held:
            held.pop()
        thread.join()
        wait_until(lambda: not fake.alive(), "nothing is left", 10)


def test_objects_end_in_any_order(alone) -> None:
    alone(dropped, devices=1, timeout_s=60)


def cycles(fake: FakeVerbs) -> None:
    """The collector takes works, windows and groups apart in its own order."""
    numbers = random.Random(7)
    for turn in range(20):
        groups = Group.local(2, name=f"cycle {turn}")
        made: list = [None, None]
        threads = [
            threading.Thread(target=lambda r=r, m=made, g=groups: m.__setitem__(r, make(g[r]))) for r in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        works = [made[0].put(np.ones(MIB, np.uint8), rank, async_op=True) for rank in (0, 1, 1)]
        knot: list = [*made, *works]
        numbers.shuffle(knot)
        knot.append(knot)
        del works, knot, made
        gc.collect()
        for group in groups:
            group.leave()
        assert not {"qps", "cqs", "channels"} & set(fake.alive())


def make(group: Group) -> Window:
    return Window.allocate(group, MIB, signals=1, transport="rdma")


def test_the_collector_takes_all_apart(alone) -> None:
    alone(cycles, devices=2)


def kept_by_work(fake: FakeVerbs) -> None:
    """A work keeps what it needs: its source and its registration, its window, the connection."""
    with windows(2, MIB) as ranks:
        array = ranks[1].array
        fake.hold()
        work = ranks[0].put(np.full(MIB, 5, np.uint8), 1, async_op=True)
        ranks[0] = None
        gc.collect()
        filler = [np.full(MIB, 6, np.uint8) for _ in range(4)]  # where the source would have been
        fake.release_all()
        work.wait(20)
        assert (array == 5).all()
        del filler, work


def test_a_work_keeps_all_it_needs(alone) -> None:
    alone(kept_by_work, devices=2)


def connection_dropped(fake: FakeVerbs) -> None:
    """The end of a connection's object waits for what is under way, and lets others run meanwhile."""
    with connected(MIB) as pair:
        connection = pair.a.connect(pair.b.bind())
        fake.hold()
        work = connection.write(np.full(MIB, 5, np.uint8), pair.remote, async_op=True)
        thread = threading.Thread(target=lambda: (begins.wait(), fake.release_all()))
        begins = threading.Event()
        thread.start()
        begins.set()
        del connection
        thread.join()
        work.wait(20)
        assert (pair.array == 5).all()


def test_a_connection_that_is_dropped_ends_after_its_operations(alone) -> None:
    alone(connection_dropped, devices=1)


def memory_dropped(fake: FakeVerbs) -> None:
    """The same for a memory that a peer is in the middle of writing."""
    a, b = RdmaTransport(), RdmaTransport()
    memory = b.allocate(MIB)
    connection = a.connect(b.bind())
    fake.hold()
    work = connection.write(np.full(MIB, 5, np.uint8), RemoteMemory.from_bytes(memory.handle()), async_op=True)
    thread = threading.Thread(target=lambda: (begins.wait(), fake.release_all()))
    begins = threading.Event()
    thread.start()
    begins.set()
    del memory
    thread.join()
    work.wait(20)
    connection.close()
    a.close()
    b.close()


def test_a_memory_that_is_dropped_ends_after_its_operations(alone) -> None:
    alone(memory_dropped, devices=1)


def forked(fake: FakeVerbs) -> None:
    """Every first use in the child is an error at once; the parent is unharmed, also by the child's end."""
    with connected(MIB) as pair, windows(2, MIB) as (near, far):
        source = np.full(MIB, 7, np.uint8)
        pair.connection.write(source, pair.remote)
        work = pair.connection.write(source, pair.remote, async_op=True)
        alive = fake.alive()
        uses = [
            lambda: pair.connection.write(source, pair.remote),
            lambda: pair.connection.write(b"small", pair.remote),
            lambda: pair.connection.read(source, pair.remote),
            lambda: pair.connection.fetch_add(pair.remote, 0, 1),
            lambda: pair.connection.flush(pair.remote),
            lambda: pair.connection.signal(pair.remote, 0),
            lambda: pair.a.bind(),
            lambda: pair.a.allocate(64),
            lambda: pair.a.connect(b""),
            lambda: near.put(source, 1),
            lambda: near.put(b"small", 1),
            lambda: near.get(source, 1),
            lambda: near.signal(1, 0),
            lambda: near.flush(1),
            lambda: far.wait_signal(0, 1, timeout_s=1),
        ]
        pid = os.fork()
        if pid == 0:
            # No test's machinery in here: it reports by its exit status.
            status = 0
            signal.alarm(20)
            for number, use in enumerate(uses, 1):
                try:
                    use()
                    status = status or number
                except OnesidedError as error:
                    if "fork" not in str(error) and status == 0 and number != 9:
                        status = 100 + number
                except BaseException:  # noqa: BLE001
                    status = status or 50 + number
            for closes in (near.close, far.close, pair.connection.close, pair.a.close, pair.b.close):
                try:
                    closes()
                except OnesidedError:
                    pass
            os._exit(status)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        work.wait(20)
        assert fake.alive() == alive
        source[:] = 8
        pair.connection.write(source, pair.remote, signal=0)
        near.put(source, 1, signal=0)
        assert far.wait_signal(0, 1, timeout_s=20) == 1
        assert (pair.array == 8).all()
        assert (far.array == 8).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_case_29_fork_after_use(alone) -> None:
    alone(forked, devices=1)


def closed_under_way(fake: FakeVerbs) -> None:
    """Closed with three pending, which the device holds: each is over when close() raises, and nothing of it lands."""
    for turn in range(2):
        groups = Group.local(2, name=f"pending {turn}")
        made: list = [None, None]

        def one(rank: int, made: list = made, groups: list = groups) -> None:
            made[rank] = make(groups[rank])

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        source = np.ones(MIB, np.uint8)
        fake.hold()
        works = [made[0].put(source, 1, async_op=True) for _ in range(3)]
        with raises(OnesidedError):
            made[0].close(timeout_s=0.05)
        assert all(work.done() for work in works)
        assert all(isinstance(work.exception(), OnesidedError) for work in works)
        source[:] = 2
        fake.release_all()
        assert not made[1].array.any()
        made[0].close()
        made[1].close()
        for group in groups:
            group.leave()


def test_closed_with_three_pending(alone) -> None:
    alone(closed_under_way, devices=2)
